"""Messages over a socket: each a length, a header of MessagePack, and the raw bytes of its groups.

::

    "FBS1" | length of the header | header | head, arrays | head, arrays | ...

Sending hands the arrays to the socket where they lie (``sendmsg``); receiving fills one new buffer for the
arrays of each group, of which they become views. Between two processes of one machine that is more than twice
as fast as `asyncio` streams, which copy everything again on each side.

A channel knows bytes and limits, not what is said. What is too large, cut off or of something else is a
`FrameError`; a peer that takes nothing for `STALL_S` is a `TimeoutError`, so nothing waits for it forever.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from forebay.replay.format.encode import Buffer, PackedGroup
from forebay.replay.remote.messages import MAX_HEADER_BYTES, FrameError, encode

Message = TypeVar("Message")
Received = tuple[Any, Any]
"""Head and arrays of a group, as `receive_group` takes them."""
Reserve = Callable[[Any, int], bool]
"""Given a message and how many bytes of its groups come next: whether there is room for them."""

STALL_S = 60.0
"""A peer that reads nothing for so long is as good as dead; one that is merely slow reads something."""

_MAGIC = b"FBS1"
_PRELUDE = struct.Struct("<4sI")

_INBOX_BYTES = 4 << 10
"""Read at once for what is small; what is larger goes to its place directly, but for so much of it."""

_GROUPS_AT_ONCE = 32
"""Groups for which memory is taken before they are there, if they are small."""

_ROOM_BYTES = 1 << 20
"""For which room is asked at a time: what a peer has announced and not sent occupies no more."""

_SKIPPED_BYTES = 64 << 10
"""Read at once of what is forgotten."""

_BUFFERS_AT_ONCE = 64
"""In one system call, which looks at all of them and takes some 200 kB, the arrays of 20 to 40 rollouts."""

_TURN_BYTES = 1 << 20
"""After so much without waiting, others have their turn: below a millisecond of copying."""


class Channel(Generic[Message]):
    """A connected, non-blocking socket on which whole messages are sent and received.

    One coroutine receives; any number send, one after another in order of their calls. A `send` that is
    cancelled has sent the whole message or nothing; after one that failed the connection has ended.

    >>> channel = Channel(sock, decode=decode_from_client, max_frame_bytes=1 << 28)
    >>> message, groups = await channel.receive()
    >>> await channel.send(Answer(...), [pack_group(group)])
    """

    def __init__(
        self, sock: socket.socket, *, decode: Callable[[Any], Message], max_frame_bytes: int
    ) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.max_header_bytes = MAX_HEADER_BYTES
        self._sock = sock
        self._decode = decode
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._inbox = memoryview(bytearray(_INBOX_BYTES))
        self._start = self._end = 0
        self._num_read = 0
        self.num_received = 0
        """Bytes so far: when it grows, the peer lives."""

    @property
    def is_sending(self) -> bool:
        """Whether a message is on its way out."""
        return self._sending.locked()

    async def receive(self, reserve: Reserve | None = None) -> tuple[Message, list[Received] | None] | None:
        """The next message with its groups; None when the peer has ended.

        `reserve` is asked as the bytes of groups come. Once it says no, those of this message are read and
        forgotten, and there is None instead of groups.

        Raises:
            FrameError: what comes is no message, is too large, or breaks off.
            OSError: the connection is broken.
        """
        # Data may always be there; without this, a fast peer would keep everybody else from running, even
        # the task that its last message began.
        await asyncio.sleep(0)
        prelude = bytearray(_PRELUDE.size)
        if not await self._fill([prelude], may_end=True):
            return None
        magic, length = _PRELUDE.unpack(prelude)
        if magic != _MAGIC:
            raise FrameError(f"a message starts with {_MAGIC!r}, got {bytes(magic)!r}")
        if length > self.max_header_bytes:
            raise FrameError(f"a header has at most {self.max_header_bytes} bytes, got {length}")
        # Memory of an empty array is the system's until it is written: a peer that announces much and sends
        # little occupies little. That of a bytearray would be cleared, and so occupied, at once.
        header = np.empty(length, np.uint8)
        await self._fill([header])
        message = self._decode(header)
        sizes = getattr(message, "sizes", ())
        if any(size < 0 for pair in sizes for size in pair):
            raise FrameError("a group has a negative size")
        if (total := sum(map(sum, sizes))) > self.max_frame_bytes:
            raise FrameError(f"a message has at most {self.max_frame_bytes} bytes, got {total}")
        if not sizes:
            return message, []
        return message, await self._receive_groups(sizes, reserve and partial(reserve, message))

    async def _receive_groups(
        self, sizes: Sequence[tuple[int, int]], has_room: Callable[[int], bool] | None
    ) -> list[Received] | None:
        groups: list[Received] = []
        num_left = sum(map(sum, sizes))
        for start in range(0, len(sizes), _GROUPS_AT_ONCE):
            of_some = sizes[start : start + _GROUPS_AT_ONCE]
            some = [(np.empty(n, np.uint8), np.empty(m, np.uint8)) for n, m in of_some]
            parts = [part.data for group in some for part in group]
            for piece in [parts] if has_room is None else _cut(parts, _ROOM_BYTES):
                num_bytes = sum(map(len, piece))
                if has_room is not None and not has_room(num_bytes):
                    await self._skip(num_left)
                    return None
                await self._fill(piece)
                num_left -= num_bytes
            groups += some
        return groups

    async def _skip(self, num_bytes: int) -> None:
        """Read so many bytes and forget them: what follows is the next message."""
        scratch = memoryview(bytearray(min(num_bytes, _SKIPPED_BYTES)))
        while num_bytes:
            await self._fill([scratch[:num_bytes]])
            num_bytes -= min(num_bytes, len(scratch))

    async def _fill(self, targets: Sequence[Any], *, may_end: bool = False) -> bool:
        """Read until these buffers are full; False if there was nothing and there may be."""
        left = deque(memoryview(target) for target in targets if len(target))
        is_begun = False
        while left:
            if self._start < self._end:
                number = min(len(left[0]), self._end - self._start)
                left[0][:number] = self._inbox[self._start : self._start + number]
                self._start += number
            elif len(left[0]) < _INBOX_BYTES and len(left) == 1:
                self._start, self._end = 0, (number := await self._read([self._inbox]))
                if number:
                    continue
            else:
                number = await self._read(list(islice(left, _BUFFERS_AT_ONCE)))
            if not number:
                if may_end and not is_begun:
                    return False
                raise FrameError("the connection ended in the middle of a message")
            is_begun = True
            while left and number >= len(left[0]):
                number -= len(left.popleft())
            if number:
                left[0] = left[0][number:]
        return True

    async def _read(self, targets: list[memoryview]) -> int:
        """Read what there is, at least one byte, into these buffers one after another; 0 at the end."""
        while True:
            try:
                number = self._sock.recvmsg_into(targets)[0]
                break
            except (BlockingIOError, InterruptedError):
                await self._when_ready(self._loop.add_reader, self._loop.remove_reader)
        self.num_received += number
        self._num_read += number
        if self._num_read > _TURN_BYTES:
            self._num_read = 0
            await asyncio.sleep(0)
        return number

    async def send(self, message: msgspec.Struct, groups: Sequence[PackedGroup] = ()) -> None:
        """Send a message and its groups.

        Raises:
            ValueError: the message is larger than a peer takes; nothing is sent.
            OSError: the connection is broken, or the peer takes nothing.
        """
        header = encode(message)
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(
                f"a message has at most {MAX_HEADER_BYTES} bytes, this one has {len(header)}; "
                f"ask for less at once"
            )
        buffers: list[Buffer] = [_PRELUDE.pack(_MAGIC, len(header)) + header]
        for group in groups:
            buffers += (group.head, *group.buffers)
        async with self._sending:
            try:
                await self._send_buffers(buffers)
            except OSError:
                # What follows half a message would be taken for the rest of it.
                self.end()
                raise

    async def _send_buffers(self, buffers: list[Buffer]) -> None:
        at = num_sent = 0
        is_cancelled = False
        while at < len(buffers):
            try:
                sent = self._sock.sendmsg(buffers[at : at + _BUFFERS_AT_ONCE])
                num_sent += sent
                if num_sent > _TURN_BYTES:
                    num_sent = 0
                    await asyncio.sleep(0)
            except (BlockingIOError, InterruptedError):
                sent = 0
                is_cancelled |= await self._wait_until_writable()
            except asyncio.CancelledError:
                is_cancelled = True
            while at < len(buffers) and sent >= (size := memoryview(buffers[at]).nbytes):
                sent -= size
                at += 1
            if sent:
                buffers[at] = memoryview(buffers[at]).cast("B")[sent:]
        if is_cancelled:
            raise asyncio.CancelledError

    async def _wait_until_writable(self) -> bool:
        """Wait until the peer has read something; True if cancelled meanwhile."""
        try:
            async with asyncio.timeout(STALL_S):
                await self._when_ready(self._loop.add_writer, self._loop.remove_writer)
        except asyncio.CancelledError:
            return True
        return False

    async def _when_ready(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        """Wait until the socket can be read or written, as `add` says."""
        ready = self._loop.create_future()
        add(self._sock.fileno(), _set, ready)
        try:
            await ready
        finally:
            remove(self._sock.fileno())

    def end(self) -> None:
        """End the connection: whoever receives or sends on it, here or there, is woken."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It has ended already.
            return

    def close(self) -> None:
        """Give the socket back; nobody receives or sends on it any more."""
        self._sock.close()


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


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
