"""Producing rollouts: prompts, sampler, strategies and the manager that runs them."""

from forebay.produce.background import TaskRunner as TaskRunner
from forebay.produce.manager import AgentLoopManager as AgentLoopManager
from forebay.produce.progress import ProduceProgress as ProduceProgress
from forebay.produce.prompts.dataset import DataConfig as DataConfig
from forebay.produce.prompts.dataset import Prompt as Prompt
from forebay.produce.prompts.dataset import load_prompts as load_prompts
from forebay.produce.results import ProduceBatchResult as ProduceBatchResult
from forebay.produce.sampler import Sampler as Sampler
from forebay.produce.strategies.asynchronous import AsyncProduceStrategy as AsyncProduceStrategy
from forebay.produce.strategies.asynchronous import AsyncProduceStrategyConfig as AsyncProduceStrategyConfig
from forebay.produce.strategies.base import STALENESS_RULES as STALENESS_RULES
from forebay.produce.strategies.base import Outlook as Outlook
from forebay.produce.strategies.base import ProduceBatchStatus as ProduceBatchStatus
from forebay.produce.strategies.base import ProduceStrategy as ProduceStrategy
from forebay.produce.strategies.base import ProduceStrategyConfig as ProduceStrategyConfig
from forebay.produce.strategies.base import StalenessRule as StalenessRule
from forebay.produce.strategies.base import SyncProduceStrategy as SyncProduceStrategy
from forebay.produce.strategies.base import SyncProduceStrategyConfig as SyncProduceStrategyConfig
from forebay.produce.strategies.base import calculate_stale_threshold as calculate_stale_threshold
from forebay.produce.strategies.context import GROUP_GENERATE_TIME_KEY as GROUP_GENERATE_TIME_KEY
from forebay.produce.strategies.context import ProduceContext as ProduceContext
from forebay.produce.strategies.context import default_is_valid_sample_fn as default_is_valid_sample_fn
from forebay.produce.strategies.context import default_should_continue_fn as default_should_continue_fn
from forebay.produce.strategies.context import has_reward_variance as has_reward_variance
from forebay.produce.strategies.pending import ProductionError as ProductionError
from forebay.produce.strategies.rules import GroupRules as GroupRules
