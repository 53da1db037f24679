"""Training: from groups of judged rollouts to new weights.

Importing this package loads neither torch nor transformers; a name that needs them does, when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.lazy import lazy_names
from forebay.train.batch import TrainBatch
from forebay.train.config import TrainConfig, WarmupConfig, check_staleness_rule
from forebay.train.objective.corrections import Correction
from forebay.train.objective.guard import GuardDecision, OffPolicyError, OffPolicyGuard
from forebay.train.packing import Packer

if TYPE_CHECKING:
    from forebay.train.controller import TrainController
    from forebay.train.learner import supervised_warmup
    from forebay.train.model.critic import Critic
    from forebay.train.objective.losses import PolicyInputs, PolicyLoss
    from forebay.train.parallel.ranks import LocalRanks, RankError, Ranks
    from forebay.train.parallel.worker import RankWorker
    from forebay.train.weight_sync import AdapterReceiver, WeightReceiver

__all__ = [
    "AdapterReceiver",
    "Correction",
    "Critic",
    "GuardDecision",
    "LocalRanks",
    "OffPolicyError",
    "OffPolicyGuard",
    "Packer",
    "PolicyInputs",
    "PolicyLoss",
    "RankError",
    "RankWorker",
    "Ranks",
    "TrainBatch",
    "TrainConfig",
    "TrainController",
    "WarmupConfig",
    "WeightReceiver",
    "check_staleness_rule",
    "supervised_warmup",
]

# These load torch.
__getattr__ = lazy_names(
    __name__,
    {
        "controller": ["TrainController"],
        "learner": ["supervised_warmup"],
        "model.critic": ["Critic"],
        "objective.losses": ["PolicyInputs", "PolicyLoss"],
        "parallel.ranks": ["LocalRanks", "RankError", "Ranks"],
        "parallel.worker": ["RankWorker"],
        "weight_sync": ["AdapterReceiver", "WeightReceiver"],
    },
)
