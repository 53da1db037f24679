"""Handing weights to engines in other processes: through shared memory on one machine, or by broadcast.

::

    trainer's process                                        each engine's process
    load_weights of engine 1 --+
    load_weights of engine 2 --+-> hand-over, once for all     WeightInbox
         SharedMemoryHandOver: written into one file in memory
              --message: path, layout, CRCs--------------------> maps the file ----+
         BroadcastHandOver: gloo or NCCL, bucket by bucket                         +--> engine.load_weights
              --message: group, layout----> --bytes------------> own buffer -------+
         <------------------------------------------------------ answered when they are in use

An engine takes weights over only when all of them have arrived, so one that dies in between, or a sender that
does, leaves the others with whole weights. The messages are plain data; which way they travel (a socket, a
Ray call) is the member's affair.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from forebay.engines.base import EngineLost
from forebay.engines.broadcast import Broadcaster, Receiver
from forebay.engines.weight_layout import from_message, layout_of

Weights = Sequence[tuple[str, torch.Tensor]]


class Member(Protocol):
    """An engine elsewhere that takes part in hand-overs."""

    async def send_weights(self, message: dict[str, Any]) -> None:
        """Have the engine's `WeightInbox` handle `message`; returns once it has."""
        ...


class WeightHandOver(Protocol):
    """One way of giving weights to several engines."""

    def join(self, member: Member) -> None:
        """Count `member` among those that get weights."""
        ...

    def leave(self, member: Member) -> None:
        """Forget `member`; it was closed or is gone."""
        ...

    async def load(self, member: Member, weights: Weights, model_step: int) -> None:
        """Return once `member` uses `weights`. Calls with the same object share one hand-over."""
        ...

    async def again(self, member: Member) -> None:
        """Give a member that lost them the weights of the last hand-over, if there was one.

        Raises:
            EngineLost: they are not kept.
        """
        ...

    def close(self) -> None:
        """Free the memory or the connections."""
        ...


class SharedMemoryHandOver:
    """Writes weights into memory that every engine on this machine can map.

    Invariants: whatever the number of engines, there is one copy, which is written once a hand-over; it is
    not written again while an engine may still read it; it goes when the last process that has it ends,
    however that ends.

    >>> hand_over = SharedMemoryHandOver(checksum=True)
    >>> hand_over.close()
    """

    def __init__(self, *, checksum: bool = False) -> None:
        """`checksum`: engines compare a CRC-32 of every parameter before they take it."""
        self._checksum = checksum
        self._file: _MemoryFile | None = None
        self._written: _Written | None = None

    def join(self, member: Member) -> None:
        """Nothing to do: who maps the memory is told where it is."""

    def leave(self, member: Member) -> None:
        """Nothing to do."""

    async def load(self, member: Member, weights: Weights, model_step: int) -> None:
        """Return once `member` uses `weights`, which are written at the first call with them."""
        if self._written is None or self._written.weights is not weights:
            self._written = _Written(
                weights, model_step, asyncio.ensure_future(self._write(weights, self._written))
            )
        written = self._written
        written.num_readers += 1
        try:
            message = await asyncio.shield(written.message)
            await member.send_weights({**message, "model_step": model_step})
        finally:
            written.num_readers -= 1
            if written.num_readers == 0:
                written.read.set()

    async def again(self, member: Member) -> None:
        """Have `member` read the memory once more."""
        if self._written is not None:
            await self.load(member, self._written.weights, self._written.model_step)

    async def _write(self, weights: Weights, earlier: _Written | None) -> dict[str, Any]:
        if earlier is not None and earlier.num_readers:
            await earlier.read.wait()
        return await asyncio.to_thread(self._fill, weights)

    def _fill(self, weights: Weights) -> dict[str, Any]:
        layout = layout_of(weights)
        if self._file is None or self._file.num_bytes != layout.num_bytes:
            self.close()
            self._file = _MemoryFile(layout.num_bytes)
        layout.write(self._file.data, weights)
        return {
            "kind": "memory",
            "path": self._file.path,
            "layout": layout.to_message(),
            "checksums": layout.checksums(self._file.data) if self._checksum else None,
        }

    def close(self) -> None:
        """Let go of the memory; an engine that has mapped it may still read it."""
        if self._file is not None:
            self._file.close()
            self._file = None


