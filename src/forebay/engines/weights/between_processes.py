"""Weights on their way between processes: through shared memory of this machine, or as plain arrays.

::

    trainer's process                                        each engine's process
    load_weights of engine 1 --+
    load_weights of engine 2 --+-> SharedMemoryHandOver        WeightInbox
         written once for all into one file in memory
              --message: path, layout--------------------------> maps the file --> engine.load_weights
         <------------------------------------------------------ answered when they are in use

With LoRA, adapters travel in the same way; the message then has their config too, and the inbox calls
``engine.load_adapters``, which puts them on the engine's starting weights.

Every parameter in the memory starts at a multiple of 64 bytes, so that a view of it has the alignment of any
dtype. Where there is no shared memory (a cluster's object store), weights travel as arrays over the memory
that they have, with name, dtype and shape: `to_plain` and `to_tensors`.

An engine takes weights over only when all of them have arrived, so one that dies in between, or a sender that
does, leaves the others with whole weights. The messages are plain data; which way they travel (a socket, a
Ray call) is the member's affair.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from forebay.engines.base import Engine, EngineLost, TakesAdapters
from forebay.models.starting_weights import AdapterConfig, AdaptersRefusedError, Weights

if TYPE_CHECKING:
    import torch

Listed: TypeAlias = "Sequence[tuple[str, torch.Tensor]]"
"""Weights that can be read more than once."""

Send = Callable[[dict[str, Any]], Awaitable[None]]
"""Has the `WeightInbox` of one engine handle a message; returns once it has."""


class SharedMemoryHandOver:
    """Writes weights into memory that every engine on this machine can map.

    Invariants: whatever the number of engines, there is one copy, which is written once a hand-over. Memory
    that an engine may still read is not written again: a hand-over that begins meanwhile gets memory of its
    own, so that an engine that hangs holds up no other. It goes when the last process that has it ends,
    however that ends, and here with the last member. Adapters have memory of their own beside the whole
    weights.

    >>> hand_over = SharedMemoryHandOver()
    >>> hand_over.close()
    """

    def __init__(self) -> None:
        self._whole: _Written | None = None
        self._adapters: _Written | None = None
        """The adapters that were given since then, if any."""
        self._num_members = 0

    def join(self) -> None:
        """Keep the memory for one member more."""
        self._num_members += 1

    def leave(self) -> None:
        """Free the memory if the member that goes was the last."""
        self._num_members -= 1
        if self._num_members == 0:
            self.close()

    async def load(
        self, send: Send, weights: Listed, model_step: int, *, adapters: AdapterConfig | None = None
    ) -> None:
        """Return once the engine behind `send` uses `weights`; calls with the same object share a hand-over.

        With `adapters`, the config of LoRA adapters, `weights` are these, for its starting weights.
        """
        written = self._whole if adapters is None else self._adapters
        if written is None or written.weights is not weights or written.model_step != model_step:
            earlier, written = written, _Written(weights, model_step, adapters)
            written.message = asyncio.create_task(self._write(written, earlier))
            if adapters is None:
                self._whole, self._adapters = written, None
            else:
                self._adapters = written
        try:
            await self._give(send, written)
        except ValueError:
            if self._adapters is written:
                # An engine that begins anew would refuse them too.
                self._adapters = None
            raise

    async def again(self, send: Send) -> None:
        """Give a member that began anew the weights of the last hand-over, if there was one.

        Where these were adapters, it gets the whole weights of an earlier hand-over before them.

        Raises:
            EngineLost: it refuses the adapters that it, or others, have taken before.
        """
        if (whole := self._whole) is not None:
            await self._give(send, whole)
        if (written := self._adapters) is not None:
            try:
                await self._give(send, written)
            except AdaptersRefusedError as error:
                # The others have them still, and the run does not hear of it: this one cannot take part.
                raise EngineLost(
                    f"it cannot use the adapters of step {written.model_step}: {error}"
                ) from error

    async def _give(self, send: Send, written: _Written) -> None:
        assert written.message is not None
        written.num_readers += 1
        message = await asyncio.shield(written.message)
        try:
            await send({**message, "model_step": written.model_step, "adapters": written.adapters})
        except (EngineLost, ValueError):
            # It is gone, or has refused them: either way it does not read.
            written.num_readers -= 1
            raise
        # An engine that was given up, or failed otherwise, may still read: then it counts for ever.
        written.num_readers -= 1

    async def _write(self, written: _Written, earlier: _Written | None) -> dict[str, Any]:
        free: MemoryFile | None = None
        if earlier is not None and earlier.message is not None:
            await asyncio.wait([earlier.message])
            free = earlier.file if earlier.num_readers == 0 else None
        return await asyncio.to_thread(self._fill, written, free)

    def _fill(self, written: _Written, free: MemoryFile | None) -> dict[str, Any]:
        layout, num_bytes = lay_out(written.weights)
        if free is None or free.num_bytes != num_bytes:
            free = MemoryFile(num_bytes)
        write(layout, free.data, written.weights)
        written.file = free
        return {"path": free.path, "inode": free.inode, "num_bytes": num_bytes, "layout": layout}

    def close(self) -> None:
        """Let go of the memory; an engine that has mapped it may still read it."""
        for written in (self._whole, self._adapters):
            if written is not None and written.file is not None:
                written.file.close()
        self._whole = self._adapters = None


class WeightInbox:
    """The engine's side of a hand-over.

    >>> inbox = WeightInbox(engine)                                                 # doctest: +SKIP
    >>> await inbox.handle(message)                                                 # doctest: +SKIP
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mapped: tuple[int, torch.Tensor] | None = None
        self._turn = asyncio.Lock()

    async def handle(self, message: dict[str, Any]) -> None:
        """Bring the weights that `message` announces into use, after those that were announced before.

        Raises:
            RuntimeError: the memory was given back meanwhile; the engine keeps what it has.
            ValueError: they are not those of the engine's model, or adapters that it refuses.
        """
        # One that the sender has given up may still be at it, and must not end after a later one.
        async with self._turn:
            data = self._map(message["path"], message["inode"], message["num_bytes"])
            weights, step = views(message["layout"], data), message["model_step"]
            if (adapters := message["adapters"]) is None:
                await self._engine.load_weights(weights, step)
            else:
                await cast("TakesAdapters", self._engine).load_adapters(weights, step, config=adapters)

    def _map(self, path: str, inode: int, num_bytes: int) -> torch.Tensor:
        # Not by the path: it has the number of a descriptor, which the next file may get again.
        if self._mapped is None or self._mapped[0] != inode:
            if not os.path.exists(path) or os.stat(path).st_ino != inode:
                raise RuntimeError(f"{path} is not the memory that was announced; it was given back")
            import torch

            self._mapped = inode, torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        return self._mapped[1]


