"""What answers the model between its turns, and what of it is kept with the rollout.

::

    reset(state) --> memory --+--> step(state, memory, text) --> Reply --> tokens with mask 0, the next turn
                              |         done: the episode is over
              plain data in the rollout's extra_fields: paused, stored, killed and continued with it

One environment object serves all rollouts; what belongs to one episode is in its `memory`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.types import Message, RolloutState

Memory = dict[str, Any]
"""Of one episode: text, numbers, lists and dicts."""


@dataclass(frozen=True)
class Reply:
    """An environment's answer to one turn of the model.

    >>> Reply("higher"), Reply(done=True, reward=1.0)
    """

    says: str | Sequence[Message] = ""
    """What the model reads next: a text, which becomes a user message, or messages."""
    done: bool = False
    """The episode is over; nothing of `says` reaches the model."""
    reward: float | None = None
    """For this turn."""

    @property
    def messages(self) -> list[Message]:
        """`says` as messages."""
        if isinstance(self.says, str):
            return [{"role": "user", "content": self.says}] if self.says else []
        return list(self.says)


class Environment(ABC):
    """Replies to the model until the episode is done. Subclasses write `reset` and `step`.

    Invariants: `step` is given its own copy of the memory, which is kept only if it returns; so a step that
    a pause interrupts is made again later, from the memory it had. Rollouts run at the same time; what one
    of them needs must be in its memory, not in the object.

    >>> class Guess(Environment):
    ...     async def reset(self, state):
    ...         return {"secret": int(state.reward_model["ground_truth"])}
    ...
    ...     async def step(self, state, memory, text):
    ...         if not text.isdigit():
    ...             return Reply("a number, please")
    ...         if int(text) == memory["secret"]:
    ...             return Reply(done=True, reward=1.0)
    ...         return Reply("higher" if int(text) < memory["secret"] else "lower")
    """

    roles: tuple[str, ...] = ("user",)
    """Of the messages that it replies with; the chat template must know them."""
    reads_special_tokens: bool = False
    """Whether the texts it reads hold the model's special tokens, all but the end of the turn."""
    gives_rewards: bool = True
    """Whether no reward from it is a reward of 0, where no judge judges."""
    prompt_tools: Sequence[dict[str, Any]] | None = None
    """What `reset` sets ``state.tools`` to where the data has none, for checks of the prompts' lengths."""

    @abstractmethod
    async def reset(self, state: RolloutState) -> Memory:
        """Begin an episode and return its memory. It may set ``state.tools``; the prompt comes after it."""

    @abstractmethod
    async def step(self, state: RolloutState, memory: Memory, text: str) -> Reply:
        """Reply to what the model wrote in this turn; `memory` may be changed in place."""

    async def resume(self, state: RolloutState, memory: Memory) -> None:  # noqa: B027 (most need nothing)
        """Get ready to go on with an interrupted episode, perhaps in another process."""

    async def close(self, state: RolloutState) -> None:  # noqa: B027
        """Let go of what `reset` or `resume` took, even half of it: the episode is over or interrupted."""

    async def shut_down(self) -> None:  # noqa: B027
        """Free what the environment itself holds; no episode will begin any more."""
