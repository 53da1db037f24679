"""An engine in a process of its own: what runs there.

::

    start --> engines built, not serving --load_weights--> serving --> generate(requests): a stream of answers
                     | a request now is answered "lost": it would get the weights of the run's beginning
    live: does not end    serving: ends with the first weights
    failure: ends if every engine is lost for good, as a server that does not come back; then the run ends
             this process, and another one builds engines anew

It wraps the engines that the run file's ``[engine]`` names; several of them stand in for each other.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from forebay.cluster.calls import ItemFailed, as_they_end
from forebay.cluster.library import PartSpec, find_modules_in
from forebay.config import Component, ConfigError
from forebay.engines.base import Completion, Engine, EngineHealth, EngineLost, GenerateRequest
from forebay.engines.pool import EnginePool
from forebay.engines.process.host import EngineHost
from forebay.engines.weights.between_processes import PlainWeight, to_tensors


@dataclass(frozen=True, kw_only=True)
class EngineSpec(PartSpec):
    """All that an engine's process is told."""

    number: int
    device: str
    """``cuda`` where the cluster gave it one."""
    serves_at_once: bool
    """With the weights in the model folder: it will be given no others."""
    sleeps: bool
    """Give the device's memory to the trainer while paused."""


class EngineActor(EngineHost):
    """The host of a run's engines on a cluster; see `forebay.engines.base` for the meaning of its methods.

    Invariant: nothing is generated before weights were loaded into this process.

    >>> actor = ray.remote(EngineActor).remote()
    >>> pid = ray.get(actor.start.remote(spec))
    """

    def __init__(self) -> None:
        super().__init__()
        self._building = asyncio.Lock()
        self._serving = asyncio.Event()
        self._lost_because = ""
        self._is_lost = asyncio.Event()
        self._sleeps = self._asleep = False

    async def start(self, spec: EngineSpec) -> int:
        """Build the engines, if this process has not yet; the id of the process.

        Raises:
            ConfigError: they cannot run the model.
        """
        async with self._building:
            if self._pool is None:
                find_modules_in(spec.search_path)
                self._pool = EnginePool(await asyncio.to_thread(_build, spec))
                self._sleeps = spec.sleeps
                if spec.serves_at_once:
                    self._serving.set()
        return os.getpid()

    async def max_context_tokens(self) -> int:
        """The most tokens, prompt and response together, one request may reach."""
        return self.pool.max_context_tokens

    async def live(self) -> None:
        """Never returns: a caller that waits for it learns of this process's end."""
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
        async for results in as_they_end([self._generate(request, caller) for request in requests]):
            yield results

    async def _generate(self, request: GenerateRequest, caller: str) -> Completion | ValueError:
        if not self._serving.is_set():
            return Completion(finish_reason="error", error_msg="the engine has no weights yet", lost=True)
        try:
            return await self.complete(request, caller)
        except ValueError as error:
            return error
        except EngineLost as error:
            self._lose(error)
            return Completion(finish_reason="error", error_msg=str(error), lost=True)

    async def pause(self) -> None:
        """End every request and take no new one; asleep, the weights leave the device."""
        await self.pool.pause()
        if self._sleeps and not self._asleep:
            self._asleep = True
            await self._each("sleep")

    async def resume(self) -> None:
        """Take requests again."""
        if self._asleep:
            await self._each("wake")
            self._asleep = False
        await self.pool.resume()

    async def load_weights(self, weights: Sequence[PlainWeight], model_step: int) -> None:
        """Take over these weights, and serve.

        Raises:
            EngineLost: no engine is left.
        """
        try:
            await self.pool.load_weights(to_tensors(weights), model_step)
        except EngineLost as error:
            self._lose(error)
            raise
        self._serving.set()

    async def made_for(self, caller: str) -> dict[str, int]:
        """How many tokens each running request of `caller` has by now."""
        return self.num_made(caller)

    async def health(self) -> EngineHealth:
        """All engines of this process together."""
        health = await self.pool.health()
        return replace(health, ok=health.ok and self._serving.is_set())

    async def close(self) -> None:
        """Free the engines, and end what they started."""
        if self._pool is not None:
            await self._pool.close()

    def _lose(self, error: EngineLost) -> None:
        """Serve no more: callers that wait for this engine wait for another process."""
        self._serving.clear()
        self._lost_because = str(error)
        self._is_lost.set()

    async def _each(self, method: str) -> None:
        for engine in self.pool.engines:
            await getattr(engine, method)()


def _build(spec: EngineSpec) -> list[Engine]:
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
    return engines


def engine_on(device: str, engine: Component) -> Component:
    """`engine` on the device that Ray gave, if it computes in this process or a child, and names none."""
    inner = engine.arguments.get("engine", "transformers") if engine.name == "process" else engine.name
    if inner != "transformers" or device == "cpu":
        return engine
    return engine.model_copy(update={"arguments": {"device": device, **engine.arguments}})
