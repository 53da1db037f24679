"""A plain function as a judger."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from forebay.judges.base import DEFAULT_TIMEOUT_S, Judger
from forebay.judges.threads import JudgeThreads
from forebay.types import RolloutState

Verdict = float | Mapping[str, Any]


class FunctionJudger(Judger):
    """Scores with ``function(state)``, which returns a number or a mapping with ``score``.

    Invariants: an ``async`` function runs on the event loop and is cancelled after `timeout_s`. A plain one
    runs in a thread, at most `num_threads` at a time; when it overruns, its rollout is FAILED but the thread
    cannot be stopped and runs on. The function must not change the rollout.

    >>> def brevity(state):
    ...     return 1.0 / (1 + len(state.response_ids))
    >>> judger = FunctionJudger(brevity)

    Args:
        function: given one COMPLETED rollout.
        name: for error messages; the function's own by default.
        timeout_s: for one call.
        num_threads: plain functions that run at once.
    """

    def __init__(
        self,
        function: Callable[[RolloutState], Verdict | Awaitable[Verdict]],
        *,
        name: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        num_threads: int = 4,
    ) -> None:
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )
        super().__init__(timeout_s=timeout_s if self._is_async else None)
        self._function: Callable[[RolloutState], Any] = function
        own_name: str = getattr(function, "__name__", type(function).__name__)
        self._name = own_name if name is None else name
        self._threads = JudgeThreads(timeout_s=timeout_s, num_threads=num_threads)

    @property
    def name(self) -> str:
        """The function's name."""
        return self._name

    async def score(self, state: RolloutState) -> Verdict:
        """What the function says."""
        if self._is_async:
            verdict: Verdict = await self._function(state)
            return verdict
        result: Verdict = await self._threads.run(self._function, state)
        return result
