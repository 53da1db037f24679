"""Tasks together: work beside a block, work that outlasts its caller, and a wait for a quiet moment.

::

    caller --finish(work)--> its own task --end--> result
      '-- cancelled, however often: waits for that end, then raises the CancelledError

    first item --> settle: turn, turn, turn ... --4 turns without another item, or `at_most`--> all of them
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")

QUIET_TURNS = 4
"""Turns of the event loop without a new item after which those of one moment are all there: what lies between
a group and its requests (task start, gather, agent loop) takes one or two."""


@asynccontextmanager
async def beside(work: Awaitable[Result]) -> AsyncIterator[asyncio.Future[Result]]:
    """A block beside which `work` runs as a task; the block ends once that task, cancelled, has ended."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def without_exit(work: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
    """The result of `work`; its SystemExit is a RuntimeError: in a task of its own it would end the event loop."""
    try:
        return await work(*arguments)
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from None


async def unless(stop: asyncio.Event, work: Awaitable[Result]) -> Result | None:
    """The result of `work`; None, and `work` cancelled, if `stop` is set before it has ended."""
    async with beside(stop.wait()) as stopping, beside(work) as working:
        ends: list[asyncio.Future[Any]] = [stopping, working]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # Both may have ended in the same turn: a result that is there is not thrown away.
        return working.result() if working.done() else None


async def finish(work: Awaitable[Result]) -> Result:
    """The result of `work`, which is not cancelled with the caller; the caller waits for its end."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await outlast(task)
        raise


async def run_to_the_end(function: Callable[..., Result], *args: object) -> Result:
    """Run `function` in a thread; when cancelled, wait for its end first: a thread cannot be stopped."""
    return await finish(asyncio.to_thread(function, *args))


async def outlast(future: asyncio.Future[Any]) -> None:
    """Wait for the end of `future`, however often the waiting is cancelled."""
    while not future.done():
        try:
            # Not `await future`: a cancellation of the caller would cancel it, too.
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        # Retrieved, so that asyncio does not warn of it: the caller is told of the cancellation instead.
        future.exception()


def is_cancelled() -> bool:
    """Whether the current task was cancelled; otherwise a call in it let a cancellation escape."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def others_first() -> None:
    """Return once tasks that are ready, and what they wake within some turns of the event loop, have gone on.

    For work that holds the loop for some milliseconds, and that somebody who waits should not wait for.
    """
    for _ in range(2 * QUIET_TURNS):
        await asyncio.sleep(0)


async def settle(num_items: Callable[[], int], *, at_most: int) -> None:
    """Return after some turns of the event loop in which `num_items` did not change, or `at_most` turns.

    The limit is for a steady load, under which such a quiet moment may never come.
    """
    quiet = 0
    for _ in range(at_most):
        if quiet == QUIET_TURNS:
            return
        seen = num_items()
        # Not a wait: lets the other ready tasks run once.
        await asyncio.sleep(0)
        quiet = quiet + 1 if num_items() == seen else 0
