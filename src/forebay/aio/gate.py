"""First come, first served: a gate for tasks that wait for room, or for a condition of their own.

::

    wait(ready) --the line is empty, and ready()--> goes on at once
                --else--> end of the line --> first, and ready() --> woken --> checks again --> goes on
                                               '---- cancelled: leaves the line, and the next is looked at

A task that goes on takes what it waited for before its next ``await``, so a cancelled wait has taken nothing.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from forebay.aio.changed import BufferClosed


class Gate:
    """A line of tasks, each waiting for room (`enter`) or for a condition of its own (`wait`).

    Invariants: only the first in line is ever woken; no task overtakes another. After `close` every wait,
    begun or new, ends with `BufferClosed`.

    >>> async def example():
    ...     gate = Gate(size=100)
    ...     await gate.enter(60)
    ...     second = asyncio.create_task(gate.enter(50))
    ...     await asyncio.sleep(0)
    ...     print(len(gate), gate.blocked)
    ...     gate.leave(60)
    ...     await second
    >>> asyncio.run(example())
    1 True
    """

    def __init__(self, size: int = sys.maxsize, *, on_wait: Callable[[], None] = lambda: None) -> None:
        """`size` bounds what is inside at a time; `on_wait` is called when a task has joined the line."""
        self._size = size
        self._used = 0
        self._line: deque[_Waiter] = deque()
        self._on_wait = on_wait
        self._closed: str | None = None

    def __len__(self) -> int:
        """The number of tasks in line."""
        return len(self._line)

    @property
    def blocked(self) -> bool:
        """Whether the first in line cannot go on."""
        return bool(self._line) and not self._line[0].ready()

    async def enter(self, amount: int) -> None:
        """Wait until there is room for `amount`, and occupy it; more than the size goes in alone.

        Raises:
            BufferClosed: the gate was closed.
        """
        # Every put and take of a buffer enters one: the usual case costs no further coroutine.
        if self._line or self._closed is not None or not self._fits(amount):
            await self.wait(lambda: self._fits(amount))
        self._used += amount
        # There may be room for the next in line as well: each that goes on wakes the one behind it.
        if self._line:
            self.wake()

    def leave(self, amount: int) -> None:
        """Give the room back."""
        self._used -= amount
        if self._line:
            self.wake()

    def _fits(self, amount: int) -> bool:
        # Alone, any amount goes in: one of more than the size would otherwise wait forever.
        return not self._used or self._used + amount <= self._size

    async def wait(self, ready: Callable[[], bool]) -> None:
        """Return when it is the caller's turn and `ready()`.

        consumes: a place in line / waits for: `ready()`, first in line / woken by: `wake`, `close` /
        produces: nothing; the caller takes what it waited for before its next ``await``

        Raises:
            BufferClosed: the gate was closed.
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
            # Between the wake-up and now, something may have been taken away.
            while self._closed is None and not ready():
                waiter.woken = loop.create_future()
                await waiter.woken
        except BaseException:
            # If it had been woken, the wake-up passes on to the next in line.
            self._line.remove(waiter)
            self.wake()
            raise
        self._line.remove(waiter)
        if self._closed is not None:
            raise BufferClosed(self._closed)

    def wake(self) -> None:
        """Look at the first in line; to be called when anything has changed that a task may wait for."""
        if self._line and not self._line[0].woken.done() and self._line[0].ready():
            self._line[0].woken.set_result(None)

    def close(self, reason: str) -> None:
        """End all waits, begun and new, with a `BufferClosed` that says `reason`."""
        self._closed = reason
        for waiter in self._line:
            # Each finds the reason when it runs: one that was woken before, in the same turn, has to as well.
            if not waiter.woken.done():
                waiter.woken.set_result(None)


@dataclass(eq=False, slots=True)
class _Waiter:
    ready: Callable[[], bool]
    woken: asyncio.Future[None]


class _Holding:
    """The lock held for one block; written out, because a generator costs every put some microseconds."""

    __slots__ = ("_amount", "_lock")

    def __init__(self, lock: Gate, amount: int) -> None:
        self._lock = lock
        self._amount = amount

    async def __aenter__(self) -> None:
        await self._lock.enter(self._amount)

    async def __aexit__(self, *_: object) -> None:
        self._lock.leave(self._amount)


class SharedLock(Gate):
    """Held by any number of sharers at once, or by one holder alone.

    Waiting tasks are served in order of arrival, so a stream of sharers does not starve one that wants it
    alone.

    >>> async def example():
    ...     lock = SharedLock()
    ...     async with lock.shared(), lock.shared():
    ...         return "two sharers"
    >>> asyncio.run(example())
    'two sharers'
    """

    def shared(self) -> _Holding:
        """Hold it together with other sharers."""
        return _Holding(self, 1)

    def alone(self) -> _Holding:
        """Hold it without any other holder."""
        # All of the size: it waits until no other holder is inside, and none fits in beside it.
        return _Holding(self, sys.maxsize)
