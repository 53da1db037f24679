"""Producing rollouts: prompts, sampler, strategies and the manager that runs them."""

from forebay.produce.background import TaskRunner
from forebay.produce.batches import ProductionStopped
from forebay.produce.manager import AgentLoopManager, split_batch
from forebay.produce.progress import ProduceProgress
from forebay.produce.prompts.dataset import DataConfig, Prompt, load_prompts
from forebay.produce.results import ProduceBatchResult, TaskResult
from forebay.produce.sampler import Sampler
from forebay.produce.strategies.asynchronous import AsyncProduceStrategy, AsyncProduceStrategyConfig
from forebay.produce.strategies.base import (
    STALENESS_RULES,
    AdmitRule,
    Outlook,
    ProduceBatchStatus,
    ProduceStrategy,
    ProduceStrategyConfig,
    StalenessRule,
    SyncProduceStrategy,
    SyncProduceStrategyConfig,
    calculate_stale_threshold,
)
from forebay.produce.strategies.context import (
    GROUP_GENERATE_TIME_KEY,
    IsValidSampleFn,
    ProduceContext,
    ShouldContinueFn,
    default_is_valid_sample_fn,
    default_should_continue_fn,
    has_reward_variance,
)
from forebay.produce.strategies.pending import ProductionError
from forebay.produce.strategies.rules import GroupRules

__all__ = [
    "GROUP_GENERATE_TIME_KEY",
    "STALENESS_RULES",
    "AdmitRule",
    "AgentLoopManager",
    "AsyncProduceStrategy",
    "AsyncProduceStrategyConfig",
    "DataConfig",
    "GroupRules",
    "IsValidSampleFn",
    "Outlook",
    "ProduceBatchResult",
    "ProduceBatchStatus",
    "ProduceContext",
    "ProduceProgress",
    "ProduceStrategy",
    "ProduceStrategyConfig",
    "ProductionError",
    "ProductionStopped",
    "Prompt",
    "Sampler",
    "ShouldContinueFn",
    "StalenessRule",
    "SyncProduceStrategy",
    "SyncProduceStrategyConfig",
    "TaskResult",
    "TaskRunner",
    "calculate_stale_threshold",
    "default_is_valid_sample_fn",
    "default_should_continue_fn",
    "has_reward_variance",
    "load_prompts",
    "split_batch",
]
