"""A run as its folder tells it: what it is, its numbers by step, its warnings, where it stands now.

It only reads. Files that a run is writing are read up to their last whole line.
"""

import contextlib
import io
import json
import os
import re
import threading
import time
import tomllib
import weakref
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from forebay.ledger import Ledger
from forebay.runs.record.history import FOLDER, REMOVED_FILE
from forebay.runs.record.live import LIVE_FILE, NOTES_FILE, STALE_S, books_of

RUN_FILE, METRICS_FILE, LEDGER_FILE = "run.toml", "metrics.jsonl", "ledger.jsonl"
MAX_DEPTH = 4
"""How far below the named folder runs are looked for."""
MAX_NOTES = 500
_TAIL_BYTES = 1 << 16
"""The last row of the metrics is in the last so many bytes of its file."""
_CHUNK = 512
"""Rows that are dicts at once, on their way into columns of a tenth of the size."""

_decode = msgspec.json.Decoder(dict[str, Any]).decode

Values = dict[str, Any]
Columns = dict[str, list[Any]]


class RunFolder:
    """One run. Rows of files that only grow are read once, and not before they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics = _Lines(folder / METRICS_FILE, needed="train_step")
        self._notes = _Lines(folder / NOTES_FILE)

    def facts(self) -> Values:
        """Name, settings and ``state`` of the run: the state of its live file, or ``lost``, or ``old``."""
        config, problem = {}, ""
        try:
            config = tomllib.loads((self.folder / RUN_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problem = f"{RUN_FILE} cannot be read: {error}"
        live = self.live()
        last = _last_row(self.folder / METRICS_FILE)
        return {
            "config": hide_secrets(config),
            "problem": problem,
            "state": live["state"],
            "steps": config.get("steps"),
            "train_step": last.get("train_step", 0),
            "unix_time_s": live.get("unix_time_s") or last.get("unix_time_s"),
            "removed": self._json(f"{FOLDER}/{REMOVED_FILE}"),
        }

    def metrics(self, names: Collection[str] | None = None, first: int = 0) -> Columns:
        """The columns `names`, or all, of ``metrics.jsonl`` from the row at `first` on, oldest first.

        A number that a row does not have is None.
        """
        return self._metrics.read(names, first)

    def notes(self, first: int = -MAX_NOTES) -> list[Values]:
        """Warnings and messages from the one at `first` on, oldest first."""
        columns = self._notes.read(None, first)
        rows = zip(*columns.values(), strict=True)
        return [hide_secrets(dict(zip(columns, row, strict=True)), by_name=False) for row in rows]

    def live(self) -> Values:
        """The live file, with its age; ``state`` is ``old`` where the run wrote none."""
        values: Values | None = hide_secrets(self._json(LIVE_FILE), by_name=False)
        if values is None:
            return {"state": "old"}
        values["age_s"] = age_s = time.time() - float(values.get("unix_time_s", 0))
        if values.get("state") == "running" and age_s > STALE_S:
            values["state"] = "lost"
        return values

    def life(self, group_id: str) -> list[Values]:
        """The events of one group in the books, oldest first."""
        # As the ledger writes it: lines are searched as bytes, and few of them decoded.
        searched = f'"group": {json.dumps(group_id)}'.encode()
        try:
            with (self.folder / LEDGER_FILE).open("rb") as file:
                return [hide_secrets(_decode(line), by_name=False) for line in file if searched in line]
        except (OSError, msgspec.MsgspecError):
            return []

    def books(self) -> Values:
        """The balance of every task by the ledger's file, for runs that wrote no live file."""
        try:
            return books_of(Ledger.read(self.folder / LEDGER_FILE))
        except (OSError, ValueError):
            return {}

    def stamp(self) -> tuple[int, ...]:
        """Changes whenever the run has written something new."""
        files = [self.folder / name for name in (METRICS_FILE, NOTES_FILE, LIVE_FILE)]
        return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)

    def _json(self, name: str) -> Values | None:
        try:
            return _decode((self.folder / name).read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None


def find_runs(folders: list[Path]) -> dict[str, Path]:
    """The run folders at or below `folders`, by a name that is their own.

    ::

        find_runs([Path("runs")])
        # {'demo': PosixPath('runs/demo'), 'older/demo': PosixPath('runs/older/demo')}
    """
    found: dict[str, Path] = {}
    for folder in folders:
        for run in _runs_below(folder):
            name = run.name if run == folder else str(run.relative_to(folder))
            is_other = found.get(name, run).resolve() != run.resolve()
            found[str(run) if is_other else name] = run
    return found


def _runs_below(folder: Path) -> Iterator[Path]:
    for name, below, files in os.walk(folder):
        path = Path(name)
        if RUN_FILE in files:
            yield path
        if RUN_FILE in files or len(path.relative_to(folder).parts) == MAX_DEPTH:
            below.clear()
        # An earlier run that is being replaced, a virtual environment, ...
        below[:] = sorted(name for name in below if not name.startswith((".", "__")) and name[-4:] != ".old")


class _Lines:
    """The JSON objects of a file that grows, as columns; damaged lines are passed over. Safe in threads.

    The last line is read again each time: the run writes an evaluation into the row of its step.
    """

    def __init__(self, path: Path, needed: str = "") -> None:
        """Rows in which `needed` is no whole number are passed over too."""
        self._path, self._needed = path, needed
        self._lock = threading.Lock()
        self._columns: Columns = {}
        self._num_rows = 0
        """The number of lines before `_end`, where the last whole line begins."""
        self._end = 0
        self._inode = 0
        self._let_go: Callable[[], Any] = lambda: None

    def read(self, names: Collection[str] | None, first: int) -> Columns:
        with self._lock:
            try:
                self._go_on()
            except OSError:
                return {}
            columns = self._columns.items()
            return {name: values[first:] for name, values in columns if names is None or name in names}

    def _go_on(self) -> None:
        with self._path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._end:
                # Rewritten by a resume: from the start.
                self._columns, self._num_rows, self._end, self._inode = {}, 0, 0, stat.st_ino
                # Held open: its inode would be given to a later file once it is deleted.
                self._let_go()
                self._let_go = weakref.finalize(self, os.close, os.dup(file.fileno()))
            file.seek(self._end)
            data = file.read()
        last = data.rfind(b"\n") + 1
        before_last = data.rfind(b"\n", 0, max(0, last - 1)) + 1
        # The row of the last line goes: that line is read again below.
        for values in self._columns.values():
            del values[self._num_rows :]
        self._num_rows = self._append(data[:before_last])
        self._end += before_last
        self._append(data[before_last:last])

    def _append(self, data: bytes) -> int:
        """Append these lines; the number of rows that are there now."""
        lines, num_rows = io.BytesIO(data), self._num_rows
        while some := list(islice(lines, _CHUNK)):
            rows = list(_rows_of(some, self._needed))
            for name in dict.fromkeys([*self._columns, *(name for row in rows for name in row)]):
                self._columns.setdefault(name, [None] * num_rows).extend(row.get(name) for row in rows)
            num_rows += len(rows)
        return num_rows


def _rows_of(lines: list[bytes], needed: str) -> Iterator[Values]:
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):
            row = _decode(line)
            if not needed or isinstance(row.get(needed), int):
                yield row


