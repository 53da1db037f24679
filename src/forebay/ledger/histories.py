"""The events of groups, and the groups of one task in columns: where each is now, since when, what is known.

::

    admitted --> live <--------- retried (taken up again), requeued (brought back)
                  |---> trained (train step)
                  '---> dropped (reason)

A rollout that leaves its group does not move the group: those that left are counted beside the place. A
group costs about 100 bytes beside its name, so that a million of them fit. This module keeps no file and no
balance.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GroupId = str | int

ADMITTED = "admitted"
PRODUCED = "produced"
RETRIED = "retried"
REQUEUED = "requeued"
TRAINED = "trained"
DROPPED = "dropped"
LEFT = "left"
REUSED, UNUSED = "reused", "unused"
LIVE = "live"

EVENTS = (ADMITTED, PRODUCED, RETRIED, REQUEUED, LEFT, TRAINED, REUSED, UNUSED, DROPPED)

_PLACES = (ADMITTED, LIVE, TRAINED)
"""The places with a code of their own; a group dropped for the i-th reason has the code 3 + i."""

_COLUMNS: Mapping[str, tuple[str, float]] = {
    "place": ("H", 0),
    "train_step": ("i", -1),
    "num_retries": ("H", 0),
    "num_left": ("H", 0),
    "num_reused": ("H", 0),
    "first_s": ("d", math.nan),
    "last_s": ("d", math.nan),
    "num_tokens": ("i", -1),
    "latency_s": ("f", math.nan),
    "score": ("f", math.nan),
}
"""Type code and the value that stands for "not known"."""


class Histories:
    """The groups of one task.

    Invariant: `counts` holds, for every place, the number of groups that are there.

    >>> histories = Histories()
    >>> histories.enter({"group": "g1", "event": "dropped", "reason": "filtered", "time_s": 0.0})
    >>> histories.counts
    Counter({'dropped:filtered': 1})
    """

    def __init__(self) -> None:
        self._rows: dict[GroupId, int] = {}
        self._reasons: list[str] = []
        # Not one table of numpy's: a number of an array is read and set in half the time.
        self._columns: dict[str, array[Any]] = {name: array(code) for name, (code, _) in _COLUMNS.items()}
        self.counts: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        """Sums of the columns that count events."""
        self.num_repeated = 0
        """Groups produced or trained again after a training that was not taken back."""

    def __len__(self) -> int:
        return len(self._rows)

    def place_of(self, group_id: GroupId) -> str | None:
        """``admitted``, ``live``, ``trained``, ``dropped:<reason>``; None for a group without events."""
        row = self._rows.get(group_id)
        return None if row is None else self._name(self._columns["place"][row])

    def name_live(self) -> list[GroupId]:
        """The groups that are neither trained nor dropped, in the order of their first events."""
        first_other, places = _PLACES.index(TRAINED), self._columns["place"]
        return [group_id for group_id, row in self._rows.items() if places[row] < first_other]

    def enter(self, event: Mapping[str, Any]) -> None:
        """Enter one event, as a line of the ledger's file; ValueError if it is none."""
        check_event(event["event"])
        before = self.place_of(event["group"])
        row, columns = self._rows.get(event["group"], len(self._rows)), self._columns
        if before is None:
            for column, (_, unknown) in _COLUMNS.items():
                columns[column].append(unknown)
            columns["first_s"][row] = event["time_s"]
            # Last: a thread that plans an epoch reads beside this, and must not find half a row.
            self._rows[event["group"]] = row
        columns["last_s"][row] = event["time_s"]
        name = event["event"]
        if name in _COUNTED:
            counted, change = _COUNTED[name]
            self.totals[counted] += change
            # Never below 0: the `reused` that an `unused` takes back may be a lost event.
            columns[counted][row] = min(max(columns[counted][row] + change, 0), _MAX_SMALL)
        for counted in ("train_step", "num_tokens"):
            if (number := event.get(counted)) is not None:
                columns[counted][row] = number
        if (latency_s := event.get("latency_s")) is not None:
            so_far = columns["latency_s"][row]
            columns["latency_s"][row] = latency_s if math.isnan(so_far) else so_far + latency_s
        if (score := event.get("score")) is not None and math.isnan(columns["score"][row]):
            columns["score"][row] = score
        after = _place_after(name, event.get("reason"), before)
        self.counts[after] += 1
        if before is not None:
            self.counts[before] -= 1
            # A balance must not list a reason that no group has any more.
            if not self.counts[before]:
                del self.counts[before]
        columns["place"][row] = self._code(after)
        self.num_repeated += before == TRAINED and name in (PRODUCED, TRAINED)

    def life(self, group_id: GroupId, task_name: str) -> GroupLife | None:
        """Everything about one group; None if it has no events."""
        row = self._rows.get(group_id)
        if row is None:
            return None
        known: dict[str, Any] = {name: column[row] for name, column in self._columns.items()}
        place, _, reason = self._name(known.pop("place")).partition(":")
        for name in ("train_step", "num_tokens", "latency_s", "score"):
            if known[name] == -1 or math.isnan(known[name]):
                known[name] = None
        return GroupLife(group_id, task_name, place, reason or None, **known)

    def column(self, name: str) -> NDArray[Any]:
        """One column, in the order of first events; do not keep it over the next event."""
        return np.array(self._columns[name])

    def is_at(self, place: str) -> NDArray[np.bool_]:
        """For each group, whether it is ``trained``, ``dropped`` (for any reason), ``dropped:<reason>``."""
        names = map(self._name, range(len(_PLACES) + len(self._reasons)))
        codes = [code for code, name in enumerate(names) if place in (name, name.partition(":")[0])]
        return np.isin(self.column("place"), codes)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON values; the columns as base64 of little-endian arrays."""
        little = {name: self.column(name).astype(_little(name)) for name in _COLUMNS}
        columns = {
            name: base64.b64encode(column.tobytes()).decode("ascii") for name, column in little.items()
        }
        return {"groups": list(self._rows), "reasons": list(self._reasons), "columns": columns}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Histories:
        """The histories that `state_dict` described.

        Raises:
            ValueError: a column does not have one entry per group.
        """
        histories = cls()
        histories._rows = {group_id: row for row, group_id in enumerate(state["groups"])}
        histories._reasons = list(state["reasons"])
        # Earlier versions did not count what they did not know.
        none = base64.b64encode(bytes(2 * len(histories)))
        stored = {"num_left": none, "num_reused": none, **state["columns"]}
        for name in _COLUMNS:
            column = np.frombuffer(base64.b64decode(stored[name]), _little(name))
            if (found := len(column)) != len(histories):
                raise ValueError(f"the ledger's state holds {len(histories)} groups but {found} of {name}")
            histories._columns[name].extend(column.tolist())
        codes, counts = np.unique(histories.column("place"), return_counts=True)
        places = [histories._name(code) for code in codes.tolist()]
        histories.counts = Counter(dict(zip(places, counts.tolist(), strict=True)))
        for name, _ in _COUNTED.values():
            histories.totals[name] = int(histories.column(name).sum())
        return histories

    def _name(self, code: int) -> str:
        named = len(_PLACES)
        return _PLACES[code] if code < named else f"{DROPPED}:{self._reasons[code - named]}"

    def _code(self, place: str) -> int:
        if place in _PLACES:
            return _PLACES.index(place)
        reason = place.removeprefix(f"{DROPPED}:")
        if reason not in self._reasons:
            self._reasons.append(reason)
        return len(_PLACES) + self._reasons.index(reason)


MAX_COUNT = 2**31 - 1
"""The largest number in the columns of train steps and tokens."""


@dataclass(frozen=True, slots=True)
class GroupLife:
    """All that the ledger knows of one group.

    >>> histories = Histories()
    >>> histories.enter({"group": "g1", "event": "trained", "train_step": 7, "time_s": 0.0})
    >>> histories.life("g1", "math").train_step
    7
    """

    group_id: GroupId
    task_name: str
    place: str
    """``admitted`` (never produced yet), ``live``, ``trained`` or ``dropped``."""
    reason: str | None
    """Why it was dropped."""
    train_step: int | None
    """The train step that consumed it last."""
    num_retries: int
    """How often it was taken up again to be generated anew or continued."""
    num_left: int
    """Rollouts that failed and left the group, which went on without them."""
    num_reused: int
    """Train steps that used it again after the one that consumed it."""
    first_s: float
    """Time of its first event, seconds since the epoch."""
    last_s: float
    """Time of its last event."""
    num_tokens: int | None
    """Response tokens of all its rollouts, as last produced."""
    latency_s: float | None
    """Seconds of generation, all tries together."""
    score: float | None
    """Mean score of its rollouts the first time they had one."""


def check_event(event: str) -> None:
    """ValueError if a group has no such event."""
    if event not in EVENTS:
        raise ValueError(f"unknown event {event!r}; known: {', '.join(EVENTS)}")


def _place_after(event: str, reason: str | None, before: str | None) -> str:
    if event == DROPPED:
        return f"{DROPPED}:{reason}"
    if event == TRAINED:
        return TRAINED
    if event in (ADMITTED, RETRIED, LEFT, REUSED, UNUSED):
        # Being taken up, used again, or going on with fewer rollouts, changes nothing for a group that has a
        # place: its outcome is told apart.
        return before or (ADMITTED if event == ADMITTED else LIVE)
    return LIVE


def _little(name: str) -> np.dtype[Any]:
    """The type of a column in a state: of the same bytes on every machine."""
    return np.dtype(_COLUMNS[name][0]).newbyteorder("<")


_COUNTED = {
    RETRIED: ("num_retries", 1),
    LEFT: ("num_left", 1),
    REUSED: ("num_reused", 1),
    UNUSED: ("num_reused", -1),
}
"""The column that an event changes, and by how much."""

_MAX_SMALL = 2**16 - 1
"""The largest number in the columns of retries and of rollouts that left; larger ones show this number."""
