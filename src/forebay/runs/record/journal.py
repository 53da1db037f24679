"""The files of a run's record: a journal of events, and the rollouts that they speak of; written and read.

::

    RUN_FOLDER/record/segment_000/   run.toml           the config of this start of the run
                      segment_001/   events.jsonl       one event a line, numbered from 1
                      (a resume)     rollouts.arrows    Arrow IPC stream: every group that was put, as given

    event loop:     note(event, group) --queue--> one thread; room(): waits while too much is queued
    writer thread:  consumes: events      waits for: the next one
                    woken by: note, the timer of the flush interval, checkpoint, close
                    produces: a piece of rollouts, then its events

Both files only grow. A piece of rollouts is written before the events that need it, so a process that is
killed leaves prefixes that can be read together; it loses the last second. Before a checkpoint is published,
everything up to it is on the disk. This module knows nothing of the meaning of the events:
`forebay.runs.record.events` notes and repeats them.

A last line that a killed process did not finish is left out with a message; anything else that is not as it
was written is a ValueError that names the place.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.io.safe_files import sync, write_text
from forebay.replay.format.tables import ROLLOUTS_SCHEMA, read_groups, rollout_batches
from forebay.replay.format.values import damage_named
from forebay.replay.groups import StoredGroup
from forebay.replay.stores.contract import StorageItem
from forebay.types import RolloutState

logger = logging.getLogger(__name__)

FORMAT = "forebay-record/2"
FOLDER, EVENTS, ROLLOUTS, RUN_FILE = "record", "events.jsonl", "rollouts.arrows", "run.toml"

FLUSH_AFTER_S = 1.0
"""A kill costs at most so much. Longer pieces are cheaper: each has 5 KB of its own and takes 1 ms."""
BACKLOG = 2048
"""A put waits while more events are queued: the work of some seconds, in bounded memory."""
_MOST_LINES = 4096
_MOST_TOKENS = 500_000
"""Of one piece: what is written at once holds the interpreter for some 10 ms."""

Facts = dict[str, Any]
"""A line of a journal: ``event``, ``number``, ``time_s``, and what the kind of event has."""


class Recorder:
    """Appends to the record of a run.

    Invariants: events are in the journal in the order in which they were noted, with consecutive numbers;
    nothing is left out, or the record has ended there: a full disk or a rollout that cannot be stored ends it
    with a warning, never the run. Made and used in the event loop's thread.

    ::

        recorder = Recorder(Path("runs/a"), run_file=to_toml(config))
        recorder.note("put", group, task="math")
        await recorder.checkpoint(5)  # now the notes so far are on the disk
        recorder.close()

    Args:
        folder: the run's.
        run_file: the resolved config, as TOML.
        device: where the trainer computes, and in which precision; for the reader.
        resumed_from: the train step of the checkpoint that the run goes on from; None for a new run.
    """

    def __init__(
        self, folder: Path, *, run_file: str, device: str | None = None, resumed_from: int | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        number = len(list((folder / FOLDER).glob("segment_*")))
        segment = folder / FOLDER / f"segment_{number:03d}"
        segment.mkdir()
        write_text(segment / RUN_FILE, run_file)
        self.segment = segment
        """The folder that this start of the run writes to."""
        self._number = 0
        self._failure = ""
        self._files = _Files(segment)
        self._timer: asyncio.TimerHandle | None = None
        self._writer: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "record")
        self.note("segment", format=FORMAT, resumed_from=resumed_from, device=device, unix_time_s=time.time())

    def note(self, event: str, rollouts: Sequence[RolloutState] | None = None, /, **facts: Any) -> None:
        """Append an event; `rollouts` are written later, so they must not be changed any more.

        `facts` are JSON values; those that are None are left out. It returns at once.
        """
        if self._failure or self._writer is None:
            return
        self._number += 1
        known = {name: value for name, value in facts.items() if value is not None}
        line = {"number": self._number, "event": event, "time_s": round(self._loop.time(), 6), **known}
        self._writer.submit(self._try, self._files.add, line, rollouts)
        if self._timer is None:
            self._timer = self._loop.call_later(FLUSH_AFTER_S, self._flush)

    async def room(self) -> None:
        """Wait until less than `BACKLOG` events are queued; mostly, that is at once."""
        if self._failure or self._writer is None:
            return
        if self._number - self._files.num_added > BACKLOG:
            # A call that does nothing, behind all that is queued: its end says that there is room.
            await self._loop.run_in_executor(self._writer, int)

    async def checkpoint(self, train_step: int) -> None:
        """Note that a checkpoint of `train_step` is being made, and wait until the record is on the disk."""
        self.note("checkpoint", train_step=train_step)
        if self._writer is not None:
            await self._loop.run_in_executor(self._writer, self._try, self._files.sync)

    def close(self) -> None:
        """Write what is queued and close the files; a second call does nothing."""
        if self._writer is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._flush()
        self._writer.shutdown()
        self._writer = None
        try:
            self._files.close()
        except (OSError, ValueError) as error:
            # The rest found no room either. The first failure says more.
            self._failure = self._failure or f"{type(error).__name__}: {error}"
        if self._failure:
            logger.warning("the record of the run in %s is not complete: %s", self.segment, self._failure)

    def _flush(self) -> None:
        self._timer = None
        if self._writer is not None:
            self._writer.submit(self._try, self._files.flush)

    # In the writer's thread

    def _try(self, action: Callable[..., None], *arguments: Any) -> None:
        if not self._failure:
            try:
                action(*arguments)
            # A full disk; a value that no table or JSON holds. The run goes on without its record.
            except (OSError, ValueError, TypeError) as error:
                self._failure = f"{type(error).__name__}: {error}"


class _Files:
    """The two files of a segment, and what is not written yet."""

    def __init__(self, segment: Path) -> None:
        self._segment = segment
        self._events: BinaryIO = (segment / EVENTS).open("xb")
        self._rollouts: BinaryIO = (segment / ROLLOUTS).open("xb")
        self._stream: Any = None
        """The Arrow writer of `rollouts`, made with the first piece."""
        self._encode = json.JSONEncoder(separators=(",", ":")).encode
        self._lines: list[str] = []
        self._items: list[StorageItem] = []
        self._num_tokens = self.num_added = 0

    def add(self, line: Facts, group: Sequence[RolloutState] | None) -> None:
        """Take an event; it is written with the next flush, which comes by itself if much is waiting."""
        self.num_added += 1
        self._lines.append(self._encode(line))
        if group is not None:
            # Rows are of no interest here; the number of the event takes the place of the uid.
            self._items.append(StorageItem(group, line["number"], line["number"], "", "", staleness=0))
            self._num_tokens += sum(len(state.tokens) + len(state.response_ids) for state in group)
        if len(self._lines) >= _MOST_LINES or self._num_tokens >= _MOST_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting: rollouts first."""
        if self._items:
            if self._stream is None:
                options = pa.ipc.IpcWriteOptions(compression="zstd")
                self._stream = pa.ipc.new_stream(self._rollouts, ROLLOUTS_SCHEMA, options=options)
            for batch in rollout_batches(self._items):
                self._stream.write_batch(batch)
            self._rollouts.flush()
            self._items, self._num_tokens = [], 0
        if self._lines:
            self._events.write("".join(f"{line}\n" for line in self._lines).encode("ascii"))
            self._events.flush()
            self._lines = []

    def sync(self) -> None:
        """`flush`, and wait for the disk."""
        self.flush()
        for name in (ROLLOUTS, EVENTS):
            sync(self._segment / name)

    def close(self) -> None:
        """Close both files, also if one takes no more; the stream of rollouts gets its end mark."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._events.close)
            stack.callback(self._rollouts.close)
            if self._stream is not None:
                stack.callback(self._stream.close)


class Segment(NamedTuple):
    """The part that counts of one start of the run."""

    folder: Path
    resumed_from: int | None
    """The train step whose checkpoint it went on from; None for a new run."""
    until: int | None
    """Its events count up to its checkpoint of this train step; None: all of them count."""


class Event(NamedTuple):
    """One line of a journal."""

    facts: Facts
    group: StoredGroup | None
    """The group of a ``put``, as it was given."""


def read_history(run_folder: Path) -> list[Segment]:
    """The segments that led to where the run is, oldest first.

    ::

        segment_000: 1 2 3 4 5* 6 7      killed after step 7; the last checkpoint (*) is that of step 5
        segment_001: 6                   resumed from 5, killed before it saved anything
        segment_002: 6 7 8 9             resumed from 5
        history:     segment_000 up to the checkpoint of step 5, then segment_002

    Raises:
        ValueError: nothing was recorded, or part of it is missing or damaged.
    """
    folders = sorted((run_folder / FOLDER).glob("segment_*"))
    if not folders:
        raise ValueError(f"{str(run_folder)!r} has no record: a language model's run begun with record = true has one")
    history: list[Segment] = []
    until: int | None = None
    for folder in reversed(folders):
        path = folder / EVENTS
        first = next(_read_lines(path), None)
        if until is not None:
            begun_at = None if first is None else first.get("resumed_from")
            # Starts that the run did not go on from. One from this checkpoint on cannot have made it, and is
            # not read: it may be damaged. Others were killed before the checkpoint, or went another way.
            if (begun_at is not None and begun_at >= until) or not any(
                _is_checkpoint(facts, until) for facts in _read_lines(path)
            ):
                continue
        if first is None or first.get("format") != FORMAT:
            raise ValueError(
                f"{str(path)!r} is not a record that this release reads ({FORMAT}); "
                f"replay it with the one that wrote it"
            )
        history.append(Segment(folder, first.get("resumed_from"), until))
        until = history[-1].resumed_from
        if until is None:
            return history[::-1]
    raise ValueError(
        f"the record in {str(run_folder)!r} begins at train step {until}: what led there was not recorded; "
        f"record a run from its start"
    )


def read_events(segment: Segment) -> Iterator[Event]:
    """The events of a segment that count, in order.

    Raises:
        ValueError: the journal or the rollouts are damaged.
    """
    path = segment.folder / ROLLOUTS
    pieces = _read_pieces(path)
    groups: dict[int, StoredGroup] = {}
    for facts in _read_lines(segment.folder / EVENTS):
        while facts["event"] == "put" and facts["number"] not in groups:
            if (piece := next(pieces, None)) is None:
                raise ValueError(f"{str(path)!r} is damaged: it does not hold the group of event {facts['number']}")
            # Pieces are in the order of the events: no later one needs a group of an earlier piece.
            groups = piece
        yield Event(facts, groups.pop(facts["number"]) if facts["event"] == "put" else None)
        if _is_checkpoint(facts, segment.until):
            return


def _is_checkpoint(facts: Facts, train_step: int | None) -> bool:
    return bool(facts["event"] == "checkpoint" and facts["train_step"] == train_step)


def _read_lines(path: Path) -> Iterator[Facts]:
    """The whole lines of a journal; their numbers are checked."""
    if not path.is_file():
        raise ValueError(f"the record is damaged: {str(path)!r} is missing")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                logger.warning("%s: the last line was not finished; it is left out", path)
                return
            with damage_named(f"{str(path)!r} line {number}"):
                facts = json.loads(line)
                if facts["number"] != number:
                    raise ValueError(f"it has number {facts['number']}, but {number} comes next")
            yield facts


def _read_pieces(path: Path) -> Iterator[dict[int, StoredGroup]]:
    """The groups of each piece of the rollouts, by the number of their event."""

    with damage_named(repr(str(path))), path.open("rb") as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            # Before anything is read from it: wrong offsets would be followed outside of the data.
            batch.validate(full=True)
            yield dict(read_groups(batch))


@contextlib.contextmanager
def batch_file(path: Path) -> Iterator[Callable[[int, Sequence[Sequence[RolloutState]]], None]]:
    """A new Parquet file for the batches of a training: a line per rollout, in the order of training.

    The block is given a function that appends the groups of a train step. The columns are those of
    `forebay.replay.format.tables`, `train_step` in front. The file can be read once the block has ended.

    ::

        with batch_file(Path("batches.parquet")) as add:
            add(step.train_step, step.groups)
    """

    kept = [field for field in ROLLOUTS_SCHEMA if field.name not in ("uid", "blobs")]
    schema = pa.schema([pa.field("train_step", pa.int64()), *kept])
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def add(train_step: int, groups: Sequence[Sequence[RolloutState]]) -> None:
            items = [StorageItem(group, at, at, "", "", staleness=0) for at, group in enumerate(groups)]
            for batch in rollout_batches(items):
                steps = pa.array([train_step] * batch.num_rows, pa.int64())
                columns = [steps, *(batch.column(field.name) for field in kept)]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))

        yield add
