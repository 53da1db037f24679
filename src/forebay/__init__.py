"""Reinforcement learning for language models: rollouts, replay and training.

`run` trains as ``forebay train`` does, from Python; importing this package loads nothing else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.entry import RunResult, run, run_async

__all__ = ["RunResult", "__version__", "run", "run_async"]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        from forebay import entry

        return getattr(entry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
