"""The history of a run in columns: a line for each rollout that has left it and each activity that ended.

::

    RUN_FOLDER/history/segment_000/  segment.json                     the checkpoint it went on from
                       segment_001/  rollouts_000000_000023.parquet   lines of the flushes 0 to 23
                       (a resume)    spans_000000_000023.parquet, rollouts_000000_000023.grams (`grams`)

    event loop:  left(groups), ended(activity) --queue--> thread --every `FLUSH_AFTER_S`--> a small file
                                                                 --every `FANOUT` files---> one larger file

A rollout leaves the run trained or dropped, and its line says all that is known by then; lines are never
changed. One that is trained on again has one more line for each time, with the outcome ``reused``. Files are
put together as they become many, so that a query opens some dozens of them; a reader that finds both takes
the one that covers more (`list_parts`). Over the limit the oldest files are removed, and ``removed.json``
counts their lines. Lines that a full disk does not take, or a slow one not in time, are left out with a
warning.
"""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.config import ConfigError
from forebay.io.safe_files import replaced, write_json
from forebay.ledger import GroupLife
from forebay.runs.record.columns import IMAGE_COLUMNS, TEXTS, Left, rollouts_table, spans_table
from forebay.runs.record.grams import LEAST_BYTES, SEARCHED, SUFFIX, TEXT_BYTES, index_texts, write_index
from forebay.train.batch import TrainBatch
from forebay.types import RolloutState
from forebay.watching.activity import Span

logger = logging.getLogger(__name__)

FORMAT = "forebay-history/1"
FOLDER, SEGMENT_FILE, REMOVED_FILE = "history", "segment.json", "removed.json"
ROLLOUTS, SPANS = "rollouts", "spans"

FLUSH_AFTER_S = 2.0
"""A kill costs at most so much. Each small file takes some 5 ms to write."""
FANOUT = 24
"""So many files of one size become one file: a line is written about four times in a run of a day."""
ROW_GROUP = 16_384
"""Lines that a query skips or reads together; of long rollouts fewer (`TEXT_BYTES`)."""


