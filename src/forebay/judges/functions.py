"""A plain function as a judge, of one rollout or of a whole group."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from forebay.aio.time_limits import CallThreads
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judge, JudgeError, Verdict, judge_together
from forebay.types import RolloutState

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_GROUP_MARK = "judges_group"


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
    >>> judge = FunctionJudge(brevity)

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
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )
        super().__init__(timeout_s=timeout_s if self._is_async else None)
        self._function: Callable[..., Any] = function
        self._arguments = arguments or {}
        own_name: str = getattr(function, "__name__", type(function).__name__)
        self._name = own_name if name is None else name
        self._threads = CallThreads(timeout_s=timeout_s, num_threads=num_threads, result="verdict")

    @property
    def name(self) -> str:
        """The function's name."""
        return self._name

    @property
    def needs_whole_group(self) -> bool:
        """Whether the function takes a group."""
        return bool(getattr(self._function, _GROUP_MARK, False))

    async def score(self, state: RolloutState) -> Verdict:
        """What the function says."""
        verdict: Verdict = await self._call(state)
        return verdict

    async def verdicts(self, states: Sequence[RolloutState]) -> list[dict[str, Any] | JudgeError]:
        """See `Judge.verdicts`."""
        if self.needs_whole_group:
            return await judge_together(self, self._call, states)
        return await super().verdicts(states)

    async def _call(self, target: Any) -> Any:
        if self._is_async:
            return await self._function(target, **self._arguments)
        return await self._threads.run(lambda: self._function(target, **self._arguments))
