"""Rollout workers: agent loops and judges in other processes, and how the run's own process uses them.

::

    RayAgentLoop.generate_group --> the least busy worker that is up --> judged group
                                          | its process ended: the group, which was kept, goes to another
                                          v
                                    counted, and told to the ledger; the third try is its last

    RolloutWorker   generate --> agent loop of the job's task --> RolloutController --> RayEngine
                                          | judge
                                          v
                                      judged group

    ClusterController: pause and continue for engines and workers, weights for engines

A worker's process holds no state that matters: the run keeps every group as it was until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.agents import AgentLoop
from forebay.aio.changed import Changes
from forebay.cluster.calls import ActorLost, CallFailed, asked, built
from forebay.cluster.engines import PlacedEngine, RayEngine
from forebay.cluster.library import PartSpec, Published, find_modules_in, import_ray
from forebay.cluster.supervisor import Supervised
from forebay.engines import Engine, RolloutController
from forebay.engines.pool import EnginePool
from forebay.runs.placement import RetryListener
from forebay.runs.rollouts import build_task_loop
from forebay.types import RolloutState, Status, reset_rollout_response
from forebay.watching.activity import GENERATE, Activities, Activity

logger = logging.getLogger(__name__)

LoopName = tuple[str, bool]
"""Task name, and whether it is for held-out prompts."""
Scale = Callable[[str, str], Awaitable[str]]


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
        self._jobs: dict[int, asyncio.Task[Any]] = {}

    async def prepare(self, model_folder: Path) -> None:
        """Load what takes long; may be called before `start`, while the engines load theirs."""
        if self._tokenizer is None:
            from forebay.models import load_tokenizer

            self._tokenizer = await asyncio.to_thread(load_tokenizer, model_folder)

    async def start(self, spec: WorkerSpec) -> int:
        """Build the agent loops, if this process has not yet; its process id.

        Called again it takes over the engines, of which some may have been replaced.

        Raises:
            ConfigError: an agent or a judge cannot be built here.
        """
        if self._controller is None:
            find_modules_in(spec.search_path)
            await self.prepare(spec.model_folder)
        # Those that join before those that leave, so that there is always one to go to.
        for actor in spec.engines:
            if actor not in self._engines:
                engine = RayEngine(actor, caller=spec.name, max_context_tokens=spec.max_context_tokens)
                self._engines[actor] = engine
                if self._controller is not None:
                    self._controller.add(engine)
        left = [self._engines.pop(actor) for actor in set(self._engines).difference(spec.engines)]
        if self._controller is None:
            self._build(spec)
        else:
            # Their requests go on at others, with their tokens.
            await asyncio.gather(*map(self._controller.remove, left))
        return os.getpid()

    def _build(self, spec: WorkerSpec) -> None:
        engines, seed = list(self._engines.values()), spec.config.seed
        controller = RolloutController(engines, seed=seed, activities=self._activities)
        shared = {"controller": controller, "tokenizer": self._tokenizer, "activities": self._activities}
        # Prompts of both kinds may be under way at the same time, with other settings.
        self._loops = {
            (task.name, held_out): build_task_loop(spec.config, task, held_out=held_out, **shared)
            for task in spec.config.tasks
            for held_out in (False, True)
        }
        self._controller = controller

    async def live(self, *, while_it_works: bool = False) -> None:
        """Never returns: a caller that waits for it learns of this process's end."""
        await asyncio.Event().wait()

    async def generate(
        self, number: int, loop: LoopName, states: list[RolloutState], is_partial: bool
    ) -> list[RolloutState]:
        """The group of `states`, generated and judged; `number` is that by which the job can be cancelled.

        Raises:
            NotBuilt: this process was started in place of one that has ended.
        """
        built(self._controller)
        task = asyncio.current_task()
        assert task is not None
        self._jobs[number] = task
        try:
            return await self._loops[loop].generate_group(states, enable_partial_rollout=is_partial)
        finally:
            del self._jobs[number]

    async def cancel(self, number: int) -> None:
        """End a job, whose group is not waited for any more."""
        if (work := self._jobs.get(number)) is not None:
            work.cancel()

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

    async def report(self) -> Report:
        """The work that is under way, and how far it is."""
        controller = built(self._controller)
        await asyncio.gather(*(engine.look() for engine in self._engines.values()))
        notes = {}
        for activity in self._activities.in_flight():
            known = controller.describe(activity)
            age_s = self._activities.age_s(activity)
            notes[str(activity.name)] = f"{known + ', ' if known else ''}{activity.stage} for {age_s:.0f} s"
        num_retries = int(controller.counts()["retries"])
        return Report(os.getpid(), notes, controller.count_tokens_made(), num_retries)


