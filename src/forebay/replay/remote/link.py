"""One connection of a client to a buffer server: calls by number, any number at a time.

::

    call --> outbox --> writing task --> socket --> server
    call <-- its future <-- reading task <-- socket <--'

Writing consumes the outbox, waits for the next message, is woken by `call`, produces bytes. Reading consumes
bytes, waits for the next message, is woken by the socket, produces answers. A third task
sends and expects signs of life (`forebay.io.heartbeat`). Whatever ends one of them ends the connection; then
every call that waits raises why.

A caller that is cancelled goes on when the server has undone its call, or does not answer at once. The answer
of such a call is thrown away when it comes.

What waits for answers is bounded: puts by their bytes, other calls by their number. Further calls wait here,
in order, before anything of them is sent. A put of many groups is sent in pieces: while the server takes
in one, the next is packed here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from forebay.aio.gate import Gate
from forebay.io.address import Address, dial, prove
from forebay.io.heartbeat import SILENCE_LIMIT_S, UNDO_S, beat
from forebay.replay.arrival import label_group
from forebay.replay.format.encode import PackedGroup, pack_group
from forebay.replay.remote import messages
from forebay.replay.remote.channel import Channel, Received
from forebay.replay.remote.groups import receive_group
from forebay.replay.remote.messages import Answer, Call, ConnectionLost, FrameError, Goodbye, Greeting, Hello
from forebay.types import ROLLOUT_FIELDS, RolloutState

Mail = tuple[msgspec.Struct, Sequence[PackedGroup]]
Returned = tuple[Any, list[list[RolloutState]]]
"""A plain value, and groups."""

PIECE_BYTES = 512 << 10
"""Groups that go in one message while more are packed. With less, both sides wake each other more often,
which costs more than it saves where no core is free; with more, the server is idle at first where one is."""


class Pieces:
    """Groups to send, labeled and packed as they are asked for; they may be asked for again.

    >>> for piece, is_last in Pieces(groups, model_step=3):
    ...     await channel.send(Piece(number, [packed.size for packed in piece]), piece)
    """

    def __init__(self, groups: Sequence[Sequence[RolloutState]], model_step: int | None) -> None:
        self._groups = groups
        self._model_step = model_step
        self._num_packed = 0
        self._packed: list[list[PackedGroup]] = []

    def __iter__(self) -> Iterator[tuple[list[PackedGroup], bool]]:
        at = 0
        while at < len(self._packed) or self._num_packed < len(self._groups):
            if at == len(self._packed):
                self._packed.append(self._pack())
            at += 1
            yield self._packed[at - 1], at == len(self._packed) and self._num_packed == len(self._groups)

    def _pack(self) -> list[PackedGroup]:
        piece: list[PackedGroup] = []
        num_bytes = 0
        for group in islice(self._groups, self._num_packed, None):
            piece.append(pack_group(label_group(group, self._model_step)))
            num_bytes += sum(piece[-1].size)
            if num_bytes >= PIECE_BYTES:
                break
        self._num_packed += len(piece)
        return piece


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that waits for its answer."""

    future: asyncio.Future[Any]
    groups: list[list[RolloutState]] = field(default_factory=list)
    is_abandoned: bool = False
    """Whether nobody waits any more."""


