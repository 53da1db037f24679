"""Weights in memory that an inference server maps: by CUDA IPC on a GPU, as shared memory on a CPU.

::

    name, tensor ... --cast, copied one after another--> one buffer --handle--> server, which copies them out
                          full, or of another dtype: a Bucket; the buffer is used again for the next

The disk is never touched, and beyond the trainer's weights and the server's there is one bucket on each side.
The layout is that of vLLM's packed transfer (0.32): sizes in bytes, without gaps. Nothing is unpickled here;
handles of GPU memory are pickled because the servers ask for them so.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from multiprocessing.reduction import ForkingPickler

import torch

from forebay.io.shared import MemoryFile
from forebay.models import empty_cache
from forebay.models.starting_weights import Weights

BUCKET_BYTES = 512 << 20
"""The size of a bucket; a larger tensor gets a larger one. Each costs a request, of milliseconds."""


@dataclass(kw_only=True)
class Bucket:
    """Tensors of one dtype that lie in one buffer, one after another and without gaps."""

    memory: _Memory
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    """torch's names of them."""
    shapes: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes of each."""

    def shared_tensors(self) -> str:
        """Names and tensors, pickled as torch shares them between processes, in base64."""
        text, begin = io.BytesIO(), 0
        tensors = []
        for name, dtype, shape, size in zip(self.names, self.dtypes, self.shapes, self.sizes, strict=True):
            data = self.memory.data[begin : begin + size]
            tensors.append((name, data.view(getattr(torch, dtype)).view(shape)))
            begin += size
        ForkingPickler(text).dump(tensors)
        return base64.b64encode(text.getvalue()).decode()


def buckets(
    weights: Weights, dtype: str, device: str, *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """All of `weights`, those of floating point as `dtype`, in buffers on `device`.

    A bucket is valid until the next one is asked for. Tensors may lie elsewhere than on `device`.

    >>> weights = [("bias", torch.zeros(3)), ("scale", torch.ones(2, 2))]
    >>> [(bucket.names, bucket.sizes) for bucket in buckets(weights, "bfloat16", "cpu")]
    [(['bias', 'scale'], [6, 8])]
    """
    memory: _Memory | None = None
    bucket: Bucket | None = None
    for name, tensor in weights:
        kind = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
        kind_name, size = str(kind).removeprefix("torch."), prod(tensor.shape) * kind.itemsize
        used = sum(bucket.sizes) if bucket else 0
        # Of one dtype, so that each tensor begins where one of its dtype may.
        if bucket and (bucket.dtypes[0] != kind_name or used + size > len(bucket.memory.data)):
            bucket.memory.settle()
            yield bucket
            bucket, used = None, 0
        if memory is None or size > len(memory.data):
            memory = _Memory(max(size, bucket_bytes), device)
        bucket = bucket or Bucket(memory=memory)
        place = memory.data[used : used + size].view(kind).view(tensor.shape)
        place.copy_(tensor.detach())
        bucket.names.append(name)
        bucket.dtypes.append(kind_name)
        bucket.shapes.append(list(tensor.shape))
        bucket.sizes.append(size)
    if bucket:
        bucket.memory.settle()
        yield bucket


def free_buckets(device: str) -> None:
    """Give the memory of buckets back to the device, once the servers that mapped it have let go of it."""
    if torch.device(device).type == "cuda":
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        empty_cache()


class _Memory:
    """A buffer that other processes of this machine can map."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self._file = MemoryFile(num_bytes) if torch.device(device).type == "cpu" else None
        self.data = (
            torch.empty(num_bytes, dtype=torch.uint8, device=device)
            if self._file is None
            else self._file.data
        )

    @cached_property
    def handle(self) -> dict[str, str]:
        """How another process of this machine finds the buffer, as JSON.

        One for all buckets: servers count how often they are given a buffer, and free it by that."""
        if self._file is not None:
            return {"path": self._file.path}
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(self.data)  # type: ignore[no-untyped-call]
        gpu = str(torch.cuda.get_device_properties(self.data.device).uuid)
        return {"ipc_handles_pickled": base64.b64encode(pickle.dumps({gpu: arguments})).decode()}

    def settle(self) -> None:
        """Wait for the copies: the server reads in another stream."""
        if self._file is None:
            torch.cuda.current_stream(self.data.device).synchronize()
