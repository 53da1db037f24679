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
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import torch

from forebay.aio.time_limits import not_counted
from forebay.cluster.calls import FEEDING, beside
from forebay.cluster.library import cause_of, import_ray, why
from forebay.engines.base import EngineLost, WeightsGone
from forebay.engines.servers.dialects import Call
from forebay.engines.servers.link import Refused, ServerLink
from forebay.engines.servers.sender import Sender
from forebay.engines.weights.buckets import Buckets
from forebay.io.address import is_loopback
from forebay.models.live_weights import LiveWeights


@dataclass(frozen=True, eq=False)
class Offer:
    """The weights of a trainer, which servers are given by it: no copy of them, but Ray's handle of its actor."""

    trainer: Any
    node: str
    """Ray's id of its machine."""


class FarWeights(LiveWeights):
    """The weights of a trainer in another process, in place of `Buckets` in this one.

    Invariant: a transfer that was given up has the server do nothing more.
    """

    def __init__(self, offer: Offer, links: dict[str, ServerLink]) -> None:
        """`links` has the servers of the transfers under way, by the names of these."""
        self._offer, self._links = offer, links
        self._written_out: Mapping[str, str] = {}
        self.weights = self
        """As of `Buckets`."""
        self.gone = asyncio.Event()
        """The trainer has ended."""

    def buckets(self, weights: Self, device: str, *, written_out: Mapping[str, str]) -> Self:
        """As the constructor of `Buckets`."""
        self._written_out = written_out
        return self

    async def send(self, link: ServerLink, sender: Sender, *, hold: bool = False) -> int | None:
        """As of `Buckets`; the process of `sender` is on the trainer's machine, if there has to be one.

        Raises:
            EngineLost: as there.
            WeightsGone: the trainer has ended.
        """
        ray, transfer = import_ray(), secrets.token_hex(8)
        far = EngineLink(link, transfer, self._offer.node, is_far=sender.device is not None)
        self._links[transfer] = link
        feed = beside(self._offer.trainer.feed, FEEDING).remote
        try:
            # Each of the server's answers has a limit. A train step has none.
            with not_counted():
                step: int | None = await feed(far, self._written_out, hold, not sender.is_joined)
        except ray.exceptions.RayError as error:
            if isinstance(cause := cause_of(error), EngineLost):
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

    def __init__(self, link: ServerLink, transfer: str, node: str, *, is_far: bool) -> None:
        """`node` has the trainer; `is_far`: the server maps no memory, even if it is there."""
        ray, self._transfer, self.dialect = import_ray(), transfer, link.dialect
        context, host = ray.get_runtime_context(), urlsplit(url := str(link)).hostname or ""
        self._engine, is_elsewhere = context.current_actor, context.get_node_id() != node
        if is_elsewhere and is_loopback(host):
            url = url.replace(host, ray.util.get_node_ip_address(), 1)
        self._server, self.is_far = url, is_far or is_elsewhere
        self.place = link.name, self.is_far
        """The same for servers that are started one after the other."""

    async def do(self, calls: Iterable[Call], *, takes_long: bool = False) -> Any:
        """As of `ServerLink`."""
        try:
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
        self._live: LiveWeights
        self._buckets: dict[str, Buckets] = {}
        self._senders: dict[Any, Sender] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="forebay-feeder", daemon=True).start()

    def offer(self, live: LiveWeights) -> None:
        """Give these from now on, in other memory than those before, which a lost server may still read."""
        self._live, self._buckets = live, {}

    async def feed(self, link: EngineLink, written_out: Mapping[str, str], hold: bool, is_new: bool) -> int | None:
        """As `Buckets.send`, with weights that the engine's servers want `written_out`; in this one's `loop`.

        `is_new`: the server's workers have joined no sender yet, or one that was lost.
        """
        sender = self._senders.setdefault(link.place, Sender(link, self._device if link.is_far else None))
        # One that the engine has given up ends with the next thing that the server is to do.
        async with sender.turn:
            if (key := str(written_out)) not in self._buckets:
                self._buckets[key] = Buckets(self._live, "cpu", written_out=written_out)
            buckets, sender.link = self._buckets[key], link
            if is_new:
                sender.kill()
            step = await buckets.send(link, sender, hold=hold)
            await buckets.release()
            return step
