"""The ledger: what became of every group, so that none is lost and none doubled.

::

    produced --> live --> trained (train step)
                  ^  \\--> dropped (reason)
                  '------- requeued (brought back: restored, or to be generated again)

Each group is in exactly one of these states, so for every task, at any moment::

    generated = trained + dropped (by reason) + live

`balance` holds the ledger's own `live` against what the buffer says; a difference is a lost or doubled group.
The ledger decides nothing and stores no rollouts. With a path, each event is also a line of JSON in an
append-only file, flushed at once.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

GroupId = str | int

LIVE = "live"
TRAINED = "trained"
DROPPED = "dropped"

_MOVES_TO = {"produced": LIVE, "requeued": LIVE, TRAINED: TRAINED, DROPPED: DROPPED}
"""The events, and where each takes a group."""


@dataclass(frozen=True)
class Balance:
    """Where the groups are: of one task, or of all, then with `by_task`.

    >>> ledger.balance({"math": 12}).difference
    0
    """

    generated: int
    """Groups that were ever produced; one that is generated again counts once."""
    trained: int
    dropped: dict[str, int]
    """By reason."""
    live: int
    """As told by the caller: in the buffer, or in flight after an earlier production."""
    repeated: int
    """Groups produced or trained again after a training, without having been requeued."""
    by_task: dict[str, Balance] = field(default_factory=dict)

    @property
    def difference(self) -> int:
        """Groups that are missing; negative: groups too many."""
        return self.generated - self.trained - sum(self.dropped.values()) - self.live

    @property
    def ok(self) -> bool:
        """Whether no group is missing, too many or repeated, in any task."""
        return self.difference == 0 and self.repeated == 0 and all(part.ok for part in self.by_task.values())


class Ledger:
    """Accounts for groups, by task. A group's first event, whichever it is, counts it as generated.

    >>> ledger = Ledger()
    >>> ledger.record("g1", "math", "produced")
    >>> ledger.record("g1", "math", "trained", train_step=1)
    >>> ledger.balance({"math": 0}).ok
    True
    """

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        self._num_events = 0
        # task -> group -> LIVE, TRAINED or the reason it was dropped for, prefixed.
        self._places: dict[str, dict[GroupId, str]] = {}
        self._counts: dict[str, Counter[str]] = {}
        self._repeated: Counter[str] = Counter()

    def record(
        self,
        group_id: GroupId,
        task_name: str,
        event: str,
        *,
        reason: str | None = None,
        train_step: int | None = None,
        **details: Any,
    ) -> None:
        """Enter that a group was ``produced``, ``trained``, ``dropped`` (with a reason) or ``requeued``.

        `details` are JSON values; they, the reason and the train step go into the file.

        Raises:
            ValueError: another event, no group id, or ``dropped`` without a reason.
        """
        if event not in _MOVES_TO:
            raise ValueError(f"unknown event {event!r}; known: {', '.join(_MOVES_TO)}")
        if group_id is None:
            raise ValueError(f"task {task_name!r}: a group without group_id cannot be accounted for")
        if event == DROPPED and not reason:
            raise ValueError(f"group {group_id!r} was dropped: give the reason, got {reason!r}")
        self._move(group_id, task_name, event, reason)
        given = {"reason": reason, "train_step": train_step, **details}
        said = {name: value for name, value in given.items() if value is not None}
        self._write({"event": event, "task": task_name, "group": group_id, **said})

    def has_seen(self, group_id: GroupId, task_name: str) -> bool:
        """Whether the group has any event."""
        return group_id in self._places.get(task_name, {})

    def was_trained(self, group_id: GroupId, task_name: str) -> bool:
        """Whether the group was trained on and not requeued since."""
        return self._places.get(task_name, {}).get(group_id) == TRAINED

    def balance(self, live: Mapping[str, int]) -> Balance:
        """Hold the books against `live`: the produced groups of each task that exist, counted elsewhere."""
        tasks = {task: self._task_balance(task, live.get(task, 0)) for task in {**self._places, **live}}
        dropped: Counter[str] = Counter()
        for part in tasks.values():
            dropped.update(part.dropped)
        return Balance(
            generated=sum(part.generated for part in tasks.values()),
            trained=sum(part.trained for part in tasks.values()),
            dropped=dict(dropped),
            live=sum(part.live for part in tasks.values()),
            repeated=sum(part.repeated for part in tasks.values()),
            by_task=tasks,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON values, for a checkpoint."""
        return {
            "num_events": self._num_events,
            "groups": {
                task: [list(item) for item in places.items()] for task, places in self._places.items()
            },
            "repeated": dict(self._repeated),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`; the file keeps its lines and gets one that says so."""
        self._places = {task: dict(items) for task, items in state["groups"].items()}
        self._counts = {task: Counter(places.values()) for task, places in self._places.items()}
        self._repeated = Counter(state["repeated"])
        self._num_events = state["num_events"]
        self._write({"event": "rewound", "to_event": self._num_events})

    def close(self) -> None:
        """Close the file; nothing can be recorded in it afterwards."""
        if self._file is not None:
            self._file.close()

    def _move(self, group_id: GroupId, task_name: str, event: str, reason: str | None) -> None:
        places = self._places.setdefault(task_name, {})
        counts = self._counts.setdefault(task_name, Counter())
        before = places.get(group_id)
        if before is not None:
            counts[before] -= 1
        if before == TRAINED and event in ("produced", TRAINED):
            self._repeated[task_name] += 1
        place = _MOVES_TO[event]
        places[group_id] = f"{DROPPED}:{reason}" if place == DROPPED else place
        counts[places[group_id]] += 1

    def _task_balance(self, task_name: str, live: int) -> Balance:
        counts = self._counts.get(task_name, Counter())
        prefix = f"{DROPPED}:"
        return Balance(
            generated=len(self._places.get(task_name, {})),
            trained=counts[TRAINED],
            dropped={
                place.removeprefix(prefix): num
                for place, num in counts.items()
                if num and place.startswith(prefix)
            },
            live=live,
            repeated=self._repeated[task_name],
        )

    def _write(self, line: Mapping[str, Any]) -> None:
        self._num_events += 1
        if self._file is not None:
            stamp = {"number": self._num_events, "time_s": self._clock()}
            self._file.write(json.dumps({**stamp, **line}) + "\n")
            self._file.flush()