class _Share:
    """What one put occupies of a window, for the time of a block.

    >>> with _Share(window) as share:
    ...     await share.grow(100)
    """

    def __init__(self, window: Gate) -> None:
        self._window = window
        self._held = 0

    async def grow(self, amount: int) -> None:
        """Wait until there is room for so much more."""
        if not self._held:
            amount = max(amount, messages.PUT_WINDOW_BYTES // messages.MAX_PUTS)
        await self._window.enter(amount, held=self._held)
        self._held += amount

    def __enter__(self) -> _Share:
        return self

    def __exit__(self, *_: object) -> None:
        self._window.leave(self._held)


class Link:
    """A connection that is up until it is lost or closed; it does not come back.

    >>> link = await Link.open(Address.parse("run/buffer.sock"), token=None)
    >>> value, groups = await link.call("count", CountArguments("math", Status.COMPLETED, None))
    """

    def __init__(
        self, channel: Channel[messages.FromServer], greeting: Greeting, address: Address, limit_s: float
    ) -> None:
        self.address = str(address)
        self._limit_s = limit_s
        self._server_waits_s = greeting.limit_s
        self.instance = greeting.instance
        self.num_live = 0
        self.version = 0
        self.num_evicted: dict[str, int] = {}
        self.lost: ConnectionLost | None = None
        """Why the connection is over; None while it is up."""
        self._channel = channel
        self._pending: dict[int, _Pending] = {}
        self._next_number = 0
        self._outbox: deque[Mail] = deque()
        self._has_mail = asyncio.Event()
        self._puts = Gate(messages.PUT_WINDOW_BYTES)
        self._put_turn = asyncio.Lock()
        self._calls = Gate(messages.MAX_CALLS)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(cls, address: Address, token: str | None, *, limit_s: float = SILENCE_LIMIT_S) -> Link:
        """Connect and be admitted, within `limit_s`; later a server that is silent for so long is given up.

        Raises:
            ConnectionLost: nobody listens or answers there, it is no buffer server of this version, or it
                refuses.
        """
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await cls._open(address, token, limit_s)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ConnectionLost(
                f"the buffer server at {address} did not answer within {limit_s:g} s"
            ) from None

    @classmethod
    async def _open(cls, address: Address, token: str | None, limit_s: float) -> Link:
        try:
            sock = await dial(address)
        except OSError as error:
            raise ConnectionLost(f"no buffer server answers at {address}: {error}") from None
        channel: Channel[messages.FromServer] = Channel(
            sock, decode=messages.decode_from_server, max_frame_bytes=messages.MAX_FRAME_BYTES
        )
        try:
            greeting = await _greet(channel, token, limit_s)
            link = cls(channel, greeting, address, limit_s)
            link._note(await _expect(channel, Answer))
        except BaseException as error:
            channel.close()
            if isinstance(error, OSError | FrameError):
                raise ConnectionLost(f"the server at {address} did not let us in: {error}") from None
            raise
        channel.max_frame_bytes = greeting.max_frame_bytes
        link._tasks = [
            asyncio.create_task(link._until_lost(work)) for work in (link._read, link._write, link._beat)
        ]
        return link

    @property
    def may_be_replaced(self) -> bool:
        """Whether the connection is over by the other side's doing: another one may have more luck."""
        return self.lost is not None and self.lost.__cause__ is None

    async def close(self) -> None:
        """End the connection; calls that wait raise `ConnectionLost`."""
        self._lose("the connection was closed on this side")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._channel.close()

    async def call(self, method: str, arguments: msgspec.Struct) -> Returned:
        """What the method returned: a plain value, and groups.

        Raises:
            ConnectionLost: the connection broke before the answer came.
            ValueError, RuntimeError, ...: what the method raised.
        """
        encoded = _encode(method, arguments)
        await self._calls.enter(1)
        try:
            with self._numbered() as (number, pending):
                mail = (Call(number, method, encoded), ())
                self._post(*mail)
                await self._answered(number, pending, mail)
                return pending.future.result(), pending.groups
        finally:
            self._calls.leave(1)

    async def put(self, method: str, arguments: msgspec.Struct, pieces: Pieces) -> Returned:
        """Call a method that brings groups, which are sent piece by piece, each as soon as it is there.

        Raises:
            ConnectionLost: the connection broke before the answer came.
            ValueError, RuntimeError, ...: what the method raised, or a piece; or the groups are too large.
        """
        encoded = _encode(method, arguments)
        with _Share(self._puts) as share, ExitStack() as stack:
            # One at a time: the next piece may have to wait for room.
            async with self._put_turn:
                number, pending = stack.enter_context(self._numbered())
                try:
                    mail = await self._send(number, method, encoded, pieces, share)
                except BaseException:
                    self._withdraw(number, pending)
                    raise
            await self._answered(number, pending, mail)
            return pending.future.result(), pending.groups

    async def tell(self, method: str, arguments: msgspec.Struct) -> None:
        """Call a method whose answer is nobody's business; it is waited for if the server answers at once."""
        is_answering = not any(pending.is_abandoned for pending in self._pending.values())
        with suppress(ConnectionLost), self._numbered() as (number, pending):
            self._post(Call(number, method, _encode(method, arguments)), ())
            if is_answering:
                await asyncio.wait([pending.future], timeout=UNDO_S)

    async def _send(
        self, number: int, method: str, arguments: msgspec.Raw, pieces: Pieces, share: _Share
    ) -> Mail:
        """Send the pieces, the last one with the call; what was sent last."""
        num_bytes = 0
        for piece, is_last in pieces:
            sizes = [packed.size for packed in piece]
            size = sum(map(sum, sizes))
            num_bytes += size
            if num_bytes > self._channel.max_frame_bytes:
                raise ValueError(
                    f"the groups have {num_bytes} bytes or more, and the server takes at most "
                    f"{self._channel.max_frame_bytes} in one call; put fewer at once, or serve the buffer "
                    f"with larger max_frame_bytes"
                )
            await share.grow(size)
            if is_last or self.lost is not None:
                break
            self._post(messages.Piece(number, sizes), piece)
            # So that it is on its way while the next one is packed.
            await asyncio.sleep(0)
        mail = (Call(number, method, arguments, sizes), piece)
        self._post(*mail)
        return mail

    async def _answered(self, number: int, pending: _Pending, mail: Mail) -> None:
        try:
            await asyncio.wait([pending.future])
        except asyncio.CancelledError:
            if mail in self._outbox:
                self._outbox.remove(mail)
                self._withdraw(number, pending)
                raise
            self._post(messages.Cancel(number), ())
            # The server undoes what it can; the caller goes on when that is done, as with a local buffer.
            await asyncio.wait([pending.future], timeout=UNDO_S)
            raise

    def _withdraw(self, number: int, pending: _Pending) -> None:
        """End a call that was not sent: the server knows at most of pieces, which it forgets in silence."""
        self._post(messages.Cancel(number), ())
        pending.future.cancel()

    def post(self, message: msgspec.Struct) -> None:
        """Send a message that has no answer."""
        self._post(message, ())

    @contextmanager
    def _numbered(self) -> Iterator[tuple[int, _Pending]]:
        """A number of a call, for the time until its answer."""
        if self.lost is not None:
            raise self._loss()
        self._next_number += 1
        number = self._next_number
        pending = self._pending[number] = _Pending(asyncio.get_running_loop().create_future())
        try:
            yield number, pending
        finally:
            if not pending.future.done():
                # Its answer still comes, and must be known as such.
                pending.is_abandoned = True
            else:
                del self._pending[number]
            if pending.future.done() and not pending.future.cancelled():
                # Retrieved, so that nobody warns of it: the caller may have been told something else.
                pending.future.exception()

    def _post(self, message: msgspec.Struct, groups: Sequence[PackedGroup]) -> None:
        self._outbox.append((message, groups))
        self._has_mail.set()

    async def _until_lost(self, work: Callable[[], Awaitable[str | None]]) -> None:
        """Do a part of the link's work; however it ends, the connection does."""
        try:
            if (reason := await work()) is not None:
                self._lose(reason)
        except (OSError, FrameError) as error:
            self._lose(f"the buffer server at {self.address} is gone: {error}")
        except asyncio.CancelledError:
            self._lose("the connection was closed on this side")
            raise
        # Whatever it is: calls that wait for a task that is gone would wait forever.
        except BaseException as error:
            self._lose(f"the connection to {self.address} failed here: {error!r}", error)
            if not isinstance(error, Exception):
                raise

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    await self._channel.send(*self._outbox.popleft())
                self._has_mail.clear()
                await self._has_mail.wait()
        except OSError:
            # The reading side finds the end, after the server's last words.
            return

    async def _read(self) -> str:
        while (received := await self._channel.receive()) is not None:
            message, groups = received
            if isinstance(message, Goodbye):
                return f"the buffer server at {self.address} is gone: {message.message}"
            if not isinstance(message, messages.Alive):
                self._deliver(message, groups)
        return f"the buffer server at {self.address} is gone: it ended the connection"

    async def _beat(self) -> str:
        def say() -> None:
            # What waits in the outbox is a sign of life as soon as the server reads it.
            if not self._outbox and not self._channel.is_sending:
                self._post(messages.Alive(), ())

        silent_s = await beat(
            say,
            lambda: self._channel.num_received,
            limit_s=self._limit_s,
            other_limit_s=self._server_waits_s,
        )
        return (
            f"the buffer server at {self.address} has been silent for {silent_s:g} s: it hangs, was stopped "
            f"or cannot be reached"
        )

    def _deliver(self, message: messages.FromServer, groups: list[Received] | None) -> None:
        if isinstance(message, Answer):
            self._note(message)
        number = getattr(message, "number", None)
        if number is None or (pending := self._pending.get(number)) is None:
            raise FrameError(f"nobody waits for this {type(message).__name__}")
        if pending.is_abandoned:
            if not isinstance(message, messages.Part):
                del self._pending[number]
            return
        match message:
            case messages.Part():
                pending.groups += [receive_group(*group) for group in groups or ()]
            case Answer():
                pending.future.set_result(message.result)
            case messages.Failure():
                pending.future.set_exception(messages.error_of(message))

    def _note(self, answer: Answer) -> None:
        self.num_live, self.version = answer.num_live, answer.version
        if answer.num_evicted is not None:
            self.num_evicted = answer.num_evicted

    def _lose(self, reason: str, cause: BaseException | None = None) -> None:
        if self.lost is None:
            self.lost = ConnectionLost(reason)
            self.lost.__cause__ = cause
        for pending in self._pending.values():
            if not (pending.future.done() or pending.is_abandoned):
                pending.future.set_exception(self._loss())
        # Wakes what still reads or writes, also what waits for a server that does neither.
        self._channel.end()

    def _loss(self) -> ConnectionLost:
        """Why the connection is over, for one caller."""
        error = ConnectionLost(str(self.lost))
        error.__cause__ = None if self.lost is None else self.lost.__cause__
        return error


async def _greet(channel: Channel[messages.FromServer], token: str | None, limit_s: float) -> Greeting:
    greeting: Greeting = await _expect(channel, Greeting)
    if greeting.protocol != messages.PROTOCOL or greeting.fields != ROLLOUT_FIELDS:
        raise FrameError("it speaks for another version of forebay")
    if greeting.needs_token and token is None:
        raise FrameError("it asks for a token")
    await channel.send(Hello(messages.PROTOCOL, prove(token, greeting.nonce), limit_s))
    return greeting


async def _expect(channel: Channel[messages.FromServer], kind: type[Any]) -> Any:
    received = await channel.receive()
    if received is None:
        raise FrameError("it ended the connection")
    message, _ = received
    if isinstance(message, Goodbye):
        raise FrameError(message.message)
    if not isinstance(message, kind):
        raise FrameError(f"it said {type(message).__name__} instead of {kind.__name__}")
    return message


def _encode(method: str, arguments: msgspec.Struct) -> msgspec.Raw:
    encoded = msgspec.Raw(messages.encode(arguments))
    if len(encoded) > messages.MAX_ARGUMENT_BYTES:
        raise ValueError(
            f"the arguments of {method} have {len(encoded)} bytes, and a server takes at most "
            f"{messages.MAX_ARGUMENT_BYTES}; make several calls"
        )
    return encoded


def new_key() -> bytes:
    """A key by which the server knows a put or a take again."""
    return secrets.token_bytes(messages.KEY_BYTES)
