"""Reinforcement learning in environments: workers, a PPO trainer, and the run around them."""

from typing import TYPE_CHECKING, Any

from forebay.environments.advantages import vtrace
from forebay.environments.config import FragmentRunConfig
from forebay.environments.workers.messages import WorkerDied, WorkerError, WorkerSpec
from forebay.environments.workers.worker_pool import WorkerMode

if TYPE_CHECKING:
    from forebay.environments.policy import Policy
    from forebay.environments.ppo import PPOTrainer

__all__ = [
    "FragmentRunConfig",
    "PPOTrainer",
    "Policy",
    "WorkerDied",
    "WorkerError",
    "WorkerMode",
    "WorkerSpec",
    "vtrace",
]


def __getattr__(name: str) -> Any:
    # These load torch.
    if name in ("PPOTrainer", "Policy"):
        from importlib import import_module

        from forebay.extras import needed_by

        with needed_by(f"forebay.environments.{name}"):
            return getattr(import_module(f"{__name__}.{'policy' if name == 'Policy' else 'ppo'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
