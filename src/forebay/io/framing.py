"""Messages on a stream socket: four bytes of length, then the message. Nothing is unpickled.

And how to connect to a Unix socket, which differs from other sockets where many do so at once.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct

LENGTH = struct.Struct("<I")
"""What stands before each message."""
MAX_BYTES = 256 << 20
"""Of a message, if nothing else is agreed: a greater length is no length but something else."""

RETRY_S = 0.05
"""Between attempts at a Unix socket whose queue of connections is full: nothing tells of room in it."""


async def connect_unix(path: str) -> socket.socket:
    """A non-blocking socket connected to `path`, as soon as there is room; OSError if nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        # Not `sock_connect`: it waits for a full queue as for a connection that is being made, which it is
        # not, and fails with EINVAL.
        while True:
            try:
                sock.connect(path)
            except BlockingIOError:
                await asyncio.sleep(RETRY_S)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


def is_answered(path: str) -> bool:
    """Whether a process listens at the Unix socket `path`, also one that hangs."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # One that hangs lets its queue fill, where a blocking connect would wait.
        probe.setblocking(False)
        return probe.connect_ex(path) in (0, errno.EAGAIN)


async def read_frame(reader: asyncio.StreamReader, max_bytes: int = MAX_BYTES) -> bytes | None:
    """The next message; None: the other side is gone.

    Raises:
        ValueError: it is longer than `max_bytes`, so what came is not a message.
    """
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > max_bytes:
            raise ValueError(f"a message has at most {max_bytes} bytes, got one of {length}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def framed(message: bytes) -> bytes:
    """`message` as it is sent."""
    return LENGTH.pack(len(message)) + message
