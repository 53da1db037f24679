"""Agent loops: how a prompt becomes judged rollouts."""

from forebay.agents.base import AgentLoop as AgentLoop
from forebay.agents.chat.rendering import IncrementRenderer as IncrementRenderer
from forebay.agents.environments import Environment as Environment
from forebay.agents.environments import Episode as Episode
from forebay.agents.environments import LiveEnvironment as LiveEnvironment
from forebay.agents.environments import Reply as Reply
from forebay.agents.multi_turn import MultiTurnAgentLoop as MultiTurnAgentLoop
from forebay.agents.multi_turn import episode_reward as episode_reward
from forebay.agents.single_turn import SingleTurnAgentLoop as SingleTurnAgentLoop
from forebay.agents.tools import ToolAgentLoop as ToolAgentLoop
