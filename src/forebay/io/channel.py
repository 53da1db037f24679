"""Messages over a stream socket, each with the raw buffers that belong to it; nothing is unpickled.

::

    "FBC1" | length of the header | header: a message, as MessagePack | buffer | buffer | ...
                                      '-- `sizes`: bytes of each buffer

    Channel          for asyncio: messages are queued, and one system call sends many; one task receives
    BlockingChannel  for threads: `send` and `receive` block, at most for a limit

Sending hands buffers to the socket where they lie (``sendmsg``); receiving fills new memory, of which arrays
become views (``recvmsg_into``). Between two processes of one machine that is more than twice as fast as the
streams of asyncio, which copy everything again on each side, and four to six times as fast as the pipes of
multiprocessing.

The peer is not trusted with memory or time: headers and buffers have bounds, memory is occupied as bytes
come, not as they are announced, and a peer that takes nothing for `STALL_S` ends the connection.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from forebay.io.messages import FrameError, Message, decode, encode

Buffer = bytes | bytearray | memoryview
Received = tuple[Message, list[Any] | None]
"""A message and its buffers, each a writable uint8 array; None: there was no room for them."""
Reserve = Callable[[Message, int], bool]
"""Given a message and how many bytes of its buffers come next: whether there is room for them."""

MAX_HEADER_BYTES = 1 << 20
"""A message without its buffers; reading one takes an event loop some 30 ms."""
MAX_FRAME_BYTES = 256 << 20
"""The most bytes that the buffers of one message may have together."""
STALL_S = 60.0
"""A peer that reads nothing for so long is as good as dead; one that is merely slow reads something."""


class Channel:
    """A connected, non-blocking socket on which whole messages are sent and received.

    Invariants: messages go out in the order of `post` and `send`, each wholly or not at all; after an error
    the connection has ended. One task receives; any number send.

    >>> from forebay.io.messages import Part
    >>> async def example():
    ...     here, there = map(Channel, socket.socketpair())
    ...     await here.send(Part(1, sizes=[3]), [b"xyz"])
    ...     message, [buffer] = await there.receive()
    ...     _ = here.close(), there.close()
    ...     return message, bytes(buffer)
    >>> asyncio.run(example())
    (Part(number=1, sizes=[3]), b'xyz')
    """

    def __init__(
        self, sock: socket.socket, *, max_header_bytes: int = MAX_HEADER_BYTES, max_frame_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        self.max_header_bytes, self.max_frame_bytes = max_header_bytes, max_frame_bytes
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Posted] = deque()
        self._num_queued = 0
        self._flushing: asyncio.Handle | None = None
        self._stalling: asyncio.TimerHandle | None = None
        self._error: OSError | None = None
        self._inbox = memoryview(bytearray(_INBOX_BYTES))
        self._start = self._end = 0
        self._turn_bytes = self._turn_messages = 0
        self.num_received = 0
        """Bytes so far: when it grows, the peer lives."""

    @property
    def is_sending(self) -> bool:
        """Whether a message is on its way out."""
        return bool(self._queue)

    def post(self, message: Message, buffers: Sequence[Buffer] = ()) -> "Posted":
        """Queue a message, to be sent before the event loop next waits; dropped if the connection has ended.

        Raises:
            ValueError: the message is larger than a peer takes, or cannot be encoded; nothing is sent.
        """
        posted = Posted(framed(message, buffers, self.max_header_bytes))
        if self._error is None:
            self._queue.append(posted)
            self._num_queued += posted.num_bytes
            # Not at once: the answers that tasks give in this turn of the loop go out in one system call.
            if self._flushing is None and self._stalling is None:
                self._flushing = self._loop.call_soon(self._flush)
        return posted

    def recall(self, posted: "Posted") -> bool:
        """Take a message back; False if some of it is sent already, and then all of it will be."""
        if posted.is_begun or posted not in self._queue:
            return False
        self._queue.remove(posted)
        self._num_queued -= posted.num_bytes
        return True

    async def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Queue a message and return when little waits to be sent; a cancelled call has queued it.

        Raises:
            ValueError: as `post`.
            OSError: the connection is broken, or the peer takes nothing.
        """
        posted = self.post(message, buffers)
        if self._num_queued > _QUEUE_BYTES:
            self._flush()
            if posted.buffers and self._error is None:
                posted.sent = self._loop.create_future()
                await posted.sent
        if self._error is not None:
            raise OSError(*self._error.args)

    def _flush(self) -> None:
        """Send as much as the socket takes; come back when it takes more."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        num_bytes = 0
        try:
            while self._queue:
                buffers = chain.from_iterable(posted.buffers for posted in self._queue)
                number = self._sock.sendmsg(list(islice(buffers, _BUFFERS_AT_ONCE)))
                num_bytes += number
                self._note_sent(number)
                if num_bytes > _TURN_BYTES and self._queue:
                    self._flushing = self._loop.call_soon(self._flush)
                    break
        except (BlockingIOError, InterruptedError):
            if self._stalling is None:
                self._loop.add_writer(self._sock.fileno(), self._flush)
            elif num_bytes:
                self._stalling.cancel()
            else:
                # The limit runs from the last byte that the peer took.
                return
            stalled = TimeoutError(f"the peer has taken nothing for {STALL_S:g} s")
            self._stalling = self._loop.call_later(STALL_S, self._fail, stalled)
            return
        except OSError as error:
            self._fail(error)
        self._stop_waiting()

    def _note_sent(self, number: int) -> None:
        self._num_queued -= number
        while number or (self._queue and not self._queue[0].buffers):
            posted = self._queue[0]
            posted.is_begun = True
            number = _drop(posted.buffers, number)
            if posted.buffers:
                return
            self._queue.popleft()
            _set(posted.sent)

    def _stop_waiting(self) -> None:
        if self._stalling is not None:
            self._stalling.cancel()
            self._stalling = None
            self._loop.remove_writer(self._sock.fileno())

    def _fail(self, error: OSError) -> None:
        """Forget what waits to be sent: after half a message the rest would be taken for another one."""
        self._error = error
        for posted in self._queue:
            _set(posted.sent)
        self._queue.clear()
        self._num_queued = 0
        self._stop_waiting()
        self._shut_down()

    async def receive(self, reserve: Reserve | None = None) -> Received | None:
        """The next message with its buffers; None when the peer has ended.

        `reserve` is asked as the bytes of buffers come. Once it says no, those of this message are read and
        forgotten, and there is None instead of buffers.

        Raises:
            FrameError: what comes is no message, is too large, or breaks off.
            OSError: the connection is broken.
        """
        # Data may always be there: a fast peer would keep other tasks from running.
        self._turn_messages += 1
        if self._turn_messages > _TURN_MESSAGES or self._turn_bytes > _TURN_BYTES:
            self._turn_messages = self._turn_bytes = 0
            await asyncio.sleep(0)
        if (message := self._read_ahead()) is not None:
            return message, []
        incoming = Incoming(self.max_header_bytes, self.max_frame_bytes, reserve)
        for targets in incoming:
            if not await self._fill(targets):
                if incoming.is_begun:
                    raise FrameError(_BROKE_OFF)
                return None
        return incoming.message, incoming.buffers

    def _read_ahead(self) -> Message | None:
        """The next message, if all of it was read with the one before and it has no buffers; else None."""
        if (start := self._start + _PRELUDE.size) <= self._end:
            magic, length = _PRELUDE.unpack_from(self._inbox, self._start)
            if magic == _MAGIC and length <= min(self._end - start, self.max_header_bytes):
                # A copy: parts of the message are views, and the inbox is written again.
                message = decode(bytes(self._inbox[start : start + length]))
                if not getattr(message, "sizes", None):
                    self._start = start + length
                    return message
        return None

    async def _fill(self, targets: list[memoryview]) -> bool:
        """Read until these buffers are full; False at the end, FrameError if some of them are."""
        left = deque(target for target in targets if len(target))
        is_begun = False
        while left:
            if self._start < self._end:
                number = min(len(left[0]), self._end - self._start)
                left[0][:number] = self._inbox[self._start : self._start + number]
                self._start += number
            # Behind the buffers the next message begins, which so takes no call of its own.
            elif not (number := await self._read([*islice(left, _BUFFERS_AT_ONCE), self._inbox], len(left))):
                if is_begun:
                    raise FrameError(_BROKE_OFF)
                return False
            is_begun = True
            if rest := _drop(left, number):
                self._start, self._end = 0, rest
        return True

    async def _read(self, targets: list[memoryview], num_wanted: int) -> int:
        """Read what there is, at least one byte, into these buffers one after another; 0 at the end."""
        # The inbox has to follow all that is wanted: if those are too many for one call, it is left out.
        if num_wanted > _BUFFERS_AT_ONCE:
            targets.pop()
        while True:
            try:
                number = self._sock.recvmsg_into(targets)[0]
                break
            except (BlockingIOError, InterruptedError):
                await self._until_readable()
        self.num_received += number
        self._turn_bytes += number
        return number

    async def _until_readable(self) -> None:
        ready = self._loop.create_future()
        self._loop.add_reader(self._sock.fileno(), _set, ready)
        try:
            await ready
        finally:
            self._loop.remove_reader(self._sock.fileno())
        # Other tasks had their turn while it waited.
        self._turn_messages = self._turn_bytes = 0

    def end(self) -> None:
        """End the connection, after what the socket still takes; tasks that use it are woken."""
        if self._queue and self._error is None:
            self._flush()
        self._shut_down()

    def _shut_down(self) -> None:
        # It may have ended already.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back; nothing receives or sends on it any more."""
        if self._sock.fileno() >= 0:
            self._fail(ConnectionAbortedError("the connection was closed on this side"))
            self._sock.close()