class History:
    """Writes the history of a run; made and used in the event loop's thread.

    Invariants: each rollout that left has one line, until its file is removed; a file that has its name is
    whole.

    ::

        history = History(run_folder, limit_bytes=2_000_000_000)
        history.left(groups, "trained", train_step=7, learned=batch)
        history.close()

    Args:
        folder: the run's.
        limit_bytes: of all files together; the oldest are removed.
        resumed_from: the train step of the checkpoint that the run goes on from; None for a new run.
    """

    def __init__(self, folder: Path, *, limit_bytes: int, resumed_from: int | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._has_warned = False
        self._files = _Files(folder / FOLDER, limit_bytes, time.time() - loop.time())
        self._rollouts: list[Left] = []
        self._num_pending = 0
        self._spans: list[Span] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writer: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "history")
        # The first grows in the event loop alone, the second in the writer's thread.
        self._num_submitted = self._num_tried = 0
        self._submit(self._files.begin, resumed_from)

    def left(
        self,
        groups: Iterable[Sequence[RolloutState]],
        outcome: str,
        *,
        train_step: int,
        reason: str | None = None,
        learned: TrainBatch | None = None,
        life: GroupLife | None = None,
    ) -> None:
        """Note groups that left the run, ``trained`` or ``dropped``, or were ``evaluated`` or ``reused``.

        They must not be changed any more. Of a group that was wiped, `life` has its length and score.
        """
        if not (listed := list(groups)):
            return
        self._rollouts.append(Left(listed, outcome, reason, train_step, time.time(), learned, life))
        self._num_pending += sum(map(len, listed))
        self._schedule(at_once=self._num_pending >= _MOST_PENDING)

    def ended(self, span: Span) -> None:
        """Note an activity, with its times on the event loop's clock."""
        self._spans.append(span)
        self._schedule(at_once=False)

    def close(self) -> None:
        """Write what is pending; a second call does nothing."""
        if self._writer is None:
            return
        self._flush()
        self._submit(self._files.finish)
        self._writer.shutdown()
        self._writer = None

    def _schedule(self, *, at_once: bool) -> None:
        if at_once:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(FLUSH_AFTER_S, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._rollouts or self._spans:
            if self._num_submitted - self._num_tried < _MOST_QUEUED:
                self._submit(self._files.add, self._rollouts, self._spans)
            else:
                self._warn("the disk is too slow")
            self._rollouts, self._spans, self._num_pending = [], [], 0

    def _submit(self, action: Callable[..., None], *arguments: Any) -> None:
        if self._writer is not None:
            self._num_submitted += 1
            self._writer.submit(self._try, action, *arguments)

    def _try(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        # A full disk; a value of user code that no column holds, of which any method may fail. The run goes
        # on without these lines. This call's future is never read: an error would not be seen.
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")
        finally:
            self._num_tried += 1

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            logger.warning("the history of the run is not complete: %s", reason)
        self._has_warned = True


_MAX_FILE_BYTES = 256 << 20
"""Larger files are not put together: the limit of the history removes whole files."""
_MOST_PENDING = 4096
"""Rollouts that wait in memory for the next flush."""
_MOST_QUEUED = 64
"""Flushes that wait for the disk, with their rollouts and train batches: two minutes of one that hangs."""


class _Files:
    """The files of the history, in the writer's thread."""

    def __init__(self, folder: Path, limit_bytes: int, to_unix_s: float = 0.0) -> None:
        """`to_unix_s` is what times on the event loop's clock lack to those of the system's."""
        self._folder, self._limit, self._to_unix_s = folder, limit_bytes, to_unix_s
        self._segment: Path | None = None
        self._number = 0

    def begin(self, resumed_from: int | None) -> None:
        """Begin a segment."""
        self._folder.mkdir(parents=True, exist_ok=True)
        segment = self._folder / f"segment_{len(list(self._folder.glob('segment_*'))):03d}"
        segment.mkdir()
        facts = {"format": FORMAT, "resumed_from": resumed_from, "unix_time_s": time.time()}
        write_json(segment / SEGMENT_FILE, facts)
        self._segment = segment

    def add(self, left: Sequence[Left], spans: Sequence[Span]) -> None:
        """Write a file of each kind that has lines; put files together, or remove some, as is due."""
        if self._segment is None:
            return
        # Also where this fails: what was written before the failure keeps its name.
        number, self._number = self._number, self._number + 1
        if left:
            _write(self._segment, ROLLOUTS, number, number, [rollouts_table(left)])
        if spans:
            _write(self._segment, SPANS, number, number, [spans_table(spans, self._to_unix_s)])
        for kind in (ROLLOUTS, SPANS):
            self._merge(kind, self._segment)
        self._remove_oldest()

    def finish(self) -> None:
        """Put the small files that are left together: those after the last that was put together.

        A name says that the file has all lines from its first flush to its last, so that none with other
        lines may lie between the files that become one.
        """
        if self._segment is None:
            return
        for kind in (ROLLOUTS, SPANS):
            parts = _parts_of(self._segment, kind)
            last = max((part.last for part in parts if part.first < part.last), default=-1)
            _join(self._segment, kind, [part for part in parts if part.first > last])

    def _merge(self, kind: str, segment: Path) -> None:
        """Put the last `FANOUT` files together, and such files again."""
        span = FANOUT
        while self._number % span == 0:
            first = self._number - span
            _join(segment, kind, [part for part in _parts_of(segment, kind) if part.first >= first])
            span *= FANOUT

    def _remove_oldest(self) -> None:
        """Keep the limit; the newest file always stays."""

        parts = sorted(
            self._folder.glob("segment_*/*.parquet"),
            # Of a start of the run by time: by name, all rollouts would go before the first activity.
            key=lambda path: (path.parent.name, path.stat().st_mtime),
        )
        total = sum(map(_size, parts))
        removed = {ROLLOUTS: 0, SPANS: 0, "until_train_step": 0}
        with contextlib.suppress(FileNotFoundError):
            removed |= json.loads((self._folder / REMOVED_FILE).read_text())
        before = dict(removed)
        while total > self._limit and len(parts) > 2:
            path = parts.pop(0)
            total -= _size(path)
            kind = ROLLOUTS if path.name.startswith(ROLLOUTS) else SPANS
            # A power cut may have left a part of a file, which must not keep all others from being removed.
            with contextlib.suppress(pa.ArrowInvalid, OSError):
                removed[kind] += pq.read_metadata(path).num_rows
                if kind == ROLLOUTS:
                    steps = pq.read_table(path, columns=["train_step"])["train_step"]
                    removed["until_train_step"] = max(removed["until_train_step"], pc.max(steps).as_py() or 0)
            _remove(path)
        if removed != before:
            write_json(self._folder / REMOVED_FILE, removed)


def _write(segment: Path, kind: str, first: int, last: int, tables: Iterable[Any]) -> None:

    path = segment / f"{kind}_{first:06d}_{last:06d}.parquet"
    # Not synced: a file that a power cut damages is left out by who reads it.
    with replaced(path, durable=False) as temporary:
        with contextlib.ExitStack() as open_files:
            writer, index = None, []
            for table in _row_groups(tables):
                if writer is None:
                    writer = open_files.enter_context(pq.ParquetWriter(temporary, table.schema, **_PARQUET))
                writer.write_table(table, row_group_size=len(table))
                # A file of one flush is put together with others within a minute.
                if kind == ROLLOUTS and last > first:
                    index.append(index_texts(table))
        if index and temporary.stat().st_size >= LEAST_BYTES:
            write_index(path, index)


def _row_groups(tables: Iterable[Any]) -> Iterator[Any]:
    """The lines of `tables` in tables of as much text as the index of a row group is made for."""

    rest = None
    for table in tables:
        rest = table if rest is None else pa.concat_tables([rest, table])
        long = [name for name in (*SEARCHED, *IMAGE_COLUMNS) if name in rest.column_names]
        text_bytes = 1 + sum(rest[name].nbytes for name in long)
        size = min(ROW_GROUP, 1 + len(rest) * TEXT_BYTES // text_bytes)
        while len(rest) >= size:
            yield rest[:size]
            rest = rest[size:]
    if rest:
        yield rest


def _join(segment: Path, kind: str, parts: "Sequence[Part]") -> None:
    """Make one file of these, unless it would be too large."""

    if len(parts) < 2 or sum(_size(part.path) for part in parts) > _MAX_FILE_BYTES:
        return
    # One after the other: unpacked and together they could take gigabytes.
    tables = (pq.read_table(part.path) for part in parts)
    _write(segment, kind, parts[0].first, parts[-1].last, tables)
    for part in parts:
        _remove(part.path)


def _size(path: Path) -> int:
    """Bytes of a file and its index."""
    index = path.with_suffix(SUFFIX)
    return path.stat().st_size + (index.stat().st_size if index.exists() else 0)


def _remove(path: Path) -> None:
    path.unlink()
    path.with_suffix(SUFFIX).unlink(missing_ok=True)


class Part(NamedTuple):
    """A file of the history."""

    path: Path
    first: int
    last: int
    """It holds the lines of these flushes of its segment."""
    until: int | None = None
    """Its lines count up to this train step; None: all of them."""


def list_parts(run_folder: Path, kind: str, damaged: set[Path] | None = None) -> list[Part]:
    """The files of `kind` (``rollouts`` or ``spans``) that count, oldest first; none without a history.

    A run that went back to a checkpoint left lines of later train steps, which count no more. The list may be
    out of date when a file of it is opened: then ask again. A segment of another version, or a damaged one,
    is left out and its file added to `damaged`, if that is given.

    Raises:
        ConfigError: there is such a segment, and `damaged` is None.
    """
    found: list[Part] = []
    until: int | None = None
    for segment in sorted((run_folder / FOLDER).glob("segment_*"), reverse=True):
        path = segment / SEGMENT_FILE
        try:
            facts = json.loads(path.read_text())
            if facts["format"] != FORMAT:
                raise ValueError(f"not a history that this release reads ({FORMAT})")
            resumed_from = None if facts["resumed_from"] is None else int(facts["resumed_from"])
        except FileNotFoundError:
            # It begins just now.
            continue
        except (ValueError, LookupError, TypeError) as error:
            if damaged is None:
                raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
            damaged.add(path)
            continue
        found[:0] = [part._replace(until=until) for part in _parts_of(segment, kind)]
        if resumed_from is not None:
            # Earlier segments count up to where this one went on from.
            until = resumed_from if until is None else min(until, resumed_from)
    return found


def read_spans(run_folder: Path) -> Iterator[Span]:
    """Every activity of the run that has ended, in the order of their beginnings; times are Unix seconds.

    Raises:
        ConfigError: the run keeps no history, or it is damaged.
    """

    while parts := list_parts(run_folder, SPANS):
        # Missing: the run has put files together, or removed some, since they were listed.
        with contextlib.suppress(FileNotFoundError):
            table = pa.concat_tables(pq.read_table(part.path) for part in parts).sort_by("start_s")
            for batch in table.to_batches():
                yield from map(Span._make, zip(*(batch[name].to_pylist() for name in Span._fields), strict=True))
            return
    raise ConfigError(f"no activities in {str(run_folder / FOLDER)!r}: history_gb = 0 keeps none")


def _parts_of(segment: Path, kind: str) -> list[Part]:
    parts: list[Part] = []
    matches = ((path, _PART.fullmatch(path.name)) for path in segment.glob(f"{kind}_*.parquet"))
    every = [Part(path, int(match[2]), int(match[3])) for path, match in matches if match]
    # The widest first: files that were put together may still be beside the one that has their lines.
    for part in sorted(every, key=lambda part: (part.first, -part.last)):
        if not parts or part.first > parts[-1].last:
            parts.append(part)
    return parts


_PART = re.compile(r"(rollouts|spans)_(\d+)_(\d+)\.parquet")
_PARQUET: Mapping[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    # Not the token lists and long texts: theirs would only grow.
    "use_dictionary": [*TEXTS, *IMAGE_COLUMNS, *Span._fields[2:]],
    # All images of a row group, once each.
    "dictionary_pagesize_limit": 2 * TEXT_BYTES,
}