class _Written:
    """Weights in shared memory, or on the way there."""

    def __init__(self, weights: Listed, model_step: int, adapters: AdapterConfig | None) -> None:
        self.weights, self.model_step, self.adapters = weights, model_step, adapters
        self.message: asyncio.Future[dict[str, Any]] | None = None
        self.file: MemoryFile | None = None
        self.num_readers = 0


class MemoryFile:
    """Memory that other processes of this user can map by `path`, freed when no process has it open."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        self.num_bytes = num_bytes
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("forebay-weights")
            self.path = f"/proc/{os.getpid()}/fd/{handle}"
            self._finalizer: Any = weakref.finalize(self, os.close, handle)
        else:
            handle, self.path = tempfile.mkstemp(prefix="forebay-weights-")
            os.close(handle)
            self._finalizer = weakref.finalize(self, os.unlink, self.path)
        os.truncate(self.path, num_bytes)
        self.inode = os.stat(self.path).st_ino
        self.data = torch.from_file(self.path, shared=True, size=num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        """Give the memory back once no other process has mapped it."""
        self._finalizer()


ALIGNMENT = 64
"""A cache line; any dtype's alignment divides it."""

Layout = Sequence[tuple[str, str, Sequence[int], int, int]]
"""Of each parameter: name, torch's name of the dtype, shape, first byte, byte after the last."""

PlainWeight = tuple[str, str, tuple[int, ...], NDArray[np.uint8]]
"""Name, torch's name of the dtype, shape, bytes."""


def lay_out(weights: Weights) -> tuple[Layout, int]:
    """Where each of these parameters is to lie, and how many bytes they take in all.

    >>> lay_out([("bias", torch.zeros(3)), ("scale", torch.ones(2, 2))])
    ([('bias', 'float32', (3,), 0, 12), ('scale', 'float32', (2, 2), 64, 80)], 128)
    """
    layout, start = [], 0
    for name, tensor in weights:
        layout.append((name, _name_of(tensor), tuple(tensor.shape), start, start + tensor.nbytes))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return layout, start


def views(layout: Layout, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters inside `data` (uint8), without a copy."""
    import torch

    for name, dtype, shape, start, stop in layout:
        yield name, data[start:stop].view(getattr(torch, dtype)).view(tuple(shape))


def write(layout: Layout, data: torch.Tensor, weights: Weights) -> None:
    """Copy `weights`, from any device, to their places in `data`."""
    for (name, place), (own_name, tensor) in zip(views(layout, data), weights, strict=True):
        assert name == own_name, f"{own_name} comes where {name} was laid out"
        place.copy_(tensor.detach())


def to_plain(weights: Weights) -> list[PlainWeight]:
    """The same as arrays over the same memory, as far as it is this machine's main memory."""
    import torch

    return [
        (
            name,
            _name_of(tensor),
            tuple(tensor.shape),
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(),
        )
        for name, tensor in weights
    ]


def to_tensors(weights: Iterable[PlainWeight]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, over the memory of the arrays: not to be written to."""
    import torch

    for name, dtype, shape, data in weights:
        with warnings.catch_warnings():
            # That it must not be written to is known: an engine that takes weights over copies them.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            tensor = torch.from_numpy(data)
        kind = getattr(torch, dtype)
        # An empty array has no stride that another dtype could be seen with.
        yield name, tensor.view(kind).reshape(shape) if data.size else torch.empty(shape, dtype=kind)


def _name_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
