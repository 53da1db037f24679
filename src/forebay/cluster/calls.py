"""Calls to actors: many small ones as one, and one that may take however long while its actor lives.

::

    ask(item) --+                                 actor
    ask(item) --+--> one call, [item, item, ...] --> as_they_end([work, work, ...])
          ^                                             | those that end together; how far others are
          '------ futures <---- stream of [(number, result), ...] or {number: how far}

A call of an actor costs about a millisecond at each end, however little it carries, and a train step has
hundreds of requests: with a call for each, a step of the demo took twice as long.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar, cast

import numpy as np

from forebay.aio.tasks import settle
from forebay.aio.time_limits import timeout_at
from forebay.cluster.library import import_ray, why
from forebay.replay.format.packed import split
from forebay.replay.groups import build_states, columns_of
from forebay.types import FIELDS, RolloutState
from forebay.watching.activity import loop_time
from forebay.watching.stalls import answered

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class ActorLost(RuntimeError):
    """The actor's process has ended, or cannot be reached."""


class NotBuilt(RuntimeError):
    """The process is a new one, in which nothing has been built yet."""


class CallFailed(RuntimeError):
    """The error of a call, in words: its class may not be known to the caller, or not travel."""


class BatchedCalls(Generic[ItemT, ResultT]):
    """The caller's side; `stream` is the actor's method, which is given a list of items.

    A stream belongs to its call: if the actor's process ends, every item without an answer raises
    `ActorLost`, and none is asked for again by itself. Meanwhile `note` is told how far items are.

    ::

        calls = BatchedCalls(actor.generate.options(num_returns="streaming").remote)
        completion = await calls.ask(request)
    """

    def __init__(
        self,
        stream: Callable[[list[ItemT]], AsyncIterator[Any]],
        note: Callable[[ItemT, int], None] = lambda item, number: None,
    ) -> None:
        self._stream, self._note = stream, note
        self._waiting: list[tuple[ItemT, asyncio.Future[ResultT]]] = []
        self._sent: set[asyncio.Task[None]] = set()

    async def ask(self, item: ItemT) -> ResultT:
        """The result of `item`; errors as of `asked`. A cancelled caller has to tell the actor itself."""
        answer: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if len(self._waiting) == 1:
            # Held, because the event loop alone would let a task that waits be collected.
            self._sent.add(sending := asyncio.create_task(self._send()))
            sending.add_done_callback(self._sent.discard)
        return await answer

    def answer_unsent(self, result: ResultT, is_meant: Callable[[ItemT], bool]) -> None:
        """Have `result` for those that `is_meant` names and that still wait for others: they are not sent."""
        for item, answer in self._waiting:
            if is_meant(item) and not answer.done():
                answer.set_result(result)

    async def _send(self) -> None:
        await settle(lambda: len(self._waiting), at_most=MAX_TURNS)
        # Those whose caller has gone meanwhile are not sent.
        batch = dict(enumerate(pair for pair in self._waiting if not pair[1].done()))
        self._waiting = []
        error: Exception = ActorLost("the actor ended the stream before its time")
        try:
            if batch:
                await asked(self._receive(batch))
        # Whichever it is: all callers that wait for an answer have it.
        except Exception as raised:
            error = raised
        finally:
            for _, answer in batch.values():
                if not answer.done():
                    answer.set_exception(error)

    async def _receive(self, batch: dict[int, tuple[ItemT, asyncio.Future[ResultT]]]) -> None:
        async for ref in self._stream([item for item, _ in batch.values()]):
            if isinstance(some := await ref, dict):
                for number, far in some.items():
                    if not batch[number][1].done():
                        self._note(batch[number][0], far)
                continue
            for number, result in some:
                # Let go of here: the slowest may take hours.
                _, answer = batch.pop(number)
                if not answer.done():
                    answer.set_result(result)


async def asked(call: Awaitable[ResultT]) -> ResultT:
    """The result of a call of an actor. A cancelled caller has to tell the actor itself.

    Raises:
        ActorLost: the actor ended first, or is a new one, in which nothing is built yet.
        CallFailed: the call raised an error.
    """
    exceptions = import_ray().exceptions
    try:
        return await call
    except (exceptions.RayActorError, exceptions.ObjectLostError, NotBuilt) as lost:
        raise ActorLost(why(lost)) from lost
    except exceptions.RayTaskError as error:
        raise CallFailed(why(error)) from error


