"""Tensors in memory that several processes of one machine map.

::

    lay_out(names and tensors) --> where each begins, bytes in all --> MemoryFile
    views(layout, data)  <-- the owner's `data`, or that of another process: `mapped(path, inode, bytes)`

Every tensor starts at a multiple of 64 bytes, so that a view of it has the alignment of any dtype.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""A cache line; any dtype's alignment divides it."""

Layout = Sequence[tuple[str, str, Sequence[int], int, int]]
"""For each tensor its name, torch's name of the dtype, shape, first byte, and the byte after the last."""


class MemoryFile:
    """Memory that other processes of this user can map by `path`, freed when no process has it open."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("forebay-weights")
            self.path = f"/proc/{os.getpid()}/fd/{handle}"
            self._finalizer: Any = weakref.finalize(self, os.close, handle)
        else:
            # Not on Linux: an ordinary file, which is deleted when the memory is given back.
            handle, self.path = tempfile.mkstemp(prefix="forebay-weights-")
            os.close(handle)
            self._finalizer = weakref.finalize(self, os.unlink, self.path)
        os.truncate(self.path, num_bytes)
        self.inode = os.stat(self.path).st_ino
        self.data = _map(self.path, num_bytes)

    def close(self) -> None:
        """Give the memory back once no other process has mapped it."""
        self._finalizer()


def map_once(path: str, inode: int, num_bytes: int) -> "torch.Tensor":
    """The memory of another process, as it announces it: uint8.

    Raises:
        RuntimeError: it was given back meanwhile.
    """
    # The path has the number of a descriptor, which the next file may get again.
    if not os.path.exists(path) or os.stat(path).st_ino != inode:
        raise RuntimeError(f"{path} is not the memory that was announced; it was given back")
    return _map(path, num_bytes)


mapped = lru_cache(maxsize=2)(map_once)
"""The same, for memory that is announced again and again: the last two stay mapped."""


def _map(path: str, num_bytes: int) -> "torch.Tensor":
    import torch

    memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # The first touch of each small page would take as long as the copy.
        place = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(num_bytes)
        ctypes.CDLL(None).madvise(*place, mmap.MADV_HUGEPAGE)
    return memory


def lay_out(tensors: "Iterable[tuple[str, torch.Tensor]]") -> tuple[Layout, int]:
    """Where each of these is to lie, and how many bytes they take in all; only their sizes are asked for.

    >>> import torch
    >>> lay_out([("bias", torch.zeros(3)), ("scale", torch.ones(2, 2))])
    ([('bias', 'float32', (3,), 0, 12), ('scale', 'float32', (2, 2), 64, 80)], 128)
    """
    layout, start = [], 0
    for name, tensor in tensors:
        kind = str(tensor.dtype).removeprefix("torch.")
        layout.append((name, kind, tuple(tensor.shape), start, start + tensor.nbytes))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return layout, start


def views(layout: Layout, data: "torch.Tensor") -> "Iterator[tuple[str, torch.Tensor]]":
    """All tensors inside `data` (uint8), without a copy."""
    import torch

    for name, dtype, shape, start, stop in layout:
        yield name, data[start:stop].view(getattr(torch, dtype)).view(tuple(shape))


class LentTensors(list[tuple[str, Any]]):
    """Tensors by name in memory that does not change until later ones are given: they need not be copied."""

    are_in_use = False
    """Whether the engine that they were given to uses them where they lie."""


def write(layout: Layout, data: "torch.Tensor", tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
    """Copy `tensors`, from any device, to their places in `data`."""
    for (name, place), (own_name, tensor) in zip(views(layout, data), tensors, strict=True):
        assert name == own_name, f"{own_name} comes where {name} was laid out"
        place.copy_(tensor.detach())
