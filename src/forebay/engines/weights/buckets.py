"""Weights on their way to inference servers, in buckets that a server maps: by CUDA IPC, or as shared memory.

::

    sizes --split--> layout 0, layout 1, ...
    number --> `LiveWeights.copy_to`: ranks put their blocks there --> Bucket --handle--> servers copy it out
                  | on a CPU the next is filled meanwhile; memory that no server reads is used again

The disk is never touched, and there are a few buckets, whatever the number of servers. Their layout is that of
vLLM's packed transfer (0.32). Nothing is unpickled here; handles of GPU memory are pickled, as servers ask for them.
"""

import asyncio
import base64
import contextlib
import io
import pickle
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from forebay.aio.time_limits import not_counted
from forebay.io.shared import Layout, MemoryFile, views
from forebay.models import empty_cache
from forebay.models.live_weights import LiveWeights
from forebay.models.starting_weights import Weights


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Tensors of one dtype that lie in one buffer, one after another and without gaps."""

    layout: Layout
    memory: "MemoryFile | GPUMemory"
    step: int
    """The model step of the weights."""

    @property
    def handle(self) -> dict[str, str]:
        """How another process of this machine finds the buffer, as JSON."""
        return {"path": self.memory.path} if isinstance(self.memory, MemoryFile) else self.memory.handle

    def shared_tensors(self) -> str:
        """Names and tensors, pickled as torch shares them between processes, in base64."""
        text = io.BytesIO()
        ForkingPickler(text).dump(list(views(self.layout, self.memory.data)))
        return base64.b64encode(text.getvalue()).decode()


class Buckets:
    """The weights of a trainer, for all servers that take them, each at its own pace.

    Invariants: servers that ask for the same bucket of the same weights get the same memory, filled once, if
    they are close together; memory that a server may still read is not written again, so one that hangs holds
    up no other, and keeps that bucket only.

    ::

        buckets = Buckets(live, "cpu")
        for number in range(len(buckets)):
            async with buckets.reading(number) as bucket:
                ...  # let a server read it
        await buckets.release()
    """

    def __init__(self, live: LiveWeights, device: str, *, written_out: Mapping[str, str] | None = None) -> None:
        """`written_out` names weights that are another's under a second name, and are to go all the same."""
        sizes = dict(live.sizes())
        self.weights = live
        self._device, self._sources = device, dict(written_out or {})
        self._parts = list(split(sizes.items()))
        # In a bucket of its own: to the trainer both have the same name.
        for name, source in self._sources.items():
            self._parts += split([(name, sizes[source])])
        self._filled: dict[int, _Filling] = {}
        self._free: list[MemoryFile | GPUMemory] = []

    def __len__(self) -> int:
        return len(self._parts)

    @contextlib.asynccontextmanager
    async def reading(self, number: int) -> AsyncIterator[Bucket]:
        """One bucket, of the weights of now; it stays as it is while the block is open.

        The wait for a train step, here as in `held`, is not counted by a `time_limit` around it."""
        filling = self._begin(number)
        filling.num_readers += 1
        with not_counted():
            bucket = await asyncio.shield(filling.task)
        # On a GPU that is shared there is no room for it, and the copy takes no time.
        if self._device == "cpu" and number + 1 < len(self._parts):
            self._begin(number + 1)
        yield bucket
        # Not after an error: the server may still read.
        filling.num_readers -= 1

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """While open, the trainer's next step waits."""
        holding = self.weights.held()
        # A thread waits for the step, and none for the transfer, which needs threads itself.
        begun = asyncio.get_running_loop().run_in_executor(None, holding.__enter__)
        try:
            with not_counted():
                await asyncio.shield(begun)
            yield
        finally:
            # Where it is cancelled over its own wait for a train step, after that.
            begun.add_done_callback(lambda _: holding.__exit__(None, None, None))

    async def send(self, link: Any, sender: Any, *, hold: bool = False) -> int | None:
        """Have the server of a `ServerLink`, with its `Sender`, take all of them, as they are now.

        The step of the weights; None if a train step changed them on the way.
        With `hold` the trainer's next step waits.

        Raises:
            EngineLost: it went away, or does not do it.
        """
        await link.do(link.dialect.begin(await sender.place()))
        first = None
        async with self.held() if hold else contextlib.nullcontext():
            for number in range(len(self)):
                async with self.reading(number) as bucket:
                    first = bucket.step if first is None else first
                    if bucket.step != first:
                        return None
                    async with sender.sending(bucket):
                        await link.do([link.dialect.bucket(bucket)])
        return first

    async def release(self) -> None:
        """Give back what no server reads, once one has all it needs."""
        self._filled = {number: filling for number, filling in self._filled.items() if filling.num_readers}
        self._free.clear()
        if self._device != "cpu":
            # Both wait for the device.
            await asyncio.to_thread(torch.cuda.ipc_collect)
            await asyncio.to_thread(empty_cache)

    def fill(self, number: int, memory: "MemoryFile | GPUMemory | None" = None) -> Bucket:
        """One bucket, in `memory` if that has room; for a thread, since it waits for a train step."""
        layout = self._parts[number]
        if memory is None or layout[-1][-1] > len(memory.data):
            size = max(layout[-1][-1], BUCKET_BYTES)
            memory = MemoryFile(size) if self._device == "cpu" else GPUMemory(size, self._device)
        own = [(self._sources.get(place[0], place[0]), *place[1:]) for place in layout]
        step = self.weights.copy_to(own, memory)
        if isinstance(memory, GPUMemory):
            # The server reads in another stream.
            torch.cuda.current_stream(memory.data.device).synchronize()
        return Bucket(layout=layout, memory=memory, step=step)

    def _begin(self, number: int) -> "_Filling":
        """Fill the bucket, unless it is there, of the weights of now, or on the way."""
        task = self._filled[number].task if number in self._filled else None
        if task and task.done() and (task.exception() or task.result().step != self.weights.step()):
            self._forget(number)
        if number not in self._filled:
            while len(self._filled) >= (NUM_KEPT if self._device == "cpu" else 1):
                self._forget(next(iter(self._filled)))
            memory = self._free.pop() if self._free else None
            task = asyncio.create_task(asyncio.to_thread(self.fill, number, memory))
            # Told to those that wait for it; there may be none, for one that was to be the next.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._filled[number] = _Filling(task)
        return self._filled[number]

    def _forget(self, number: int) -> None:
        filling = self._filled.pop(number)
        if not filling.num_readers and filling.task.done() and not filling.task.exception():
            self._free.append(filling.task.result().memory)


