"""The end of a channel that calls: any number of calls at a time, each answered by its number.

::

    call --post--> channel --> socket            `call` waits for: its answer, or the end of the link
    call <-- its future <-- reading task <-- socket
    beating task: says `Alive`, and ends the link of a peer that says nothing

Whatever ends one of the two tasks ends the link: then every call raises why, and so does every later one.

A caller that is cancelled says so to the other side and goes on when that has undone the call, or after
`UNDO_S`. An answer that comes later is given to `late`, or thrown away.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from forebay.io.channel import Buffer, Channel, Posted
from forebay.io.heartbeat import SILENCE_LIMIT_S, UNDO_S, beat
from forebay.io.messages import (
    ERRORS,
    Alive,
    Answer,
    Call,
    Cancel,
    Failure,
    FrameError,
    Goodbye,
    Message,
    Part,
    encode_value,
    error_of,
    sizes_of,
)


class Pending:
    """A call without an answer."""

    __slots__ = ("buffers", "future", "is_answered", "is_withdrawn", "late", "number", "posted")

    def __init__(self, number: int, late: Callable[[Any], None] | None) -> None:
        self.number, self.late = number, late
        self.is_withdrawn = False
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_answered = False
        self.buffers: list[Any] = []
        """Of its parts and its answer, as far as they have come."""
        self.posted: Posted | None = None


class Link:
    """A connection that is up until it is lost or closed; it does not come back.

    Invariants: calls begin in the order in which they are made; one that was cancelled before it was sent has
    not happened.

    An example is that of `forebay.io.session.Session`.

    Args:
        channel: connected; the link closes it.
        where: what is at the other end, for the reason of a loss.
        limit_s: after so long without a byte from there the link is lost.
        other_limit_s: how long the other side waits for a sign of life from here.
        errors: classes of errors that calls raise as what they are.
        loss: makes the error that calls raise when the link is lost.
    """

    def __init__(
        self,
        channel: Channel,
        where: str,
        *,
        limit_s: float = SILENCE_LIMIT_S,
        other_limit_s: float = SILENCE_LIMIT_S,
        errors: Mapping[str, type[Exception]] = ERRORS,
        loss: Callable[[str], Exception] = ConnectionError,
    ) -> None:
        self.channel, self.where = channel, where
        self.lost: Exception | None = None
        """Why the link is over; None while it is up."""
        self._limits_s, self._errors, self._loss = (limit_s, other_limit_s), errors, loss
        self._pending: dict[int, Pending] = {}
        self._numbers = itertools.count(1)
        self._tasks = [asyncio.create_task(self._until_lost(work)) for work in (self._read, self._beat)]

    async def call(
        self,
        method: str,
        arguments: Any = None,
        buffers: Sequence[Buffer] = (),
        *,
        late: Callable[[Any], None] | None = None,
    ) -> tuple[Any, list[Any]]:
        """The answer and its buffers; `late` gets the answer to a call that was cancelled too late.

        Raises:
            ValueError, ...: what the method raised; or the arguments cannot be sent.
            Exception: of the kind that `loss` makes, if the link is lost before the answer comes.
        """
        pending = self.begin(late)
        try:
            message = Call(pending.number, method, encode_value(arguments), sizes_of(buffers))
            pending.posted = self.channel.post(message, buffers)
        except ValueError:
            del self._pending[pending.number]
            raise
        return await self.result(pending)

    @property
    def is_answering(self) -> bool:
        """False while the answer to a call that was cancelled is overdue."""
        return not any(pending.is_withdrawn for pending in self._pending.values())

    def tell(self, method: str, arguments: Any) -> asyncio.Future[Any] | None:
        """Make a call whose answer is thrown away; a future for its end, or None if the link is lost."""
        if self.lost is not None:
            return None
        pending = self.begin()
        pending.is_withdrawn = True
        self.channel.post(Call(pending.number, method, encode_value(arguments)))
        return pending.future

    def begin(self, late: Callable[[Any], None] | None = None) -> Pending:
        """A number for a call, which is then sent; `result` waits for its answer."""
        if self.lost is not None:
            raise self.loss()
        number = next(self._numbers)
        pending = self._pending[number] = Pending(number, late)
        return pending

    async def result(self, pending: Pending) -> tuple[Any, list[Any]]:
        """Wait for the answer, which may be cancelled."""
        try:
            return await pending.future, pending.buffers
        except asyncio.CancelledError:
            await self.withdraw(pending)
            raise

    async def withdraw(self, pending: Pending) -> None:
        """The caller does not want the answer: undo the call, and wait a little for that."""
        pending.is_withdrawn = True
        if pending.future.done() and not pending.future.cancelled():
            # It came in the same moment. The error is retrieved in any case, or asyncio would warn of it.
            error = pending.future.exception()
            if error is None and pending.late is not None:
                pending.late(pending.future.result())
        if pending.is_answered or self.lost is not None:
            return
        self.channel.post(Cancel(pending.number))
        if pending.posted is None or self.channel.recall(pending.posted):
            # The other side knows of its parts at most, which it forgets in silence.
            del self._pending[pending.number]
            return
        # The answer says that the call is undone, and it comes soon unless the other side hangs.
        pending.future = asyncio.get_running_loop().create_future()
        await asyncio.wait([pending.future], timeout=UNDO_S)

    async def close(self) -> None:
        """End the link; calls that wait raise that it was closed on this side."""
        self._lose("the connection was closed on this side")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.channel.close()

    async def _until_lost(self, work: Callable[[], Awaitable[str]]) -> None:
        """Do a part of the link's work; however it ends, the link does."""
        try:
            self._lose(await work())
        except (OSError, FrameError) as error:
            self._lose(f"{self.where} is gone: {error}")
        except asyncio.CancelledError:
            self._lose("the connection was closed on this side")
            raise
        # Whatever it is: calls that wait for a task that is gone would wait forever.
        except BaseException as error:
            self._lose(f"the connection to {self.where} failed here: {error!r}", error)
            if not isinstance(error, Exception):
                raise

    async def _read(self) -> str:
        """consumes: messages / waits for: the next / woken by: the socket / produces: ends of calls"""
        while (received := await self.channel.receive()) is not None:
            message, buffers = received
            if isinstance(message, Goodbye):
                return f"{self.where} is gone: {message.message}"
            self._deliver(message, buffers or [])
        return f"{self.where} is gone: it ended the connection"

    async def _beat(self) -> str:
        """consumes: nothing / waits for: the next beat / woken by: the clock / produces: signs of life"""
        limit_s, other_limit_s = self._limits_s

        def say() -> None:
            # A message that waits to be sent is a sign of life as soon as the other side reads it.
            if not self.channel.is_sending:
                self.channel.post(Alive())

        silent_s = await beat(
            say, lambda: self.channel.num_received, limit_s=limit_s, other_limit_s=other_limit_s
        )
        return f"{self.where} has been silent for {silent_s:g} s: it hangs, was stopped or cannot be reached"

    def _deliver(self, message: Message, buffers: list[Any]) -> None:
        if isinstance(message, Alive):
            return
        if not isinstance(message, Part | Answer | Failure):
            self.note(message, buffers)
            return
        if (pending := self._pending.get(message.number)) is None:
            raise FrameError(f"no call waits for this {type(message).__name__}")
        # A caller may have been cancelled in this moment, before it has had its turn to say so.
        is_wanted = not (pending.is_withdrawn or pending.future.cancelled())
        if is_wanted:
            pending.buffers += self.take_in(buffers)
        if isinstance(message, Part):
            return
        # Before the call is forgotten: if reading fails, the loss of the link is its answer.
        value = self.read(message) if isinstance(message, Answer) else None
        del self._pending[message.number]
        pending.is_answered = True
        if not is_wanted and isinstance(message, Answer) and pending.late is not None:
            pending.late(value)
        if isinstance(message, Failure) and is_wanted:
            pending.future.set_exception(error_of(message, self._errors))
        elif not pending.future.done():
            pending.future.set_result(value)

    def read(self, answer: Answer) -> Any:
        """The value that `call` returns for an answer; called for every answer, as they come."""
        return answer.value

    def take_in(self, buffers: list[Any]) -> list[Any]:
        """The list that `call` returns for these buffers; called as they come."""
        return buffers

    def note(self, message: Message, buffers: list[Any]) -> None:
        """A message that belongs to no call; FrameError unless a subclass expects it."""
        raise FrameError(f"a {type(message).__name__} was not expected")

    def _lose(self, reason: str, cause: BaseException | None = None) -> None:
        if self.lost is None:
            self.lost = self._loss(reason)
            self.lost.__cause__ = cause
        pending, self._pending = self._pending, {}
        for each in pending.values():
            if not (each.future.done() or each.is_withdrawn):
                each.future.set_exception(self.loss())
        # Wakes the task that reads, and frees the memory of what waits for a peer that reads nothing.
        self.channel.end()

    def loss(self) -> Exception:
        """Why the link is over, for one caller."""
        error = self._loss(str(self.lost))
        error.__cause__ = None if self.lost is None else self.lost.__cause__
        return error
