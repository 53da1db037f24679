"""Judges made of functions and of other judges.

::

    rollout --by--> its key, for example its data source
       |
       +--> part "answer"  (every key)        --> score a --> reward["answer"] = a
       +--> part "format"  (only some keys)   --> score f --> reward["format"] = f
       |                                                      reward["score"] = weights . scores
       '--> any part fails, or none applies: FAILED
"""

import asyncio
import hashlib
import inspect
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from forebay.aio.time_limits import CallThreads
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judge, JudgeError, Verdict, checked_or_error
from forebay.types import ROLLOUT_FIELDS, TURN_REWARDS_KEY, RolloutState

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_GROUP_MARK = "judges_group"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One judge of a `ComposedJudge`."""

    label: str
    """Its key in the reward."""
    judge: Judge
    weight: float = 1.0
    """0: only logged."""
    only: tuple[str, ...] | None = None
    """The keys of the rollouts that it judges; None: all."""


class ComposedJudge(Judge):
    """The weighted sum of the scores of several judges, each for the rollouts that it is meant for.

    Invariants: the reward holds ``score``, every part's score under its label and what else the part said
    under ``label/...``, and the parts' rewards by turn, weighted, where they were earned; the weights are
    used as they are given; a rollout that a part fails on, or that no part judges, is FAILED. A part that
    judges groups gets the rollouts of the group that it is meant for. Parts keep their own time-outs and
    retries.

    >>> judge = ComposedJudge(
    ...     [
    ...         Part(label="answer", judge=FunctionJudge(lambda state: 1.0)),
    ...         Part(label="proof", judge=FunctionJudge(lambda state: 0.5), weight=0.5, only=("proofs",)),
    ...     ]
    ... )
    >>> asyncio.run(judge.score(RolloutState([], data_source="proofs")))
    {'score': 1.25, 'answer': 1.0, 'proof': 0.5}

    Args:
        parts: with different labels.
        by: the field of the rollout, or of a mapping in one (``reward_model.style``), that `only` refers to.

    Raises:
        ValueError: no parts, a label twice or reserved, or an unknown field.
    """

    def __init__(self, parts: Sequence[Part], *, by: str = "data_source") -> None:
        super().__init__(timeout_s=None)
        labels = [part.label for part in parts]
        if not parts:
            raise ValueError("parts must not be empty")
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"two parts are called {sorted(twice)}; give one of them another label")
        if "score" in labels:
            raise ValueError("a part may not be called 'score', where the sum goes; give it another label")
        if by.partition(".")[0] not in ROLLOUT_FIELDS:
            raise ValueError(
                f"by = {by!r} is not a field of a rollout; use data_source, task_name or reward_model.KEY"
            )
        self.parts = tuple(parts)
        self.by = by
        self._name = " + ".join(labels)
        self.needs_whole_group = any(part.judge.needs_whole_group for part in parts)

    async def score(self, state: RolloutState) -> Verdict:
        """The weighted sum, and the parts."""
        (verdict,) = await self.verdicts([state])
        if isinstance(verdict, JudgeError):
            raise verdict
        return verdict

    async def verdicts(self, states: Sequence[RolloutState]) -> list[dict[str, Any] | JudgeError]:
        """Each part judges the rollouts that it is meant for, all parts at once."""
        keys = [self._key(state) for state in states]

        async def ask(part: Part) -> dict[int, dict[str, Any] | JudgeError]:
            """The part's verdicts by the place of the rollouts that it is meant for."""
            places = [at for at, key in enumerate(keys) if part.only is None or key in part.only]
            judged = [states[at] for at in places]
            # Nothing is asked about an empty group, which a group judge may not bear.
            return dict(zip(places, await part.judge.verdicts(judged) if judged else [], strict=True))

        by_part = await asyncio.gather(*map(ask, self.parts))
        pairs = list(zip(self.parts, by_part, strict=True))
        return [
            self._combine(key, {part: found[at] for part, found in pairs if at in found})
            for at, key in enumerate(keys)
        ]

    def _key(self, state: RolloutState) -> str | None:
        name, *path = self.by.split(".")
        value = getattr(state, name)
        for step in path:
            value = value.get(step) if isinstance(value, Mapping) else None
        return None if value is None else str(value)

    def _combine(
        self, key: str | None, verdicts: Mapping[Part, dict[str, Any] | JudgeError]
    ) -> dict[str, Any] | JudgeError:
        if not verdicts:
            return JudgeError(f"no part judges rollouts whose {self.by} is {key!r}")
        reward: dict[str, Any] = {"score": 0.0}
        turn_rewards: list[tuple[int, float]] = []
        for part, verdict in verdicts.items():
            if isinstance(verdict, JudgeError):
                # Without one part the sum would be on another scale than its siblings'.
                return JudgeError(f"part {part.label}: {verdict}", place=verdict.place)
            reward["score"] += part.weight * verdict["score"]
            reward[part.label] = verdict["score"]
            turn_rewards += [(end, part.weight * paid) for end, paid in verdict.get(TURN_REWARDS_KEY, ())]
            reward |= {f"{part.label}/{name}": value for name, value in verdict.items() if name != "score"}
        if turn_rewards:
            reward[TURN_REWARDS_KEY] = turn_rewards
        # Each score is finite; their weighted sum may not be.
        return checked_or_error(reward)

    async def aclose(self) -> None:
        """Close the parts."""
        await asyncio.gather(*(part.judge.aclose() for part in self.parts))


