"""The ledger's file: one line of JSON per event, append-only, and the rule by which it is read.

::

    {"number": 7, "time_s": 1.7e9, "event": "trained", "task": "math", "group": "g1", "train_step": 2}

Events are numbered from 1. A run that goes back to a checkpoint goes on from the checkpoint's number, so
**a line takes the place of every line before it with the same or a higher number**. What is left, in order,
is what happened. A ``rewound`` line (``to_event``) marks each such place for human readers. A last line
that a dying process did not finish stands for nothing.

    {"event": "restarted", "time_s": 1.7e9, "part": "engine 0", "reason": "its process has ended"}

A line like this is about a process, not a group. It has no number: going back to a checkpoint does not undo
it, and it is no event of the account.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESTARTED = "restarted"
_APART = f'{{"event": "{RESTARTED}"'.encode()

_NUMBER = re.compile(rb'\{"number": (\d+),')


class Journal:
    """Appends lines to a file and hands each to the operating system at once.

    >>> journal = Journal(Path("runs/a/ledger.jsonl"))
    >>> journal.write({"number": 1, "event": "produced", "task": "math", "group": "g1"})
    >>> journal.close()
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        if self._file.tell():
            self._file.seek(-1, 2)
            if self._file.read(1) != b"\n":
                # A line that was cut off must not swallow the next one.
                self._file.write(b"\n")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one event.

        Raises:
            TypeError, ValueError: a value is none of JSON's; nothing is written.
            OSError: the file takes no more.
        """
        self._file.write(json.dumps(line).encode("ascii") + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events that stand, oldest first.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: events are missing, or a line is not one.
    """
    kept = iter(_lines_that_stand(path))
    wanted = next(kept, None)
    with path.open("rb") as file:
        for place, line in enumerate(file):
            if place != wanted:
                continue
            wanted = next(kept, None)
            try:
                event = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{str(path)!r} line {place + 1} is damaged: {error}") from None
            yield event


def _lines_that_stand(path: Path) -> array[int]:
    """Their places in the file; the i-th is that of event number i + 1."""
    kept = array("q")
    with path.open("rb") as file:
        for place, line in enumerate(file):
            found = _NUMBER.match(line)
            if line.startswith(_APART) or not line.endswith(b"}\n"):
                continue
            if found is None:
                raise ValueError(f"{str(path)!r} line {place + 1} is not a ledger's: {line[:60]!r}")
            number = int(found[1])
            if not 1 <= number <= len(kept) + 1:
                raise ValueError(
                    f"{str(path)!r} line {place + 1} is event {number}, but events from {len(kept) + 1} on "
                    f"are missing before it"
                )
            del kept[number - 1 :]
            kept.append(place)
    return kept
