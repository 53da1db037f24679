"""The events of groups, and the groups of one task in columns: where each is now, since when, what is known.

::

    admitted --> live <--------- retried (taken up again), requeued (brought back)
                  |---> trained (train step)
                  '---> dropped (reason)

A rollout that leaves its group does not move the group: those that left are counted beside the place. Open
groups, admitted and live, are kept in memory; settled ones, trained and dropped, in a temporary file of
SQLite's, about 80 bytes each, of which two MB are kept in memory. That file ends with the process; `save` keeps
a copy, which has the open groups, too. This module keeps no file of the events, and no balance.
"""

import contextlib
import json
import math
import os
import sqlite3
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
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
OPEN = (ADMITTED, LIVE)
"""The places of groups that are neither trained nor dropped."""

EVENTS = (ADMITTED, PRODUCED, RETRIED, REQUEUED, LEFT, TRAINED, REUSED, UNUSED, DROPPED)


class Histories:
    """The groups of one task.

    Invariant: `counts` holds, for every place, the number of groups that are there.

    >>> histories = Histories()
    >>> histories.enter({"group": "g1", "event": "dropped", "reason": "filtered", "time_s": 0.0})
    >>> histories.counts
    Counter({'dropped:filtered': 1})
    """

    def __init__(
        self, saved: Path | None = None, sums: Mapping[str, Any] | None = None, *, loads_open: bool = False
    ) -> None:
        """Without events, or as `save` left them in the file `saved`, whose `sums` it gave.

        Unless it `loads_open`, open groups of the file are in memory only once an event names them.
        """
        self._open: dict[GroupId, Row] = {}
        # Without a name it is a temporary file, and in memory as long as it is small. Nothing is committed,
        # which halves the time, and nothing rolled back: a forked process that ends would do that to the file
        # of its parent.
        self._settled = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._process_id = os.getpid()
        weakref.finalize(self, self._settled.close)
        if saved is not None:
            with contextlib.closing(sqlite3.connect(saved)) as source:
                source.backup(self._settled)
        self._ask("PRAGMA journal_mode = OFF")
        self._ask("BEGIN")
        # Names as JSON: 4 is not "4", a number has any size, and a text every character that a line holds.
        self._ask(f"CREATE TABLE IF NOT EXISTS settled (name PRIMARY KEY, {', '.join(_COLUMNS)}) WITHOUT ROWID")
        opened = list(self._ask(f"SELECT * FROM settled WHERE place IN {OPEN}")) if loads_open else []
        # Names all at once, which takes a tenth of the time of one after the other.
        names = json.loads(f"[{','.join(row[0] for row in opened)}]")
        self._open |= {n: dict(zip(_COLUMNS, row[1:], strict=True)) for n, row in zip(names, opened, strict=True)}
        self._lock = threading.Lock()
        """A thread that plans an epoch reads beside the events."""
        sums = sums or {"counts": {}, "totals": {}, "powers": [], "repeated": 0}
        self.counts: Counter[str] = Counter(sums["counts"])
        self.totals: Counter[str] = Counter(sums["totals"])
        """Sums of the columns that count events."""
        self._powers: Counter[tuple[str, int]] = Counter({(place, n): power for place, n, power in sums["powers"]})
        """By place and exponent: the sum of that power of the groups' tokens."""
        self.num_repeated: int = sums["repeated"]
        """Groups produced or trained again after a training that was not taken back."""

    def __len__(self) -> int:
        return sum(self.counts.values())

    def name_live(self) -> list[GroupId]:
        """The groups that are neither trained nor dropped, in the order of their first events."""
        with self._lock:
            return sorted(self._open, key=lambda group_id: self._open[group_id]["first_s"])

    def save(self, path: Path) -> dict[str, Any]:
        """Write all groups into a new file; the sums, as JSON values.

        Raises:
            OSError: the disk takes no more.
        """
        with self._lock, contextlib.closing(sqlite3.connect(path)) as target:
            for group_id, row in self._open.items():
                self._ask(_REPLACE, json.dumps(group_id), *row.values())
            # A transaction that has begun would make the copy wait for ever.
            self._ask("COMMIT")
            try:
                self._settled.backup(target)
            except sqlite3.Error as error:
                raise OSError(f"{str(path)!r} cannot be written: {error}") from error
            self._ask("BEGIN")
        powers = [[*key, power] for key, power in self._powers.items()]
        return {"counts": self.counts, "totals": self.totals, "powers": powers, "repeated": self.num_repeated}

    def glance(self, group_ids: Collection[GroupId]) -> dict[GroupId, tuple[str, int | None]]:
        """Place and tokens of those of the groups that have events."""
        with self._lock:
            found = {each: (row["place"], row["num_tokens"]) for each in group_ids if (row := self._open.get(each))}
            others = [each for each in group_ids if each not in found]
            # A line each: no text in JSON has an end of a line.
            names = dict(zip(json.dumps(others, separators=("\n", ":"))[1:-1].split("\n"), others, strict=False))
            asked = "SELECT name, place, num_tokens FROM settled WHERE name IN (SELECT value FROM json_each(?))"
            rows = self._ask(asked, json.dumps([*names]))
            return found | {names[name]: (place, num_tokens) for name, place, num_tokens in rows}

    def enter(self, event: Mapping[str, Any], *, is_new: bool = False) -> None:
        """Enter one event, as a line of the ledger's file; `is_new`: its group is known to have none yet.

        Raises:
            ValueError, LookupError, TypeError: it is none; nothing is entered.
            OSError: a settled group finds no room on the disk.
        """
        name, group_id, time_s = event["event"], event["group"], float(event["time_s"])
        check_event(name)
        said = {column: kind(event[column]) for column, kind in _SAID.items() if event.get(column) is not None}
        with self._lock:
            row = None if is_new else self._find(group_id)
            before = None if row is None else row["place"]
            if row is None:
                row = dict.fromkeys(_COLUMNS) | {"first_s": time_s, **dict.fromkeys(_COUNTS, 0)}
            else:
                self._count(row, -1)
            row["last_s"] = time_s
            if name in _COUNTED:
                counted, change = _COUNTED[name]
                # Never below 0: the `reused` that an `unused` takes back may be a lost event.
                change = max(change, -row[counted])
                row[counted] += change
                self.totals[counted] += change
            if "latency_s" in said and row["latency_s"] is not None:
                said["latency_s"] += row["latency_s"]
            if row["score"] is not None or math.isnan(said.get("score", 0.0)):
                said.pop("score", None)
            row |= said
            row["place"] = _place_after(name, event.get("reason"), before)
            self.num_repeated += before == TRAINED and name in (PRODUCED, TRAINED)
            if row["place"] in OPEN and before is not None and before not in OPEN:
                self._ask("DELETE FROM settled WHERE name = ?", json.dumps(group_id))
            self._keep(group_id, row)

    def life(self, group_id: GroupId, task_name: str) -> "GroupLife | None":
        """Everything about one group; None if it has no events."""
        with self._lock:
            if (row := self._find(group_id)) is None:
                return None
            place, _, reason = row["place"].partition(":")
            return GroupLife(group_id, task_name, reason=reason or None, **{**row, "place": place})

    def values(self, place: str, column: str) -> NDArray[np.floating]:
        """The known values (N,) of a column, of groups ``trained`` or ``dropped:<reason>``; it reads all."""
        known = f"SELECT {column} FROM settled WHERE place = ? AND {column} IS NOT NULL"
        with self._lock:
            return np.fromiter((value for (value,) in self._ask(known, place)), np.float64)

    def token_powers(self, place: str) -> tuple[int, int, int]:
        """How many groups ``trained`` or ``dropped:<reason>`` have tokens, their sum, that of squares."""
        return self._powers[place, 0], self._powers[place, 1], self._powers[place, 2]

    def state(self) -> list[list[Any]]:
        """Each group's id and columns, as JSON values, in the order of first events."""
        with self._lock:
            lines = self._ask(f"SELECT * FROM settled WHERE place NOT IN {OPEN}")
            rows = [[json.loads(name), *row] for name, *row in lines]
            rows += [[group_id, *row.values()] for group_id, row in self._open.items()]
        return sorted(rows, key=lambda row: (row[1 + _COLUMNS.index("first_s")], str(row[0])))

    @classmethod
    def from_state(cls, state: Any) -> "Histories":
        """The histories that `state` described."""
        histories = cls()
        for group_id, *values in state:
            row = {column: values[place] for place, column in enumerate(_COLUMNS)}
            histories._keep(group_id, row)
            histories.totals.update({counted: row[counted] for counted in _COUNTS})
        return histories

    def _find(self, group_id: GroupId) -> "Row | None":
        if group_id in self._open:
            return self._open[group_id]
        found = self._ask("SELECT * FROM settled WHERE name = ?", json.dumps(group_id)).fetchone()
        return None if found is None else dict(zip(_COLUMNS, found[1:], strict=True))

    def _keep(self, group_id: GroupId, row: "Row") -> None:
        """Keep a group where its place says."""
        self._count(row, 1)
        if row["place"] in OPEN:
            self._open[group_id] = row
        else:
            self._ask(_REPLACE, json.dumps(group_id), *row.values())
            self._open.pop(group_id, None)

    def _count(self, row: "Row", sign: int) -> None:
        """Add the row to the sums, or take it back."""
        place, tokens = row["place"], row["num_tokens"]
        self.counts[place] += sign
        # A balance must not list a reason that no group has any more.
        if not self.counts[place]:
            del self.counts[place]
        if tokens is not None and place not in OPEN:
            for exponent in range(3):
                self._powers[place, exponent] += sign * tokens**exponent

    def _ask(self, text: str, *values: Any) -> sqlite3.Cursor:
        if self._process_id != os.getpid():
            raise RuntimeError("a forked process cannot use its parent's ledger; read the ledger's file there")
        try:
            return self._settled.execute(text, values)
        except sqlite3.Error as error:
            # From here on every question fails, so that no group is forgotten unseen.
            self._settled.close()
            raise OSError(
                f"the books of settled groups have no room in the folder for temporary files ({error}); make "
                f"room there, or set SQLITE_TMPDIR to a folder that has some"
            ) from error


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


_COLUMNS = tuple(each.name for each in fields(GroupLife) if each.name not in ("group_id", "task_name", "reason"))
"""The columns of a group, in this order; its reason is a part of its place."""

Row = dict[str, Any]
"""The columns of one group; None: not known."""


_COUNTED = {RETRIED: ("num_retries", 1), LEFT: ("num_left", 1), REUSED: ("num_reused", 1), UNUSED: ("num_reused", -1)}
"""The column that an event changes, and by how much."""

_COUNTS = ("num_retries", "num_left", "num_reused")
_SAID = {"train_step": int, "num_tokens": int, "latency_s": float, "score": float}
"""The columns that an event may give, and of which type."""
_REPLACE = f"REPLACE INTO settled VALUES (?{', ?' * len(_COLUMNS)})"
