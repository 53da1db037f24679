"""The register of what a run is doing right now, and for how long; reports, traces and displays read it.

It is not a profiler (nothing inside a forward pass is seen) and not a log (what has ended is told to the
listeners and forgotten).

::

    with activities.span("generate", rollout_id): --> in flight --> ended
                 agent loop, producer, run             |              |
                            in_flight():               listeners: trace, busy shares, displays
                            stall reports

Code that does something gets the register as an optional argument and, without one, makes its own, which
nothing reads. Times are those of the event loop's clock, so the register works under virtual time. Spans
begin and end in the event loop's thread.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

GENERATE = "generate"
"""A rollout is generated: engine, agent and tools together; named by its rollout id."""
QUEUED = "queued"
"""A rollout waits for an engine that has room; within `GENERATE`, as `TOOL` is."""
TOOL = "tool"
"""A rollout waits for a tool or an environment."""
JUDGE = "judge"
"""The completed rollouts of a group are judged; named by the group id."""
PUT = "put"
"""A group is stored."""
WAIT_BATCH = "wait_batch"
"""The trainer waits for its batch."""
TRAIN = "train"
SYNC = "sync"
EVALUATE = "evaluate"
EVALUATE_BESIDE = "evaluate_beside"
"""Held-out prompts are tried while production and training go on."""
CHECKPOINT = "checkpoint"


def loop_time() -> float:
    """Seconds on the running event loop's clock."""
    return asyncio.get_running_loop().time()


class Activities:
    """The register of what is in flight.

    Invariants: an activity is in flight from the moment its span is entered until it is left, however it is
    left; nothing that ended is kept, so memory follows what is in flight.

    >>> async def example():
    ...     activities = Activities()
    ...     with activities.span("generate", "math/0/17/3", task="math", group="math/0/17"):
    ...         return [(activity.name, activity.stage) for activity in activities.in_flight()]
    >>> asyncio.run(example())
    [('math/0/17/3', 'generate')]
    """

    def __init__(self) -> None:
        # A dict is the ordered set of Python: the oldest comes first.
        self._in_flight: dict[Activity, None] = {}
        self._listeners: list[tuple[Listener, Listener]] = []

    def span(self, stage: str, name: "Name", *, task: "Name" = None, group: "Name" = None) -> "Activity":
        """A context manager: what happens inside is `stage` of `name`. Any text may be a stage."""
        return Activity(self, stage, name, task, group)

    def listen(self, began: "Listener", ended: "Listener") -> None:
        """Call these as an activity begins (``start_s`` is set) and ends (``end_s`` and ``note`` are set).

        Activities that are in flight already count as beginning now.
        """
        self._listeners.append((began, ended))
        for activity in self._in_flight:
            began(activity)

    def in_flight(self) -> "list[Activity]":
        """All that is being done, the oldest first."""
        return list(self._in_flight)

    def age_s(self, activity: "Activity") -> float:
        """Seconds since `activity` began."""
        return loop_time() - activity.start_s


class Stage(NamedTuple):
    """How a stage is spoken of."""

    track: str
    """The line of a trace that the stage is drawn in."""
    report: str
    """The words in a stall report, with the activity's name."""
    side: str = ""
    """Which side of the run is busy meanwhile: "producer" or "trainer"; waiting is no work of either."""
    doing: str = ""
    """The words in the live view, which shows the stages of the producer: "generating 380 rollouts"."""
    what: str = ""
    """A rollout or a group."""


STAGES: Mapping[str, Stage] = {
    TRAIN: Stage("trainer", "training {name}", "trainer"),
    CHECKPOINT: Stage("trainer", "checkpoint {name}", "trainer"),
    WAIT_BATCH: Stage("waiting", "the trainer waiting for {name}"),
    SYNC: Stage("sync", "weight sync {name}", "trainer"),
    EVALUATE: Stage("evaluation", "evaluation {name}", "trainer"),
    EVALUATE_BESIDE: Stage("evaluation", "evaluation {name} beside production"),
    GENERATE: Stage("rollouts", "rollout {name} generating", "producer", "generating", "rollout"),
    QUEUED: Stage("queue", "rollout {name} queued", "", "queued:", "rollout"),
    TOOL: Stage("tools", "rollout {name} waiting for a tool", "producer", "at a tool:", "rollout"),
    JUDGE: Stage("judging", "group {name} being judged", "producer", "judging", "group"),
    PUT: Stage("storing", "group {name} being stored", "", "storing", "group"),
}
"""The stages of a run, in the order in which a trace draws them; programs may have others."""

