"""A rollout worker: the process that has agent loops and judges, and pushes what the run is to know.

::

    generate --> agent loop of the job's task --> RolloutController --> RayEngine
                         | judge                             live --> reports, copies of unfinished groups
                         v
                     judged group
"""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from forebay.agents import AgentLoop
from forebay.cluster.calls import PUSH_EVERY_S, as_one_piece, built, from_one_piece
from forebay.cluster.engines import RayEngine
from forebay.cluster.library import PartSpec, find_modules_in
from forebay.cluster.supervisor import BEAT_EVERY_S
from forebay.engines import RolloutController
from forebay.produce.strategies.context import Group
from forebay.produce.strategies.rules import check_form
from forebay.produce.unfinished import copy_unfinished
from forebay.runs.rollouts import build_task_loop
from forebay.watching.activity import Activities, loop_time

LoopName = tuple[str, bool]
"""Task name, and whether it is for held-out prompts."""


class RolloutWorker:
    """The agent loops of every task of a run, made an actor by Ray.

    ::

        actor = ray.remote(RolloutWorker).remote()
        pid = ray.get(actor.start.remote(spec))
    """

    def __init__(self) -> None:
        self._activities = Activities()
        self._tokenizer: Any = None
        self._engines: dict[Any, RayEngine] = {}
        """Engines by Ray's handle of their actor."""
        self._controller: RolloutController | None = None
        self._loops: dict[LoopName, AgentLoop] = {}
        self._jobs: dict[int, Job] = {}
        self._copy_every_s = math.inf

    async def prepare(self, model_folder: Path) -> None:
        """Load what takes long; may be called before `start`, while the engines load theirs."""
        if self._tokenizer is None:
            from forebay.models import load_tokenizer

            self._tokenizer = await asyncio.to_thread(load_tokenizer, model_folder)

    async def start(self, spec: "WorkerSpec") -> int:
        """Build the agent loops, if this process has not yet; its process id.

        Called again it takes over the engines, of which some may have been replaced.

        Raises:
            ConfigError: an agent or a judge cannot be built here.
        """
        if self._controller is None:
            find_modules_in(spec.search_path)
            await self.prepare(spec.model_folder)
        # Those that join before those that leave, so that there is always one to go to.
        for actor, _ in spec.engines:
            if actor not in self._engines:
                engine = RayEngine(actor, caller=spec.name, max_context_tokens=spec.max_context_tokens)
                self._engines[actor] = engine
                if self._controller is not None:
                    self._controller.add(engine)
        left = [self._engines.pop(actor) for actor in self._engines.keys() - dict(spec.engines).keys()]
        controller = self._controller = self._controller or self._build(spec)
        controller.rank({self._engines[actor]: times for actor, times in spec.engines})
        # Their requests go on at others, with their tokens.
        await asyncio.gather(*map(controller.remove, left))
        return os.getpid()

    def _build(self, spec: "WorkerSpec") -> RolloutController:
        limit_s = None
        if (every_s := spec.config.produce.save_partial_every_s) is not None:
            # A quarter passes until a rollout has its tokens, one until the run has the copy, and half until
            # that is saved.
            limit_s = self._copy_every_s = every_s / 4
        controller = RolloutController(
            list(self._engines.values()),
            seed=spec.config.seed,
            time_limit_s=limit_s,
            goes_on=True,
            activities=self._activities,
        )
        shared = {"controller": controller, "tokenizer": self._tokenizer, "activities": self._activities}
        # Prompts of both kinds may be under way at the same time, with other settings.
        self._loops = {
            (task.name, held_out): build_task_loop(spec.config, task, held_out=held_out, **shared)
            for task in spec.config.tasks
            for held_out in (False, True)
        }
        return controller

    async def live(self) -> "AsyncIterator[Report | Copies]":
        """The work under way whenever that has changed, and at least as a sign of life; copies of unfinished
        groups. It never ends.
        """
        before, copied, copied_s = None, dict[int, int](), loop_time()
        while True:
            report = self._report()
            if before is None or report != before or report.at_s >= before.at_s + BEAT_EVERY_S:
                yield report
                before = report
            if report.at_s >= copied_s + self._copy_every_s:
                copied_s = report.at_s
                if copies := self._copies(copied):
                    yield copies
            # A pace: what changes meanwhile is told together.
            await asyncio.sleep(min(PUSH_EVERY_S, copied_s + self._copy_every_s - report.at_s))

    async def generate(self, told: bytes) -> bytes:
        """The group, generated and judged; as one piece, as it was.

        With it are told the number by which the job can be cancelled, its loop, and whether its rollouts go on.

        Raises:
            NotBuilt: this process was started in place of one that has ended.
        """
        built(self._controller)
        states, number, loop, is_partial = from_one_piece(told)
        lengths = [len(state.response_ids) for state in states]
        job = self._jobs[number] = Job(asyncio.current_task(), self._loops[loop], states)
        try:
            made = await job.loop.generate_group(states, enable_partial_rollout=is_partial)
            return as_one_piece(check_form(made, states, lengths))
        finally:
            del self._jobs[number]

    async def cancel(self, number: int) -> None:
        """End a job, whose group is not waited for any more."""
        if (job := self._jobs.get(number)) is not None and job.task is not None:
            job.task.cancel()

    async def pause(self) -> None:
        """Have what is running end as ABORTED; the engines are paused by the run."""
        built(self._controller)
        for loop in self._loops.values():
            await loop.pause()

    async def resume(self) -> None:
        """Generate again."""
        # The loops themselves go on with their next group (`AgentLoop.go_on`).
        await built(self._controller).continue_generation()

    async def close(self) -> None:
        """Free what agents and judges hold."""
        for loop in self._loops.values():
            await loop.close()

    def _report(self) -> "Report":
        controller = built(self._controller)
        notes, queued = {}, controller.queued()
        for activity in self._activities.in_flight():
            known, name = controller.describe(activity), str(activity.name)
            text = known if name in queued else f"{known + ', ' if known else ''}{activity.stage}"
            notes[name] = text, activity.start_s
        num_retries = int(controller.counts()["retries"])
        return Report(os.getpid(), notes, controller.count_tokens_made(), num_retries, loop_time(), queued)

    def _copies(self, copied: dict[int, int]) -> "Copies":
        """Copies of groups that have got further; `copied` are the lengths of those copied before."""
        copies, before = {}, dict(copied)
        copied.clear()
        for number, job in self._jobs.items():
            copied[number] = sum(len(state.response_ids) for state in job.states)
            if job.loop.is_whole_at_awaits and copied[number] != before.get(number, 0):
                copies[number] = copy_unfinished(job.states, job.loop.sample_params)
        return copies


Copies = dict[int, Group]
"""Unfinished groups, by the numbers of their jobs."""


class Job(NamedTuple):
    """A group in work."""

    task: asyncio.Task[Any] | None
    loop: AgentLoop
    states: Group


@dataclass(frozen=True, kw_only=True)
class WorkerSpec(PartSpec):
    """All that a worker's process is told."""

    engines: tuple[tuple[Any, float], ...] = ()
    """Ray's handles of `EngineActor`s, of which the first equally busy one gets a request; how much busier each
    counts than it is, a straggler.
    """
    max_context_tokens: int = 0
    """The most tokens, prompt and response together, that every engine takes."""


@dataclass(frozen=True)
class Report:
    """How far a worker's process is."""

    pid: int | None = None
    notes: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """For each rollout or group in work: what is done, how far; and since when, by the process's clock."""
    num_tokens_made: int = 0
    num_retries: int = 0
    """Requests that went to another engine, or to the same again, because one was lost."""
    at_s: float = field(default=0.0, compare=False)
    """When it was made, by the same clock."""
    queued: frozenset[str] = frozenset()
    """Rollouts that wait for an engine, or for room there."""