PUSH_EVERY_S = 5.0
"""Between two reports of how far something is: people read them, and the stall watch, once a minute."""

MAX_TURNS = 64
"""Turns of the event loop that an item waits for others: some milliseconds; a call costs about one."""


def built(part: ResultT | None) -> ResultT:
    """`part`, which `start` has built.

    Raises:
        NotBuilt: this process was started in place of one that has ended.
    """
    if part is None:
        raise NotBuilt("nothing has been built in this process yet")
    return part


def as_one_piece(group: Sequence[RolloutState], *told: Any) -> bytes:
    """The group, and what is told with it, for `from_one_piece`.

    Of what is given as it is Ray handles each array by itself, and pickle each rollout: a call with a group takes
    twice the time.
    """
    columns = columns_of(group)
    # One array that all members share, such as a prompt's tokens, is pickled once.
    apart = [name for name in _ARRAYS if len(set(map(id, columns[name]))) > 1]
    filled = {name: arrays for name in apart if any(map(len, arrays := columns[name]))}
    joined = {name: (np.concatenate(arrays), [*map(len, arrays)]) for name, arrays in filled.items()}
    return cast("bytes", import_ray().cloudpickle.dumps((columns | dict.fromkeys(filled), joined, *told)))


def from_one_piece(data: bytes) -> tuple[Any, ...]:
    """The group, and what was told with it."""
    columns, joined, *told = import_ray().cloudpickle.loads(data)
    columns |= {name: split(*arrays) for name, arrays in joined.items()}
    return build_states(columns.values()), *told


_ARRAYS = [name for name, rule in FIELDS.items() if rule.dtype is not None]


async def as_they_end(
    calls: Sequence[Coroutine[Any, Any, ResultT]], how_far: Callable[[int], int] = lambda number: 0
) -> AsyncIterator[list[tuple[int, ResultT]] | dict[int, int]]:
    """The actor's side: run `calls` together; their results, numbered, those that end together together.

    Every while also `how_far` the others are, if that has changed. The first that raises ends the others.
    """
    told, tell_s = dict[int, int](), loop_time()
    ended: asyncio.Queue[asyncio.Task[ResultT]] = asyncio.Queue()
    numbers = {asyncio.create_task(call): number for number, call in enumerate(calls)}
    for task in numbers:
        task.add_done_callback(ended.put_nowait)
    try:
        while numbers:
            try:
                async with timeout_at(tell_s + PUSH_EVERY_S):
                    together = [await ended.get()]
            except TimeoutError:
                tell_s, far = loop_time(), {number: how_far(number) for number in numbers.values()}
                if far != told:
                    yield (told := far)
                continue
            # Not a wait: items that end in the same turn go along.
            await asyncio.sleep(0)
            together += [ended.get_nowait() for _ in range(ended.qsize())]
            yield [(numbers.pop(task), task.result()) for task in together]
    finally:
        for task in numbers:
            task.cancel()
        await asyncio.gather(*numbers, return_exceptions=True)


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
    feeds = {FEEDING: _MOST_FEEDS} if hasattr(kind, "feed") else {}
    return import_ray().remote(concurrency_groups={_SIGNS: 1, _BESIDE: 1, **feeds})(kind)


_SIGNS = "signs of life"
"""The calls that a thread of their own answers."""
_BESIDE = "beside"
"""The same for calls that wait for threads of the actor, and hold up no other."""
FEEDING, _MOST_FEEDS = "feeding", 64
"""The same for transfers of weights to servers, so many at once, of an actor that can `feed`."""


def signs_of_life(actor: Any) -> Any:
    """The method that such an actor answers beside a call, for `result_of`."""
    return actor.__ray_ready__.options(concurrency_group=_SIGNS)


def beside(method: Any, group: str = _BESIDE) -> Any:
    """`method` of such an actor, called beside its other calls."""
    return method.options(concurrency_group=group)