def _last_row(path: Path) -> Values:
    """The last whole row of a file, of which no more than its end is read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    return next(_rows_of(lines[::-1], "train_step"), {})


_TOKEN = r"token(?!s\W+(?:[\d_]+(?![\w-])|(?:none|null)\b))s?"
"""A number of tokens, or none, is a limit."""
_WORDS = (
    # At the beginning of a word, of apiKey too; num_pass = 3 is a count.
    r"(?:(?<![a-z0-9])(?<!num[_-])|(?-i:(?<=[a-z0-9])(?=[A-Z])))(?:(?:api|access|auth|secret)[_-]?)?(?:keys?|"
    rf"key[_-]?id|{_TOKEN}|secrets?|pass(?:word|wd|phrase)?s?|pwd|credentials?|auth(?:orization)?)"
)
_SECRET = re.compile(rf"(?i){_WORDS}$")
_GIVEN = re.compile(
    rf"(?i)({_WORDS}\\?[\"']?\s*=\s*|{_WORDS}\\?[\"']\s*:\s*|(?<!\w)--?[\w-]{{0,40}}?{_WORDS}\s+|\bbearer\s+|"
    # A bare "key:" or "token:" is mostly of another kind.
    rf"(?:api[_ -]?key|(?<!num)[_-](?:key|{_TOKEN})|secret|password|passphrase|pwd|authorization)s?\s*:\s*)"
    # The value of the last scheme is a list, on the same line.
    r"(?:(?:bearer|basic|token|api-?key)\s+|digest\s.*(?=\S))?(\\?[\"'])?(?(2).*?\2|\S+)"
)
_ISSUED = re.compile(
    r"\b((sk|hf|gh.|github_pat|glpat|xox.)[_-](?=[\w-]{,40}\d)[\w-]{16,}|AKIA\w{16}|eyJ[\w-]{,400}\.[\w.-]+)"
)
"""Issued by the largest services: known by how it begins. Long texts of a model cost all of these little."""
_ALL_SECRET = ("env", "environment", "headers")
"""Below these keys people give credentials by names of any kind."""
_IN_URL = re.compile(r"\b(\w+://)(?:[^/\s:@]*:[^/\s@]*|[^/\s?#@]+)@")


def hide_secrets(value: Any, name: str = "", every: bool = False, by_name: bool = True) -> Any:
    """`value` without what looks like a credential: by the name of a key or an option, or in an address.

    Without `by_name` only in texts, of errors, say: the keys are names of tasks and the like.

    >>> hide_secrets({"api_key": "abc", "url": "postgresql://me:pw@host/db"})
    {'api_key': '(hidden)', 'url': 'postgresql://(hidden)@host/db'}
    >>> hide_secrets({"arguments": ["--api-key", "abc", "--hf-token=abc"], "env": {"A": "abc"}})
    {'arguments': ['--api-key', '(hidden)', '--hf-token=(hidden)'], 'env': {'A': '(hidden)'}}
    """
    every = every or (by_name and name.lower() in _ALL_SECRET and not isinstance(value, str))
    if isinstance(value, dict):
        return {key: hide_secrets(item, str(key), every, by_name) for key, item in value.items()}
    if isinstance(value, list):
        # The value of an option is the next item.
        names = [str(item) if str(item).startswith("-") else name for item in ["", *value]]
        return [hide_secrets(item, name, every, by_name) for item, name in zip(value, names, strict=False)]
    if value and (every or (by_name and isinstance(value, str) and _SECRET.search(name))):
        return "(hidden)"
    return hide_in_text(value) if isinstance(value, str) else value


def hide_in_text(text: str) -> str:
    """`text` without what is given in it as a credential, or looks like one.

    >>> hide_in_text("401 for sorting, Authorization: Bearer abc")
    '401 for sorting, Authorization: (hidden)'
    """
    return _ISSUED.sub("(hidden)", _GIVEN.sub(r"\1(hidden)", _IN_URL.sub(r"\1(hidden)@", text)))