def judges_group(function: FunctionT) -> FunctionT:
    """Mark `function` as one that takes the list of a group's rollouts and returns their verdicts in order.

    >>> @judges_group
    ... def longest_wins(states):
    ...     longest = max(len(state.response_ids) for state in states)
    ...     return [float(len(state.response_ids) == longest) for state in states]
    """
    setattr(function, _GROUP_MARK, True)
    return function


class FunctionJudge(Judge):
    """Scores with ``function(state)``, which returns a number or a mapping with ``score``.

    Invariants: an ``async`` function runs on the event loop and is cancelled after `timeout_s`. A plain one
    runs in a thread, at most `num_threads` at a time; when it overruns, its rollout is FAILED but the thread
    cannot be stopped and runs on. The function must not change the rollout. It may raise
    `TransientJudgeError` to be called again.

    >>> def brevity(state):
    ...     return 1.0 / (1 + len(state.response_ids))
    >>> asyncio.run(FunctionJudge(brevity).score(RolloutState([], response_ids=[7, 8, 9])))
    0.25

    Args:
        function: given one COMPLETED rollout; or all those of a group, if it is marked by `judges_group`.
        name: for error messages; the function's own by default.
        timeout_s: for one call.
        num_threads: plain functions that run at once.
        arguments: further keyword arguments of the function.
    """

    def __init__(
        self,
        function: Callable[..., Verdict | Awaitable[Verdict] | Sequence[Any] | Awaitable[Sequence[Any]]],
        *,
        name: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        num_threads: int = 4,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )
        # The clock of a plain function begins when it gets its thread (`CallThreads`).
        super().__init__(timeout_s=timeout_s if is_async else None)
        self.needs_whole_group = bool(getattr(function, _GROUP_MARK, False))
        own_name: str = getattr(function, "__name__", type(function).__name__)
        self._name = own_name if name is None else name
        threads = CallThreads(timeout_s=timeout_s, num_threads=num_threads, result="verdict")
        called: Callable[..., Any] = partial(function, **(arguments or {}))
        self._call = called if is_async else partial(threads.run, called)

    async def score(self, state: RolloutState) -> Verdict:
        """The function's verdict on one rollout."""
        verdict: Verdict = await self._call(state)
        return verdict

    async def score_group(self, states: Sequence[RolloutState]) -> Sequence[Verdict | Exception]:
        """The function's verdicts on a group, if it takes groups."""
        if not self.needs_whole_group:
            return await super().score_group(states)
        verdicts: Sequence[Verdict | Exception] = await self._call(states)
        return verdicts


class ShuffledJudge(Judge):
    """Judges with `inner`, then permutes the rewards among the rollouts of the group.

    Training on it shows what is gained without any signal: format, luck, a bug that leaks answers.
    Invariants: the multiset of a group's rewards is unchanged; the permutation depends only on the seed and
    the group's id; FAILED rollouts keep their failure; a single rollout is judged as it is.

    >>> ShuffledJudge(FunctionJudge(lambda state: 1.0, name="one"), seed=1).name
    'shuffled one'
    """

    needs_whole_group = True
    """A part of the group would be permuted among itself."""

    def __init__(self, inner: Judge, *, seed: int) -> None:
        super().__init__(timeout_s=None)
        self.inner = inner
        self.seed = seed
        self._name = f"shuffled {inner.name}"

    async def score(self, state: RolloutState) -> Verdict:
        """The inner judge's score: one rollout has nothing to be permuted with."""
        return await self.inner.score(state)

    async def verdicts(self, states: Sequence[RolloutState]) -> list[dict[str, Any] | JudgeError]:
        """The inner judge's, permuted."""
        verdicts = await self.inner.verdicts(states)
        if rewards := [verdict for verdict in verdicts if not isinstance(verdict, JudgeError)]:
            # Not `hash`, which gives another number for the same text in each process.
            digest = hashlib.blake2b(f"{self.seed}/{states[0].group_id}".encode(), digest_size=8).digest()
            random.Random(int.from_bytes(digest, "little")).shuffle(rewards)
        return [verdict if isinstance(verdict, JudgeError) else rewards.pop(0) for verdict in verdicts]

    async def aclose(self) -> None:
        """Close the inner judge."""
        await self.inner.aclose()
