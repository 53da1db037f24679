"""Engines of this process at work for callers in others: one host, whichever way calls travel.

::

    caller --call--> EngineHost --> EnginePool --> engines
                        '-- knows whose request each is, so that those of a caller that is gone end

    transports: a channel (`HostSession`, for `ProcessEngine`); an actor (`forebay.cluster.engines`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from forebay.config import Component, StrictModel
from forebay.engines.base import Completion, Engine, GenerateRequest
from forebay.engines.pool import EnginePool
from forebay.engines.weights.between_processes import WeightInbox
from forebay.io.channel import Channel
from forebay.io.link import Result, Session
from forebay.io.messages import Call, Note, encode_value
from forebay.models import AttentionKey, ModelConfig, Precision
from forebay.types import IntArray, SampleParams

PROGRESS_EVERY_S = 0.5
"""Reports are for people and for noticing stalls, which take minutes."""

MAX_HEADER_BYTES = 64 << 20
"""Where weights lie takes some 100 bytes for each parameter, and a model may have many thousands."""

PARENT_LIMIT_S = 7 * 86_400.0
"""Without a sign of life of the parent: it may be stopped and go on, and if it ends the socket says so."""


class HostSession(Session):
    """Answers the calls of the parent, which come over a socket, one after the other or many at once.

    Beside them it says how many tokens running requests have, twice a second while something runs.

    >>> await HostSession(EngineHost(engines), Channel(sock), silence_limit_s=120.0).run()  # doctest: +SKIP
    """

    def __init__(self, host: EngineHost, channel: Channel, *, silence_limit_s: float) -> None:
        """`silence_limit_s` is how long the parent waits for a sign of life."""
        super().__init__(channel, limit_s=PARENT_LIMIT_S, other_limit_s=silence_limit_s)
        self._host = host
        self._inbox = WeightInbox(host.pool)
        self._timer: asyncio.TimerHandle | None = None

    async def handle(self, call: Call, buffers: list[Any] | None) -> Result:
        """The result of a call of `ProcessEngine`."""
        argument = msgspec.msgpack.decode(call.arguments)
        match call.method:
            case "generate":
                assert buffers is not None
                return await self._generate(argument, buffers[0].view(np.int32))
            case "load_weights":
                await self._inbox.handle(argument)
                return None, ()
            case "abort":
                await self._host.abort(argument)
                return None, ()
        assert call.method in ("pause", "resume", "health", "close"), call.method
        return await getattr(self._host.pool, call.method)(), ()

    async def _generate(self, message: dict[str, Any], input_ids: IntArray) -> Result:
        params = SampleParams(**message.pop("params"))
        request = GenerateRequest(**message, input_ids=input_ids, params=params)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PROGRESS_EVERY_S, self._report)
        completion = await self._host.complete(request, "parent")
        arrays = (completion.response_ids, completion.logprobs, completion.model_steps)
        buffers = [
            np.asarray(array, kind).tobytes()
            for array, kind in zip(arrays, (np.int32, np.float32, np.int32), strict=True)
        ]
        ended: dict[str, Any] = {name: getattr(completion, name) for name in ("finish_reason", "error_msg")}
        if (experts := completion.routed_experts) is not None:
            buffers.append(experts.tobytes())
        ended["routed_experts"] = None if experts is None else (experts.dtype.str, experts.shape)
        return ended, buffers

    def _report(self) -> None:
        made = self._host.num_made("parent")
        self.channel.post(Note(encode_value(made)))
        later = asyncio.get_running_loop().call_later
        self._timer = later(PROGRESS_EVERY_S, self._report) if made else None


class EngineHost:
    """The engines of one process, and the requests that its callers have there.

    Invariant: a request is known by its caller from its first moment to its end.

    >>> host = EngineHost([engine])                                                 # doctest: +SKIP
    >>> completion = await host.complete(request, "worker 0")                       # doctest: +SKIP
    """

    def __init__(self, engines: Sequence[Engine] | None = None) -> None:
        self._pool = None if engines is None else EnginePool(engines)
        self._at_work: dict[str, set[str]] = {}
        """The ids of running requests, by caller."""

    @property
    def pool(self) -> EnginePool:
        """The engines, as one.

        Raises:
            NotBuilt: this process was started in place of one that has ended.
        """
        if self._pool is None:
            raise NotBuilt("the engine has not been built in this process")
        return self._pool

    async def complete(self, request: GenerateRequest, caller: str) -> Completion:
        """The completion of a request of `caller`; errors as of `EnginePool.generate`."""
        at_work = self._at_work.setdefault(caller, set())
        at_work.add(request.request_id)
        try:
            return await self.pool.generate(request)
        finally:
            at_work.discard(request.request_id)

    def num_made(self, caller: str) -> dict[str, int]:
        """How many tokens each running request of `caller` has by now."""
        return {name: self.pool.num_made(name) for name in self._at_work.get(caller, ())}

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; at an engine that is lost they have ended."""
        await self.pool.abort(request_ids)

    async def forget(self, caller: str) -> None:
        """End the requests of a caller whose process has ended."""
        if request_ids := list(self._at_work.pop(caller, ())):
            await self.abort(request_ids)


class NotBuilt(RuntimeError):
    """The process is a new one, in which nothing has been built yet."""


class EngineRecipe(StrictModel):
    """All that a process needs to make its engine, as plain data: its command line has it as JSON."""

    model_folder: Path
    model: ModelConfig
    engine: Component
    dtype: Precision = "float32"
    """Of the weights that the engine holds."""
    attention: AttentionKey = "auto"
    device: str = "cpu"
    threads: int = 1
    """For torch."""
