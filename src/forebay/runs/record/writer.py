"""Writes the record of a run: a journal of events, and the rollouts that they speak of.

::

    RUN_FOLDER/record/segment_000/   run.toml           the config of this start of the run
                      segment_001/   events.jsonl       one event a line, numbered from 1
                      (a resume)     rollouts.arrows    Arrow IPC stream: every group that was put, as given

    event loop:     note(event, group) --queue--> one thread; room(): waits while too much is queued
    writer thread:  consumes: events      waits for: the next one
                    woken by: note, the timer of the flush interval, checkpoint, close
                    produces: a piece of rollouts, then its events

Both files only grow. A piece of rollouts is written before the events that need it, and a line in the journal
says where it lies, so a process that is killed leaves a prefix that can be read; it loses the last second.
Before a checkpoint is published, everything up to it is on the disk. This module knows nothing of what the
events mean: `forebay.runs.record.observers` notes them, `forebay.runs.record.reader` reads them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from forebay.io.durable import sync, write_text
from forebay.replay.stores.contract import StorageItem
from forebay.types import RolloutState

logger = logging.getLogger(__name__)

FORMAT = "forebay-record/1"
FOLDER, EVENTS, ROLLOUTS, RUN_FILE = "record", "events.jsonl", "rollouts.arrows", "run.toml"

FLUSH_AFTER_S = 1.0
"""A kill costs at most so much. Longer pieces are cheaper: each has 5 KB of its own and takes 1 ms."""
BACKLOG = 2048
"""With more queued events a put waits: some seconds' worth, and bounded memory."""
_MOST_LINES = 4096
_MOST_TOKENS = 500_000
"""Of one piece: what is written at once holds the interpreter for some 10 ms."""

Line = dict[str, Any]


class Recorder:
    """Appends to the record of a run.

    Invariants: events are in the journal in the order in which they were noted, with consecutive numbers;
    nothing is left out, or the record has ended there: a full disk or a rollout that cannot be stored ends it
    with a warning, never the run. Made and used in the event loop's thread.

    >>> recorder = Recorder(Path("runs/a"), run_file=to_toml(config))
    >>> recorder.note("put", group, task="math")
    >>> await recorder.checkpoint(5)                 # what was noted so far is on the disk
    >>> recorder.close()

    Args:
        folder: the run's.
        run_file: the resolved config, as TOML.
        resumed_from: the train step of the checkpoint that the run goes on from; None for a new run.
    """

    def __init__(self, folder: Path, *, run_file: str, resumed_from: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        segment = _new_segment(folder / FOLDER)
        write_text(segment / RUN_FILE, run_file)
        self.segment = segment
        """The folder that this start of the run writes to."""
        self._number = self._num_added = 0
        self._failure: Exception | None = None
        self._files = _Files(segment)
        self._timer: asyncio.TimerHandle | None = None
        self._writer: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "record")
        self.note("segment", format=FORMAT, resumed_from=resumed_from, unix_time_s=time.time())

    def note(self, event: str, rollouts: Sequence[RolloutState] | None = None, /, **facts: Any) -> None:
        """Append an event; `rollouts` are written later, so they must not be changed any more.

        `facts` are JSON values; those that are None are left out. It returns at once.
        """
        if self._failure is not None or self._writer is None:
            return
        self._number += 1
        known = {name: value for name, value in facts.items() if value is not None}
        line = {"number": self._number, "event": event, "time_s": self.now_s(), **known}
        self._writer.submit(self._add, line, rollouts)
        if self._timer is None:
            self._timer = self._loop.call_later(FLUSH_AFTER_S, self._flush)

    def now_s(self) -> float:
        """Seconds on the event loop's clock, to the microsecond."""
        return round(self._loop.time(), 6)

    async def room(self) -> None:
        """Wait until less than `BACKLOG` events are queued; mostly, that is at once."""
        if self._writer is not None and self._number - self._num_added > BACKLOG:
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
            self._failure = self._failure or error
        if self._failure is not None:
            logger.warning(
                "the record of the run in %s is not complete: %s: %s",
                self.segment,
                type(self._failure).__name__,
                self._failure,
            )

    def _flush(self) -> None:
        self._timer = None
        if self._writer is not None:
            self._writer.submit(self._try, self._files.flush)

    # In the writer's thread

    def _add(self, line: Line, group: Sequence[RolloutState] | None) -> None:
        self._num_added += 1
        self._try(self._files.add, line, group)

    def _try(self, action: Callable[..., None], *arguments: Any) -> None:
        if self._failure is None:
            try:
                action(*arguments)
            # A full disk; a value that no table or JSON holds. The run goes on without its record.
            except (OSError, ValueError, TypeError) as error:
                self._failure = error


class _Files:
    """The two files of a segment, and what is not written yet."""

    def __init__(self, segment: Path) -> None:
        self._segment = segment
        self._events: BinaryIO = (segment / EVENTS).open("xb")
        self._rollouts: BinaryIO = (segment / ROLLOUTS).open("xb")
        self._stream: Any = None
        """Of Arrow; made with the first piece."""
        self._encode = json.JSONEncoder(separators=(",", ":")).encode
        self._lines: list[str] = []
        self._items: list[StorageItem] = []
        self._num_tokens = 0

    def add(self, line: Line, group: Sequence[RolloutState] | None) -> None:
        """Take an event; it is written with the next flush, which comes by itself if much is waiting."""
        self._lines.append(self._encode(line))
        if group is not None:
            # Rows are of no interest here; the number of the event takes the place of the uid.
            self._items.append(StorageItem(group, line["number"], line["number"], "", "", staleness=0))
            self._num_tokens += sum(len(state.tokens) + len(state.response_ids) for state in group)
        if len(self._lines) >= _MOST_LINES or self._num_tokens >= _MOST_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting: rollouts first."""
        text = [*self._write_rollouts(), *self._lines]
        if text:
            self._events.write("".join(f"{line}\n" for line in text).encode("ascii"))
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

    def _write_rollouts(self) -> list[str]:
        """Write the waiting groups; the lines that say where they lie."""
        if not self._items:
            return []
        # Here, because loading Arrow takes longer than the event loop may stand still.
        import pyarrow as pa

        from forebay.replay.format.tables import ROLLOUTS_SCHEMA, rollout_batches

        if self._stream is None:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            self._stream = pa.ipc.new_stream(self._rollouts, ROLLOUTS_SCHEMA, options=options)
        places = []
        for batch in rollout_batches(self._items):
            # The stream begins with its schema, which is written together with the first piece.
            start = self._rollouts.tell() or len(ROLLOUTS_SCHEMA.serialize())
            self._stream.write_batch(batch)
            num_bytes = self._rollouts.tell() - start
            places.append(self._encode({"event": "rollouts", "offset": start, "bytes": num_bytes}))
        self._rollouts.flush()
        self._items, self._num_tokens = [], 0
        return places


def _new_segment(folder: Path) -> Path:
    """The next free ``segment_NNN``, made."""
    folder.mkdir(parents=True, exist_ok=True)
    segment = folder / f"segment_{len(list(folder.glob('segment_*'))):03d}"
    segment.mkdir()
    return segment
