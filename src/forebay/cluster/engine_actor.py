"""An engine in a process of its own: what runs there.

::

    start --> engines built, not serving --load_weights--> serving --> generate(requests): a stream of answers
                     | a request now is answered "lost": it would get the weights of the run's beginning
    live: does not end    serving: ends with the first weights
    failure: ends if every engine is lost for good, as a server that does not come back; then the run ends
             this process, and another one builds engines anew

It wraps whatever the run file's ``[engine]`` names; several engines of one factory stand in for each other.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.cluster.calls import ItemFailed, as_they_end
from forebay.cluster.library import find_modules_in
from forebay.cluster.supervisor import NotBuilt
from forebay.cluster.weights import PlainWeight, to_tensors
from forebay.config import Component, ConfigError
from forebay.engines.base import Completion, EngineHealth, EngineLost, GenerateRequest
from forebay.engines.pool import EnginePool
from forebay.runs.config import RunConfig

logger = logging.getLogger(__name__)


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
        self._built: EnginePool | None = None
        self._building = asyncio.Lock()
        self._serving = asyncio.Event()
        self._lost_because = ""
        self._is_lost = asyncio.Event()
        self._asleep = False
        self._at_work: dict[str, set[str]] = {}
        """The ids of running requests, by caller."""

    async def start(self, spec: EngineSpec) -> EngineFacts:
        """Build the engines, if this process has not yet.

        Raises:
            ConfigError: they cannot run the model.
        """
        async with self._building:
            if self._built is None:
                find_modules_in(spec.search_path)
                self._built = await asyncio.to_thread(_build, spec)
                self._sleeps = spec.sleeps
                if spec.serves_at_once:
                    self._serving.set()
        return EngineFacts(os.getpid(), self._pool.max_context_tokens)

    async def live(self) -> None:
        """Never returns: whoever waits for it learns of this process's end."""
        await asyncio.Event().wait()

    async def failure(self) -> str:
        """Return why, once every engine is lost for good."""
        await self._is_lost.wait()
        return self._lost_because

    async def serving(self) -> None:
        """Return once there are weights to generate with."""
        await self._serving.wait()

    async def generate(
        self, requests: Sequence[GenerateRequest], caller: str
    ) -> AsyncIterator[list[tuple[int, Completion | ValueError | ItemFailed]]]:
        """The completions of `requests` as they end; a `ValueError` for one that can never run."""
        calls = [self._generate(request, caller) for request in requests]
        async for results in as_they_end(calls):
            yield results

    async def _generate(self, request: GenerateRequest, caller: str) -> Completion | ValueError:
        if self._built is None or not self._serving.is_set():
            return Completion(finish_reason="error", error_msg="the engine has no weights yet", lost=True)
        at_work = self._at_work.setdefault(caller, set())
        at_work.add(request.request_id)
        try:
            return await self._pool.generate(request)
        except ValueError as error:
            return error
        except EngineLost as error:
            self._lose(error)
            return Completion(finish_reason="error", error_msg=str(error), lost=True)
        finally:
            at_work.discard(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; at an engine that is lost they have ended."""
        engines = self._pool.engines
        ended = await asyncio.gather(*(e.abort(request_ids) for e in engines), return_exceptions=True)
        for error in filter(None, ended):
            logger.debug("an engine was asked to abort: %s", error)

    async def forget(self, caller: str) -> None:
        """End the requests of a caller whose process has ended."""
        if (request_ids := list(self._at_work.pop(caller, ()))) and self._built is not None:
            await self.abort(request_ids)

    async def pause(self) -> None:
        """End every request and take no new one; asleep, the weights leave the device."""
        await self._pool.pause()
        if self._sleeps and not self._asleep:
            self._asleep = True
            await self._each("sleep")

    async def resume(self) -> None:
        """Take requests again."""
        if self._asleep:
            await self._each("wake")
            self._asleep = False
        await self._pool.resume()

    async def load_weights(self, weights: Sequence[PlainWeight], model_step: int) -> None:
        """Take over these weights, and serve.

        Raises:
            EngineLost: no engine is left.
        """
        try:
            await self._pool.load_weights(to_tensors(weights), model_step)
        except EngineLost as error:
            self._lose(error)
            raise
        self._serving.set()

    async def num_made(self, caller: str) -> dict[str, int]:
        """How many tokens each running request of `caller` has by now."""
        return {name: self._pool.num_made(name) for name in self._at_work.get(caller, ())}

    async def health(self) -> EngineHealth:
        """All engines of this process together."""
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
        if self._built is not None:
            await self._built.close()

    @property
    def _pool(self) -> EnginePool:
        """The engines.

        Raises:
            NotBuilt: this process was started in place of one that has ended.
        """
        if self._built is None:
            raise NotBuilt("the engine has not been built in this process")
        return self._built

    def _lose(self, error: EngineLost) -> None:
        """Serve no more: who waits for this engine waits for another process."""
        self._serving.clear()
        self._lost_because = str(error)
        self._is_lost.set()

    async def _each(self, method: str) -> None:
        for engine in self._pool.engines:
            await getattr(engine, method)()


def _build(spec: EngineSpec) -> EnginePool:
    import torch

    from forebay.models import load_tokenizer
    from forebay.runs.rollouts import build_run_engines

    config = spec.config
    torch.set_num_threads(config.threads)
    engines = build_run_engines(
        config.model_copy(update={"engine": engine_on(spec.device, config.engine)}),
        spec.model_folder,
        load_tokenizer(spec.model_folder),
        scratch=config.folder / "engines" / str(spec.number),
    )
    for built in engines:
        if spec.sleeps and not (hasattr(built, "sleep") and hasattr(built, "wake")):
            raise ConfigError(
                f"engine {config.engine.name!r} cannot give its GPU to the trainer between steps: it has no "
                f"sleep and wake ({type(built).__name__}); use engine 'transformers', give it a GPU of its "
                f"own with produce.mode = 'separate', or shares with gpus_per_engine and gpus_per_trainer"
            )
    return EnginePool(engines)


def engine_on(device: str, engine: Component) -> Component:
    """`engine` on the device that Ray gave, if it computes in this process or a child, and names none."""
    inner = engine.arguments.get("engine", "transformers") if engine.name == "process" else engine.name
    if inner != "transformers" or device == "cpu":
        return engine
    return engine.model_copy(update={"arguments": {"device": device, **engine.arguments}})
