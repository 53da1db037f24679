"""Waiting for several things at once, and work that is done wholly or not at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

from forebay.aio.cancellation import outlast

T = TypeVar("T")


class Awaited:
    """Something to await, or not: no coroutine is made, and none complains, before it is awaited."""

    def __init__(self, wait: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._wait = wait

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait().__await__()


@contextlib.asynccontextmanager
async def relayed(
    news: asyncio.Event, *sources: tuple[Callable[[int], Awaitable[int]], int]
) -> AsyncIterator[None]:
    """In here, `news` is set at every change of a source: what waits for its next change, and its version."""

    async def relay(wait: Callable[[int], Awaitable[int]], version: int) -> None:
        while True:
            version = await wait(version)
            news.set()

    relays = [asyncio.create_task(relay(wait, version), name="relay changes") for wait, version in sources]
    try:
        yield
    finally:
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def whole_or_undone(work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]]) -> T:
    """What `work` gives. Cancelled meanwhile, let it end, undo it, and only then be cancelled."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:

        async def take_back() -> None:
            await asyncio.wait([task])
            if task.exception() is None:
                await undo(task.result())

        undoing = asyncio.create_task(take_back())
        await outlast(undoing)
        undoing.result()
        raise
