"""Environments that are objects with a state of their own: one for each rollout, replayed where it goes on.

::

    reset --> make() --> step(text), step(text), ... --> close()
                              | the texts are the memory
    another process: make() --> the same texts again --> on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator

from forebay.agents.environments.contract import Environment, Memory, Reply
from forebay.config import StrictModel, check_arguments, look_up
from forebay.types import RolloutState


class Episode(Protocol):
    """An environment for one rollout, with a state of its own: a game, a simulator, a shell."""

    async def reset(self, state: RolloutState) -> None:
        """Begin."""
        ...

    async def step(self, text: str) -> Reply:
        """Reply to one turn of the model."""
        ...


def _check_make(make: Any) -> Any:
    if isinstance(make, str):
        look_up("episode", make, {})
    return make


class LiveEnvironment(Environment):
    """Makes one `Episode` object for each rollout, and replays it where a rollout is continued.

    Invariants: an object lives from the start to the end or interruption of its rollout; the memory holds
    the turns' texts, which are played again to an object that takes its place. So a step must depend only on
    the rollout and the texts before it. ``close()`` is called on objects that have one.

    >>> environment = LiveEnvironment(Chess, {"skill": 3})

    Args:
        make: as in `Arguments`, or the class or function itself.
        arguments: see `Arguments`.

    Raises:
        ConfigError: there is no such class, or it does not take the arguments.
    """

    class Arguments(StrictModel, strict=True):
        """What a run file may say of a ``live`` environment."""

        make: Annotated[Any, AfterValidator(_check_make)]
        """``package.module:Name`` of a class or function that makes the `Episode` of a rollout."""
        arguments: Mapping[str, Any] | None = None
        """Its keyword arguments."""

    def __init__(
        self, make: Callable[..., Episode] | str, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self._make: Callable[..., Episode] = look_up("episode", make, {}) if isinstance(make, str) else make
        self._arguments = dict(arguments or {})
        check_arguments("episode", str(make), self._make, self._arguments)
        self._live: dict[int, Episode] = {}

    async def reset(self, state: RolloutState) -> Memory:
        """Make the object and begin."""
        await self._begin(state)
        return {"texts": []}

    async def step(self, state: RolloutState, memory: Memory, text: str) -> Reply:
        """What the object replies."""
        reply = await self._live[id(state)].step(text)
        memory["texts"].append(text)
        return reply

    async def resume(self, state: RolloutState, memory: Memory) -> None:
        """Make an object and bring it to where the interrupted one was."""
        episode = await self._begin(state)
        for text in memory["texts"]:
            await episode.step(text)

    async def close(self, state: RolloutState) -> None:
        """Close the object."""
        close = getattr(self._live.pop(id(state), None), "close", None)
        if close is not None:
            await close()

    async def _begin(self, state: RolloutState) -> Episode:
        episode = self._live[id(state)] = self._make(**self._arguments)
        await episode.reset(state)
        return episode
