"""Agent loops: how a prompt becomes judged rollouts."""

from forebay.agents.base import AgentLoop, Generator, split_attempts
from forebay.agents.build import (
    AGENT_ARGUMENTS,
    AGENTS,
    build_agent_loop,
    check_agent,
    prompt_tools,
    with_max_context,
)
from forebay.agents.chat.rendering import (
    ChatTokenizer,
    IncrementRenderer,
    render_prompt,
    require_chat_template,
)
from forebay.agents.chat.tool_calls import PARSERS, ToolCall
from forebay.agents.environments.build import ENVIRONMENTS
from forebay.agents.environments.contract import Environment, Episode, LiveEnvironment, Reply
from forebay.agents.environments.retry import SecondChances
from forebay.agents.extra_fields import (
    CONVERSATION_KEY,
    COUNTS,
    EPISODE_KEY,
    TOOL_CALLS_KEY,
    TOOL_ERRORS_KEY,
    TURNS_KEY,
    mean_counts,
)
from forebay.agents.multi_turn import MultiTurnAgentLoop, episode_reward
from forebay.agents.single_turn import SingleTurnAgentLoop
from forebay.agents.tools import ToolAgentLoop, ToolEnvironment
from forebay.types import TRAJECTORY_OF_KEY

__all__ = [
    "AGENTS",
    "AGENT_ARGUMENTS",
    "CONVERSATION_KEY",
    "COUNTS",
    "ENVIRONMENTS",
    "EPISODE_KEY",
    "PARSERS",
    "TOOL_CALLS_KEY",
    "TOOL_ERRORS_KEY",
    "TRAJECTORY_OF_KEY",
    "TURNS_KEY",
    "AgentLoop",
    "ChatTokenizer",
    "Environment",
    "Episode",
    "Generator",
    "IncrementRenderer",
    "LiveEnvironment",
    "MultiTurnAgentLoop",
    "Reply",
    "SecondChances",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "ToolCall",
    "ToolEnvironment",
    "build_agent_loop",
    "check_agent",
    "episode_reward",
    "mean_counts",
    "prompt_tools",
    "render_prompt",
    "require_chat_template",
    "split_attempts",
    "with_max_context",
]