Name = str | int | None


class Span(NamedTuple):
    """An activity that has ended, as histories and traces have it; texts that were not given are empty."""

    start_s: float
    end_s: float
    stage: str
    name: str
    task: str
    group_id: str
    note: str


class Activity:
    """One thing that is, or was, being done; made by `Activities.span`.

    ``end_s`` is NaN while it is in flight. ``note`` may be set while it lasts, for readers of a
    trace ("completed, 412 tokens").
    """

    __slots__ = ("_register", "end_s", "group", "name", "note", "stage", "start_s", "task")

    def __init__(self, register: Activities, stage: str, name: Name, task: Name, group: Name) -> None:
        self._register = register
        self.stage = stage
        self.name = name
        self.task = task
        self.group = group
        self.note = ""
        self.start_s = self.end_s = float("nan")

    def span(self) -> Span:
        """The ended activity as a `Span`."""
        name, task, group = ("" if text is None else str(text) for text in (self.name, self.task, self.group))
        return Span(self.start_s, self.end_s, self.stage, name, task, group, self.note)

    def __enter__(self) -> "Activity":
        register = self._register
        self.start_s = loop_time()
        register._in_flight[self] = None
        for began, _ in register._listeners:
            began(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self.note:
            self.note = kind.__name__
        register = self._register
        self.end_s = loop_time()
        # Before the listeners are told: for them it is not in flight any more.
        del register._in_flight[self]
        for _began, ended in register._listeners:
            ended(self)


Listener = Callable[[Activity], None]
"""Must be quick and must not raise."""


SIDES = ("producer", "trainer")

WINDOW_S = 30.0
"""Long enough for a share that does not jump, short enough to show what the run does now."""
_PARTS_OF_WINDOW = 32
"""How finely the past is remembered: a share is off by at most this part of its window."""


class BusyShare:
    """The share of the last `WINDOW_S` seconds in which each side did anything; the rest it was idle.

    Nothing is sampled: between two events the count of what is in flight stands still, so busy seconds are
    exact.

    Invariants: 0 <= share <= 1; memory does not grow with what happens.

    >>> from forebay.aio.virtual_time import run
    >>> async def example():
    ...     activities = Activities()
    ...     busy = BusyShare(activities)
    ...     with activities.span("train", 1):
    ...         await asyncio.sleep(3)
    ...     await asyncio.sleep(1)
    ...     return round(busy.share("trainer"), 2), round(busy.share("producer"), 2)
    >>> run(example())
    (0.75, 0.0)
    """

    def __init__(self, activities: Activities) -> None:
        """Listen to `activities` from now on."""
        self._at_s = loop_time()
        self._counts: Counter[str] = Counter()
        self._busy_s = dict.fromkeys(SIDES, 0.0)
        self._past = deque([(self._at_s, dict(self._busy_s))])
        """The busy seconds at moments of the window."""
        activities.listen(partial(self._count, 1), partial(self._count, -1))

    def share(self, side: str) -> float:
        """Busy share of the window, or of the time since the start if that is shorter; 0 at the start.

        Raises:
            KeyError: there is no such side.
        """
        busy_s, now_s = self.busy_s(side), self._at_s
        since_s = max(self._past[0][0], now_s - WINDOW_S)
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
        self._advance(loop_time())
        return self._busy_s[side]

    def _count(self, change: int, activity: Activity) -> None:
        if activity.stage in STAGES and (side := STAGES[activity.stage].side):
            before = self._counts[side]
            # Only the first to begin and the last to end change whether the side is busy.
            if before == 0 or before + change == 0:
                # The moment of the event; an activity that was in flight already counts from now.
                self._advance(loop_time() if change > 0 else activity.end_s)
            self._counts[side] = before + change

    def _advance(self, now_s: float) -> None:
        """Count what has been busy since the last event."""
        for side in SIDES:
            if self._counts[side]:
                self._busy_s[side] += now_s - self._at_s
        self._at_s = now_s
        if now_s - self._past[-1][0] >= WINDOW_S / _PARTS_OF_WINDOW:
            self._past.append((now_s, dict(self._busy_s)))
            # The last one before the window stays: the window begins between it and the next.
            while len(self._past) > 1 and self._past[1][0] <= now_s - WINDOW_S:
                self._past.popleft()
