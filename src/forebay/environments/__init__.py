"""Reinforcement learning in environments: workers, a PPO trainer, and the run around them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.environments.advantages import vtrace
    from forebay.environments.config import FragmentRunConfig
    from forebay.environments.policy import Policy
    from forebay.environments.ppo import PPOTrainer
    from forebay.environments.workers.messages import WorkerDied, WorkerError, WorkerMode, WorkerSpec

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

# torch is loaded only where a policy is used.
_LAZY = {
    "FragmentRunConfig": "config",
    "PPOTrainer": "ppo",
    "Policy": "policy",
    "WorkerDied": "workers.messages",
    "WorkerError": "workers.messages",
    "WorkerMode": "workers.messages",
    "WorkerSpec": "workers.messages",
    "vtrace": "advantages",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        from forebay.extras import needed_by

        with needed_by(f"forebay.environments.{name}"):
            return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
