"""Producing rollouts: prompts, sampler, strategies and the manager that runs them."""

from forebay.produce.context import (
    GROUP_GENERATE_TIME_KEY,
    IsValidSampleFn,
    ProduceContext,
    ShouldContinueFn,
    default_is_valid_sample_fn,
    default_should_continue_fn,
    has_reward_variance,
)
from forebay.produce.manager import AgentLoopManager, TaskRunner, split_batch
from forebay.produce.progress import ProduceProgress
from forebay.produce.prompts import DataConfig, Prompt, load_prompts
from forebay.produce.results import ProduceBatchResult, TaskResult
from forebay.produce.sampler import Sampler
from forebay.produce.strategies import (
    ProduceBatchStatus,
    ProduceStrategy,
    ProduceStrategyConfig,
    ProductionError,
    SyncProduceStrategy,
    SyncProduceStrategyConfig,
    calculate_stale_threshold,
)

__all__ = [
    "GROUP_GENERATE_TIME_KEY",
    "AgentLoopManager",
    "DataConfig",
    "IsValidSampleFn",
    "ProduceBatchResult",
    "ProduceBatchStatus",
    "ProduceContext",
    "ProduceProgress",
    "ProduceStrategy",
    "ProduceStrategyConfig",
    "ProductionError",
    "Prompt",
    "Sampler",
    "ShouldContinueFn",
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