BUCKET_BYTES = 512 << 20
"""The size of a bucket; a larger tensor gets a larger one. Each costs a request, of milliseconds."""
NUM_KEPT = 3
"""Buckets that are there at a time: one that most servers read, the next, and one for those behind."""


@dataclass(eq=False)
class _Filling:
    """A bucket that is there, or on the way."""

    task: asyncio.Task[Bucket]
    num_readers: int = 0


def split(sizes: Weights) -> Iterator[Layout]:
    """The layouts of buckets for tensors of these sizes, in their order.

    >>> [[name for name, *_ in part] for part in split([("a", torch.zeros(3)), ("b", torch.arange(2))])]
    [['a'], ['b']]
    """
    part: list[tuple[str, str, Sequence[int], int, int]] = []
    for name, tensor in sizes:
        kind, begin = str(tensor.dtype).removeprefix("torch."), part[-1][-1] if part else 0
        # Of one dtype, so that each tensor begins where one of its dtype may.
        if part and (part[0][1] != kind or begin + tensor.nbytes > BUCKET_BYTES):
            yield part
            part, begin = [], 0
        part.append((name, kind, tuple(tensor.shape), begin, begin + tensor.nbytes))
    if part:
        yield part


class GPUMemory:
    """A buffer on a GPU that other processes of this machine can map."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @cached_property
    def handle(self) -> dict[str, str]:
        """The buffer by the name of its GPU.

        One for all buckets: servers count how often they are given a buffer, and free it by that."""
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(self.data)  # type: ignore[no-untyped-call]
        gpu = str(torch.cuda.get_device_properties(self.data.device).uuid)
        return {"ipc_handles_pickled": base64.b64encode(pickle.dumps({gpu: arguments})).decode()}
