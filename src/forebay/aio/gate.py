"""First come, first served: a lock that many may share, and a window that lets in so much at a time."""

from __future__ import annotations

import asyncio
import sys
from collections import deque


class Window:
    """Lets in as much as `size` at a time, first come, first served; what is larger goes alone.

    Who is in already may ask for more (`held` is what it has), but only one at a time, or two would wait for
    each other.

    >>> await window.enter(100)
    >>> await window.enter(50, held=100)
    >>> window.leave(150)
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._waiting: deque[tuple[asyncio.Future[None], int, int]] = deque()

    async def enter(self, amount: int, *, held: int = 0) -> None:
        """Wait until there is room for `amount`, and occupy it."""
        if not self._waiting and self._fits(amount, held):
            self._used += amount
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, amount, held))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was granted in the same moment.
                self._used -= amount
            elif (turn, amount, held) in self._waiting:
                self._waiting.remove((turn, amount, held))
            self._wake()
            raise

    def leave(self, amount: int) -> None:
        """Make room again."""
        self._used -= amount
        if self._waiting:
            self._wake()

    def _fits(self, amount: int, held: int) -> bool:
        return self._used == held or self._used + amount <= self._size

    def _wake(self) -> None:
        while self._waiting and self._fits(*self._waiting[0][1:]):
            turn, amount, _ = self._waiting.popleft()
            if not turn.done():
                self._used += amount
                turn.set_result(None)


class SharedLock:
    """Held by any number of sharers at once, or by one holder alone: a window that one fills or many share.

    Who waits is served in order of arrival, so a stream of sharers does not starve who wants it alone.
    Consumes nothing, waits for earlier holders, is woken by their release.

    >>> async with lock.shared(): ...
    >>> async with lock.alone(): ...
    """

    def __init__(self) -> None:
        self._window = Window(_ALL)

    def shared(self) -> _Holding:
        """Hold it together with other sharers."""
        return _Holding(self._window, 1)

    def alone(self) -> _Holding:
        """Hold it with nobody else."""
        return _Holding(self._window, _ALL)


_ALL = sys.maxsize
"""More than there can be sharers."""


class _Holding:
    """The lock held for one block; written out, because a generator costs every put some microseconds."""

    __slots__ = ("_amount", "_window")

    def __init__(self, window: Window, amount: int) -> None:
        self._window = window
        self._amount = amount

    async def __aenter__(self) -> None:
        await self._window.enter(self._amount)

    async def __aexit__(self, *_: object) -> None:
        self._window.leave(self._amount)
