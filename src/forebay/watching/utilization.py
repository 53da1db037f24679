"""How busy the producer and the trainer are: shares of time from what begins and ends.

::

    activities --began, ended--> a count of what is in flight, by side --> busy seconds --> share(side)

Nothing is sampled: between two events the count stands still, so the busy seconds are exact.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from forebay.watching.activity import STAGES, Activities, Activity

SIDES = ("producer", "trainer")

_PARTS_OF_WINDOW = 32
"""How finely the past is remembered: a share is off by at most this part of its window."""


class BusyShare:
    """The share of the last `window_s` seconds in which each side did anything; the rest it was idle.

    Invariants: 0 <= share <= 1; memory does not grow with what happens.

    >>> import asyncio
    >>> from forebay.aio.virtual_time import run
    >>> async def example():
    ...     activities = Activities()
    ...     busy = BusyShare(activities, window_s=10)
    ...     with activities.span("train", 1):
    ...         await asyncio.sleep(3)
    ...     await asyncio.sleep(1)
    ...     return round(busy.share("trainer"), 2), round(busy.share("producer"), 2)
    >>> run(example())
    (0.75, 0.0)
    """

    def __init__(self, activities: Activities, *, window_s: float = 30.0) -> None:
        """Listen to `activities` from now on.

        Raises:
            ValueError: the window is not positive.
        """
        if window_s <= 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self._window_s = window_s
        self._clock = activities.clock
        self._at_s = self._clock()
        self._counts: Counter[str] = Counter()
        self._busy_s = dict.fromkeys(SIDES, 0.0)
        self._past = deque([(self._at_s, dict(self._busy_s))])
        """The busy seconds at moments of the window."""
        activities.listen(self._began, self._ended)

    def share(self, side: str) -> float:
        """Busy share of the window, or of the time since the start if that is shorter; 0 at the start.

        Raises:
            KeyError: there is no such side.
        """
        busy_s, now_s = self.busy_s(side), self._at_s
        since_s = max(self._past[0][0], now_s - self._window_s)
        if now_s <= since_s:
            return 0.0
        times, values = zip(*((at_s, busy[side]) for at_s, busy in self._past), strict=True)
        # Drawn straight between the two moments remembered around the beginning of the window.
        before_s = np.interp(since_s, [*times, now_s], [*values, busy_s])
        return float(min(1.0, max(0.0, (busy_s - before_s) / (now_s - since_s))))

    def busy_s(self, side: str) -> float:
        """Busy seconds since the start, exact: differences give the share of any stretch of time.

        Raises:
            KeyError: there is no such side.
        """
        self._advance(self._clock())
        return self._busy_s[side]

    def _began(self, activity: Activity) -> None:
        self._count(activity.stage, 1, self._clock())

    def _ended(self, activity: Activity) -> None:
        self._count(activity.stage, -1, activity.end_s)

    def _count(self, stage: str, change: int, now_s: float) -> None:
        if stage in STAGES and (side := STAGES[stage].side):
            self._advance(now_s)
            self._counts[side] += change

    def _advance(self, now_s: float) -> None:
        """Count what has been busy since the last event."""
        for side in SIDES:
            if self._counts[side]:
                self._busy_s[side] += now_s - self._at_s
        self._at_s = now_s
        if now_s - self._past[-1][0] >= self._window_s / _PARTS_OF_WINDOW:
            self._past.append((now_s, dict(self._busy_s)))
            # The last one before the window stays: the window begins between it and the next.
            while len(self._past) > 1 and self._past[1][0] <= now_s - self._window_s:
                self._past.popleft()
