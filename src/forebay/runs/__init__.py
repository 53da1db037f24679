"""Runs: the run file, the components, the verbs and the two loops. Names load torch when asked for."""

from typing import TYPE_CHECKING

from forebay.lazy import lazy_names

if TYPE_CHECKING:
    from forebay.runs import steps
    from forebay.runs.build import Run, build_run
    from forebay.runs.colocated import run_colocated
    from forebay.runs.config import RunConfig
    from forebay.runs.separate import run_separate

__all__ = ["Run", "RunConfig", "build_run", "run_colocated", "run_separate", "steps"]

__getattr__ = lazy_names(__name__, __file__)
