"""The ledger: what became of every group, so that none is lost and none doubled.

::

    admitted --> produced --> live --> trained (train step) <-- reused (by later train steps)
                               ^  \\--> dropped (reason)
                               '------- requeued (brought back: restored, or to be generated again)

Each group is in exactly one of these places, so for every task, at any moment::

    generated = trained + dropped (by reason) + live

where a group counts as generated from its first event on, and as live from then until it is trained or
dropped: in the buffer, or in flight. The books count groups. A rollout that failed and left its group, which
goes on without it, is an event of that group (``left``, one for each rollout); so every rollout either shares
its group's place or has left. `balance` holds the ledger's own `live` against what the caller counted;
a difference is a lost or doubled group. The ledger decides nothing and stores no rollouts. With a path, each
event is also a line in an append-only file (`journal`), and a checkpoint needs no more than how far that file
went: `checkpoint` costs the same after a million events as after ten.
"""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.io.safe_files import DamagedError, DiskError, check, publish, unfinished, write_json
from forebay.ledger import histories as books
from forebay.ledger.journal import RESTARTED, START, Journal, Place, WentBack, read_events

STATE_VERSION = 3
PLACE_VERSION = 2
"""The version of a state that is a place in the ledger's file."""
REWOUND = "rewound"
BOOKS, PLACE = "books", "place.json"
"""The folder of kept books, beside the file, and what says of which of its events they are."""


