"""How busy the producer and the trainer are: shares of time from what begins and ends.

::

    activities --began, ended--> a count of what is in flight, by side --> busy seconds --> share(side)

Nothing is sampled: between two events the count stands still, so the busy seconds are exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from forebay.watching.activity import (
    CHECKPOINT,
    EVALUATE,
    GENERATE,
    JUDGE,
    SYNC,
    TOOL,
    TRAIN,
    Activities,
    Activity,
)

SIDES: Mapping[str, tuple[str, ...]] = {
    "producer": (GENERATE, TOOL, JUDGE),
    "trainer": (TRAIN, SYNC, EVALUATE, CHECKPOINT),
}
"""The stages in which each side does something; waiting and queueing are its idle time."""

_PARTS_OF_WINDOW = 32
"""How finely the past is remembered: a share is off by at most this part of its window."""


class _Side:
    """The busy seconds of one side, and what they were at moments of the recent past."""

    def __init__(self, start_s: float, slots: int) -> None:
        self.slots = slots
        self.count = 0
        self.busy_s = 0.0
        self.at_s = start_s
        self.past: deque[tuple[float, float]] = deque([(start_s, 0.0)])

    def advance(self, now_s: float, window_s: float) -> None:
        """Count what has been busy since the last event."""
        self.busy_s += (now_s - self.at_s) * min(self.count, self.slots) / self.slots
        self.at_s = now_s
        if now_s - self.past[-1][0] >= window_s / _PARTS_OF_WINDOW:
            self.past.append((now_s, self.busy_s))
            # The last one before the window stays: the window begins between it and the next.
            while len(self.past) > 1 and self.past[1][0] <= now_s - window_s:
                self.past.popleft()

    def busy_until(self, then_s: float) -> float:
        """The busy seconds at `then_s`, drawn straight between the moments remembered around it."""
        before_s, before = self.past[0]
        for after_s, after in [*self.past, (self.at_s, self.busy_s)]:
            if after_s > then_s:
                share = max(0.0, then_s - before_s) / (after_s - before_s) if after_s > before_s else 0.0
                return before + (after - before) * share
            before_s, before = after_s, after
        return self.busy_s


class BusyShare:
    """The share of the last `window_s` seconds in which each side was busy; the rest it was idle.

    Invariants: 0 <= share <= 1; memory does not grow with what happens.

    >>> async def example():
    ...     activities = Activities()
    ...     busy = BusyShare(activities, window_s=10)
    ...     with activities.span("train", 1):
    ...         await asyncio.sleep(3)
    ...     await asyncio.sleep(1)
    ...     return round(busy.share("trainer"), 2), round(busy.share("producer"), 2)
    >>> run(example())                                        # on virtual time
    (0.75, 0.0)
    """

    def __init__(
        self,
        activities: Activities,
        *,
        sides: Mapping[str, Iterable[str]] = SIDES,
        slots: Mapping[str, int] | None = None,
        window_s: float = 30.0,
    ) -> None:
        """Listen to `activities` from now on.

        `sides` gives each side's stages. A side counts as wholly busy with ``slots[side]`` activities (1
        where left out: any activity), and in proportion with fewer.

        Raises:
            ValueError: a window or a number of slots that is not positive, or slots of an unknown side.
        """
        slots = dict(slots or {})
        if window_s <= 0 or any(number < 1 for number in slots.values()):
            raise ValueError(f"window_s and slots must be positive, got {window_s} and {slots}")
        if unknown := set(slots) - set(sides):
            raise ValueError(f"slots for {sorted(unknown)}, but the sides are {sorted(sides)}")
        self._window_s = window_s
        self._clock = activities.clock
        self._start_s = self._clock()
        self._sides = {name: _Side(self._start_s, slots.get(name, 1)) for name in sides}
        self._of_stage: dict[str, list[_Side]] = {}
        for name, stages in sides.items():
            for stage in stages:
                self._of_stage.setdefault(stage, []).append(self._sides[name])
        activities.listen(self)

    def share(self, side: str) -> float:
        """Busy share of the window, or of the time since the start if that is shorter; 0 at the start.

        Raises:
            KeyError: there is no such side.
        """
        state, now_s = self._sides[side], self._clock()
        state.advance(now_s, self._window_s)
        since_s = max(self._start_s, now_s - self._window_s)
        if now_s <= since_s:
            return 0.0
        share = (state.busy_s - state.busy_until(since_s)) / (now_s - since_s)
        return min(1.0, max(0.0, share))

    def busy_s(self, side: str) -> float:
        """Busy seconds since the start, exact: differences give the share of any stretch of time.

        Raises:
            KeyError: there is no such side.
        """
        state = self._sides[side]
        state.advance(self._clock(), self._window_s)
        return state.busy_s

    def began(self, activity: Activity) -> None:
        """One more is in flight."""
        for side in self._of_stage.get(activity.stage, ()):
            side.advance(self._clock(), self._window_s)
            side.count += 1

    def ended(self, activity: Activity) -> None:
        """One fewer is in flight."""
        for side in self._of_stage.get(activity.stage, ()):
            side.advance(activity.end_s, self._window_s)
            side.count -= 1
