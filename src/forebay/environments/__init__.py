"""Reinforcement learning in environments: workers, a PPO trainer, and the run around them."""

from typing import TYPE_CHECKING

from forebay.environments.config import FragmentRunConfig
from forebay.environments.workers.messages import WorkerDied, WorkerError, WorkerSpec
from forebay.environments.workers.worker_pool import WorkerMode
from forebay.lazy import lazy_names

if TYPE_CHECKING:
    from forebay.environments.policy import Policy
    from forebay.environments.ppo import PPOTrainer, vtrace

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

# These load torch.
__getattr__ = lazy_names(__name__, {"policy": ["Policy"], "ppo": ["PPOTrainer", "vtrace"]})
