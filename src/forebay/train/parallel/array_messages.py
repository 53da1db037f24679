"""Values with arrays between a process and its own children: msgpack and raw buffers, no pickle.

::

    send: value --msgpack--> `Note` (arrays are numbered) | buffer 0 | buffer 1 | ...
    receive: each buffer is read into new memory, of which the array or tensor becomes a view

A value is made of None, numbers, text, lists, dicts with text keys, numpy arrays and CPU tensors (any dtype).
"""

import socket
import sys
from typing import Any

import msgspec
import numpy as np
import torch

from forebay.io.channel import BlockingChannel
from forebay.io.messages import Alive, Note, sizes_of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAX_VALUE_BYTES = 64 << 20
"""The bound of a value without its arrays: the names of weights are some hundred kilobytes."""

_ARRAY = 1
"""The number of our one msgpack extension type."""


def connect(sock: socket.socket, limit_s: float | None = None) -> BlockingChannel:
    """A channel to another process of this trainer, for messages of any size: batches, weights."""
    return BlockingChannel(sock, limit_s=limit_s, max_header_bytes=MAX_VALUE_BYTES, max_frame_bytes=sys.maxsize)


def send(channel: BlockingChannel, value: Any) -> None:
    """Send one value.

    Raises:
        TypeError: it holds something else than arrays and plain values.
        OSError: the other end is closed, or takes nothing within the channel's limit (`TimeoutError`).
    """
    buffers: list[Bytes] = []
    encoded = msgspec.msgpack.encode(value, enc_hook=lambda array: _take_out(array, buffers))
    channel.send(Note(msgspec.Raw(encoded), sizes_of(buffers)), [buffer.data for buffer in buffers])


def receive(channel: BlockingChannel) -> Any:
    """Wait for one value; signs of life are skipped.

    Raises:
        EOFError: the other end is closed.
        TimeoutError: nothing came within the channel's limit.
    """
    while isinstance((received := channel.receive())[0], Alive):
        pass
    message, buffers = received
    assert isinstance(message, Note)
    left = iter(buffers or ())
    return msgspec.msgpack.decode(message.value, ext_hook=lambda _, data: _put_back(data, next(left)))


def _take_out(array: Any, buffers: list[Bytes]) -> msgspec.msgpack.Ext:
    """The value's entry of an array, its dtype and shape; the content is added to `buffers`."""
    if isinstance(array, torch.Tensor):
        # As bytes, because numpy has no bfloat16.
        buffers.append(array.detach().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(array, np.ndarray):
        buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    else:
        raise TypeError(f"a message holds arrays and plain values, got {type(array).__name__}")
    # That of a tensor begins with "torch.".
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode([str(array.dtype), list(array.shape)]))


def _put_back(data: memoryview, buffer: Bytes) -> Any:
    """The array of an entry."""
    name, shape = msgspec.msgpack.decode(data, type=tuple[str, list[int]])
    if name.startswith("torch."):
        dtype = getattr(torch, name.removeprefix("torch."))
        # torch makes no view of an empty buffer.
        flat = torch.from_numpy(buffer).view(dtype) if len(buffer) else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)
    return buffer.view(name).reshape(shape)
