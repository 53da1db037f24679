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

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

QUEUED = "queued"
"""A group or rollout waits for its turn to be generated."""
GENERATE = "generate"
"""A rollout is generated: engine, agent and tools together; named by its rollout id."""
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

    def __init__(self, *, clock: Callable[[], float] = loop_time) -> None:
        self.clock = clock
        # A dict is the ordered set of Python: the oldest comes first.
        self._in_flight: dict[Activity, None] = {}
        self._listeners: tuple[tuple[Listener, Listener], ...] = ()

    def span(self, stage: str, name: Name, *, task: Name = None, group: Name = None) -> Activity:
        """A context manager: what happens inside is `stage` of `name`. Any text may be a stage."""
        return Activity(self, stage, name, task, group)

    def listen(self, began: Listener, ended: Listener) -> Callable[[], None]:
        """Call these as an activity begins (``start_s`` is set) and ends (``end_s`` and ``note`` are set).

        Activities that are in flight already count as beginning now. The result ends the listening.
        """
        listener = began, ended
        self._listeners = (*self._listeners, listener)
        for activity in self._in_flight:
            began(activity)

        def stop() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

        return stop

    def in_flight(self) -> list[Activity]:
        """All that is being done, the oldest first."""
        return list(self._in_flight)

    def age_s(self, activity: Activity) -> float:
        """Seconds since `activity` began."""
        return self.clock() - activity.start_s

    def _begin(self, activity: Activity) -> None:
        activity.start_s = self.clock()
        self._in_flight[activity] = None
        for began, _ in self._listeners:
            began(activity)

    def _end(self, activity: Activity) -> None:
        activity.end_s = self.clock()
        del self._in_flight[activity]
        for _, ended in self._listeners:
            ended(activity)


class Stage(NamedTuple):
    """How a stage is spoken of."""

    track: str
    """Of a trace."""
    report: str
    """In a stall report, with the activity's name."""
    side: str = ""
    """Which side of the run is busy meanwhile: "producer" or "trainer"; waiting is no work of either."""
    doing: str = ""
    """In the live view, which shows the stages of the producer: "generating 380 rollouts"."""
    what: str = ""
    """A rollout or a group."""


STAGES: Mapping[str, Stage] = {
    TRAIN: Stage("trainer", "training {name}", "trainer"),
    CHECKPOINT: Stage("trainer", "checkpoint {name}", "trainer"),
    WAIT_BATCH: Stage("waiting", "the trainer waiting for {name}"),
    SYNC: Stage("sync", "weight sync {name}", "trainer"),
    EVALUATE: Stage("evaluation", "evaluation {name}", "trainer"),
    QUEUED: Stage("queued", "{name} waiting for its turn", "", "queued", "group"),
    GENERATE: Stage("rollouts", "rollout {name} generating", "producer", "generating", "rollout"),
    TOOL: Stage("tools", "rollout {name} waiting for a tool", "producer", "at a tool:", "rollout"),
    JUDGE: Stage("judging", "group {name} being judged", "producer", "judging", "group"),
    PUT: Stage("storing", "group {name} being stored", "", "storing", "group"),
}
"""The stages of a run, in the order in which a trace draws them; programs may have others."""

Name = str | int | None


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

    def __enter__(self) -> Activity:
        self._register._begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self.note:
            self.note = kind.__name__
        self._register._end(self)


Listener = Callable[[Activity], None]
"""Must be quick and must not raise."""
