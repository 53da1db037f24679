"""An engine in a process of its own: what runs there.

::

    start --> engines built, not serving --load_weights--> serving --> generate(requests): a stream of answers
                     | a request now is answered "lost": it would get the weights of the run's beginning
    live: does not end    serving: ends with the first weights

It wraps whatever the run file's ``[engine]`` names; several engines of one factory stand in for each other.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.cluster.calls import as_they_end
from forebay.cluster.library import find_modules_in
from forebay.cluster.weights import PlainWeight, to_tensors
from forebay.engines.base import Completion, EngineHealth, GenerateRequest
from forebay.engines.pool import EnginePool
from forebay.runs.config import RunConfig


@dataclass(frozen=True)
class EngineSpec:
    """What an engine's process is told."""

    config: RunConfig
    model_folder: Path
    number: int
    search_path: tuple[str, ...]
    """Where the run's own process finds its modules."""
    device: str
    """``cuda`` where the cluster gave it one."""
    serves_at_once: bool
    """With the weights in the model folder: nobody will give it others."""
    sleeps: bool
    """Give the device's memory to the trainer while paused."""


@dataclass(frozen=True)
class EngineFacts:
    """What an engine's process tells."""

    pid: int
    max_context_tokens: int


class EngineActor:
    """The engines of one process; see `forebay.engines.base` for what its methods do.

    Invariant: nothing is generated before weights were loaded into this process.

    >>> actor = ray.remote(EngineActor).remote()
    >>> facts = ray.get(actor.start.remote(spec))
    """

    def __init__(self) -> None:
        self._sleeps = False
        self._pool: EnginePool | None = None
        self._building = asyncio.Lock()
        self._serving = asyncio.Event()
        self._asleep = False
        self._at_work: dict[str, set[str]] = {}
        """The ids of running requests, by caller."""

    async def start(self, spec: EngineSpec) -> EngineFacts:
        """Build the engines, if this process has not yet.

        Raises:
            ConfigError: they cannot run the model.
        """
        async with self._building:
            if self._pool is None:
                find_modules_in(spec.search_path)
                self._pool = await asyncio.to_thread(_build, spec)
                self._sleeps = spec.sleeps
                if spec.serves_at_once:
                    self._serving.set()
        return EngineFacts(os.getpid(), self._pool.max_context_tokens)

    async def live(self) -> None:
        """Never returns: whoever waits for it learns of this process's end."""
        await asyncio.Event().wait()

    async def serving(self) -> None:
        """Return once there are weights to generate with."""
        await self._serving.wait()

    async def generate(
        self, requests: Sequence[GenerateRequest], caller: str
    ) -> AsyncIterator[list[tuple[int, Completion | ValueError]]]:
        """The completions of `requests` as they end; a `ValueError` for one that can never run."""
        calls = [self._generate(request, caller) for request in requests]
        async for results in as_they_end(calls):
            yield results

    async def _generate(self, request: GenerateRequest, caller: str) -> Completion | ValueError:
        if self._pool is None or not self._serving.is_set():
            return Completion(finish_reason="error", error_msg="the engine has no weights yet", lost=True)
        at_work = self._at_work.setdefault(caller, set())
        at_work.add(request.request_id)
        try:
            return await self._pool.generate(request)
        except ValueError as error:
            return error
        finally:
            at_work.discard(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests."""
        assert self._pool is not None
        for engine in self._pool.engines:
            await engine.abort(request_ids)

    async def forget(self, caller: str) -> None:
        """End the requests of a caller whose process has ended."""
        if request_ids := list(self._at_work.pop(caller, ())):
            await self.abort(request_ids)

    async def pause(self) -> None:
        """End every request and take no new one; asleep, the weights leave the device."""
        assert self._pool is not None
        await self._pool.pause()
        if self._sleeps and not self._asleep:
            self._asleep = True
            await self._each("sleep")

    async def resume(self) -> None:
        """Take requests again."""
        assert self._pool is not None
        if self._asleep:
            await self._each("wake")
            self._asleep = False
        await self._pool.resume()

    async def load_weights(self, weights: Sequence[PlainWeight], model_step: int) -> None:
        """Take over these weights, and serve."""
        assert self._pool is not None
        await self._pool.load_weights(to_tensors(weights), model_step)
        self._serving.set()

    async def num_made(self, caller: str) -> dict[str, int]:
        """How many tokens each running request of `caller` has by now."""
        assert self._pool is not None
        return {name: self._pool.num_made(name) for name in self._at_work.get(caller, ())}

    async def health(self) -> EngineHealth:
        """All engines of this process together."""
        assert self._pool is not None
        parts = await self._pool.health()
        return EngineHealth(
            ok=self._serving.is_set() and all(part.ok for part in parts),
            num_running=sum(part.num_running for part in parts),
            num_waiting=sum(part.num_waiting for part in parts),
            model_step=min(part.model_step for part in parts),
            detail="; ".join(part.detail for part in parts if part.detail),
        )

    async def close(self) -> None:
        """Free the engines, and end what they started."""
        if self._pool is not None:
            await self._pool.close()

    async def _each(self, method: str) -> None:
        """Call `method` of every engine that has it: freeing a device's memory is not every engine's."""
        assert self._pool is not None
        for engine in self._pool.engines:
            if (change := getattr(engine, method, None)) is not None:
                await change()


def _build(spec: EngineSpec) -> EnginePool:
    import torch

    from forebay.models import load_tokenizer
    from forebay.runs.rollouts import build_run_engines

    config = spec.config
    torch.set_num_threads(config.threads)
    arguments: dict[str, Any] = dict(config.engine.arguments)
    if config.engine.name == "transformers" and spec.device != "cpu":
        arguments.setdefault("device", spec.device)
    engine = config.engine.model_copy(update={"arguments": arguments})
    engines = build_run_engines(
        config.model_copy(update={"engine": engine}),
        spec.model_folder,
        load_tokenizer(spec.model_folder),
        scratch=config.folder / "engines" / str(spec.number),
    )
    return EnginePool(engines)
