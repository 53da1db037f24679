"""Agent loops: how a prompt becomes judged rollouts."""

from forebay.agents.base import AgentLoop, Generator, split_attempts
from forebay.agents.build import build_agent_loop, check_agent, prompt_tools, with_max_context
from forebay.agents.chat.rendering import ChatTokenizer, IncrementRenderer, render_prompt
from forebay.agents.chat.tool_calls import ToolCall
from forebay.agents.environments import Environment, Episode, LiveEnvironment, Reply, SecondChances
from forebay.agents.multi_turn import MultiTurnAgentLoop, episode_reward
from forebay.agents.single_turn import SingleTurnAgentLoop
from forebay.agents.tools import ToolAgentLoop
from forebay.types import TRAJECTORY_OF_KEY

__all__ = [
    "TRAJECTORY_OF_KEY",
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
    "build_agent_loop",
    "check_agent",
    "episode_reward",
    "prompt_tools",
    "render_prompt",
    "split_attempts",
    "with_max_context",
]
