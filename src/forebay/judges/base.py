"""The contract of a judge, and the one place where a judge's failure becomes a FAILED rollout.

::

    judge(rollout | group) -> verdicts(completed rollouts) --> reward = {"score": ..., ...}, status kept
                                |                        '--> status FAILED, error_msg says which rollout,
                                |                             judge and why; reward stays None
                                v
      score(rollout), one by one, or score_group(all of them) for a `GroupJudge`
         | raises TransientJudgeError: again after a pause, up to max_retries times
         | raises anything else, or all of it takes longer than timeout_s: a failure

A failure is never a zero reward: a rollout without a verdict must not be trained on.
"""

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from forebay.aio.time_limits import timeout
from forebay.tracebacks import raised_at
from forebay.types import TURN_REWARDS_KEY, RolloutState, Status, note_place

Target = TypeVar("Target", RolloutState, list[RolloutState])
Verdict = float | Mapping[str, Any]

DEFAULT_TIMEOUT_S = 30.0
"""Long enough for any rule-based judge on a busy machine, short enough to notice one that hangs."""

DEFAULT_MAX_RETRIES = 4
"""With the pauses below about eight seconds: enough for a service that restarts."""

_FIRST_PAUSE_S = 0.5
# Only judges with more retries than the default come to it.
_LONGEST_PAUSE_S = 60.0


