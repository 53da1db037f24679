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
from forebay.cluster.calls import feeding
from forebay.cluster.library import cause_of, import_ray, why
from forebay.engines.base import EngineLost, WeightsGone
from forebay.engines.servers.dialects import Call, Dialect
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


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server as the trainer's process knows it."""

    engine: str
    """The name of the engine that drives it."""
    name: str
    """The same each time that either is started."""
    url: str
    """Its address, as the trainer's machine sees it."""
    dialect: Dialect
    is_far: bool
    """Whether it maps no memory of the trainer's machine."""
    written_out: Mapping[str, str]
    """As of `Buckets`."""


class FarWeights(LiveWeights):
    """The weights of a trainer in another process, in place of `Buckets` in this one.

    Invariant: a transfer that was given up has the server do nothing more.
    """

    def __init__(self, offer: Offer, engine: str, links: dict[str, ServerLink]) -> None:
        """`links` has the servers of the transfers under way, by their names; `engine` is the name of the process."""
        self._offer, self._engine, self._links = offer, engine, links
        self._written_out: Mapping[str, str] = {}
        self.gone = asyncio.Event()
        """The trainer has ended."""

    def buckets(self, weights: Self, device: str, *, written_out: Mapping[str, str]) -> Self:
        """As the constructor of `Buckets`."""
        self._written_out = written_out
        return self

    @property
    def weights(self) -> Self:
        """As of `Buckets`."""
        return self

    @property
    def is_gone(self) -> bool:
        """As of `Buckets`."""
        return self.gone.is_set()

    async def send(self, link: ServerLink, sender: Sender, *, hold: bool = False) -> int | None:
        """As of `Buckets`; the process of `sender` is on the trainer's machine, if there has to be one.

        Raises:
            EngineLost: as there.
            WeightsGone: the trainer has ended.
        """
        ray, transfer = import_ray(), secrets.token_hex(8)
        context, url = ray.get_runtime_context(), urlsplit(str(link))
        is_elsewhere = context.get_node_id() != self._offer.node
        if is_elsewhere and is_loopback(url.hostname or ""):
            url = url._replace(netloc=f"{ray.util.get_node_ip_address()}:{url.port}")
        served = Served(
            engine=self._engine,
            name=link.name,
            url=url.geturl(),
            dialect=link.dialect,
            is_far=is_elsewhere or sender.device is not None,
            written_out=self._written_out,
        )
        self._links[transfer] = link
        feed = feeding(self._offer.trainer.feed).remote
        try:
            # Each of the server's answers has a limit. A train step has none.
            with not_counted():
                step: int | None = await feed(context.current_actor, transfer, served, hold, not sender.is_joined)
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
    """A server as of `ServerLink`, by way of the engine's process that drives it."""

    def __init__(self, engine: Any, transfer: str, served: Served) -> None:
        self.dialect, self._server = served.dialect, served.url
        self._engine, self._transfer = engine, transfer

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
        self._senders: dict[tuple[str, str, bool], Sender] = {}
        """By engine and server; so are the transfers, the last of each."""
        self._transfers: dict[tuple[str, str, bool], asyncio.Task[Any]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="forebay-feeder", daemon=True).start()

    def offer(self, live: LiveWeights) -> None:
        """Give these from now on, in other memory than those before, which a lost server may still read."""
        self._live, self._buckets = live, {}

    def feed(self, link: ServerLink, served: Served, hold: bool, is_new: bool) -> int | None:
        """As `Buckets.send`; `is_new`: the server's workers are in no sender's group, or in one that was lost."""
        return asyncio.run_coroutine_threadsafe(self._feed(link, served, hold, is_new), self._loop).result()

    def dismiss(self, engine: str) -> None:
        """End the senders of an engine's servers."""
        for (name, *_), sender in list(self._senders.items()):
            if name == engine:
                self._loop.call_soon_threadsafe(sender.kill)

    async def _feed(self, link: ServerLink, served: Served, hold: bool, is_new: bool) -> int | None:
        # One that is started anew may be on another machine than before.
        own, server = asyncio.current_task(), (served.engine, served.name, served.is_far)
        assert own is not None
        before, self._transfers[server] = self._transfers.get(server), own
        if before is not None:
            # The engine has given that up.
            before.cancel()
            await asyncio.wait([before])
        if (key := str(served.written_out)) not in self._buckets:
            self._buckets[key] = Buckets(self._live, "cpu", written_out=served.written_out)
        buckets, device = self._buckets[key], self._device if served.is_far else None
        sender = self._senders.setdefault(server, Sender(link, device))
        sender.link = link
        if is_new:
            sender.kill()
        try:
            step = await buckets.send(link, sender, hold=hold)
        except BaseException:
            sender.kill()
            raise
        await buckets.release()
        return step
