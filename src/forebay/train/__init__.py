"""Training: from groups of judged rollouts to new weights.

Importing this package loads neither torch nor transformers; a name that needs them does, when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forebay.extras import needed_by
from forebay.train.batch import TrainBatch
from forebay.train.config import TrainConfig, WarmupConfig, check_staleness_rule
from forebay.train.objective.corrections import Correction
from forebay.train.objective.guard import GuardDecision, OffPolicyError, OffPolicyGuard
from forebay.train.packing import Packer

if TYPE_CHECKING:
    from forebay.train.controller import TrainController
    from forebay.train.model.critic import Critic
    from forebay.train.objective.losses import PolicyInputs, PolicyLoss
    from forebay.train.parallel.ranks import LocalRanks, RankError, Ranks
    from forebay.train.parallel.worker import RankWorker
    from forebay.train.warmup import supervised_warmup
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

_WITH_TORCH = {
    "AdapterReceiver": "weight_sync",
    "Critic": "model.critic",
    "LocalRanks": "parallel.ranks",
    "PolicyInputs": "objective.losses",
    "PolicyLoss": "objective.losses",
    "RankError": "parallel.ranks",
    "RankWorker": "parallel.worker",
    "Ranks": "parallel.ranks",
    "TrainController": "controller",
    "WeightReceiver": "weight_sync",
    "supervised_warmup": "warmup",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_by(f"forebay.train.{name}"):
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