class Judge(ABC):
    """Gives rollouts their reward. Subclasses write `score`; everything else is here.

    >>> class Length(Judge):
    ...     async def score(self, state):
    ...         return float(len(state.response_ids))

    Args:
        timeout_s: for one rollout, all its tries together; None waits for ever.
        max_retries: how often a rollout is tried again after a `TransientJudgeError`.
    """

    needs_whole_group: bool = False
    """Whether verdicts depend on the other rollouts of the group, so that all must be finished first."""
    waits: bool = True
    """Whether `score` may wait for anything. Where it does not, rollouts are judged one after the other, without a
    task and a clock for each: no time limit could end what does not wait."""
    _name = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # A subclass with a score of its own has to promise it anew.
        if {"score", "score_group"} & vars(cls).keys() and "waits" not in vars(cls):
            cls.waits = True

    def __init__(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, max_retries: int = DEFAULT_MAX_RETRIES) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive or None, got {timeout_s}")
        if max_retries < 0:
            raise ValueError(f"max_retries must not be negative, got {max_retries}")
        self.timeout_s = timeout_s
        self.max_retries = max_retries

    @property
    def name(self) -> str:
        """The name of this judge in error messages."""
        return self._name or type(self).__name__

    @abstractmethod
    async def score(self, state: RolloutState) -> Verdict:
        """The score of one completed rollout, or a mapping with ``score`` and whatever should be logged."""

    async def judge(self, target: Target) -> Target:
        """Judge one COMPLETED rollout or all COMPLETED rollouts of a group, in place, and return it.

        Rollouts of any other status are left as they are.
        """
        states = [target] if isinstance(target, RolloutState) else target
        completed = [state for state in states if state.status is Status.COMPLETED]
        if not completed:
            return target
        for state, verdict in zip(completed, await self.verdicts(completed), strict=True):
            if isinstance(verdict, JudgeError):
                state.reward = None
                state.status = Status.FAILED
                state.error_msg = f"rollout {state.rollout_id}: judge {self.name}: {verdict}"
                note_place(state, verdict.place)
            else:
                state.reward = verdict
        return target

    async def score_group(self, states: Sequence[RolloutState]) -> Sequence[Verdict | Exception]:
        """The verdicts on a group's completed rollouts if `needs_whole_group`; else on a single rollout."""
        return [await self.score(state) for state in states]

    async def verdicts(self, states: Sequence[RolloutState]) -> "list[dict[str, Any] | JudgeError]":
        """The reward of each rollout, or why it has none; nothing is written to the rollouts."""
        # A group of one each: then a rollout's time-out, retries and failure are its own.
        parts = [states] if self.needs_whole_group else [[state] for state in states]
        calls = map(self._verdicts_together, parts)
        found = await asyncio.gather(*calls) if self.waits else [await call for call in calls]
        return [verdict for part in found for verdict in part]

    async def _verdicts_together(self, states: Sequence[RolloutState]) -> "Sequence[dict[str, Any] | JudgeError]":
        """The verdicts of one call of `score_group`, with one time-out and its retries for all of them."""
        late = JudgeError(f"no verdict within {self.timeout_s} s")
        try:
            # Around all tries: a judge that asks for another one until its time is over is late.
            async with timeout(self.timeout_s, lambda: late) if self.waits else contextlib.nullcontext() as limit:
                verdicts = await self._with_retries(states)
            # A judge may catch its cancellation and say 0, which would be a reward for the time it took.
            if limit is not None and limit.expired():
                raise late
            if len(verdicts) != len(states):
                raise JudgeError(f"{len(verdicts)} verdicts for the {len(states)} rollouts of the group")
        # Judges are user code: whatever one raises, sys.exit() included, fails what it judged, and only that.
        except (Exception, SystemExit) as error:
            return [_as_judge_error(error)] * len(states)
        return [checked_or_error(verdict) for verdict in verdicts]

    async def _with_retries(self, states: Sequence[RolloutState]) -> Sequence[Verdict | Exception]:
        pause_s = _FIRST_PAUSE_S
        num_tries = 0
        while True:
            num_tries += 1
            try:
                return await self.score_group(states)
            except TransientJudgeError as error:
                if num_tries > self.max_retries:
                    raise JudgeError(f"{error} (tried {num_tries} times)") from error
                # A service may say when it is back; the pauses after that double all the same.
                await asyncio.sleep(pause_s if error.after_s is None else error.after_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    # Not abstract: most judges hold nothing.
    def close(self) -> None:  # noqa: B027
        """Give back what the judge holds; may block for a moment."""

    async def aclose(self) -> None:
        """`close`, off the event loop."""
        await asyncio.to_thread(self.close)


class GroupJudge(Judge):
    """Judges the rollouts of a group together: rankings, pairwise comparisons, novelty within the group.

    Invariants: `score_group` gets the COMPLETED rollouts of one group, all at once; `timeout_s` and retries
    are for the whole group. An exception in place of a verdict fails that rollout; one that is raised, a
    time-out and a wrong number of verdicts fail all of them.

    >>> class Shortest(GroupJudge):
    ...     async def score_group(self, states):
    ...         shortest = min(len(state.response_ids) for state in states)
    ...         return [float(len(state.response_ids) == shortest) for state in states]
    """

    needs_whole_group = True

    @abstractmethod
    async def score_group(self, states: Sequence[RolloutState]) -> Sequence[Verdict | Exception]:
        """A verdict for each rollout, in their order."""

    async def score(self, state: RolloutState) -> Verdict:
        """The verdict on a group of one."""
        (verdict,) = await self.score_group([state])
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


class JudgeError(Exception):
    """Why a rollout has no verdict; as text, it is what the rollout's ``error_msg`` ends in.

    `place` is the file and line in the judge's own code, if it raised.
    """

    def __init__(self, message: str, *, place: str | None = None) -> None:
        super().__init__(message)
        self.place = place


class TransientJudgeError(Exception):
    """Raised by a judge that may well succeed if it is asked again: it will be.

    >>> TransientJudgeError("the service is restarting", after_s=2.0).after_s
    2.0

    Args:
        message: becomes the rollout's error if the last try fails too.
        after_s: when to try again; None lets the pause double with each try.
    """

    def __init__(self, message: str, *, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


def checked_or_error(verdict: Verdict | Exception) -> dict[str, Any] | JudgeError:
    """`checked_reward` of a verdict, or as an error what raised: the failure of one member alone."""
    try:
        if isinstance(verdict, Exception):
            raise verdict
        return checked_reward(verdict)
    # One member's failure, of whatever kind, must not be its siblings'.
    except Exception as error:
        return _as_judge_error(error)


def _as_judge_error(error: BaseException) -> JudgeError:
    if isinstance(error, JudgeError):
        return error
    return JudgeError(f"{type(error).__name__}: {error}", place=raised_at(error))


def checked_reward(verdict: Verdict) -> dict[str, Any]:
    """The verdict as a reward: a dict with a finite ``score``, and finite rewards by turn if it has any.

    Raises:
        ValueError, TypeError: it is none.
    """
    reward: dict[str, Any] = dict(verdict) if isinstance(verdict, Mapping) else {"score": verdict}
    if "score" not in reward:
        raise ValueError(f"the verdict has no 'score', only {sorted(reward)}")
    try:
        # `float` would read text, which a judge has to read itself.
        if isinstance(reward["score"], str | bytes):
            raise TypeError
        score = float(reward["score"])
    except (TypeError, ValueError):
        raise TypeError(
            f"it returned {verdict!r}; a judge returns a number, or a mapping with a number as 'score'"
        ) from None
    if not math.isfinite(score):
        raise ValueError(f"the score is {score}; it must be finite")
    reward["score"] = score
    for end, paid in reward.get(TURN_REWARDS_KEY, ()):
        if not math.isfinite(end) or not math.isfinite(paid):
            raise ValueError(f"turn_rewards has {paid} after {end} tokens; both must be finite")
    return reward


def mean_parts(rewards: Iterable[Mapping[str, Any] | None]) -> dict[str, float]:
    """``judge/<key>``: the mean of each number beside ``score``, over the rewards that have it.

    Truth values count as 0 and 1; text, and numbers that are not finite, are left out.

    >>> mean_parts([{"score": 1.0, "short": 0.5, "why": "ok"}, {"score": 0.0, "short": 1.0}, None])
    {'judge/short': 0.75}
    """
    found: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in (reward or {}).items():
            if name != "score" and isinstance(value, int | float | np.number | np.bool_):
                # An integer may have more digits than a float takes.
                with contextlib.suppress(OverflowError):
                    found.setdefault(name, []).append(float(value))
    finite = {name: [value for value in values if math.isfinite(value)] for name, values in found.items()}
    return {f"judge/{name}": sum(values) / len(values) for name, values in finite.items() if values}