@dataclass(frozen=True, kw_only=True)
class WorkerSpec(PartSpec):
    """All that a worker's process is told."""

    engines: tuple[Any, ...] = ()
    """Ray's handles of `EngineActor`s; of equally busy ones the first gets a request."""
    max_context_tokens: int = 0
    """The most tokens, prompt and response together, that every engine takes."""


@dataclass(frozen=True)
class Report:
    """How far a worker's process is."""

    pid: int | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    """For each rollout or group in work: what is done, for how long, how far."""
    num_tokens_made: int = 0
    num_retries: int = 0
    """Requests that went to another engine, or to the same again, because one was lost."""


MAX_LOST_WORKERS = 3
"""Workers that one group may lose before it fails: a group that brings down every worker must end."""

LOOK_EVERY_S = 1.0
"""The time between two reports of the workers, which people and the stall watch read."""


class Workers:
    """All rollout workers of a run.

    Invariant: one worker has a group at a time; the caller's rollouts stay as they were until it is back::

        group = await workers.generate(("math", False), states, enable_partial_rollout=True)
    """

    def __init__(self, workers: Sequence[PlacedWorker]) -> None:
        self.all = list(workers)
        """One that is gone for good may be replaced."""
        self._left: list[PlacedWorker] = []
        """Workers that get no more groups, or are gone."""
        self.on_retry: RetryListener | None = None
        """Told of each group that is generated again."""
        self.num_retries = 0
        """Groups that were generated again because their worker had ended."""
        self._numbers = itertools.count()
        self._looking: asyncio.Future[list[None]] | None = None
        self._looked_s = float("-inf")
        self._last_tries = asyncio.Lock()
        self._is_paused = False
        self._changes = Changes()
        """A worker is up again, a group has ended, or a pause begins."""

    @property
    def ever(self) -> list[PlacedWorker]:
        """All, with those that are leaving: these are paused like the others; and those that have left."""
        return [*self.all, *self._left]

    async def generate(
        self, loop: LoopName, states: list[RolloutState], *, enable_partial_rollout: bool
    ) -> list[RolloutState]:
        """The group, generated and judged by some worker: other objects than those given.

        Raises:
            GroupFailed: the agent loop raised, or three workers ended over the group.
            Paused: it would have to wait for a worker.
        """
        lost: list[str] = []
        while True:
            # Before its last try a group may only have been beside the one that brings workers down.
            turn = self._last_tries if len(lost) == MAX_LOST_WORKERS - 1 else contextlib.nullcontext()
            async with turn:
                worker = await self._least_busy()
                try:
                    return await worker.generate(next(self._numbers), loop, states, enable_partial_rollout)
                except ActorLost as error:
                    lost.append(f"{worker.name}: {error}")
            if len(lost) == MAX_LOST_WORKERS:
                raise GroupFailed(f"{len(lost)} workers ended over this group: {'; '.join(lost)}")
            self.num_retries += 1
            if self.on_retry is not None:
                self.on_retry(states[0].task_name, states[0].group_id, "worker died")

    async def pause(self) -> None:
        """Have what is running end as ABORTED, and what waits for a worker too."""
        self._is_paused = True
        self._changes.note()
        await asyncio.gather(*(worker.pause() for worker in self.ever))

    async def resume(self) -> None:
        """Generate again."""
        self._is_paused = False
        await asyncio.gather(*(worker.resume() for worker in self.ever))

    def note_of(self, name: str) -> str:
        """The last report on the rollout or group `name`, which may be a second old; empty without one."""
        self._look()
        # The last report of a process that has ended tells of groups that others have by now.
        reports = [worker.report for worker in self.ever if worker.is_up]
        return next((report.notes[name] for report in reports if name in report.notes), "")

    def count_tokens_made(self) -> int:
        """Tokens made so far, as of the last report; it never falls."""
        self._look()
        return sum(worker.num_tokens_made for worker in self.ever)

    def count_retries(self) -> int:
        """Requests that were made again because an engine was lost, as of the last report."""
        self._look()
        return sum(worker.num_retries for worker in self.ever)

    async def close(self) -> None:
        """Watch no more, and free what the workers hold."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self.ever), return_exceptions=True)

    async def leave(self, worker: PlacedWorker) -> None:
        """Give it no more groups; return once those that it has are done."""
        self.all.remove(worker)
        self._left.append(worker)
        while worker.num_in_flight:
            await self._changes.wait(self._changes.version)

    async def _least_busy(self) -> PlacedWorker:
        while True:
            for worker in self.all:
                worker.on_change = self._changes.note
                # Here, where there is an event loop; a second call does nothing.
                worker.watch()
            if up := [worker for worker in self.all if worker.is_up]:
                return min(up, key=lambda worker: worker.num_in_flight)
            if self._is_paused:
                raise Paused
            await self._changes.wait(self._changes.version)

    def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        # One at a time: a worker that hangs holds up the next, until its supervisor has ended it.
        if (self._looking is None or self._looking.done()) and now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._looking = asyncio.gather(*(worker.look() for worker in self.ever))


class PlacedWorker(Supervised):
    """One rollout worker elsewhere."""

    kind = RolloutWorker
    num_in_flight = 0
    num_tokens_made = 0
    """Tokens made by all its processes, as of the last report; it never falls."""
    num_retries = 0
    """Retries of requests because an engine was lost, as of the last report."""
    report = Report()

    def use(self, actor: Any) -> None:
        """Send jobs to this actor, which has reported nothing yet."""
        super().use(actor)
        self.report = Report()

    async def generate(self, number: int, *job: Any) -> list[RolloutState]:
        """The judged group; arguments as of `RolloutWorker.generate`.

        Raises:
            ActorLost: its process ended first.
            GroupFailed: the agent loop raised.
        """
        incarnation = self.incarnation
        self.num_in_flight += 1
        try:
            group: list[RolloutState] = await asked(self.actor.generate.remote(number, *job))
            return group
        except ActorLost as error:
            self.suspect(incarnation, error)
            raise
        except CallFailed as error:
            # Agent loops are user code: what they raise fails their group, as in one process.
            raise GroupFailed(str(error)) from error
        except asyncio.CancelledError:
            # Told and not waited for: this caller is cancelled itself.
            self.actor.cancel.remote(number)
            raise
        finally:
            self.num_in_flight -= 1
            self.on_change()

    async def look(self) -> None:
        """Bring `report` up to date, as far as the worker answers."""
        if not self.is_up:
            return
        try:
            report = await self.actor.report.remote()
        except import_ray().exceptions.RayError:
            logger.debug("%s gave no report", self.name)
            return
        # A new process counts from zero.
        before = self.report if self.report.pid == report.pid else Report()
        self.num_tokens_made += report.num_tokens_made - before.num_tokens_made
        self.num_retries += report.num_retries - before.num_retries
        self.report = report


class GroupFailed(RuntimeError):
    """A group could not be generated; the message says why."""


class Paused(RuntimeError):
    """A group has no worker, and a pause does not wait for one."""


class RayAgentLoop:
    """An agent loop whose work is done by rollout workers.

    The caller's rollouts are not changed; the group comes back as others with the same ids::

        group = await RayAgentLoop(workers, ("math", False), activities).generate_group(states)
    """

    def __init__(self, workers: Workers, loop: LoopName, activities: Activities) -> None:
        self._workers = workers
        self._loop = loop
        self._activities = activities

    async def generate_group(
        self, states: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        """The group, generated elsewhere; each rollout counts as generating until all are back.

        A group that could not be generated anywhere comes back FAILED, with the reason.
        """
        unfinished = [state for state in states if state.status is not Status.COMPLETED]
        with contextlib.ExitStack() as spans:
            for state in states:
                # `AgentLoop` keeps a finished rollout as it is, so nothing is done to it.
                if not (state.status is Status.COMPLETED and len(state.response_ids)):
                    task, group = state.task_name, state.group_id
                    span = self._activities.span(GENERATE, state.rollout_id, task=task, group=group)
                    spans.enter_context(span)
            try:
                return await self._workers.generate(
                    self._loop, states, enable_partial_rollout=enable_partial_rollout
                )
            except Paused:
                for state in unfinished:
                    state.status = Status.ABORTED
            except GroupFailed as error:
                logger.warning("group %s failed: %s", states[0].group_id, error)
                for state in unfinished:
                    reset_rollout_response(state)
                    state.status = Status.FAILED
                    state.error_msg = f"rollout {state.rollout_id}: {error}"
        return states

    async def pause(self) -> None:
        """Ask for what is running to end as ABORTED."""
        await self._workers.pause()

    async def close(self) -> None:
        """Nothing: the workers are the cluster's, which may go on with another run."""


