"""Training: from groups of judged rollouts to new weights.

Importing this package loads neither torch nor transformers; a name that needs them does, when it is used.
"""

from typing import TYPE_CHECKING

from forebay.lazy import lazy_names
from forebay.train.batch import TrainBatch as TrainBatch
from forebay.train.config import TrainConfig as TrainConfig
from forebay.train.config import WarmupConfig as WarmupConfig
from forebay.train.config import check_staleness_rule as check_staleness_rule
from forebay.train.objective.corrections import Correction as Correction
from forebay.train.objective.guard import GuardDecision as GuardDecision
from forebay.train.objective.guard import OffPolicyError as OffPolicyError
from forebay.train.objective.guard import OffPolicyGuard as OffPolicyGuard
from forebay.train.packing import Packer as Packer

if TYPE_CHECKING:
    from forebay.train.controller import TrainController as TrainController
    from forebay.train.objective.losses import PolicyInputs as PolicyInputs
    from forebay.train.objective.losses import PolicyLoss as PolicyLoss
    from forebay.train.parallel.ranks import LocalRanks as LocalRanks
    from forebay.train.parallel.ranks import RankError as RankError
    from forebay.train.parallel.ranks import Ranks as Ranks
    from forebay.train.parallel.worker import RankWorker as RankWorker
    from forebay.train.supervised import supervised_warmup as supervised_warmup


# These load torch.
__getattr__ = lazy_names(__name__, __file__)
