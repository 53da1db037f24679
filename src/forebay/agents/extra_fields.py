"""The entries of agents in a rollout's ``extra_fields``: their keys, and what reports read there.

::

    turns, num_tool_calls, ...   --mean_counts--> metrics of a batch   --facts_of--> name: value, for people
    conversation | chat_record   --conversation_of--> the messages after the prompt
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forebay.types import EPISODE_KEY, Message, RolloutState

TURNS_KEY = "turns"
"""Finished turns of the model."""
TOOL_CALLS_KEY = "num_tool_calls"
"""Calls that the model made, wrong ones included."""
TOOL_ERRORS_KEY = "num_tool_errors"
"""The calls among them that gave an error in place of a result."""
REQUESTS_KEY = "num_requests"
"""Requests of an agent program to its chat API."""
CONVERSATION_KEY = "conversation"
"""The messages after the prompt, for judges and people; never made into tokens."""
RECORD_KEY = "chat_record"
"""The conversation of a program's trajectory, for going on after a pause."""

COUNTS = {"turns": TURNS_KEY, "tool_calls": TOOL_CALLS_KEY, "tool_errors": TOOL_ERRORS_KEY}
"""Keys by the name of the metric."""


def mean_counts(rollouts: Sequence[RolloutState]) -> dict[str, float]:
    """The mean of each count over the rollouts that have it; those that none has are left out.

    >>> mean_counts([RolloutState([], extra_fields={"turns": number}) for number in (1, 2)])
    {'turns': 1.5}
    """
    found = {
        name: [state.extra_fields[key] for state in rollouts if key in state.extra_fields]
        for name, key in COUNTS.items()
    }
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def conversation_of(state: RolloutState) -> list[Message]:
    """The messages after the prompt; none where the response is all there is.

    A program may not have begun with the prompt it was given; then they are all that it sent. Values
    that are no messages are left out: agents are user code, and stores keep any value.

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
    facts = {name: state.extra_fields[name] for name in (*COUNTS.values(), REQUESTS_KEY) if name in state.extra_fields}
    episode = state.extra_fields.get(EPISODE_KEY)
    if isinstance(episode, Mapping) and episode.get("ended_by") is not None:
        facts["ended_by"] = episode["ended_by"]
    return facts
