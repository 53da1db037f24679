"""A counter of changes that coroutines can wait on: the wake-up behind `ReplayBuffer.wait_for_change`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class BufferClosed(RuntimeError):
    """The buffer was closed, and what was waited for will not happen."""


class Changes:
    """Counts changes and wakes everyone who waits for the next one; a change is never missed.

    After `close` a wait ends at once: with what has changed until then, or with `BufferClosed`.

    >>> seen = changes.version      # before looking at the content
    >>> seen = await changes.wait(seen)
    """

    def __init__(self) -> None:
        self.version = 0
        self._is_closed = False
        self._next: asyncio.Event | None = None
        """Made when someone waits: most changes are not waited for."""

    def note(self) -> None:
        """Something changed."""
        self.version += 1
        self._wake()

    def close(self) -> None:
        """Nothing changes any more."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._next is not None:
            self._next.set()
            self._next = None

    @contextmanager
    def noted_if_cut_short(self) -> Iterator[None]:
        """A change is noted if the block is cancelled or fails: what it called may have happened."""
        try:
            yield
        except BaseException:
            self.note()
            raise

    async def wait(self, version: int) -> int:
        """Return the present version as soon as it is not `version` any more.

        Raises:
            BufferClosed: it is, and stays.
        """
        while self.version == version:
            if self._is_closed:
                raise BufferClosed("the buffer was closed")
            if self._next is None:
                self._next = asyncio.Event()
            await self._next.wait()
        return self.version
