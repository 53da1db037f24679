"""Runs: the run file, the components, the verbs and the two loops. Names load torch when asked for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.runs import steps
    from forebay.runs.build import Run, build_run
    from forebay.runs.colocated import run_colocated
    from forebay.runs.config import RunConfig
    from forebay.runs.separate import run_separate

__all__ = ["Run", "RunConfig", "build_run", "run_colocated", "run_separate", "steps"]

_HOMES = {
    "Run": "build",
    "RunConfig": "config",
    "build_run": "build",
    "run_colocated": "colocated",
    "run_separate": "separate",
}


def __getattr__(name: str) -> Any:
    import importlib

    from forebay.extras import needed_by

    with needed_by(f"forebay.runs.{name}"):
        if name == "steps":
            return importlib.import_module("forebay.runs.steps")
        if name in _HOMES:
            return getattr(importlib.import_module(f"forebay.runs.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
