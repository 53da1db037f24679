"""Noticing that a server is gone, or stands still, while answers of it are read.

::

    with reading(): heard(), heard(), ...                       quiet: nobody reads

    _watch    consumes: nothing               waits for: the clock, the end of the server's process
              woken by: the first reading     produces: one call of `lose`, when the server is gone or stands
                                                        still

It ends nothing itself: who reads does, when told that the server is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forebay.engines.servers.launch import LocalServer
from forebay.engines.servers.link import ServerLink

_HEALTH_EVERY_S = 10.0
"""Seconds between two questions while something runs: a machine that vanished closes no connection."""
_SILENCE_S = 60.0
"""Without a token, after which the model's own process is asked: it may hang in a healthy server."""


class Watch:
    """Watches a server as long as somebody reads from it.

    Invariants: it watches while somebody reads, and only then; what it finds it says once.

    >>> watch = Watch(link, None, lose=print)                                          # doctest: +SKIP
    >>> with watch.reading():                                                          # doctest: +SKIP
    ...     watch.heard()
    """

    def __init__(self, link: ServerLink, server: LocalServer | None, lose: Callable[[str], None]) -> None:
        """`server` is its process, where it is known; `lose` is told why the server is lost."""
        self._link, self._server, self._lose = link, server, lose
        self._heard_s = 0.0
        """When a token came, or reading began."""
        self._num_reading = 0
        self._watching: asyncio.Task[None] | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While open, an answer is read."""
        self._num_reading += 1
        self._quiet.clear()
        if self._watching is None:
            self.heard()
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._num_reading -= 1
            if not self._num_reading:
                self._quiet.set()
                self._watching.cancel()
                self._watching = None

    def heard(self) -> None:
        """Something came."""
        self._heard_s = asyncio.get_running_loop().time()

    async def quiet(self) -> None:
        """Wait until no answer is being read."""
        await self._quiet.wait()

    async def _watch(self) -> None:
        ended = asyncio.create_task(self._process_ended())
        try:
            why = ""
            while not why:
                await asyncio.wait([ended], timeout=_HEALTH_EVERY_S)
                why = ended.result() if ended.done() else await self._what_is_wrong()
            self._lose(why)
        finally:
            ended.cancel()

    async def _what_is_wrong(self) -> str:
        """Nothing (empty), or why the server must be taken for lost."""
        if not await self._link.is_healthy():
            return "it does not answer any more"
        silent_s = asyncio.get_running_loop().time() - self._heard_s
        if silent_s > _SILENCE_S and not await self._link.is_alive():
            return f"it stands still: no token for {silent_s:.0f} s, and its model does not answer"
        return ""

    async def _process_ended(self) -> str:
        """How the server's process ended, once it has; of another's server nothing is known."""
        if self._server is None:
            await asyncio.Event().wait()
            raise AssertionError("nobody sets that event")
        code = await self._server.wait()
        return f"it ended with exit code {code}; the end of its log:\n{self._server.log_tail()}"
