"""Messages on a stream socket: four bytes of length, then the message. Nothing is unpickled."""

from __future__ import annotations

import asyncio
import struct

LENGTH = struct.Struct("<I")
"""What stands before each message."""
MAX_BYTES = 256 << 20
"""Of a message, if nothing else is agreed: a greater length is no length but something else."""


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
