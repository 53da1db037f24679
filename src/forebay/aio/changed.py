"""A counter of changes that coroutines wait on: the wake-up behind `ReplayBuffer.wait_for_change`."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class BufferClosed(RuntimeError):
    """The buffer was closed, or another owner took it over: the change that was waited for will not come."""


class Changes:
    """Counts changes and wakes every task that waits for the next one; no change is missed.

    After `close` a wait ends at once: with the changes up to then, or with `BufferClosed`.

    >>> async def example():
    ...     changes = Changes()
    ...     seen = changes.version  # before looking at the content
    ...     changes.note()
    ...     return await changes.wait(seen)
    >>> asyncio.run(example())
    1
    """

    def __init__(self) -> None:
        self.version = 0
        self._is_closed = False
        self._next: asyncio.Event | None = None
        """Made by the first task that waits: most changes are not waited for."""

    def note(self) -> None:
        """Count a change."""
        self.version += 1
        self._wake()

    def close(self) -> None:
        """End every wait: no more changes will come."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._next is not None:
            self._next.set()
            # The next wait makes a new one: this one stays set, and a wait on it would end at once.
            self._next = None

    @contextmanager
    def noted_if_cut_short(self) -> Iterator[None]:
        """Count a change if the block is cancelled or fails: the calls in it may have happened."""
        try:
            yield
        except BaseException:
            self.note()
            raise

    async def wait(self, version: int) -> int:
        """Return the present version as soon as it differs from `version`.

        consumes: nothing / waits for: the next change / woken by: `note`, `close` / produces: the version

        Raises:
            BufferClosed: no change came before the end.
        """
        while self.version == version:
            if self._is_closed:
                raise BufferClosed("the buffer was closed")
            if self._next is None:
                self._next = asyncio.Event()
            await self._next.wait()
        return self.version
