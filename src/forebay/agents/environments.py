"""Environments answer the model between its turns; their memory is kept with the rollout.

::

    reset(state) --> memory --+--> step(state, memory, text) --> Reply --> tokens with mask 0, the next turn
                              |         done: the episode is over
              plain data in the rollout's extra_fields: paused, stored, killed and continued with it

One environment object serves all rollouts; the state of one episode is in its `memory`. One is here:
`LiveEnvironment`, for objects with a state of their own (`Episode`). Each rollout gets one, replayed where it goes
on: ``make() -> step(text), step(text), ... -> close()``, and in another process ``make()``, the same texts again,
and on.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from forebay.config import (
    ConfigError,
    StrictModel,
    check_arguments,
    checked_by,
    find_component,
    look_up,
    parse_component,
)
from forebay.types import Message, RolloutState

Memory = dict[str, Any]
"""The memory of one episode: text, numbers, lists and dicts."""


@dataclass(frozen=True)
class Reply:
    """An environment's answer to one turn of the model.

    >>> Reply("higher").messages, Reply(done=True, reward=1.0).messages
    ([{'role': 'user', 'content': 'higher'}], [])
    """

    says: str | Sequence[Message] = ""
    """The next text that the model reads: a text, which becomes a user message, or messages."""
    done: bool = False
    """The episode is over; nothing of `says` reaches the model."""
    reward: float | None = None
    """The reward of this turn; None: none is given."""

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
    """The roles of the messages that it replies with; the chat template must know them."""
    reads_special_tokens: bool = False
    """Whether the texts it reads hold the model's special tokens, all but the end of the turn."""
    gives_rewards: bool = True
    """Whether no reward from it is a reward of 0, where no judge judges."""
    prompt_tools: Sequence[dict[str, Any]] | None = None
    """The tools that `reset` puts into ``state.tools`` where the data has none, for checks of the prompts'
    lengths."""

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


class Episode(Protocol):
    """An environment for one rollout, with a state of its own: a game, a simulator, a shell."""

    async def reset(self, state: RolloutState) -> None:
        """Begin with the rollout's prompt, before its first turn."""

    async def step(self, text: str) -> Reply:
        """Reply to one turn of the model."""


def _find_make(make: Any) -> Any:
    return look_up("episode", make, {}) if isinstance(make, str) else make


class LiveEnvironment(Environment):
    """Makes one `Episode` object for each rollout, and replays it where a rollout is continued.

    Invariants: an object lives from the start to the end or interruption of its rollout; the memory holds
    the turns' texts, which are played again to an object that takes its place. So a step must depend only on
    the rollout and the texts before it. ``close()`` is called on objects that have one.

    Args:
        make: as in `Arguments`, or the class or function itself.
        arguments: see `Arguments`.

    Raises:
        ConfigError: there is no such class, or it does not take the arguments.
    """

    class Arguments(StrictModel, strict=True):
        """Keys of a ``live`` environment in a run file."""

        make: Annotated[Any, checked_by(_find_make)]
        """``package.module:Name`` of a class or function that makes the `Episode` of a rollout."""
        arguments: Mapping[str, Any] | None = None
        """Its keyword arguments."""

    def __init__(self, make: Callable[..., Episode] | str, arguments: Mapping[str, Any] | None = None) -> None:
        self._make: Callable[..., Episode] = _find_make(make)
        self._arguments = dict(arguments or {})
        check_arguments("episode", str(make), self._make, self._arguments)
        self._live: dict[int, Episode] = {}

    async def reset(self, state: RolloutState) -> Memory:
        """Make the object and begin."""
        await self._begin(state)
        return {"texts": []}

    async def step(self, state: RolloutState, memory: Memory, text: str) -> Reply:
        """The object's reply to one turn of the model."""
        reply = await self._live[id(state)].step(text)
        memory["texts"].append(text)
        return reply

    async def resume(self, state: RolloutState, memory: Memory) -> None:
        """Make an object and bring it to where the interrupted one was."""
        episode = await self._begin(state)
        for text in memory["texts"]:
            await episode.step(text)

    async def close(self, state: RolloutState) -> None:
        """Close this rollout's object, if it has a ``close``."""
        # There is none where it could not be made, or a pause came first.
        close = getattr(self._live.pop(id(state), None), "close", None)
        if close is not None:
            await close()

    async def _begin(self, state: RolloutState) -> Episode:
        episode = self._live[id(state)] = self._make(**self._arguments)
        await episode.reset(state)
        return episode


ENVIRONMENTS: dict[str, Any] = {"live": LiveEnvironment}
"""The names that ``environment`` may have in a run file; besides, ``package.module:Class``."""


def find_environment(environment: Any) -> Any:
    """The class, or function, that `environment` names and that takes its arguments; one that is made already
    is itself. Nothing is made.

    Raises:
        ConfigError: the name is unknown, or its arguments do not fit.
    """
    if not isinstance(environment, str | Mapping):
        return environment
    return find_component("environment", parse_component(environment, source="environment"), ENVIRONMENTS)


def build_environment(environment: Environment | str | Mapping[str, Any]) -> Environment:
    """`environment`, or what it names: a name, or a table with ``name`` and ``arguments``.

    Raises:
        ConfigError: the name is unknown, or its arguments do not fit.
    """
    if isinstance(environment, Environment):
        return environment
    config = parse_component(environment, source="environment")
    made = find_component("environment", config, ENVIRONMENTS)(**config.arguments)
    if not isinstance(made, Environment):
        raise ConfigError(
            f"environment {config.name!r} makes a {type(made).__name__}; it must be an Environment with "
            f"reset(state) and step(state, memory, text)"
        )
    return made
