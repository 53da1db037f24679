"""The end of a channel that answers: a task for each call of one peer.

::

    reading --Call--> a task --> Answer | Failure        any number at a time, in any order
       |----Cancel--> that task is cancelled; its answer says so
       |----Alive---> (it lives)
       '--the peer ended, or said nothing for `limit_s`--> every task is cancelled

Reading consumes messages, waits for the next one, is woken by the socket, produces tasks. A call that waits
holds up no other call.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from forebay.io.channel import Buffer, Channel, Reserve
from forebay.io.heartbeat import SILENCE_LIMIT_S, beat
from forebay.io.messages import (
    Alive,
    Answer,
    Call,
    Cancel,
    FrameError,
    Message,
    encode_value,
    failure_of,
    sizes_of,
)

ACCEPT_PAUSE_S = 1.0
"""When the system has no file descriptor left; asyncio's own servers wait as long."""

_log = logging.getLogger(__name__)

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
    >>> from forebay.io.link import Link
    >>> asyncio.run(example())
    6
    """

    reserve: Reserve | None = None
    """As of `Channel.receive`."""

    def __init__(self, channel: Channel, *, limit_s: float, other_limit_s: float = SILENCE_LIMIT_S) -> None:
        self.channel = channel
        self.limit_s, self.other_limit_s = limit_s, other_limit_s
        self.calls: dict[int, asyncio.Task[None]] = {}
        """Those without an answer."""
        self._silence: TimeoutError | None = None

    async def handle(self, call: Call, buffers: list[Any] | None) -> Result:
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
        except FrameError as error:
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

        def say() -> None:
            # A message that waits to be sent is a sign of life; a peer that does not read it is found by it.
            if not self.channel.is_sending:
                self.channel.post(Alive())

        silent_s = await beat(
            say,
            lambda: self.channel.num_received,
            limit_s=self.limit_s,
            other_limit_s=self.other_limit_s,
        )
        self._silence = TimeoutError(f"it gave no sign of life for {silent_s:g} s")
        # Wakes the reading.
        self.channel.end()

    def dispatch(self, message: Message, buffers: list[Any] | None) -> None:
        """Do what a message asks for; FrameError if it may not come now."""
        match message:
            case Call():
                if message.number in self.calls:
                    raise FrameError(f"there is a call {message.number} already")
                task = asyncio.create_task(self._answer(message, buffers), name=message.method)
                self.calls[message.number] = task
                task.add_done_callback(lambda task: self._note_end(message.number, task))
            case Cancel(number=number):
                self.cancel(number)
            case Alive():
                pass
            case _:
                raise FrameError(f"a {type(message).__name__} was not expected")

    def cancel(self, number: int) -> None:
        """The peer does not wait for this call any more, which may have been answered."""
        if number in self.calls and self.may_end(number):
            self.calls[number].cancel()

    async def _answer(self, call: Call, buffers: list[Any] | None) -> None:
        try:
            value, sent = await self.handle(call, buffers)
            answer = Answer(call.number, encode_value(value), sizes_of(sent))
        except FrameError:
            raise
        # Whatever it is, it is the caller's.
        except Exception as error:
            await self.channel.send(failure_of(call.number, error))
        else:
            await self.channel.send(answer, sent)

    def _note_end(self, number: int, task: asyncio.Task[None]) -> None:
        del self.calls[number]
        self.ended(number)
        if task.cancelled():
            # Here, because a task that is cancelled before its first step does nothing itself.
            self.channel.post(failure_of(number, asyncio.CancelledError("the call was cancelled")))
        elif (error := task.exception()) is not None:
            if isinstance(error, FrameError):
                self.refuse(str(error))
            # It could not be answered.
            self.channel.end()


class Acceptor:
    """Accepts connections at a listening socket; a task serves each, and closes it.

    consumes: connections / waits for: the next one / woken by: the listening socket / produces: tasks
    """

    def __init__(
        self, listener: socket.socket, serve: Callable[[socket.socket], Awaitable[None]], path: Path | None
    ) -> None:
        self._listener, self._serve, self._path = listener, serve, path
        self.tasks: set[asyncio.Task[None]] = set()
        """Of the connections that are being served."""
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """Accept no more, and let the address go; connections go on."""
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

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
        except (OSError, FrameError) as error:
            _log.info("a connection ended: %s", error)
        # A fault in serving one connection must not reach the others.
        except Exception:
            _log.exception("serving a connection failed")
        finally:
            sock.close()