class Posted:
    """A message in the queue of a channel."""

    __slots__ = ("buffers", "is_begun", "num_bytes", "sent")

    def __init__(self, buffers: deque[Buffer]) -> None:
        self.buffers = buffers
        self.num_bytes = sum(map(len, buffers))
        self.is_begun = False
        self.sent: asyncio.Future[None] | None = None
        """Made when `Channel.send` waits for it."""


class BlockingChannel:
    """The same over a socket of a thread; `limit_s` bounds how long the peer may give, or take, nothing.

    Invariants: any thread may send, one receives; nothing is read ahead, so that the socket can be used by a
    `Channel` afterwards.

    >>> from forebay.io.messages import Part
    >>> ours, theirs = map(BlockingChannel, socket.socketpair())
    >>> ours.send(Part(1, sizes=[3]), [b"xyz"])
    >>> theirs.receive()[0]
    Part(number=1, sizes=[3])
    >>> _ = ours.close(), theirs.close()
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        limit_s: float | None = None,
        max_header_bytes: int = MAX_HEADER_BYTES,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        sock.settimeout(limit_s)
        self.sock = sock
        self._limits = max_header_bytes, max_frame_bytes
        self._sending = threading.Lock()
        self._ended = threading.Event()

    def fileno(self) -> int:
        """The descriptor of the socket, for waiting on several channels at once."""
        return self.sock.fileno()

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send a message; returns when all of it is with the system.

        Raises:
            ValueError: the message cannot be encoded; nothing is sent.
            TimeoutError: the peer takes nothing.
            OSError: the connection is broken.
        """
        left = framed(message, buffers, self._limits[0])
        with self._sending:
            while left:
                _drop(left, self.sock.sendmsg(list(islice(left, _BUFFERS_AT_ONCE))))

    def receive(self) -> Received:
        """Wait for the next message.

        Raises:
            EOFError: the peer has ended the connection.
            FrameError: what comes is no message, or is too large.
            TimeoutError: nothing comes.
            OSError: the connection is broken.
        """
        incoming = Incoming(*self._limits)
        for targets in incoming:
            left = deque(target for target in targets if len(target))
            while left:
                number = self.sock.recvmsg_into(list(islice(left, _BUFFERS_AT_ONCE)))[0]
                if not number:
                    raise EOFError("the connection was closed by the other side")
                _drop(left, number)
        return incoming.message, incoming.buffers

    def beat(self, sign: Message, pause_s: float) -> None:
        """Send `sign` every `pause_s` seconds from a thread, until the end.

        consumes: nothing / waits for: the next beat, or the end / woken by: the clock, `close`, a broken
        connection / produces: signs of life
        """

        def run() -> None:
            while not self._ended.wait(pause_s):
                try:
                    self.send(sign)
                except OSError:
                    # The thread that receives is told why.
                    return

        threading.Thread(target=run, name="signs of life", daemon=True).start()

    def close(self) -> None:
        """End the connection; a thread that receives is woken with `EOFError`."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


_MAGIC = b"FBC1"
_PRELUDE = struct.Struct("<4sI")
_INBOX_BYTES = 16 << 10
"""Read beyond a message, so that small messages that came together take one system call."""
_BUFFERS_AT_ONCE = 64
"""In one system call, which looks at all of them and takes some 200 kB, the arrays of 20 to 40 rollouts."""
_ROOM_BYTES = 1 << 20
"""For which room is asked at a time: what a peer has announced and not sent occupies no more."""
_SKIPPED_BYTES = 64 << 10
"""Read at once of what is forgotten."""
_TURN_BYTES, _TURN_MESSAGES = 1 << 20, 32
"""After so much without waiting, other tasks have their turn: below a millisecond of copying."""
_QUEUE_BYTES = 64 << 10
"""`Channel.send` returns while no more waits to be sent."""
_BROKE_OFF = "the connection ended in the middle of a message"


class Incoming:
    """One message as it is read, by either channel: iterate for the memory to fill next."""

    def __init__(self, max_header_bytes: int, max_frame_bytes: int, reserve: Reserve | None = None) -> None:
        self._limits, self._reserve = (max_header_bytes, max_frame_bytes), reserve
        self.is_begun = False
        self.message: Any = None
        self.buffers: list[Any] | None = []

    def __iter__(self) -> Iterator[list[memoryview]]:
        max_header_bytes, max_frame_bytes = self._limits
        prelude = bytearray(_PRELUDE.size)
        yield [memoryview(prelude)]
        self.is_begun = True
        magic, length = _PRELUDE.unpack(prelude)
        if magic != _MAGIC:
            raise FrameError(f"a message starts with {_MAGIC!r}, got {bytes(magic)!r}")
        if length > max_header_bytes:
            raise FrameError(f"a header has at most {max_header_bytes} bytes, got {length}")
        # An array takes no memory before bytes come; a bytearray would be cleared, and so take it, at once.
        header = np.empty(length, np.uint8)
        yield [header.data]
        self.message = decode(header)
        sizes = getattr(self.message, "sizes", ())
        if (total := sum(sizes)) > max_frame_bytes:
            raise FrameError(f"a message has at most {max_frame_bytes} bytes, got {total}")
        if sizes:
            yield from self._receive_buffers(sizes, total)

    def _receive_buffers(self, sizes: Sequence[int], num_left: int) -> Iterator[list[memoryview]]:
        buffers: list[Any] = []
        # Few at a time: an array takes memory of Python's own before its first byte has come.
        for start in range(0, len(sizes), _BUFFERS_AT_ONCE):
            some = [np.empty(size, np.uint8) for size in sizes[start : start + _BUFFERS_AT_ONCE]]
            parts = [array.data for array in some]
            for piece in [parts] if self._reserve is None else _cut(parts, _ROOM_BYTES):
                num_bytes = sum(map(len, piece))
                if self._reserve is not None and not self._reserve(self.message, num_bytes):
                    self.buffers = None
                    scratch = memoryview(bytearray(_SKIPPED_BYTES))
                    # They are read all the same: the next message comes behind them.
                    for at in range(0, num_left, _SKIPPED_BYTES):
                        yield [scratch[: num_left - at]]
                    return
                yield piece
                num_left -= num_bytes
            buffers += some
        self.buffers = buffers


def _cut(parts: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """The parts in their order, `size` bytes at a time."""
    piece: list[memoryview] = []
    room = size
    for part in parts:
        rest = part
        while len(rest) >= room:
            yield [*piece, rest[:room]]
            rest, piece, room = rest[room:], [], size
        if len(rest):
            piece.append(rest)
            room -= len(rest)
    if piece:
        yield piece


def framed(
    message: Message, buffers: Sequence[Buffer] = (), max_header_bytes: int = MAX_HEADER_BYTES
) -> deque[Buffer]:
    """The bytes of a message and its buffers, in parts that are not empty."""
    header = encode(message)
    if len(header) > max_header_bytes:
        raise ValueError(
            f"a message has at most {max_header_bytes} bytes beside its buffers, this one has {len(header)}; "
            f"make several calls, or ask for less at once"
        )
    parts: deque[Buffer] = deque((_PRELUDE.pack(_MAGIC, len(header)) + header,))
    for buffer in buffers:
        if len(part := buffer if type(buffer) is bytes else memoryview(buffer).cast("B")):
            parts.append(part)
    return parts


def _drop(parts: deque[Any], number: int) -> int:
    """Drop so many bytes at the front of `parts`, each bytes or a view of them; the number beyond the end."""
    while parts and number >= len(parts[0]):
        number -= len(parts.popleft())
    if parts and number:
        parts[0] = memoryview(parts[0])[number:]
        return 0
    return number


def _set(ready: asyncio.Future[None] | None) -> None:
    if ready is not None and not ready.done():
        ready.set_result(None)
