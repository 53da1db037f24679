"""Calls of a rollout that a pause may end: environments and tools, which no engine's pause reaches.

::

    run(call) --> its own task --> result
                       |  pause(): cancelled --> Interrupted    (the rollout ends ABORTED and is continued)
                       '- the limit passes   --> TimeoutError   (the rollout is FAILED)
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from forebay.aio.time_limits import time_limit

Result = TypeVar("Result")


class Interrupted(Exception):
    """A pause ended the call."""


class Interruptible:
    """Runs calls until they are paused.

    Invariants: once paused, no call runs and none begins until `allow`; a call that ends by itself in the
    moment of the pause keeps its result.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._interrupted: set[asyncio.Task[Any]] = set()
        self._is_paused = False

    def allow(self) -> None:
        """Let calls run again."""
        self._is_paused = False

    def pause(self) -> None:
        """End all calls."""
        self._is_paused = True
        for task in self._running:
            if task.cancel():
                self._interrupted.add(task)

    async def run(self, call: Coroutine[Any, Any, Result], what: str, limit_s: float | None) -> Result:
        """The result of `call`.

        Raises:
            Interrupted: a pause came first.
            TimeoutError: it took longer than `limit_s`; the message begins with `what`.
        """
        if self._is_paused:
            call.close()
            raise Interrupted
        # Made within its limit, whose clock it may stop.
        task: asyncio.Task[Result] | None = None
        limit: asyncio.Timeout | None = None
        try:
            async with time_limit(limit_s) as limit:
                task = asyncio.create_task(call)
                self._running.add(task)
                return await task
        except asyncio.CancelledError:
            if task in self._interrupted and not is_cancelled():
                raise Interrupted from None
            raise
        except TimeoutError as error:
            if limit is not None and limit.expired():
                raise TimeoutError(f"{what} did not answer within {limit_s:g} s") from None
            raise RuntimeError(f"{what}: TimeoutError: {error}") from error
        except Exception as error:
            raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            if task is not None:
                self._running.discard(task)
                self._interrupted.discard(task)


def is_cancelled() -> bool:
    """Whether the current task was cancelled; otherwise a call in it let a cancellation escape."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
