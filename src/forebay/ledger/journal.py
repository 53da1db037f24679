"""The ledger's file: one line of JSON per event, append-only, and the rule by which it is read.

::

    {"number": 7, "time_s": 1.7e9, "event": "trained", "task": "math", "group": "g1", "crc32": 1864170583}

Events are numbered from 1. A run that goes back to a checkpoint goes on from the checkpoint's number, so
**a line takes the place of every line before it with the same or a higher number**. The lines that are
left, in order, are the events that happened. A ``rewound`` line (``to_event``) marks each such place for
human readers. A last line that a dying process did not finish stands for nothing.

``crc32`` is the checksum of the line up to its comma. Lines of version 0.1 have none. A line that is not what
its checksum says stands for nothing either. A number that no line has is an event that was lost: to a power
cut before it was synced, or to a damaged disk. Lost events are counted, and the rest is read.

    {"event": "restarted", "time_s": 1.7e9, "part": "engine 0", "reason": "its process has ended"}
    {"event": "scaled", "time_s": 1.7e9, "part": "engines", "reason": "+1: 3 now, 2 of them up"}

A line like these is about processes, not a group. It has no number: going back to a checkpoint does not undo
it, and it is no event of the account.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay.io.safe_files import sync

RESTARTED = "restarted"
_APART = b'{"event": '

_REWOUND = b'"event": "rewound"'
_NUMBER = re.compile(rb'\{"number": (\d{1,18}),')
_CHECKSUM = re.compile(rb', "crc32": (\d{1,10})\}\n$')


class Journal:
    """Appends lines to a file and hands each to the operating system at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        # Unbuffered: what a full disk refused must not be written with a later line, or by `close`.
        self._file = path.open("a+b", buffering=0)
        self.num_bytes = self._file.seek(0, os.SEEK_END)
        """How long the file is."""
        self._is_torn = False
        if self.num_bytes:
            self._file.seek(-1, os.SEEK_END)
            # A line that was cut off must not swallow the next one.
            self._is_torn = self._file.read(1) != b"\n"

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Append events.

        Raises:
            TypeError, ValueError: a value is none of JSON's; nothing is written.
            OSError: the file takes no more.
        """
        texts = [json.dumps(line).encode("ascii")[:-1] for line in lines]
        data = b"".join(b'%b, "crc32": %d}\n' % (text, zlib.crc32(text)) for text in texts)
        data = b"\n" + data if self._is_torn else data
        # It counts as torn until all of it is written: a full disk may take only a part.
        self._is_torn = True
        while data:
            written = self._file.write(data)
            self.num_bytes += written
            data = data[written:]
        self._is_torn = False

    def sync(self) -> None:
        """Wait until everything written is on the disk; it may run in another thread than `write`."""
        os.fsync(self._file.fileno())
        sync(self.path.parent)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WentBack(ValueError):
    """Lines after a place say that the run went back to before it."""


Place = tuple[int, int]
"""How far a ledger's file went at some moment: bytes, events."""
START: Place = (0, 0)


def read_events(path: Path, *, num_bytes: int | None = None, after: Place = START) -> Iterator[dict[str, Any]]:
    """The events that stand, oldest first; of the first `num_bytes` of the file, if given.

    Only those `after` a place, if given. Numbers that are missing are events that were lost.

    Raises:
        FileNotFoundError: there is no file.
        WentBack: not all that stood at the place still stands.
        ValueError: there are lines, and none of them is a ledger's.
    """
    places, problem = _lines_that_stand(path, num_bytes, after)
    num_read = after[1]
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            try:
                event = json.loads(file.readline())
            except ValueError as error:
                problem = problem or f"{str(path)!r} is damaged at byte {place}: {error}"
                continue
            num_read += 1
            yield event
    if problem and not num_read:
        raise ValueError(problem)


def _lines_that_stand(path: Path, num_bytes: int | None, after: Place) -> tuple[array[int], str]:
    """Where the lines begin that stand, of those after a place, and what is wrong with the first unreadable one."""
    places, numbers = array("q"), array("q")
    problem, has_checksums, end, num_damaged = "", after[0] > 0, after[0], 0
    with path.open("rb") as file:
        file.seek(end)
        for place, line in enumerate(file):
            begin, end = end, end + len(line)
            if num_bytes is not None and end > num_bytes:
                break
            if not line.endswith(b"}\n"):
                # Cut short, unless it does not even begin as one.
                if line.strip(b"\0\n") and not line.startswith(b"{"):
                    problem = problem or f"{str(path)!r} line {place + 1} is not a ledger's: {line[:60]!r}"
                continue
            checksum = _CHECKSUM.search(line)
            # From the first on, all have one: a line without was changed.
            has_checksums = has_checksums or checksum is not None
            is_right = checksum is not None and zlib.crc32(line[: checksum.start()]) == int(checksum[1])
            if has_checksums and not is_right:
                problem = problem or f"{str(path)!r} line {place + 1} is damaged: {line[:60]!r}"
                num_damaged += 1
                continue
            if line.startswith(_APART):
                continue
            found = _NUMBER.match(line)
            number = 0 if found is None else int(found[1])
            if number < 1:
                what = "not a ledger's" if found is None else f"event {number}, but they are numbered from 1"
                problem = problem or f"{str(path)!r} line {place + 1} is {what}: {line[:60]!r}"
                continue
            if _REWOUND in line:
                # Damage before it is of lines after the place it goes back to, which were never synced.
                num_damaged = 0
            if number - num_damaged <= after[1]:
                raise WentBack(f"{str(path)!r} goes back to event {number} after event {after[1]}")
            # The damaged lines just before had the numbers below: if the run had gone back, older lines with
            # those numbers stand for something that was undone.
            while numbers and numbers[-1] >= number - num_damaged:
                numbers.pop()
                places.pop()
            numbers.append(number)
            places.append(begin)
            num_damaged = 0
    return places, problem
