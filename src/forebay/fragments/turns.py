"""Waiting in line: who came first goes first, however little those behind want.

::

    wait(ready) --nobody waits, and ready()--> goes on at once
                --else--> at the end of the line --> first, and ready() --> woken --> checks again --> goes on
                                             '------ cancelled: leaves the line, the next one's turn

Whoever is woken takes what it wants before it gives up control, so a cancelled wait has taken nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


class BufferClosed(RuntimeError):
    """The buffer was closed, or another one took over its folder."""


@dataclass(eq=False)
class _Waiter:
    ready: Callable[[], bool]
    woken: asyncio.Future[None]


class Turns:
    """A line of tasks, each waiting for a condition of its own.

    Invariants: only the first in line is ever woken; nobody overtakes.

    >>> turns = Turns()
    >>> await turns.wait(lambda: True)
    """

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """`on_wait` is called when someone has got in line: others may go on because of it."""
        self._line: deque[_Waiter] = deque()
        self._on_wait = on_wait
        self._closed: str | None = None

    def __len__(self) -> int:
        return len(self._line)

    @property
    def blocked(self) -> bool:
        """Whether the first in line cannot go on."""
        return bool(self._line) and not self._line[0].ready()

    async def wait(self, ready: Callable[[], bool]) -> None:
        """Return when it is the caller's turn and `ready()`.

        consumes: a place in line / waits for: `ready()`, first in line / woken by: `wake`, `close` /
        produces: nothing; the caller takes what it waited for before its next ``await``

        Raises:
            BufferClosed: there will be no turn.
        """
        if self._closed is not None:
            raise BufferClosed(self._closed)
        if not self._line and ready():
            return
        loop = asyncio.get_running_loop()
        waiter = _Waiter(ready, loop.create_future())
        self._line.append(waiter)
        try:
            self._on_wait()
            await waiter.woken
            # Between the waking and now something may have been taken away.
            while self._closed is None and not ready():
                waiter.woken = loop.create_future()
                await waiter.woken
        except BaseException:
            self._line.remove(waiter)
            self.wake()
            raise
        self._line.remove(waiter)
        if self._closed is not None:
            raise BufferClosed(self._closed)

    def wake(self) -> None:
        """To be called when anything has changed that someone may wait for."""
        if self._line and not self._line[0].woken.done() and self._line[0].ready():
            self._line[0].woken.set_result(None)

    def close(self, reason: str) -> None:
        """End all waits with a `BufferClosed` that says `reason`, now and later."""
        self._closed = reason
        for waiter in self._line:
            # Woken only: one that was woken before, in the same turn, has to find out as well.
            if not waiter.woken.done():
                waiter.woken.set_result(None)
