"""Work that comes to its end although its caller is cancelled.

::

    caller --finish(work)--> its own task --end--> result
      '-- cancelled, however often: waits for that end, then raises the CancelledError
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def finish(work: Awaitable[Result]) -> Result:
    """The result of `work`, which is not cancelled with the caller; the caller waits for its end."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await outlast(task)
        raise


async def outlast(future: asyncio.Future[Any]) -> None:
    """Wait for the end of `future`, however often the waiting is cancelled."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        # Retrieved, so that nobody warns of it: the caller is told of the cancellation instead.
        future.exception()
