"""One conversation of a program with the model: its messages, its tokens, and what is kept of both.

::

    prompt --> turn, mask 1 --> continue_with(messages, increment), mask 0 --> turn, mask 1 --> ...
                                  '-- take_back(), if it got no answer
    note() --> extra_fields of the rollout, from which it is made again after a pause
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.agents.extra_fields import RECORD_KEY
from forebay.types import TOKEN_FIELDS, IntArray, Message, RolloutState


@dataclass(eq=False)
class Trajectory:
    """One recorded conversation and its tokens.

    Invariants: ``turn_starts`` has an entry for each turn that was asked for, and ``finish_reasons`` one for
    each that was finished; what `note` keeps is enough to make it again, with the rollout.

    >>> trajectory = Trajectory(state, tools=None, messages=[{"role": "user", "content": "2 + 2?"}])
    """

    state: RolloutState
    tools: list[dict[str, Any]] | None
    messages: list[Message]
    """As `plain_message` has them, the model's own turns included."""
    turn_starts: list[int] = field(default_factory=lambda: [0])
    """Where in ``response_ids`` each turn of the model begins."""
    finish_reasons: list[str] = field(default_factory=list)
    """Of each turn that was finished, as the program was told."""
    is_exhausted: bool = False
    """Whether the budget or the context cut the latest turn, or refused the next."""
    is_busy: bool = False
    num_replayed: int | None = None
    """While the program runs again after a pause: how many messages it has been seen to repeat."""

    @property
    def turn_ids(self) -> list[int]:
        """The tokens of the latest turn."""
        ids: list[int] = self.state.response_ids[self.turn_starts[-1] :].tolist()
        return ids

    @property
    def is_cut(self) -> bool:
        """Whether a limit ended the latest finished turn."""
        return bool(self.finish_reasons) and self.finish_reasons[-1] == "length"

    def place_of_turn(self, position: int) -> int | None:
        """Which turn of the model the message at `position` is; None if it is none."""
        if self.messages[position]["role"] != "assistant":
            return None
        # Those that the program began with come before.
        later = sum(message["role"] == "assistant" for message in self.messages[position:])
        place = len(self.finish_reasons) - later
        return place if place >= 0 else None

    def note(self) -> None:
        """Keep the record with the rollout, as plain data."""
        self.state.extra_fields[RECORD_KEY] = {
            "tools": self.tools,
            "messages": self.messages,
            "turn_starts": self.turn_starts,
            "finish_reasons": self.finish_reasons,
            "is_exhausted": self.is_exhausted,
        }

    def continue_with(self, messages: list[Message], ids: IntArray) -> None:
        """Append the increment `ids`, which makes the conversation `messages`."""
        state = self.state
        step = int(state.response_model_steps[-1])
        state.append(ids, logprobs=np.zeros(len(ids), np.float32), mask=0, model_step=step)
        self.turn_starts = [*self.turn_starts, len(state.response_ids)]
        self.messages = messages
        self.note()

    def take_back(self) -> None:
        """Undo the latest `continue_with`, unless the model has begun to answer."""
        if self.turn_ids or len(self.turn_starts) == 1:
            return
        cut_unanswered(self.state)
        self.turn_starts = self.turn_starts[:-1]
        while self.messages[-1]["role"] != "assistant":
            self.messages = self.messages[:-1]
        self.note()


def cut_unanswered(state: RolloutState) -> None:
    """Take off what follows the model's last token: replies that it has no room to answer teach nothing."""
    end = len(state.response_ids)
    while end and not state.response_mask[end - 1]:
        end -= 1
    surplus = len(state.response_ids) - end
    if end and surplus:
        state.tokens = state.tokens[: len(state.tokens) - surplus].copy()
        for name in TOKEN_FIELDS:
            setattr(state, name, getattr(state, name)[:end].copy())
