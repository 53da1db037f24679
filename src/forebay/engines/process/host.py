"""The child's side of a `ProcessEngine`: any engine, behind a socket.

::

    frames --> one task a call --> engine --> answers, in the order in which they are ready
               progress of what runs ------> twice a second, while something runs

    consumes: frames    waits for: the next one    woken by: it, or the end of the parent, which ends the host
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from forebay.config import Component
from forebay.engines.base import Engine, EngineSurroundings, GenerateRequest
from forebay.engines.build import build_engines
from forebay.io.framing import framed, read_frame
from forebay.models import ModelConfig, load_tokenizer
from forebay.models.starting_weights import AdaptersRefusedError
from forebay.types import SampleParams

PROGRESS_EVERY_S = 0.5
"""Reports are for people and for noticing stalls, which take minutes."""


class EngineHost:
    """Answers calls for `engine`, one after the other or many at once.

    >>> await EngineHost(engine, reader, writer).serve()                            # doctest: +SKIP
    """

    def __init__(self, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from forebay.engines.weights.shared_memory import WeightInbox

        self._engine, self._reader, self._writer = engine, reader, writer
        self._inbox = WeightInbox(engine)
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self) -> None:
        """Serve until the parent closes the connection or is gone."""
        hello = {
            "max_context_tokens": self._engine.max_context_tokens,
            "model_step": self._engine.model_step,
            "takes_adapters": getattr(self._engine, "takes_adapters", False),
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
            return asdict(await self._engine.health())
        if method == "abort":
            return await self._engine.abort(argument)
        assert method in ("pause", "resume", "close"), method
        return await getattr(self._engine, method)()

    async def _generate(self, message: dict[str, Any]) -> dict[str, Any]:
        request = GenerateRequest(
            **{
                **message,
                "input_ids": np.frombuffer(message["input_ids"], np.int32),
                "params": SampleParams(**message["params"]),
            }
        )
        self._running.add(request.request_id)
        if self._timer is None:
            self._report_later()
        try:
            completion = await self._engine.generate(request)
        finally:
            self._running.discard(request.request_id)
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
        made = {request_id: self._engine.num_made(request_id) for request_id in self._running}
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
    await EngineHost(engine, reader, writer).serve()