class Ledger:
    """Accounts for groups, by task. A group's first event, whichever it is, counts it as generated.

    >>> ledger = Ledger()
    >>> ledger.record("g1", "math", "produced", num_tokens=96, latency_s=1.5, score=0.25)
    >>> ledger.record("g1", "math", "trained", train_step=1)
    >>> ledger.balance({"math": 0}).ok
    True
    """

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._journal = None if path is None else Journal(path)
        self._num_events = 0
        self.lost_events = 0
        """Events that are missing in the file that the ledger was read from."""
        self._tasks: dict[str, books.Histories] = defaultdict(books.Histories)

    @classmethod
    def read(cls, path: Path, *, num_bytes: int | None = None, num_events: int | None = None) -> "Ledger":
        """The ledger that wrote the file `path`, as it was after its last event; it writes no file.

        Or as it was when the file had `num_bytes` and the ledger `num_events`. Events that are missing are
        counted in `lost_events`; the rest is entered.

        Raises:
            FileNotFoundError: there is no file.
            ValueError: the file is no ledger's.
        """
        ledger = cls()
        ledger._enter_lines(path, num_bytes, num_events)
        return ledger

    def _enter_lines(self, path: Path, num_bytes: int | None, num_events: int | None, after: Place = START) -> None:
        for event in read_events(path, num_bytes=num_bytes, after=after):
            number = event["number"]
            # Numbers rise: the rest was written after the state that is asked for.
            if num_events is not None and number > num_events:
                break
            try:
                if event["event"] != REWOUND:
                    self._tasks[event["task"]].enter(event)
            except (ValueError, LookupError, TypeError, OverflowError) as error:
                raise ValueError(f"event {number} of {str(path)!r} is not a ledger's: {error!r}") from None
            # A gap in the numbers: the lines between were lost.
            self.lost_events += number - self._num_events - 1
            self._num_events = number
        if num_events is not None:
            self.lost_events += num_events - self._num_events
            self._num_events = num_events

    def record(
        self,
        group_id: books.GroupId,
        task_name: str,
        event: str,
        *,
        reason: str | None = None,
        train_step: int | None = None,
        num_tokens: int | None = None,
        latency_s: float | None = None,
        score: float | None = None,
        **details: Any,
    ) -> None:
        """Enter an event of a group.

        ``admitted`` (taken up for the first time), ``produced`` (generated and stored), ``retried`` (taken up
        again), ``left`` (one of its rollouts has left it), ``trained``, ``reused`` (trained on once more),
        ``unused`` (that step did not happen), ``dropped`` (with a reason) or ``requeued``. Of a production,
        `num_tokens` counts the response tokens of all rollouts that were generated, `latency_s` the seconds
        it took, `score` is the mean score. `details` are further JSON values; they go into the file only.

        Raises:
            ValueError: another event, no group id, ``dropped`` without a reason, or a number too large.
            TypeError: with a path, a detail that is no JSON value.
            OSError: the file takes no more, and nothing is entered; or there is no room for temporary files,
                and the ledger must be read anew.
        """
        books.check_event(event)
        if group_id is None:
            raise ValueError(f"task {task_name!r}: a group without group_id cannot be accounted for")
        for name, count in (("train_step", train_step), ("num_tokens", num_tokens)):
            if count is not None and not 0 <= count <= books.MAX_COUNT:
                raise ValueError(f"group {group_id!r}: {name} must be from 0 to {books.MAX_COUNT}, got {count!r}")
        if event == books.DROPPED and not reason:
            raise ValueError(f"group {group_id!r} was dropped: give the reason, got {reason!r}")
        given = {"reason": reason, "train_step": train_step, "num_tokens": num_tokens, "latency_s": latency_s}
        said = {name: value for name, value in (given | {"score": score, **details}).items() if value is not None}
        line = {"time_s": self._clock(), "event": event, "task": task_name, "group": group_id, **said}
        # Written first: a line that no file takes must not be in the books alone.
        self._write(line)
        self._tasks[task_name].enter(line)

    def record_found(self, task_name: str, groups: Mapping[books.GroupId, Mapping[str, Any]]) -> set[books.GroupId]:
        """Enter, in one go, what the rows of a buffer say of live groups and the books do not know.

        Of each group its row's tags, with the values of its production as in `record`; none: it was only taken up.

        Returns:
            Those that the books call trained or dropped, of which nothing is entered.

        Raises:
            OSError: as `record`.
        """
        said = {"time_s": self._clock(), "task": task_name, "found": True}
        known, told = self._tasks[task_name].glance(groups), list[dict[str, Any]]()
        for group_id, tags in groups.items():
            facts = {name: tags[name] for name in ("num_tokens", "latency_s", "score") if name in tags}
            place, num_tokens = known.get(group_id, (None, None))
            if place is None or (place in books.OPEN and facts and num_tokens != facts.get("num_tokens")):
                told.append({"event": books.PRODUCED if facts else books.ADMITTED, "group": group_id, **said, **facts})
        self._write(*told)
        for line in told:
            self._tasks[task_name].enter(line, is_new=line["group"] not in known)
        return {group_id for group_id, (place, _) in known.items() if place not in books.OPEN}

    def note_part(self, part: str, reason: str, event: str = RESTARTED) -> None:
        """Put into the file what became of a process of the run; no group's account changes.

        Raises:
            OSError: the file takes no more.
        """
        if self._journal is not None:
            self._journal.write({"event": event, "time_s": self._clock(), "part": part, "reason": reason})

    def life(self, group_id: books.GroupId, task_name: str) -> books.GroupLife | None:
        """The history of one group; None if it has no event."""
        return self._tasks[task_name].life(group_id, task_name) if task_name in self._tasks else None

    def histories(self, task_name: str | None = None) -> Iterator[books.Histories]:
        """The groups of one task, or of each."""
        return (groups for name, groups in self._tasks.items() if task_name in (None, name))

    @property
    def task_names(self) -> list[str]:
        """The tasks that have events, in the order of their first."""
        return list(self._tasks)

    def name_live(self, task_name: str) -> list[books.GroupId]:
        """The groups of the task that are neither trained nor dropped, in the order of their first events."""
        return self._tasks[task_name].name_live() if task_name in self._tasks else []

    def count_live(self) -> dict[str, int]:
        """The groups of each task that are neither trained nor dropped, by the ledger's own account."""
        return {name: one.counts[books.LIVE] + one.counts[books.ADMITTED] for name, one in self._tasks.items()}

    def balance(self, live: Mapping[str, int]) -> "Balance":
        """Hold the books against `live`: the groups of each task that exist, as counted elsewhere.

        That is, those in the buffer, and those in flight of which there is an event.
        """
        tasks: dict[str, Balance] = {}
        for task in {**self._tasks, **live}:
            groups = self._tasks.get(task) or books.Histories()
            places = {place.partition(":"): number for place, number in groups.counts.items()}
            tasks[task] = Balance(
                generated=len(groups),
                trained=groups.counts[books.TRAINED],
                dropped={reason: number for (place, _, reason), number in places.items() if place == books.DROPPED},
                live=live.get(task, 0),
                repeated=groups.num_repeated,
                retried=groups.totals["num_retries"],
                left=groups.totals["num_left"],
                reused=groups.totals["num_reused"],
            )
        dropped: Counter[str] = sum((Counter(part.dropped) for part in tasks.values()), Counter())
        counted = ("generated", "trained", "live", "repeated", "retried", "left", "reused")
        sums = {name: sum(getattr(part, name) for part in tasks.values()) for name in counted}
        return Balance(**sums, dropped=dict(dropped), lost_events=self.lost_events, by_task=tasks)

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        """The state that `restore` needs in a checkpoint in `folder`, as JSON values.

        With a path, the place in the file, whose name is relative to `folder`: call `sync` before the
        checkpoint counts. Without one, everything.
        """
        if self._journal is None:
            return self.state_dict()
        return {
            "version": PLACE_VERSION,
            "num_events": self._num_events,
            "lost_events": self.lost_events,
            "file": os.path.relpath(self._journal.path.resolve(), folder.resolve()),
            "num_bytes": self._journal.num_bytes,
        }

    def sync(self) -> None:
        """Wait until the file is on the disk; it may run in another thread than `record`.

        Raises:
            OSError: the disk takes no more.
        """
        if self._journal is not None:
            self._journal.sync()

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go back to what `checkpoint` gave for `folder`; the file keeps its lines and gets one that says so.

        Events that are missing in the file by now are counted in `lost_events`.

        Raises:
            ValueError: `state` is not a ledger's; the ledger is as it was.
        """
        read = self.read_checkpoint(state, folder)
        self._tasks, self._num_events, self.lost_events = read._tasks, read._num_events, read.lost_events
        # The line has the number of the first undone event: from here on, all undone lines are void.
        self._write({"time_s": self._clock(), "event": REWOUND, "to_event": self._num_events})

    def keep(self, state: Mapping[str, Any]) -> None:
        """Keep the books of what `checkpoint` gave, so that `restore` reads only later lines.

        They are a cache beside the file, about 80 bytes a group; it may run in another thread than `record`. Without
        a file nothing is kept.

        Raises:
            OSError: the disk takes no more, or somebody has moved or changed the file.
        """
        if self._journal is None:
            return
        path, place = self._journal.path, (state["num_bytes"], state["num_events"])
        try:
            read = _read_kept(path, place) or self.read(path, num_bytes=place[0], num_events=place[1])
        except (FileNotFoundError, IsADirectoryError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise DiskError(f"the ledger {str(path)!r} was moved or changed during the run: {said}") from error
        with unfinished(path.with_name(BOOKS)) as temporary:
            tasks = [(name, read._tasks[name].save(temporary / f"{n}.db")) for n, name in enumerate(read._tasks)]
            kept = {"place": place, "end": _end_at(path, place[0]), "lost_events": read.lost_events, "tasks": tasks}
            write_json(temporary / PLACE, kept)
            publish(temporary, path.with_name(BOOKS))

    @classmethod
    def read_checkpoint(cls, state: Mapping[str, Any], folder: Path) -> "Ledger":
        """The ledger as it was when `checkpoint` gave `state` for `folder`; it writes no file.

        Raises:
            ValueError: as `restore`.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version not in (PLACE_VERSION, STATE_VERSION):
            raise ValueError(f"a ledger's state has version {STATE_VERSION}, got {version!r}")
        read = cls()
        try:
            if version == PLACE_VERSION:
                path, num_events = folder.resolve() / state["file"], state["num_events"]
                if not path.exists():
                    # The file is gone. The run can go on, but every event counts as lost.
                    read._num_events = read.lost_events = num_events
                    return read
                kept = _read_kept(path, (state["num_bytes"], num_events), loads_open=True)
                return kept or cls.read(path, num_bytes=state["num_bytes"], num_events=num_events)
            for task, groups in state["tasks"].items():
                read._tasks[task] = books.Histories.from_state(groups)
            for task, number in state["repeated"].items():
                read._tasks[task].num_repeated = number
            read._num_events = int(state["num_events"])
            read.lost_events = int(state["lost_events"])
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"this is not a ledger's state: {error!r}") from None
        return read

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON values; it grows with the ledger."""
        return {
            "version": STATE_VERSION,
            "num_events": self._num_events,
            "lost_events": self.lost_events,
            "tasks": {task: groups.state() for task, groups in self._tasks.items()},
            "repeated": {task: groups.num_repeated for task, groups in self._tasks.items()},
        }

    def close(self) -> None:
        """Close the file; nothing can be recorded in it afterwards."""
        if self._journal is not None:
            self._journal.close()

    def _write(self, *lines: Mapping[str, Any]) -> None:
        if self._journal is not None:
            self._journal.write(*({"number": n, **line} for n, line in enumerate(lines, self._num_events + 1)))
        # Not before: a number that is in no line would count as an event that was lost.
        self._num_events += len(lines)


def _read_kept(path: Path, to: Place, *, loads_open: bool = False) -> Ledger | None:
    """The ledger at a place, from the kept books on; None where these are not of what the file `path` has up to it."""
    folder, read = path.with_name(BOOKS), Ledger()
    try:
        check(folder)
        kept = json.loads((folder / PLACE).read_text("utf-8"))
        num_bytes, read._num_events = kept["place"]
        read.lost_events = kept["lost_events"]
        if num_bytes > to[0] or kept["end"] != _end_at(path, num_bytes):
            return None
        for number, (name, sums) in enumerate(kept["tasks"]):
            read._tasks[name] = books.Histories(folder / f"{number}.db", sums, loads_open=loads_open)
        read._enter_lines(path, *to, (num_bytes, read._num_events))
    except (DamagedError, WentBack):
        return None
    return read


def _end_at(path: Path, num_bytes: int) -> str:
    """The end of the last line within the first bytes, with its checksum."""
    with path.open("rb") as file:
        file.seek(max(0, num_bytes - 64))
        return file.read(min(64, num_bytes)).decode("latin-1")


@dataclass(frozen=True)
class Balance:
    """Where the groups are: of one task, or of all, then with `by_task`.

    >>> Balance(generated=5, trained=2, dropped={"filtered": 1}, live=1, repeated=0).difference
    1
    """

    generated: int
    """Groups that were ever taken up; one that is generated again counts once."""
    trained: int
    dropped: dict[str, int]
    """Groups dropped, by reason."""
    live: int
    """The number that the caller gave: in the buffer, or in flight."""
    repeated: int
    """Groups produced or trained again after a training, without having been requeued."""
    retried: int = 0
    """How often groups were taken up again to be generated anew or continued."""
    lost_events: int = 0
    """Events that are missing in the ledger's file; what they said of their groups is not in the numbers."""
    left: int = 0
    """Rollouts that failed and left their group, which went on without them."""
    reused: int = 0
    """How often groups were trained on again; each counts once in `trained`, whatever its uses."""
    by_task: "dict[str, Balance]" = field(default_factory=dict)

    @property
    def difference(self) -> int:
        """Groups that are missing; negative: groups too many."""
        return self.generated - self.trained - sum(self.dropped.values()) - self.live

    @property
    def ok(self) -> bool:
        """Whether no group is missing, too many or repeated, in any task, and no event is."""
        return (
            self.difference == 0
            and self.repeated == 0
            and self.lost_events == 0
            and all(part.ok for part in self.by_task.values())
        )
