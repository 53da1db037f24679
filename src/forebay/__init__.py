"""Reinforcement learning for language models: rollouts, replay and training.

`run` trains as ``forebay train`` does, from Python; importing this package loads nothing else.
"""

from typing import TYPE_CHECKING

from forebay.lazy import lazy_names

if TYPE_CHECKING:
    from forebay.entry import RunResult, run, run_async

__all__ = ["RunResult", "__version__", "run", "run_async"]

__version__ = "0.2.0"

__getattr__ = lazy_names(__name__, __file__)
