"""What a run is doing right now, and for how long: the register that reports, traces and displays read.

It is not a profiler (nothing inside a forward pass is seen) and not a log (what has ended is told to the
listeners and forgotten).

::

    with activities.span("generate", rollout_id): --> in flight --> ended
                 agent loop, producer, run             |              |
                            in_flight(), counts(): displays,       listeners: trace, busy shares
                            stall reports

Whoever does something gets the register as an optional argument and, without one, makes its own, which nobody
reads. Times are those of the event loop's clock, so the register works under virtual time. Spans begin and
end in the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol

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

Name = str | int | None


def loop_time() -> float:
    """Seconds on the running event loop's clock."""
    return asyncio.get_running_loop().time()


class Activity:
    """One thing that is, or was, being done; made by `Activities.span`.

    ``end_s`` is NaN while it is in flight. ``note`` may be set by whoever does it, for people who read a
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and not self.note:
            self.note = kind.__name__
        self._register._end(self)


class Listener(Protocol):
    """Is told of every activity as it begins and ends; must be quick and must not raise."""

    def began(self, activity: Activity) -> None:
        """``start_s`` is set."""
        ...

    def ended(self, activity: Activity) -> None:
        """``end_s`` and ``note`` are set."""
        ...


class Activities:
    """The register of what is in flight.

    Invariants: an activity is in flight from the moment its span is entered until it is left, however it is
    left; nothing that ended is kept, so memory follows what is in flight.

    >>> async def example():
    ...     activities = Activities()
    ...     with activities.span("generate", "math/0/17/3", task="math", group="math/0/17"):
    ...         return [(a.name, a.stage) for a in activities.in_flight()], activities.counts()
    >>> asyncio.run(example())
    ([('math/0/17/3', 'generate')], {'generate': 1})
    """

    def __init__(self, *, clock: Callable[[], float] = loop_time) -> None:
        self.clock = clock
        # A dict is the ordered set of Python: the oldest comes first.
        self._in_flight: dict[Activity, None] = {}
        self._listeners: tuple[Listener, ...] = ()

    def span(self, stage: str, name: Name, *, task: Name = None, group: Name = None) -> Activity:
        """A context manager: what happens inside is `stage` of `name`. Any text may be a stage."""
        return Activity(self, stage, name, task, group)

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of what begins from now on; what is in flight already counts as beginning now."""
        self._listeners = (*self._listeners, listener)
        for activity in self._in_flight:
            listener.began(activity)

    def ignore(self, listener: Listener) -> None:
        """Tell `listener` nothing more."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)

    def in_flight(self, stages: Iterable[str] | None = None) -> list[Activity]:
        """What is being done, the oldest first; of these stages only, if given."""
        if stages is None:
            return list(self._in_flight)
        wanted = frozenset(stages)
        return [activity for activity in self._in_flight if activity.stage in wanted]

    def oldest(self) -> Activity | None:
        """What has been going on for longest; None when nothing is."""
        return next(iter(self._in_flight), None)

    def age_s(self, activity: Activity) -> float:
        """Seconds since `activity` began."""
        return self.clock() - activity.start_s

    def counts(self) -> dict[str, int]:
        """How many activities are in flight, by stage."""
        return dict(Counter(activity.stage for activity in self._in_flight))

    def _begin(self, activity: Activity) -> None:
        activity.start_s = self.clock()
        self._in_flight[activity] = None
        for listener in self._listeners:
            listener.began(activity)

    def _end(self, activity: Activity) -> None:
        activity.end_s = self.clock()
        del self._in_flight[activity]
        for listener in self._listeners:
            listener.ended(activity)
