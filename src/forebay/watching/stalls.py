"""A wait that nothing will end says so: first a warning that names what hangs, then an error.

::

    guard(): a task waits --> timer --> warn_after_s without progress --> one warning
          progressed(): counts from here again            | fail_after_s
          progress() has grown: from the last look        v
                                              StallError in every guarded wait

    consumes: nothing    waits for: the clock, while a caller waits
    woken by: one timer of the event loop, set to the next moment that matters
    produces: one log line per stall, and errors

It does not know what progress is: code that finishes something that others wait for (a stored group, a train
step, an evaluated prompt) calls `progressed`, and what goes on in small steps (the tokens of one long
rollout) may be a number that the watch looks at before it warns or fails. Guard only the waits that
production has to end: a producer that waits for room while the trainer trains for an hour is not stalled.

`answered` is for the other kind of wait: one thing is asked for, and its answer is due within a fixed time.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

from forebay.aio.time_limits import timeout
from forebay.watching.activity import STAGES, Activities, Activity, loop_time

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_NAMED = 5
"""Enough to tell one hanging rollout from an engine that stands still, few enough for one line."""

_AROUND = frozenset(name for name, stage in STAGES.items() if stage.track in ("waiting", "evaluation"))
"""Stages that wait for other stages; reported last, because they are symptoms."""


ANSWER_LIMIT_S = 60.0
"""Longer than an engine needs for the forward pass that it has to end before it can answer."""


class StallError(RuntimeError):
    """Nothing has made progress for too long; the message is the stall report."""


@dataclass(eq=False)
class StallWatch:
    """Watches the waits of one event loop.

    Invariants: without a waiting task no timer runs; one stall, however many tasks wait, is one warning; at
    the limit every guarded wait ends with a `StallError`. The time counts from the latest progress, or from
    when the first of the waiting tasks began to, whichever is later. Growth of `progress` is dated to the
    look that finds it, so a stall among such steps is noticed at most `warn_after_s` later.

    Raises:
        ValueError: the limits are not positive, or the second is not the longer one.

    ::

        watch = StallWatch(activities, warn_after_s=60, fail_after_s=600)
        async with watch.guard():
            await produce()
        # StallError: no progress for 600 s; 9 in flight: rollout math/0/17/3 generating for 598 s, ...
    """

    activities: Activities
    """The register that a report takes the hanging activities from."""
    _: KW_ONLY
    warn_after_s: float = 60.0
    fail_after_s: float = 600.0
    describe: Callable[[Activity], str] = lambda activity: ""
    """More about an activity for the report ("412 tokens")."""
    progress: Callable[[], int] = int
    """A number that grows with the work done and never falls (tokens made so far): asked when the first
    begins to wait and every `warn_after_s` from then on, not more often."""
    away: Callable[[], str] = str
    """For the report: the names of what should do the work and is lost, or starts; empty without any."""

    def __post_init__(self) -> None:
        if not 0 < self.warn_after_s < self.fail_after_s:
            raise ValueError(
                f"warn_after_s must be positive and fail_after_s longer, got {self.warn_after_s}, {self.fail_after_s}"
            )
        self._seen_progress = 0
        self._waiting: dict[asyncio.Timeout, None] = {}
        self._since_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.has_warned = False
        """Whether a stall goes on that was warned of."""
        self.num_warnings = 0
        """One for each stall."""
        self._failure = ""

    def progressed(self) -> None:
        """Something that others may wait for is done: count from here again. Costs next to nothing."""
        stalled_s, self._since_s = self.stalled_s, loop_time()
        if self.has_warned:
            logger.warning("progress again after %.0f s", stalled_s)
            # The timer stands at the failure; the next moment that matters is the warning, which is earlier.
            self.has_warned = False
            self._set_timer()

    @property
    def stalled_s(self) -> float:
        """Seconds since the latest progress, or since the first of the waiting tasks began to; else 0."""
        return loop_time() - self._since_s if self._waiting else 0.0

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """``async with watch.guard():`` what waits in here is watched.

        Raises:
            StallError: nothing progressed for `fail_after_s`; what waited in here was cancelled.
        """
        try:
            async with timeout(None, lambda: StallError(self._failure)) as limit:
                if not self._waiting:
                    self._since_s = max(self._since_s, loop_time())
                    # Only looked at: growth while nothing waited is no progress of this wait.
                    self._has_grown()
                self._waiting[limit] = None
                if self._timer is None:
                    self._set_timer()
                yield
        finally:
            self._waiting.pop(limit, None)
            if not self._waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self.has_warned = False

    def report(self) -> str:
        """The report: how long without progress, and the oldest activities with stage and age."""
        by_cause = sorted(self.activities.in_flight(), key=lambda activity: activity.stage in _AROUND)
        named = ", ".join(self._words(activity) for activity in by_cause[:_NUM_NAMED])
        more = f" and {len(by_cause) - _NUM_NAMED} more" if len(by_cause) > _NUM_NAMED else ""
        what = f"{len(by_cause)} in flight: {named}{more}" if by_cause else "nothing is in flight"
        away = f"{names} not up; " if (names := self.away()) else ""
        return f"no progress for {self.stalled_s:.0f} s; {away}{what}"

    def _words(self, activity: Activity) -> str:
        known_stage = STAGES.get(activity.stage)
        template = known_stage.report if known_stage else f"{{name}} in stage {activity.stage}"
        known = self.describe(activity) or activity.note
        words = template.format(name=activity.name)
        return f"{words} for {self.activities.age_s(activity):.0f} s" + (f" ({known})" if known else "")

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_s = self._since_s + (self.fail_after_s if self.has_warned else self.warn_after_s)
        if self.has_warned:
            # Between the warning and the failure, too: what goes on again is told before it is late.
            at_s = min(at_s, loop_time() + self.warn_after_s)
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_at(at_s, self._look)

    def _has_grown(self) -> bool:
        """Whether there is more progress than when this was asked last."""
        before, self._seen_progress = self._seen_progress, self.progress()
        return self._seen_progress > before

    def _look(self) -> None:
        """The timer's time has come; progress may have moved the moment that matters."""
        assert self._timer is not None
        # The timer's own time, not the clock's: a sum that rounds down would set the timer again and again.
        reached_s = self._timer.when()
        self._timer = None
        if self._has_grown():
            self.progressed()
        elif reached_s >= self._since_s + self.fail_after_s:
            self._failure = self.report()
            logger.error("%s", self._failure)
            # A task that begins to wait from now on starts a count of its own.
            failing, self._waiting, self.has_warned = self._waiting, {}, False
            for limit in failing:
                limit.reschedule(loop_time())
        elif reached_s >= self._since_s + self.warn_after_s and not self.has_warned:
            self.has_warned, self.num_warnings = True, self.num_warnings + 1
            logger.warning("%s", self.report())
        self._set_timer()


async def answered(call: Awaitable[T], what: str, limit_s: float = ANSWER_LIMIT_S) -> T:
    """The result of `call` within `limit_s` seconds; then it is cancelled.

    Raises:
        StallError: it took longer; the message begins with `what`, which names part and request.
    """
    async with timeout(limit_s, lambda: StallError(f"{what}: no answer within {limit_s:g} s")):
        return await call