class ClusterController(EnginePool):
    """The run's own process has this in place of a rollout controller: it generates nothing itself."""

    def __init__(self, engines: Sequence[PlacedEngine], workers: Workers, scale: Scale) -> None:
        super().__init__(engines)  # type: ignore[arg-type]  # they take weights as `Published`
        self._placed, self._workers, self._scale = engines, workers, scale

    async def scale(self, parts: str, change: str) -> str:
        """As `RayCluster.scale`, whose list of engines is this controller's."""
        try:
            return await self._scale(parts, change)
        finally:
            self.engines = self._placed  # type: ignore[assignment]

    @property
    def engines_up(self) -> dict[int, Engine]:
        """The engines that serve now, by their place in `engines`; others start again, or are gone."""
        return {n: engine for n, engine in enumerate(self._placed) if engine.is_up}  # type: ignore[misc]

    async def update_weights(self, weights: Any, model_step: int) -> None:
        """Have every engine use `weights`, which are `Published`; one that is starting again gets them then.

        An engine that does not take them in time is ended, and gets them when it is there again.
        """
        assert isinstance(weights, Published)
        # Some may have joined or left; one that joins from now on has the weights of the first.
        self.engines = self._placed  # type: ignore[assignment]
        for engine in self._placed:
            engine.weights = weights
        await asyncio.gather(*(engine.load_weights(weights, model_step) for engine in self._placed))

    async def pause_generation(self) -> None:
        """End what runs as aborted, at the engines and in the workers."""
        # Not by way of the pool, whose limit is shorter than what an engine elsewhere has.
        await asyncio.gather(*(engine.pause() for engine in self._placed), self._workers.pause())

    async def continue_generation(self) -> None:
        """Take rollouts again."""
        await asyncio.gather(*(engine.resume() for engine in self._placed), self._workers.resume())

    def describe(self, activity: Activity) -> str:
        """The work on the rollout that `activity` is named after, and how far it is."""
        return self._workers.note_of(str(activity.name)) if activity.stage == GENERATE else ""

    def count_tokens_made(self) -> int:
        """Tokens that all workers' rollouts have got so far; it never falls, and may be a look behind."""
        return self._workers.count_tokens_made()

    async def close(self) -> None:
        """Nothing: engines and workers are the cluster's, which may go on with another run."""
