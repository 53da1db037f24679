"""What a rollout says of its turns, for people: the messages after its prompt, and how the episode went.

::

    extra_fields: conversation | chat_record --conversation_of--> messages after the prompt
                  turns, num_tool_calls, episode, ... --facts_of--> name: value
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.agents.chat.trajectory import RECORD_KEY
from forebay.agents.measures import TOOL_CALLS_KEY, TOOL_ERRORS_KEY, TURNS_KEY
from forebay.agents.multi_turn import CONVERSATION_KEY, EPISODE_KEY
from forebay.types import Message, RolloutState

_FACTS = (TURNS_KEY, TOOL_CALLS_KEY, TOOL_ERRORS_KEY, "num_requests")


def conversation_of(state: RolloutState) -> list[Message]:
    """The messages after the prompt; none where the response is all there is.

    A program may not have begun with the prompt it was given; then they are all that it sent. What is no
    message is left out: agents are anybody's, and stores keep what they are given.

    >>> turns = [{"role": "assistant", "content": "50"}, {"role": "user", "content": "more!"}]
    >>> conversation_of(RolloutState([], extra_fields={"conversation": turns})) == turns
    True
    """
    record = state.extra_fields.get(RECORD_KEY)
    given = record.get("messages") if isinstance(record, Mapping) else None
    if given is None:
        given = state.extra_fields.get(CONVERSATION_KEY)
    elif isinstance(given, list) and given[: len(state.message)] == state.message:
        given = given[len(state.message) :]
    return [message for message in given if isinstance(message, dict)] if isinstance(given, list) else []


def facts_of(state: RolloutState) -> dict[str, Any]:
    """Turns, calls, errors and what ended the episode, where the agent noted them."""
    facts = {name: state.extra_fields[name] for name in _FACTS if name in state.extra_fields}
    episode = state.extra_fields.get(EPISODE_KEY)
    if isinstance(episode, Mapping) and episode.get("ended_by") is not None:
        facts["ended_by"] = episode["ended_by"]
    return facts
