"""Weights on their way between processes of one machine: through memory that they share.

::

    trainer's process                                        each engine's process
    load_weights of engine 1 --+
    load_weights of engine 2 --+-> SharedMemoryHandOver        WeightInbox
         written once for all into one file in memory <-- the ranks of the trainer, if it has several
              --message: path, layout--------------------------> maps the file --> update_weights
         <------------------------------------------------------ answered when they are in use

With LoRA, adapters travel in the same way; the message then has their config too, and the inbox calls
``update_adapters``, which puts them on the engine's starting weights.

Live weights (`LiveWeights`) go there from where they lie: of a trainer on several ranks, each rank writes its
own slices, and no process has them all.

An engine takes weights over only when all of them have arrived, so one that dies in between, or a sender that
does, leaves the others with whole weights. The messages are plain data; which way they travel (a socket, a
Ray call) is the member's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from forebay.engines.base import EngineLost
from forebay.engines.pool import EnginePool
from forebay.io.shared import Layout, MemoryFile, lay_out, mapped, views, write
from forebay.models.live_weights import LiveWeights
from forebay.models.starting_weights import AdapterConfig, AdaptersRefusedError

if TYPE_CHECKING:
    import torch

Listed: TypeAlias = "Sequence[tuple[str, torch.Tensor]] | LiveWeights"
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
                raise EngineLost(f"it cannot use the adapters of step {written.model_step}: {error}") from error

    async def _give(self, send: Send, written: _Written) -> None:
        assert written.message is not None
        written.num_readers += 1
        # Shielded: other engines wait for the same write.
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
        layout, memory = put(written.weights, free)
        written.file = memory
        return {"path": memory.path, "inode": memory.inode, "num_bytes": memory.num_bytes, "layout": layout}

    def close(self) -> None:
        """Let go of the memory; an engine that has mapped it may still read it."""
        for written in (self._whole, self._adapters):
            if written is not None and written.file is not None:
                written.file.close()
        self._whole = self._adapters = None


class WeightInbox:
    """The side of a hand-over where the engines are.

    ::

        inbox = WeightInbox(EnginePool(engines))
        await inbox.handle(message)
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()

    async def handle(self, message: dict[str, Any]) -> None:
        """Bring the weights that `message` announces into use, after those that were announced before.

        Raises:
            RuntimeError: the memory was given back meanwhile; the engine keeps what it has.
            ValueError: they are not those of the engine's model, or adapters that it refuses.
        """
        # One that the sender has given up may still be at it, and must not end after a later one.
        async with self._turn:
            data = mapped(message["path"], message["inode"], message["num_bytes"])
            await take_over(self._pool, message["layout"], data, message["model_step"], adapters=message["adapters"])


def put(weights: Listed, memory: MemoryFile | None) -> tuple[Layout, MemoryFile]:
    """Put `weights` into `memory`, if it has just the room, else into new one."""
    layout, num_bytes = lay_out(weights.sizes() if isinstance(weights, LiveWeights) else weights)
    if memory is None or memory.num_bytes != num_bytes:
        memory = MemoryFile(num_bytes)
    if isinstance(weights, LiveWeights):
        weights.copy_to(layout, memory)
    else:
        write(layout, memory.data, weights)
    return layout, memory


async def take_over(
    pool: EnginePool, layout: Layout, data: torch.Tensor, model_step: int, *, adapters: AdapterConfig | None
) -> None:
    """Give engines the weights in these bytes, or, with their config, the adapters.

    Raises:
        AdaptersRefusedError: an engine does not take these.
        EngineLost: no engine is left.
    """
    if adapters is None:
        await pool.update_weights(views(layout, data), model_step)
    else:
        await pool.update_adapters(views(layout, data), model_step, config=adapters)


class _Written:
    """Weights in shared memory, or on the way there."""

    def __init__(self, weights: Listed, model_step: int, adapters: AdapterConfig | None) -> None:
        self.weights, self.model_step, self.adapters = weights, model_step, adapters
        self.message: asyncio.Future[dict[str, Any]] | None = None
        self.file: MemoryFile | None = None
        self.num_readers = 0
