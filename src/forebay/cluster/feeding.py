"""Weights from the trainer's process straight to the inference servers that engines elsewhere drive.

::

    engine's process                                    trainer's process
    FarWeights.send --feed: which server------------->  Feeder: `Buckets.send`, as where both are in one process
        do <--------what the server is to do----------    | its calls: `EngineLink`
        |--HTTP--> server <==a bucket in shared memory====| on one machine
        |            '---its workers <==NCCL or gloo======' else by a `Sender`
    FarWeights.send <--------step----------------------

An engine whose process ends fails its transfers, each of which lets go of the bucket and of the trainer's next
step. A trainer that ends is `WeightsGone` to every engine that still reads.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Self
from urllib.parse import urlsplit

import torch

from forebay.aio.time_limits import not_counted, timeout
from forebay.cluster.calls import FEEDING, beside
from forebay.cluster.library import cause_of, import_ray, why
from forebay.engines.base import EngineLost, WeightsGone
from forebay.engines.servers.dialects import Call
from forebay.engines.servers.link import CONTROL_LIMIT_S, Refused, ServerLink
from forebay.engines.servers.sender import Sender
from forebay.engines.weights.buckets import Buckets
from forebay.io.address import is_loopback
from forebay.io.shared import lay_out
from forebay.models.live_weights import LiveWeights


class FarWeights(LiveWeights):
    """The weights of a trainer in another process, in place of `Buckets` in this one.

    Invariant: a transfer that was given up has the server do nothing more.
    """

    def __init__(self, trainer: Any, links: dict[str, ServerLink]) -> None:
        """`trainer` is Ray's handle of it; `links` has the servers of the transfers under way, by their names."""
        self._trainer, self._links = trainer, links
        self._written_out: Mapping[str, str] = {}
        self.weights = self
        """The same object: there it is what these are buckets of."""
        self.gone = asyncio.Event()
        """The trainer has ended."""

    def buckets(self, weights: Self, device: str, *, written_out: Mapping[str, str]) -> Self:
        """These themselves, where weights of this process would have `Buckets` made."""
        self._written_out = written_out
        return self

    async def send(self, link: ServerLink, sender: Sender, *, hold: bool = False) -> int | None:
        """As of `Buckets`; the process of `sender` is on the trainer's machine, if there has to be one.

        Raises:
            EngineLost, Refused: as there.
            WeightsGone: the trainer has ended.
        """
        ray, transfer = import_ray(), secrets.token_hex(8)
        far = EngineLink(link, transfer, sender)
        self._links[transfer] = link
        feed = beside(self._trainer.feed, FEEDING).remote
        try:
            # Each of the server's answers has a limit. A train step has none.
            with not_counted():
                step: int | None = await feed(far, self._written_out, hold)
        except ray.exceptions.RayError as error:
            if not isinstance(cause := cause_of(error), ray.exceptions.RayError):
                raise cause from None
            self.gone.set()
            raise WeightsGone(f"the trainer gives no weights any more: {why(error)}") from error
        finally:
            del self._links[transfer]
        sender.is_joined = True
        return step

    async def release(self) -> None:
        """Nothing: the trainer's process does."""


class EngineLink(ServerLink):
    """A server as of `ServerLink`, for the trainer's process: by way of the engine's, where it is made."""

    def __init__(self, link: ServerLink, transfer: str, sender: Sender) -> None:
        """`sender` is the one there, which starts no process, but says whether there is to be one."""
        ray, self.dialect, self._server = import_ray(), link.dialect, str(link)
        context = ray.get_runtime_context()
        self._engine, self._transfer = context.current_actor, transfer
        self.node, self._address = context.get_node_id(), ray.util.get_node_ip_address()
        self.name = link.name
        self.is_far, self.is_new = sender.device is not None, not sender.is_joined
        """Whether it maps no memory, wherever it is; and whether its workers have not joined the sender of now."""

    def come_to(self, node: str) -> None:
        """Name the server as the machine `node`, which has the trainer, reaches it."""
        host, self.is_far = urlsplit(str(self)).hostname or "", self.is_far or self.node != node
        if self.node != node and is_loopback(host):
            self._server = str(self).replace(host, self._address, 1)

    async def do(self, calls: Iterable[Call], *, takes_long: bool = False) -> Any:
        """As of `ServerLink`; the engine's process, which has a limit for each call, may stand still."""
        late = EngineLost(f"{self}: the process of its engine gave no answer")
        try:
            async with timeout(None if takes_long else 2 * CONTROL_LIMIT_S, lambda: late):
                return await self._engine.do.remote(self._transfer, list(calls), takes_long)
        except import_ray().exceptions.RayError as error:
            cause = cause_of(error)
            raise cause if isinstance(cause, EngineLost | Refused) else EngineLost(why(error)) from None


class Feeder:
    """Gives a trainer's weights to servers; for the process of the trainer, and its threads.

    Invariants: all servers are given the weights of now; a server has one transfer at a time, and one sender, which
    is the same from one hand-over to the next until the server is lost.
    """

    def __init__(self, device: str) -> None:
        """`device` is the trainer's, or that of its ranks."""
        self._device = "cuda:0" if device != "cpu" and torch.cuda.is_available() else "cpu"
        self._lacks_gpu = device != "cpu" and self._device == "cpu"
        """Whether ranks have GPUs that this process does not see, and nothing was said about it yet."""
        self._live: LiveWeights
        self._buckets: dict[str, Buckets] = {}
        self._senders: dict[Any, Sender] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="forebay-feeder", daemon=True).start()

    def offer(self, live: LiveWeights) -> int:
        """Give these from now on, in other memory than those before, which lost servers may read; their bytes."""
        self._live, self._buckets = live, {}
        return lay_out(live.sizes())[1]

    async def feed(self, link: EngineLink, written_out: Mapping[str, str], hold: bool) -> int | None:
        """As `Buckets.send`, with weights that the engine's servers want `written_out`; in this one's `loop`."""
        link.come_to(import_ray().get_runtime_context().get_node_id())
        device = self._device if link.is_far else None
        if link.is_far and self._lacks_gpu:
            self._lacks_gpu = False
            logging.getLogger(__name__).warning("the trainer's process sees no GPU of its ranks, so it sends by gloo")
        sender = self._senders.setdefault((link.name, device), Sender(link, device))
        # A transfer that the engine has given up ends with the next thing that the server is to do.
        async with sender.turn:
            if (key := str(written_out)) not in self._buckets:
                self._buckets[key] = Buckets(self._live, "cpu", written_out=written_out)
            buckets, sender.link = self._buckets[key], link
            if link.is_new:
                sender.kill()
            try:
                step = await buckets.send(link, sender, hold=hold)
            except BaseException:
                # The server may be gone for good.
                sender.kill()
                raise
            await buckets.release()
            return step
