"""Weights on their way between processes of one machine: through memory that they share.

::

    trainer's process                                        each engine's process
    load_weights of engine 1 --+
    load_weights of engine 2 --+-> SharedMemoryHandOver        WeightInbox
         written once for all into one file in memory <-- the ranks of the trainer, if it has several
              --message: path, layout--------------------------> maps the file --> update_weights
         <------------------ answered when they are in use, and whether the engine reads them where they lie
    step 1: file A   step 2: file B   step 3: file A, once every engine has said that it uses B

With LoRA, adapters travel in the same way; the message then has their config too, and the inbox calls
``update_adapters``, which puts them on the engine's starting weights.

Live weights (`LiveWeights`) go there from where they lie: of a trainer on several ranks, each rank writes its
own slices, and no process has them all.

An engine on a CPU generates with the weights in that memory: no engine copies them, and all have them once. One
on a GPU copies them there; one that drives a server writes them into files.

An engine takes weights over only when all of them have arrived, so one that dies in between, or a sender that
does, leaves the others with whole weights. The messages are plain data; which way they travel (a socket, a
Ray call) is the member's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

from forebay.engines.base import EngineLost
from forebay.engines.pool import EnginePool
from forebay.io.shared import Layout, LentTensors, MemoryFile, lay_out, mapped, views, write
from forebay.models.live_weights import LiveWeights
from forebay.models.starting_weights import AdapterConfig, AdaptersRefusedError

if TYPE_CHECKING:
    import torch

Listed: TypeAlias = "Sequence[tuple[str, torch.Tensor]] | LiveWeights"
"""Weights that can be read more than once."""

Send = Callable[[dict[str, Any]], Awaitable[bool]]
"""Has the `WeightInbox` of one engine handle a message; its answer. The same for all messages to an engine."""


class SharedMemoryHandOver:
    """Writes weights into memory that every engine on this machine can map.

    Invariants: weights are written once a hand-over, whatever the number of engines. Memory that an engine may
    still read is not written again: a hand-over that begins meanwhile gets other memory. So where engines use
    the weights in it there are two copies in turns, else one; and an engine that hangs holds up no other. It
    goes when the last process that has it ends, however that ends, and here with the last member. Adapters
    have memory of their own beside the whole weights.

    >>> hand_over = SharedMemoryHandOver()
    >>> hand_over.close()
    """

    def __init__(self) -> None:
        self._whole: _Written | None = None
        self._adapters: _Written | None = None
        """The adapters that were given since then, if any."""
        self._before: list[_Written] = []
        """Earlier hand-overs, whose memory is used again when no engine reads it."""
        self._num_members, self._numbers = 0, count()

    def join(self) -> None:
        """Keep the memory for one member more."""
        self._num_members += 1

    def leave(self, send: Send) -> None:
        """Note that the engine behind `send` is gone for good; free the memory if it was the last."""
        self.forget(send)
        self._num_members -= 1
        if self._num_members == 0:
            self.close()

    def forget(self, send: Send) -> None:
        """Note that the process behind `send` has ended, and reads nothing."""
        for written in filter(None, (*self._before, self._whole, self._adapters)):
            written.readers.discard(send)

    async def load(
        self, send: Send, weights: Listed, model_step: int, *, adapters: AdapterConfig | None = None
    ) -> None:
        """Return once the engine behind `send` uses `weights`; calls with the same object share a hand-over.

        With `adapters`, the config of LoRA adapters, `weights` are these, for its starting weights.
        """
        written = self._whole if adapters is None else self._adapters
        if written is None or written.weights is not weights or written.model_step != model_step:
            ended = (self._whole, self._adapters) if adapters is None else (self._adapters,)
            self._before += filter(None, ended)
            written = _Written(next(self._numbers), weights, model_step, adapters)
            written.message = asyncio.create_task(self._write(written))
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
        written.num_calls += 1
        try:
            # Shielded: other engines wait for the same write.
            message = await asyncio.shield(written.message)
            written.readers.add(send)
            uses = await send({**message, "model_step": written.model_step, "adapters": written.adapters})
        finally:
            written.num_calls -= 1
        # After an error, or given up, it may read both these and those before, until it has later ones.
        for other in self._before:
            if other.number < written.number:
                other.readers.discard(send)
        if not uses:
            written.readers.discard(send)

    async def _write(self, written: _Written) -> dict[str, Any]:
        if writing := [other.message for other in self._before if other.number < written.number]:
            await asyncio.wait(filter(None, writing))
        free = [other for other in self._before if not (other.readers or other.num_calls or other is written)]
        self._before = [other for other in self._before if other not in free]
        files = [other.file for other in free if other.file]
        layout, memory = await asyncio.to_thread(put, written.weights, files)
        written.file = memory
        return {"path": memory.path, "inode": memory.inode, "num_bytes": memory.num_bytes, "layout": layout}

    def close(self) -> None:
        """Let go of the memory; an engine that has mapped it may still read it."""
        for written in filter(None, (*self._before, self._whole, self._adapters)):
            if written.file is not None:
                written.file.close()
        self._whole = self._adapters = None
        self._before = []


class WeightInbox:
    """The side of a hand-over where the engines are.

    ::

        inbox = WeightInbox(EnginePool(engines))
        await inbox.handle(message)
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()

    async def handle(self, message: dict[str, Any]) -> bool:
        """Bring the weights that `message` announces into use, after those that were announced before.

        Whether they are used where they lie, and not a copy.

        Raises:
            RuntimeError: the memory was given back meanwhile; the engine keeps what it has.
            ValueError: they are not those of the engine's model, or adapters that it refuses.
        """
        # One that the sender has given up may still be at it, and must not end after a later one.
        async with self._turn:
            data = mapped(message["path"], message["inode"], message["num_bytes"])
            step, adapters = message["model_step"], message["adapters"]
            return await take_over(self._pool, message["layout"], data, step, adapters=adapters)


def put(weights: Listed, free: Iterable[MemoryFile]) -> tuple[Layout, MemoryFile]:
    """Put `weights` into one of these that has just the room, else into new memory."""
    layout, num_bytes = lay_out(weights.sizes() if isinstance(weights, LiveWeights) else weights)
    memory = next((memory for memory in free if memory.num_bytes == num_bytes), None) or MemoryFile(num_bytes)
    if isinstance(weights, LiveWeights):
        weights.copy_to(layout, memory)
    else:
        write(layout, memory.data, weights)
    return layout, memory


async def take_over(
    pool: EnginePool, layout: Layout, data: torch.Tensor, model_step: int, *, adapters: AdapterConfig | None
) -> bool:
    """Give engines the weights in these bytes, which stay as they are, or, with their config, the adapters.

    Whether one uses them where they lie.

    Raises:
        AdaptersRefusedError: an engine does not take these.
        EngineLost: no engine is left.
    """
    lent = LentTensors(views(layout, data))
    if adapters is not None:
        await pool.update_adapters(lent, model_step, config=adapters)
    else:
        await pool.update_weights(lent, model_step)
    return lent.are_in_use


class _Written:
    """Weights in shared memory, or on the way there."""

    def __init__(self, number: int, weights: Listed, model_step: int, adapters: AdapterConfig | None) -> None:
        self.number, self.weights, self.model_step, self.adapters = number, weights, model_step, adapters
        self.message: asyncio.Future[dict[str, Any]] | None = None
        self.file: MemoryFile | None = None
        self.readers: set[Send] = set()
        """Engines that may read it."""
        self.num_calls = 0
        """How many are being told of it."""
