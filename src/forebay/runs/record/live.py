"""The state of a run at this moment, and the warnings so far, as files that another process may read.

::

    once a second --values()--> RUN/live.json     replaced: a reader finds the old one or the new one, whole
    note(kind, text) ---------> RUN/notes.jsonl   appended: one line for each warning or message

    consumes: nothing   waits for: the clock   woken by: a timer   produces: files

A file that was not replaced for `STALE_S` is of a run that hangs, or was killed.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from forebay.io.safe_files import is_disk_error, replaced
from forebay.ledger import Ledger
from forebay.produce import AgentLoopManager
from forebay.runs.show.live import look_again_and_again
from forebay.runs.show.status import RunStatus

logger = logging.getLogger(__name__)

LIVE_FILE, NOTES_FILE = "live.json", "notes.jsonl"
PERIOD_S = 1.0
MAX_CPU_SHARE = 0.003
"""The share of one core at most: after an expensive look the next is put off."""
STALE_S = 15.0

Values = dict[str, Any]
_Look = Callable[[], Values]


class LiveFile:
    """Writes ``live.json`` once a second until `close`; in the event loop's thread.

    Invariant: an error of the disk ends the file with a warning, never the run. Another error, of a look at
    the run, is logged once, and the next look may succeed.
    """

    def __init__(self, folder: Path, at: _Look, values: _Look, refresh: Callable[[], Awaitable[None]]) -> None:
        """`at` says where the run stands, and costs nothing; `values` says all of it, after `refresh`."""
        self._path = folder / LIVE_FILE
        self._notes = folder / NOTES_FILE
        self._at, self._values, self._refresh = at, values, refresh
        self._has_logged = False
        self._task = asyncio.create_task(self._write_all(), name="live file")

    def note(self, kind: str, text: str) -> None:
        """Append a line for people: a ``warning`` or a ``message``."""
        line = {"unix_time_s": time.time(), "kind": kind, "text": text, **self._at()}
        with contextlib.suppress(OSError), self._notes.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")

    def close(self, state: str) -> None:
        """Write the last state: ``finished``, ``stopped`` or ``failed``."""
        # First: a look after this one would say that the run goes on.
        self._task.cancel()
        with contextlib.suppress(OSError):
            self._write(state)

    def _write(self, state: str) -> None:
        values = {"unix_time_s": time.time(), "state": state, **self._at(), **self._values()}
        # After a power cut nothing looks for the state of the last second.
        with replaced(self._path, durable=False) as temporary:
            temporary.write_text(json.dumps(values, default=str), encoding="utf-8")

    async def _write_all(self) -> None:
        try:
            await look_again_and_again(self._look, PERIOD_S, MAX_CPU_SHARE)
        except OSError as error:
            logger.warning("%s is not written any more: %s", self._path, error)

    async def _look(self) -> None:
        try:
            await self._refresh()
            self._write("running")
        # Of a remote store, for instance. This task is not awaited: its end would not be seen.
        except Exception as error:
            if is_disk_error(error):
                raise
            if not self._has_logged:
                logger.warning("%s could not be written, and will be tried again", self._path, exc_info=True)
            self._has_logged = True


def live_values(status: RunStatus, manager: AgentLoopManager) -> Values:
    """The state of the run now: groups by place, work in flight by stage, the oldest of it."""
    return {**msgspec.to_builtins(status.now(), str_keys=True), "books": books_of(manager.ledger)}


def books_of(ledger: Ledger) -> Values:
    """The places of the groups of each task, by the ledger's own account."""
    books: Values = msgspec.to_builtins(ledger.balance(ledger.count_live()).by_task)
    return books
