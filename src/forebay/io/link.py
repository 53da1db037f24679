"""The two ends of a channel: one calls, any number of times at once, and one answers, by number.

::

    Link
    call --post--> channel --> socket            `call` waits for: its answer, or the end of the link
    call <-- its future <-- reading task <-- socket
    beating task: says `Alive`, and ends the link of a peer that says nothing

    Session
    reading --Call--> a task --> Answer | Failure        any number at a time, in any order
       |----Cancel--> that task is cancelled; its answer says so
       |----Alive---> (it lives)
       '--the peer ended, or said nothing for `limit_s`--> every task is cancelled

Whatever ends one of the two tasks of a `Link` ends the link: then every call raises why, and so does every
later one. A caller that is cancelled says so to the other side and goes on when that has undone the call, or
after `UNDO_S`. An answer that comes later is given to `late`, or thrown away. In a `Session` no call holds up
another one.
"""

import asyncio
import itertools
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.io import messages
from forebay.io.channel import Buffer, Channel, Posted, Reserve


class Link:
    """A connection that is up until it is lost or closed; it does not come back.

    Invariants: calls begin in the order in which they are made; one that was cancelled before it was sent has
    not happened.

    An example is that of `Session`.

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
        limit_s: float = messages.SILENCE_LIMIT_S,
        other_limit_s: float = messages.SILENCE_LIMIT_S,
        errors: Mapping[str, type[Exception]] = messages.ERRORS,
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
        sizes: list[int] | None = None,
        late: Callable[[Any], None] | None = None,
    ) -> tuple[Any, list[Any]]:
        """The answer and its buffers; `late` gets the answer to a call that was cancelled too late.

        With `sizes` the other side gets all bytes of `buffers` as buffers of these sizes.

        Raises:
            ValueError, ...: what the method raised; or the arguments cannot be sent.
            Exception: of the kind that `loss` makes, if the link is lost before the answer comes.
        """
        if self.lost is not None:
            raise self.loss()
        number = next(self._numbers)
        message = messages.Call(number, method, messages.encode_value(arguments), sizes or messages.sizes_of(buffers))
        pending = self._pending[number] = Pending(number, self.channel.post(message, buffers), late)
        try:
            return await pending.future, pending.buffers
        except asyncio.CancelledError:
            await self._withdraw(pending)
            raise

    @property
    def is_answering(self) -> bool:
        """False while the answer to a call that was cancelled is overdue."""
        return not any(pending.is_withdrawn for pending in self._pending.values())

    def tell(self, method: str, arguments: Any) -> asyncio.Future[Any] | None:
        """Make a call whose answer is thrown away; a future for its end, or None if the link is lost."""
        if self.lost is not None:
            return None
        number = next(self._numbers)
        posted = self.channel.post(messages.Call(number, method, messages.encode_value(arguments)))
        pending = self._pending[number] = Pending(number, posted)
        # The caller may drop the future: a failure in it would be an exception that is never retrieved.
        pending.is_withdrawn = True
        return pending.future

    async def _withdraw(self, pending: "Pending") -> None:
        """The caller does not want the answer: undo the call, and wait a little for that."""
        pending.is_withdrawn = True
        if pending.future.done() and not pending.future.cancelled():
            # It came in the same moment. The error is retrieved in any case, or asyncio would warn of it.
            error = pending.future.exception()
            if error is None and pending.late is not None:
                pending.late(pending.future.result())
        # It is answered, or the link is lost.
        if pending.number not in self._pending:
            return
        if self.channel.recall(pending.posted):
            del self._pending[pending.number]
            return
        self.channel.post(messages.Cancel(pending.number))
        # The answer says that the call is undone, and it comes soon unless the other side hangs.
        pending.future = asyncio.get_running_loop().create_future()
        await asyncio.wait([pending.future], timeout=messages.UNDO_S)

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
        except (OSError, messages.FrameError) as error:
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
            if isinstance(message, messages.Goodbye):
                return f"{self.where} is gone: {message.message}"
            self._deliver(message, buffers or [])
        return f"{self.where} is gone: it ended the connection"

    async def _beat(self) -> str:
        """consumes: nothing / waits for: the next beat / woken by: the clock / produces: signs of life"""
        silent_s = await _beat(self.channel, *self._limits_s)
        return f"{self.where} has been silent for {silent_s:g} s: it hangs, was stopped or cannot be reached"

    def _deliver(self, message: messages.Message, buffers: list[Any]) -> None:
        if isinstance(message, messages.Alive):
            return
        if not isinstance(message, messages.Part | messages.Answer | messages.Failure):
            self.note(message, buffers)
            return
        if (pending := self._pending.get(message.number)) is None:
            raise messages.FrameError(f"no call waits for this {type(message).__name__}")
        # A caller may have been cancelled in this moment, before it has had its turn to say so.
        is_wanted = not (pending.is_withdrawn or pending.future.cancelled())
        if is_wanted:
            pending.buffers += self.take_in(buffers)
        if isinstance(message, messages.Part):
            return
        # Before the call is forgotten: if reading fails, the loss of the link is its answer.
        value = self.read(message) if isinstance(message, messages.Answer) else None
        del self._pending[message.number]
        if not is_wanted and isinstance(message, messages.Answer) and pending.late is not None:
            pending.late(value)
        if isinstance(message, messages.Failure) and is_wanted:
            pending.future.set_exception(messages.error_of(message, self._errors))
        elif not pending.future.done():
            pending.future.set_result(value)

    def read(self, answer: messages.Answer) -> Any:
        """The value that `call` returns for an answer; called for every answer, as they come."""
        return answer.value

    def take_in(self, buffers: list[Any]) -> list[Any]:
        """The list that `call` returns for these buffers; called as they come."""
        return buffers

    def note(self, message: messages.Message, buffers: list[Any]) -> None:
        """A message that belongs to no call; FrameError unless a subclass expects it."""
        raise messages.FrameError(f"a {type(message).__name__} was not expected")

    def _lose(self, reason: str, cause: BaseException | None = None) -> None:
        if self.lost is None:
            self.lost = self._loss(reason)
            self.lost.__cause__ = cause
        pending, self._pending = self._pending, {}
        for each in pending.values():
            # Waits for a withdrawn call end within `UNDO_S`.
            if not (each.future.done() or each.is_withdrawn):
                each.future.set_exception(self.loss())
        # Wakes the task that reads, and frees the memory of what waits for a peer that reads nothing.
        self.channel.end()

    def loss(self) -> Exception:
        """Why the link is over, for one caller."""
        error = self._loss(str(self.lost))
        error.__cause__ = None if self.lost is None else self.lost.__cause__
        return error


class Pending:
    """A call without an answer."""

    __slots__ = ("buffers", "future", "is_withdrawn", "late", "number", "posted")

    def __init__(self, number: int, posted: Posted, late: Callable[[Any], None] | None = None) -> None:
        self.number, self.posted, self.late = number, posted, late
        self.is_withdrawn = False
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.buffers: list[Any] = []
        """The buffers of its parts and its answer, as far as they have come."""


Result = tuple[Any, Sequence[Buffer]]
"""A value that MessagePack can hold, and buffers."""


class Session:
    """Serves one peer until it leaves, is silent for `limit_s`, or breaks the rules of the channel.

    Invariants: every call that has come is answered once, also one that was cancelled, unless the connection
    ends first; when `run` returns, no call is left that `may_end`.

    >>> class Adding(Session):
    ...     async def handle(self, call, buffers):
    ...         return sum(msgspec.msgpack.decode(call.arguments)), ()
    >>> async def example():
    ...     here, there = socket.socketpair()
    ...     running = asyncio.create_task(Adding(Channel(there), limit_s=30.0).run())
    ...     link = Link(Channel(here), "the adding process")
    ...     value, _ = await link.call("add", [1, 2, 3])
    ...     await link.close()
    ...     await running
    ...     return msgspec.msgpack.decode(value)
    >>> import msgspec
    >>> asyncio.run(example())
    6
    """

    reserve: Reserve | None = None
    """Asked as the bytes of buffers come, as in `Channel.receive`; None: all are read."""

    def __init__(self, channel: Channel, *, limit_s: float, other_limit_s: float = messages.SILENCE_LIMIT_S) -> None:
        self.channel = channel
        self.limit_s, self.other_limit_s = limit_s, other_limit_s
        self.calls: dict[int, asyncio.Task[None]] = {}
        """Calls that are being answered, by number."""
        self._silence: TimeoutError | None = None

    async def handle(self, call: messages.Call, buffers: list[Any] | None) -> Result:
        """The result of one call; errors are the caller's, but a FrameError ends the session."""
        raise NotImplementedError

    async def admit(self) -> bool:
        """Say and hear the first words; False ends the session."""
        return True

    def may_end(self, number: int) -> bool:
        """Whether this call may be cancelled: by the peer, and with the connection."""
        return True

    def ended(self, number: int) -> None:
        """This call is answered, or was cancelled."""

    def refuse(self, reason: str) -> None:
        """Say why the connection ends: the peer broke the rules of the channel."""

    async def run(self) -> None:
        """Serve; returns, or raises why, when the connection is over.

        Raises:
            FrameError: what came is no message.
            OSError: the connection broke, or the peer was silent (`TimeoutError`).
        """
        tasks: list[asyncio.Task[None]] = []
        try:
            if not await self.admit():
                return
            tasks.append(asyncio.create_task(self._beat()))
            while (received := await self.channel.receive(self.reserve)) is not None:
                self.dispatch(*received)
        except messages.FrameError as error:
            # A silent peer may have been cut off in the middle of a message.
            if self._silence is None:
                self.refuse(str(error))
                raise
        finally:
            self.channel.end()
            tasks += [task for number, task in self.calls.items() if self.may_end(number)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.channel.close()
        if self._silence is not None:
            raise self._silence

    async def _beat(self) -> None:
        """consumes: nothing / waits for: the next beat / woken by: the clock / produces: signs of life"""
        silent_s = await _beat(self.channel, self.limit_s, self.other_limit_s)
        self._silence = TimeoutError(f"it gave no sign of life for {silent_s:g} s")
        # Wakes the reading.
        self.channel.end()

    def dispatch(self, message: messages.Message, buffers: list[Any] | None) -> None:
        """Do what a message asks for; FrameError if it may not come now."""
        match message:
            case messages.Call():
                if message.number in self.calls:
                    raise messages.FrameError(f"there is a call {message.number} already")
                task = asyncio.create_task(self._answer(message, buffers), name=message.method)
                self.calls[message.number] = task
                task.add_done_callback(lambda task: self._note_end(message.number, task))
            case messages.Cancel(number=number):
                # It may have been answered.
                if number in self.calls and self.may_end(number):
                    self.calls[number].cancel()
            case messages.Alive():
                pass
            case _:
                raise messages.FrameError(f"a {type(message).__name__} was not expected")

    async def _answer(self, call: messages.Call, buffers: list[Any] | None) -> None:
        try:
            value, sent = await self.handle(call, buffers)
            answer = messages.Answer(call.number, messages.encode_value(value), messages.sizes_of(sent))
        # No answer to this call: the peer broke the rules, and `_note_end` ends the session.
        except messages.FrameError:
            raise
        # Whatever it is, it is the caller's.
        except Exception as error:
            await self.channel.send(messages.failure_of(call.number, error))
        else:
            await self.channel.send(answer, sent)

    def _note_end(self, number: int, task: asyncio.Task[None]) -> None:
        del self.calls[number]
        self.ended(number)
        if task.cancelled():
            # Here, because a task that is cancelled before its first step does nothing itself.
            self.channel.post(messages.failure_of(number, asyncio.CancelledError("the call was cancelled")))
        elif (error := task.exception()) is not None:
            if isinstance(error, messages.FrameError):
                self.refuse(str(error))
            # It could not be answered.
            self.channel.end()


ACCEPT_PAUSE_S = 1.0
"""When the system has no file descriptor left; asyncio's own servers wait as long."""

_log = logging.getLogger(__name__)


class Acceptor:
    """Accepts connections at a listening socket; a task serves each, and closes it.

    consumes: connections / waits for: the next one / woken by: the listening socket / produces: tasks
    """

    def __init__(
        self, listener: socket.socket, serve: Callable[[socket.socket], Awaitable[None]], path: Path | None
    ) -> None:
        self._listener, self._serve, self._path = listener, serve, path
        self._inode = None if path is None else path.stat().st_ino
        self.tasks: set[asyncio.Task[None]] = set()
        """The tasks that serve a connection each."""
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """Accept no more, and let the address go; connections go on."""
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        # Before the listener is closed: from then on another server may take the path, and the inode, too. It
        # may have taken the path already if somebody removed the file.
        if self._path is not None and self._path.exists() and self._path.stat().st_ino == self._inode:
            self._path.unlink()
        self._listener.close()

    async def close(self) -> None:
        """Accept no more, and end the connections."""
        await self.stop()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            task = asyncio.create_task(self._run(sock))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _run(self, sock: socket.socket) -> None:
        try:
            await self._serve(sock)
        except (OSError, messages.FrameError) as error:
            _log.info("a connection ended: %s", error)
        # A fault in serving one connection must not reach the others.
        except Exception:
            _log.exception("serving a connection failed")
        finally:
            sock.close()


async def _beat(channel: Channel, limit_s: float, other_limit_s: float) -> float:
    """Give the other end signs of life; return after it was silent for `limit_s`, with the seconds.

    `other_limit_s` is how long the other end waits for a sign of life from here.
    """
    pause_s = min(limit_s, other_limit_s) / messages.BEATS
    # Counted in beats of this loop: one that was blocked, or whose process was stopped, has not listened, and
    # must read what lies in its socket before it calls the other end silent.
    allowed = math.ceil(limit_s / pause_s)
    heard, silent = channel.num_received, 0
    while silent < allowed:
        await asyncio.sleep(pause_s)
        # A message that waits to be sent is a sign of life as soon as the other side reads it; a peer that
        # reads nothing is found by it.
        if not channel.is_sending:
            channel.post(messages.Alive())
        before, heard = heard, channel.num_received
        silent = 0 if heard != before else silent + 1
    return silent * pause_s
