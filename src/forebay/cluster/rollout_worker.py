"""Agent loops and judges in a process of their own: what runs there.

::

    generate([job, ...]) --> agent loop of the job's task --> RolloutController --> RayEngine ...
                                     | judge
                                     v
                             a stream of judged groups, as they end

It holds no state that matters: the run keeps every group as it was until it is back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.agents import AgentLoop
from forebay.cluster.calls import ItemFailed, as_they_end
from forebay.cluster.engines import RayEngine
from forebay.cluster.library import PartSpec, find_modules_in
from forebay.engines import RolloutController
from forebay.engines.process.host import NotBuilt
from forebay.runs.rollouts import build_task_loop
from forebay.types import RolloutState
from forebay.watching.activity import Activities

LoopName = tuple[str, bool]
"""Task name, and whether it is for held-out prompts."""


class RolloutWorker:
    """The agent loops of every task of a run.

    >>> actor = ray.remote(RolloutWorker).remote()
    >>> pid = ray.get(actor.start.remote(spec))
    """

    def __init__(self) -> None:
        self._activities = Activities()
        self._tokenizer: Any = None
        self._engines: dict[Any, RayEngine] = {}
        """By Ray's handle."""
        self._built: RolloutController | None = None
        self._loops: dict[LoopName, AgentLoop] = {}
        self._jobs: dict[int, asyncio.Task[Any]] = {}

    async def prepare(self, model_folder: Path) -> None:
        """Load what takes long; may be called before `start`, while the engines load theirs."""
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(_load_tokenizer, model_folder)

    async def start(self, spec: WorkerSpec) -> int:
        """Build the agent loops, if this process has not yet; its process id.

        Called again it takes over the engines, of which some may have been replaced.

        Raises:
            ConfigError: an agent or a judge cannot be built here.
        """
        if self._built is None:
            find_modules_in(spec.search_path)
            await self.prepare(spec.model_folder)
        if tuple(self._engines) != spec.engines:
            self._engines = {
                actor: self._engines.get(actor) or RayEngine(actor, spec.max_context_tokens, caller=spec.name)
                for actor in spec.engines
            }
            if self._built is not None:
                self._built.engines = list(self._engines.values())
        if self._built is None:
            self._build(spec)
        return os.getpid()

    def _build(self, spec: WorkerSpec) -> None:
        controller = RolloutController(list(self._engines.values()), seed=spec.config.seed)
        self._loops = {
            (task.name, held_out): build_task_loop(
                spec.config,
                task,
                held_out=held_out,
                controller=controller,
                tokenizer=self._tokenizer,
                activities=self._activities,
            )
            for task in spec.config.tasks
            for held_out in (False, True)
        }
        self._built = controller

    def _ready(self) -> RolloutController:
        """The controller that the agent loops generate with.

        Raises:
            NotBuilt: this process was started in place of one that has ended.
        """
        if self._built is None:
            raise NotBuilt("the agent loops have not been built in this process")
        return self._built

    async def live(self) -> None:
        """Never returns: a caller that waits for it learns of this process's end."""
        await asyncio.Event().wait()

    async def generate(
        self, jobs: Sequence[Job]
    ) -> AsyncIterator[list[tuple[int, list[RolloutState] | ItemFailed]]]:
        """The groups of `jobs` as they are done.

        Raises:
            NotBuilt: this process was started in place of one that has ended.
        """
        self._ready()
        async for results in as_they_end([self._generate(job) for job in jobs]):
            yield results

    async def _generate(self, job: Job) -> list[RolloutState]:
        task = asyncio.current_task()
        assert task is not None
        self._jobs[job.number] = task
        try:
            return await self._loops[job.loop].generate_group(
                job.states, enable_partial_rollout=job.enable_partial_rollout
            )
        finally:
            del self._jobs[job.number]

    async def cancel(self, number: int) -> None:
        """End a job, whose group is not waited for any more."""
        if (work := self._jobs.get(number)) is not None:
            work.cancel()

    async def pause(self) -> None:
        """Have what is running end as ABORTED; the engines are paused by the run."""
        self._ready()
        for loop in self._loops.values():
            await loop.pause()

    async def resume(self) -> None:
        """Go on."""
        await self._ready().continue_generation()

    async def close(self) -> None:
        """Free what agents and judges hold."""
        for loop in self._loops.values():
            await loop.close()

    async def report(self) -> Report:
        """The work that is under way, and how far it is."""
        controller = self._ready()
        await asyncio.gather(*(engine.look() for engine in self._engines.values()))
        notes = {}
        for activity in self._activities.in_flight():
            known = controller.describe(activity)
            age_s = self._activities.age_s(activity)
            notes[str(activity.name)] = f"{known + ', ' if known else ''}{activity.stage} for {age_s:.0f} s"
        return Report(notes, controller.count_tokens_made(), int(controller.counts()["retries"]))


@dataclass(frozen=True, kw_only=True)
class WorkerSpec(PartSpec):
    """All that a worker's process is told."""

    engines: tuple[Any, ...]
    """Ray's handles of `EngineActor`s; of equally busy ones the first gets a request."""
    max_context_tokens: int
    """Of every engine."""


@dataclass(frozen=True)
class Job:
    """A group to be generated and judged."""

    number: int
    """By which it can be cancelled."""
    loop: LoopName
    states: list[RolloutState]
    enable_partial_rollout: bool


@dataclass(frozen=True)
class Report:
    """How far a worker is."""

    notes: Mapping[str, str]
    """By rollout or group that something is done to: what, for how long, how far."""
    num_tokens_made: int
    num_retries: int = 0
    """Requests that went to another engine, or to the same again, because one was lost."""


def _load_tokenizer(model_folder: Path) -> Any:
    from forebay.models import load_tokenizer

    return load_tokenizer(model_folder)
