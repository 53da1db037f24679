"""Calls to actors: many small ones as few, and one that may take however long while its actor lives.

::

    ask(item) --+                                              actor
    ask(item) --+--> one call, [items] --> as_they_end([call, call, ...])
    ask(item) --+                                | those that end together
          ^                                      v
          '------ futures <---- stream of [(number, result), ...]

A call to an actor costs about a millisecond at each end, however little it carries, and a train step has
hundreds of requests. The stream belongs to its call: if the actor's process ends, every item without an
answer raises `ActorLost`, and none is asked for again by itself. An item that fails there fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from forebay.aio.tasks import settle
from forebay.cluster.library import import_ray, why
from forebay.engines.process.host import NotBuilt
from forebay.watching.stalls import answered

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

MAX_TURNS = 64
"""Of the event loop for which an item waits for others: some milliseconds, while a call costs about one."""


class ActorLost(RuntimeError):
    """The actor's process has ended, or cannot be reached."""


class ItemFailed(RuntimeError):
    """The error of a call, in words: its class may not be known to the caller, or not travel."""


class BatchedCalls(Generic[ItemT, ResultT]):
    """The caller's side; `stream` is the actor's method, which is given a list of items.

    consumes: items; waits for: a quiet moment, within limits, then the answers; woken by: `ask`, the actor;
    produces: results.

    >>> calls = BatchedCalls(actor.generate.options(num_returns="streaming").remote)
    >>> completion = await calls.ask(request)
    """

    def __init__(self, stream: Callable[[list[ItemT]], AsyncIterator[Any]]) -> None:
        self._stream = stream
        self._waiting: list[tuple[ItemT, asyncio.Future[ResultT]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, item: ItemT) -> ResultT:
        """The result of `item`. A cancelled caller has to tell the actor itself.

        Raises:
            ActorLost: the actor ended first.
            ItemFailed: its call raised an error.
        """
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._sending is None:
            self._sending = self._start(self._send())
        return await future

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        # Held, because the event loop alone would let a task that waits be collected.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send(self) -> None:
        await settle(lambda: len(self._waiting), at_most=MAX_TURNS)
        batch = [pair for pair in self._waiting if not pair[1].done()]
        self._waiting, self._sending = [], None
        if batch:
            self._start(self._receive(batch))

    async def _receive(self, batch: Sequence[tuple[ItemT, asyncio.Future[ResultT]]]) -> None:
        exceptions = import_ray().exceptions
        error: Exception = ActorLost("the actor ended the stream before its time")
        try:
            async for ref in self._stream([item for item, _ in batch]):
                for number, result in await ref:
                    future = batch[number][1]
                    if future.done():
                        continue
                    if isinstance(result, ItemFailed):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
        except (exceptions.RayActorError, exceptions.ObjectLostError, NotBuilt) as lost:
            error = ActorLost(why(lost))
        # Any other error of the actor is an error of the call, for all callers that wait.
        except Exception as other:
            error = other
        finally:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)


async def as_they_end(
    calls: Sequence[Coroutine[Any, Any, ResultT]],
) -> AsyncIterator[list[tuple[int, ResultT | ItemFailed]]]:
    """The actor's side: run `calls` together; their results, numbered, those that end together together.

    One that raises has an `ItemFailed` for a result; the others go on.
    """
    ended: list[int] = []
    news = asyncio.Event()

    def note(number: int, _: asyncio.Task[ResultT]) -> None:
        ended.append(number)
        news.set()

    tasks = [asyncio.create_task(call) for call in calls]
    for number, task in enumerate(tasks):
        task.add_done_callback(partial(note, number))
    try:
        num_left = len(tasks)
        while num_left:
            await news.wait()
            # Not a wait: items that end in the same turn go along.
            await asyncio.sleep(0)
            news.clear()
            batch, ended[:] = ended[:], []
            num_left -= len(batch)
            yield [(number, _result_of(tasks[number])) for number in batch]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _result_of(task: asyncio.Task[ResultT]) -> ResultT | ItemFailed:
    if task.cancelled():
        return ItemFailed("cancelled")
    error = task.exception()
    return task.result() if error is None else ItemFailed(f"{type(error).__name__}: {error}")


async def result_of(ref: Any, alive: Any, what: str, *, every_s: float, limit_s: float) -> Any:
    """The result of a call that may take however long, as long as its actor gives signs of life.

    Ray notices a process that ended, not one that is stopped or hangs. So `alive`, a method of the actor that
    is answered beside the call, is called every `every_s` seconds.

    Raises:
        StallError: there was no sign within `limit_s`; the message begins with `what`.
        Exception: as the call.
    """
    answer = asyncio.ensure_future(ref)
    try:
        while not (await asyncio.wait([answer], timeout=every_s))[0]:
            # An actor that has ended, or is being made anew: the call itself tells of it.
            with contextlib.suppress(import_ray().exceptions.RayError):
                await answered(alive.remote(), what, limit_s)
        return answer.result()
    finally:
        answer.cancel()


def blocking_actor(kind: type[Any]) -> Any:
    """Ray's class for actors of `kind`, whose calls block: beside one, they still give signs of life."""
    return import_ray().remote(concurrency_groups={_SIGNS: 1})(kind)


_SIGNS = "signs of life"
"""The calls that a thread of their own answers."""


def signs_of_life(actor: Any) -> Any:
    """The method that such an actor answers beside a call, for `result_of`."""
    return actor.__ray_ready__.options(concurrency_group=_SIGNS)