class BroadcastHandOver:
    """Broadcasts weights to all its members at once: for engines on other machines or other GPUs.

    Invariants: all members get every hand-over, whoever it was started for; a member that is lost fails the
    hand-over for all, which keep the weights they have, and the next one goes to those that are left.

    >>> hand_over = BroadcastHandOver(host="10.0.0.1", device="cuda:0")             # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        device: str = "cpu",
        checksum: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        """`host` is this machine as the members know it, where they meet; `device` the trainer's.

        A member that does not take part within `timeout_s` is lost.
        """
        self._broadcaster = Broadcaster(host=host, device=device, timeout_s=timeout_s)
        self._checksum = checksum
        self._members: list[Member] = []
        self._sent: tuple[Weights, asyncio.Future[dict[int, BaseException | None]]] | None = None

    def join(self, member: Member) -> None:
        """The next hand-over goes to `member` too."""
        self._members.append(member)
        self._broadcaster.forget_group()

    def leave(self, member: Member) -> None:
        """Go on without `member`."""
        if member in self._members:
            self._members.remove(member)
            self._broadcaster.forget_group()

    async def load(self, member: Member, weights: Weights, model_step: int) -> None:
        """Return once `member` uses `weights`, which the first call with them sends to all members."""
        if self._sent is None or self._sent[0] is not weights:
            earlier = self._sent[1] if self._sent else None
            self._sent = weights, asyncio.ensure_future(self._send(weights, model_step, earlier))
        errors = await asyncio.shield(self._sent[1])
        if (error := errors[id(member)]) is not None:
            raise error

    async def again(self, member: Member) -> None:
        """Not possible: what was sent is not kept.

        Raises:
            EngineLost: there was a hand-over.
        """
        if self._sent is not None:
            raise EngineLost("its weights were broadcast and are not kept: it waits for the next hand-over")

    async def _send(
        self, weights: Weights, model_step: int, earlier: asyncio.Future[Any] | None
    ) -> dict[int, BaseException | None]:
        if earlier is not None:
            await asyncio.wait([earlier])
        members = list(self._members)
        group = self._broadcaster.group(len(members))
        layout = layout_of(weights)
        message = {
            "kind": "broadcast",
            "layout": layout.to_message(),
            "model_step": model_step,
            "checksum": self._checksum,
        }
        sending = asyncio.ensure_future(
            asyncio.to_thread(self._broadcaster.send, layout, weights, self._checksum)
        )
        *answers, sent = await asyncio.gather(
            *(
                member.send_weights({**message, "group": {**group, "rank": rank}})
                for rank, member in enumerate(members, start=1)
            ),
            sending,
            return_exceptions=True,
        )
        if sent is not None or any(answers):
            self._broadcaster.forget_group()
        return {id(member): answer or sent for member, answer in zip(members, answers, strict=True)}

    def close(self) -> None:
        """End the connections."""
        self._broadcaster.forget_group()


class WeightInbox:
    """The engine's side of every hand-over.

    >>> inbox = WeightInbox(engine)                                                 # doctest: +SKIP
    >>> await inbox.handle(message)                                                 # doctest: +SKIP
    """

    def __init__(self, engine: _TakesWeights, device: str = "cpu") -> None:
        """`device` is where a broadcast arrives."""
        self._engine = engine
        self._device = device
        self._mapped: tuple[str, torch.Tensor] | None = None
        self._receiver = Receiver(device)

    async def handle(self, message: dict[str, Any]) -> None:
        """Bring the weights that `message` announces into use.

        Raises:
            WeightsCorruptError: they are not those that were sent; the engine keeps what it has.
            ValueError: they are not those of the engine's model.
        """
        layout = from_message(message["layout"])
        if message["kind"] == "memory":
            data = self._map(message["path"], layout.num_bytes)
            checksums = message["checksums"]
        else:
            data, checksums = await asyncio.to_thread(self._receiver.receive, layout, message)
        if checksums is not None:
            await asyncio.to_thread(layout.check, data.cpu(), checksums)
        await self._engine.load_weights(layout.views(data), message["model_step"])

    def _map(self, path: str, num_bytes: int) -> torch.Tensor:
        if self._mapped is None or self._mapped[0] != path or len(self._mapped[1]) != num_bytes:
            self._mapped = path, torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        return self._mapped[1]


class _TakesWeights(Protocol):
    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None: ...


class _Written:
    """Weights in shared memory, or on the way there."""

    def __init__(self, weights: Weights, model_step: int, message: asyncio.Future[dict[str, Any]]) -> None:
        self.weights, self.model_step, self.message = weights, model_step, message
        self.num_readers = 0
        self.read = asyncio.Event()


class _MemoryFile:
    """Memory that other processes of this user can map by `path`, freed when nobody has it open."""

    def __init__(self, num_bytes: int) -> None:
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
        self.data = torch.from_file(self.path, shared=True, size=num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        """Give the memory back once nobody else has mapped it."""
        self._finalizer()
