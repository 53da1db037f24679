"""Engines of this process at work for callers in others: one host, whichever way calls travel.

::

    caller --call--> EngineHost --> EnginePool --> engines
                        '-- knows whose request each is, so that those of a caller that is gone end

    transports: frames on a socket (`SocketHost`); calls of an actor (`forebay.cluster.engine_actor`)
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from forebay.config import Component
from forebay.engines.base import Completion, Engine, EngineSurroundings, GenerateRequest
from forebay.engines.build import build_engines
from forebay.engines.pool import EnginePool
from forebay.io.framing import framed, read_frame
from forebay.models import ModelConfig, load_tokenizer
from forebay.models.starting_weights import AdaptersRefusedError
from forebay.types import SampleParams

PROGRESS_EVERY_S = 0.5
"""Reports are for people and for noticing stalls, which take minutes."""


class NotBuilt(RuntimeError):
    """The process is a new one, in which nothing has been built yet."""


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


class SocketHost:
    """Answers calls that come as frames, one after the other or many at once.

    consumes: frames    waits for: the next one    woken by: it, or the end of the parent, which ends the host

    >>> await SocketHost(EngineHost([engine]), reader, writer).serve()              # doctest: +SKIP
    """

    def __init__(self, host: EngineHost, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from forebay.engines.weights.shared_memory import WeightInbox

        self._host, self._reader, self._writer = host, reader, writer
        self._inbox = WeightInbox(host.pool)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self) -> None:
        """Serve until the parent closes the connection or is gone."""
        hello = {
            "max_context_tokens": self._host.pool.max_context_tokens,
            "model_step": self._host.pool.model_step,
            "takes_adapters": self._host.pool.takes_adapters,
        }
        self._write(hello)
        while (frame := await read_frame(self._reader)) is not None:
            number, method, argument = msgspec.msgpack.decode(frame)
            task = asyncio.create_task(self._answer(number, method, argument))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, method: str, argument: Any) -> None:
        try:
            result, error = await self._call(method, argument), None
        # It goes to whoever called.
        except Exception as raised:
            text = str(raised) if isinstance(raised, ValueError) else f"{type(raised).__name__}: {raised}"
            is_plain = isinstance(raised, ValueError) and not isinstance(raised, AdaptersRefusedError)
            result, error = None, ("ValueError" if is_plain else type(raised).__name__, text)
        self._write((number, result, error))

    async def _call(self, method: str, argument: Any) -> Any:
        if method == "generate":
            return await self._generate(argument)
        if method == "load_weights":
            return await self._inbox.handle(argument)
        if method == "health":
            return asdict(await self._host.pool.health())
        if method == "abort":
            return await self._host.abort(argument)
        assert method in ("pause", "resume", "close"), method
        return await getattr(self._host.pool, method)()

    async def _generate(self, message: dict[str, Any]) -> dict[str, Any]:
        request = GenerateRequest(
            **{
                **message,
                "input_ids": np.frombuffer(message["input_ids"], np.int32),
                "params": SampleParams(**message["params"]),
            }
        )
        if self._timer is None:
            self._report_later()
        completion = await self._host.complete(request, "parent")
        return {
            "response_ids": np.asarray(completion.response_ids, np.int32).tobytes(),
            "logprobs": np.asarray(completion.logprobs, np.float32).tobytes(),
            "model_steps": np.asarray(completion.model_steps, np.int32).tobytes(),
            "finish_reason": completion.finish_reason,
            "error_msg": completion.error_msg,
        }

    def _report_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_EVERY_S, self._report)

    def _report(self) -> None:
        self._timer = None
        made = self._host.num_made("parent")
        self._write((None, made, None))
        if made:
            self._report_later()

    def _write(self, message: Any) -> None:
        self._writer.write(framed(msgspec.msgpack.encode(message)))


def main() -> None:
    """The child: ``python -c ... SOCKET RECIPE``."""
    handle, recipe = int(sys.argv[1]), json.loads(sys.argv[2])
    import torch

    torch.set_num_threads(recipe["threads"])
    folder = Path(recipe["model_folder"])
    surroundings = EngineSurroundings(
        model_folder=folder,
        model=ModelConfig.model_validate(recipe["model"]),
        dtype=recipe["dtype"],
        tokenizer=load_tokenizer(folder),
        scratch=folder,
    )
    (engine,) = build_engines(Component.model_validate(recipe["engine"]), surroundings)
    asyncio.run(_serve(engine, socket.socket(fileno=handle)))
    # Threads of the engine may be in a forward pass that nobody waits for.
    os._exit(0)


async def _serve(engine: Engine, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    await SocketHost(EngineHost([engine]), reader, writer).serve()
