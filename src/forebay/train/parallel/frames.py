"""Messages with arrays between a process and its own children: msgpack and raw buffers, no pickle.

::

    send: value --msgpack--> header (arrays are numbered) | buffer 0 | buffer 1 | ...
    receive: header first, then each buffer straight into the memory of the array that it becomes

A value is made of None, numbers, text, lists, dicts with text keys, numpy arrays and CPU tensors (any dtype).
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_ARRAY = 1
"""The number of our one msgpack extension type."""


class _Place(msgspec.Struct):
    """Stands for an array in the header."""

    tensor: bool
    dtype: str
    shape: list[int]


def send(connection: Connection, value: Any) -> None:
    """Send one message.

    Raises:
        OSError: the other end is closed.
    """
    buffers: list[Bytes] = []
    header = msgspec.msgpack.encode(value, enc_hook=lambda array: _note(array, buffers))
    connection.send_bytes(header)
    for buffer in buffers:
        connection.send_bytes(buffer.data)


def receive(connection: Connection) -> Any:
    """Wait for one message.

    Raises:
        EOFError: the other end is closed.
    """
    memory: list[Bytes] = []
    value = msgspec.msgpack.decode(connection.recv_bytes(), ext_hook=lambda _, data: _make(data, memory))
    for buffer in memory:
        connection.recv_bytes_into(buffer.data)
    return value


def _note(array: Any, buffers: list[Bytes]) -> msgspec.msgpack.Ext:
    """The header's entry of an array, whose content is added to `buffers`."""
    if isinstance(array, torch.Tensor):
        tensor = array.detach().contiguous()
        place = _Place(True, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        content = tensor.flatten().view(torch.uint8).numpy()
    elif isinstance(array, np.ndarray):
        place = _Place(False, array.dtype.str, list(array.shape))
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    else:
        raise TypeError(f"a message holds arrays and plain values, got {type(array).__name__}")
    if len(content):
        buffers.append(content)
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(place))


def _make(data: memoryview, memory: list[Bytes]) -> Any:
    """An array for an entry of the header; its memory is added to `memory`, to be filled."""
    place = msgspec.msgpack.decode(data, type=_Place)
    array: Any
    if place.tensor:
        array = torch.empty(place.shape, dtype=getattr(torch, place.dtype))
        content = array.flatten().view(torch.uint8).numpy()
    else:
        array = np.empty(place.shape, np.dtype(place.dtype))
        content = array.reshape(-1).view(np.uint8)
    if len(content):
        memory.append(content)
    return array
