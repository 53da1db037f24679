"""How the run's own process uses rollout workers.

::

    RayAgentLoop.generate_group --> the least busy worker that is up --> judged group
                                          | its process ended: the group, which was kept, goes to another
                                          v
                                    counted, and told to the ledger; the third try is its last

    ClusterController: pause and continue for engines and workers, weights for engines

A worker's process holds no state that matters: the run keeps every group as it was until it is back, or, with
``produce.save_partial_every_s``, as it was when the worker pushed the last copy of it.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Any, cast

from forebay.aio.changed import Changes
from forebay.cluster.calls import ActorLost, CallFailed, as_one_piece, asked, from_one_piece
from forebay.cluster.engines import PlacedEngine
from forebay.cluster.library import Published
from forebay.cluster.rollout_worker import Copies, LoopName, Report, RolloutWorker
from forebay.cluster.supervisor import START_LIMIT_S, Supervised
from forebay.engines import Engine
from forebay.engines.pool import EnginePool
from forebay.produce.strategies.context import Group
from forebay.runs.placement import RetryListener
from forebay.types import Status, reset_rollout_response
from forebay.watching.activity import GENERATE, QUEUED, Activities, Activity, loop_time
from forebay.watching.stalls import answered

logger = logging.getLogger(__name__)

Scale = Callable[[str, str], Awaitable[str]]

MAX_LOST_WORKERS = 3
"""Workers that one group may lose before it fails: a group that brings down every worker must end."""


class Workers:
    """All rollout workers of a run.

    Invariant: one worker has a group at a time; until it is back the caller's list stays as it was, or holds
    the copies of its rollouts that the worker pushed last::

        group = await workers.generate(("math", False), states, enable_partial_rollout=True)
    """

    def __init__(self, workers: "Sequence[PlacedWorker]") -> None:
        self.all = list(workers)
        """One that is gone for good may be replaced."""
        self._left: list[PlacedWorker] = []
        """Workers that get no more groups, or are gone."""
        self.on_retry: RetryListener | None = None
        """Told of each group that is generated again."""
        self.num_retries = 0
        """Groups that were generated again because their worker had ended."""
        self.activities = Activities()
        """Where rollouts are noted as queued that workers say are."""
        self._numbers = itertools.count()
        self._last_tries = asyncio.Lock()
        self._is_paused = False
        self._changes = Changes()
        """A worker is up again, a group has ended, or a pause begins."""

    @property
    def ever(self) -> "list[PlacedWorker]":
        """All, with those that are leaving: these are paused like the others; and those that have left."""
        return [*self.all, *self._left]

    async def generate(self, loop: LoopName, states: Group, *, enable_partial_rollout: bool) -> Group:
        """The group, generated and judged by some worker: other objects than those given.

        Raises:
            CallFailed: the agent loop raised, or three workers ended over the group.
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
                raise CallFailed(f"{len(lost)} workers ended over this group: {'; '.join(lost)}")
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
        """The last report on the rollout or group `name`, which may be seconds old; empty without one."""
        # The last report of a process that has ended tells of groups that others have by now.
        for worker in self.ever:
            if worker.is_up and name in worker.report.notes:
                text, since_s = worker.report.notes[name]
                return f"{text} for {worker.report.at_s - since_s + loop_time() - worker.heard_s:.0f} s"
        return ""

    async def close(self) -> None:
        """Watch no more, and free what the workers hold."""
        await asyncio.gather(*(worker.close() for worker in self.ever), return_exceptions=True)

    async def leave(self, worker: "PlacedWorker") -> None:
        """Give it no more groups; return once those that it has are done."""
        self.all.remove(worker)
        self._left.append(worker)
        while worker.num_in_flight:
            await self._changes.wait(self._changes.version)

    async def _least_busy(self) -> "PlacedWorker":
        while True:
            for worker in self.all:
                worker.changes, worker.activities = self._changes, self.activities
                # Here, where there is an event loop; a second call does nothing.
                worker.watch()
            if up := [worker for worker in self.all if worker.is_up]:
                return min(up, key=lambda worker: worker.num_in_flight)
            if self._is_paused:
                raise Paused
            await self._changes.wait(self._changes.version)


def shares(num_workers: int, slowness: Sequence[float]) -> list[list[tuple[int, float]]]:
    """For each worker the order in which it tries equally busy engines, and how much busier to it each counts.

    `slowness` is that of each engine. The starts are evenly apart, also those of the first few workers, to which
    groups go first. A straggler is used by the worker that begins next to it, and not by the others.

    >>> shares(2, [1, 1, 4, 1])
    [[(0, 1.0), (1, 1.0), (2, 1000000.0), (3, 1.0)], [(2, 2.0), (3, 1.0), (0, 1.0), (1, 1.0)]]
    """
    found, num_engines = [list[tuple[int, float]]()] * num_workers, len(slowness)
    for turn, number in enumerate(sorted(range(num_workers), key=lambda number: number * _GOLDEN % 1)):
        ahead = sorted(((n - turn * num_engines / num_workers) % num_engines, n) for n in range(num_engines))
        found[number] = [(n, _times(slowness[n], far / num_engines, num_workers)) for far, n in ahead]
    return found


_GOLDEN = (5**0.5 - 1) / 2
"""The first few of its multiples are evenly apart, modulo 1, however many they are."""
_UNUSED = 1e6
"""More than `Members.rank` takes for a straggler."""


def _times(slowness: float, ahead: float, num_workers: int) -> float:
    return max(1.0, slowness / num_workers) if slowness == 1 or ahead * num_workers < 1 else _UNUSED


class PlacedWorker(Supervised):
    """One rollout worker elsewhere."""

    kind = RolloutWorker
    num_in_flight = 0
    num_tokens_made = 0
    """Tokens made by all its processes, as of the last report; it never falls."""
    num_retries = 0
    """Retries of requests because an engine was lost, as of the last report."""
    report = Report()
    heard_s = 0.0
    """When that came, by the run's clock."""
    activities: Activities

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._queued: dict[str, Activity] = {}
        """Rollouts here that the run's register has as queued."""

    def use(self, actor: Any) -> None:
        """Send jobs to this actor, which has reported nothing yet."""
        super().use(actor)
        self.report, self._groups = Report(), Copies()

    async def generate(self, number: int, loop: LoopName, states: Group, is_partial: bool) -> Group:
        """The judged group; `states` follow the pushed copies.

        Raises:
            ActorLost: its process ended first.
            CallFailed: the agent loop raised.
        """
        incarnation = self.incarnation
        self.num_in_flight += 1
        self._groups[number] = states
        try:
            told = as_one_piece(states, number, loop, is_partial)
            return cast("Group", from_one_piece(await asked(self.actor.generate.remote(told)))[0])
        except ActorLost as error:
            self.suspect(incarnation, error)
            raise
        except asyncio.CancelledError:
            # Told and not waited for: this caller is cancelled itself.
            self.actor.cancel.remote(number)
            raise
        finally:
            self.num_in_flight -= 1
            self._groups.pop(number, None)
            self._note_unqueued(self._queued.keys() & {str(state.rollout_id) for state in states})
            self.changes.note()

    def hear(self, said: Report | Copies) -> None:
        """Keep the newest report, and the newest copies in the lists of those that wait for their groups."""
        if not isinstance(said, Report):
            for number in said.keys() & self._groups.keys():
                self._groups[number][:] = said[number]
            return
        # A new process counts from zero.
        before = self.report if self.report.pid == said.pid else Report()
        self.num_tokens_made += said.num_tokens_made - before.num_tokens_made
        self.num_retries += said.num_retries - before.num_retries
        self.report, self.heard_s = said, loop_time()
        self._note_unqueued(self._queued.keys() - said.queued)
        for state in itertools.chain(*self._groups.values()):
            if (name := str(state.rollout_id)) in said.queued and name not in self._queued:
                span = self.activities.span(QUEUED, state.rollout_id, task=state.task_name, group=state.group_id)
                self._queued[name] = span.__enter__()

    def _note_unqueued(self, names: Set[str]) -> None:
        for name in names:
            self._queued.pop(name).__exit__(None)


class Paused(RuntimeError):
    """A group has no worker, and a pause does not wait for one."""


class RayAgentLoop:
    """An agent loop whose work is done by rollout workers.

    The caller's rollouts are not changed, or are replaced in its list by copies that are further; the group
    comes back as others with the same ids::

        group = await RayAgentLoop(workers, ("math", False), activities).generate_group(states)
    """

    is_whole_at_awaits = True
    """Workers push copies of those that are."""

    def __init__(self, workers: Workers, loop: LoopName, activities: Activities) -> None:
        self._workers = workers
        self._loop = loop
        self._activities = workers.activities = activities

    async def generate_group(self, states: Group, *, enable_partial_rollout: bool = False) -> Group:
        """The group, generated elsewhere; each rollout counts as generating until all are back.

        A group that could not be generated anywhere comes back FAILED, with the reason.
        """
        with contextlib.ExitStack() as spans:
            for state in states:
                # `AgentLoop` keeps a finished rollout as it is, so nothing is done to it.
                if not (state.status is Status.COMPLETED and len(state.response_ids)):
                    about = {"task": state.task_name, "group": state.group_id}
                    spans.enter_context(self._activities.span(GENERATE, state.rollout_id, **about))
            try:
                return await self._workers.generate(self._loop, states, enable_partial_rollout=enable_partial_rollout)
            except Paused:
                for state in _unfinished(states):
                    state.status = Status.ABORTED
            # Agent loops are user code: what they raise fails their group, as in one process.
            except CallFailed as error:
                logger.warning("group %s failed: %s", states[0].group_id, error)
                for state in _unfinished(states):
                    reset_rollout_response(state)
                    state.status = Status.FAILED
                    state.error_msg = f"rollout {state.rollout_id}: {error}"
        return states

    async def pause(self) -> None:
        """Ask for what is running to end as ABORTED."""
        await self._workers.pause()

    async def close(self) -> None:
        """Nothing: the workers are the cluster's, which may go on with another run."""


def _unfinished(states: Group) -> Group:
    return [state for state in states if state.status is not Status.COMPLETED]


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

    def away(self) -> str:
        """The names of the others, and of workers that are not up."""
        return ", ".join(part.name for part in (*self._placed, *self._workers.all) if not part.is_up)

    async def update_weights(self, weights: Any, model_step: int) -> None:
        """Have every engine use `weights`, which are `Published`; one that is starting again gets them then.

        An engine that does not take them in time is ended, and gets them when it is there again.
        """
        assert isinstance(weights, Published)
        # Some may have joined or left; one that joins from now on has the weights of the first.
        self.engines = self._placed  # type: ignore[assignment]
        for engine in self._placed:
            engine.weights = weights
        loading = [engine.load_weights(weights, model_step) for engine in self._placed]
        # All have ended before one's error is told: whole weights, in place of adapters, come after these.
        for error in filter(None, await asyncio.gather(*loading, return_exceptions=True)):
            raise error

    async def pause_generation(self) -> None:
        """End what runs as aborted, at the engines and in the workers."""
        # Not by way of the pool, whose limit is shorter than what an engine elsewhere has.
        await asyncio.gather(*(engine.pause() for engine in self._placed), self._workers.pause())

    async def continue_generation(self) -> None:
        """Take rollouts again."""
        await asyncio.gather(*(engine.resume() for engine in self._placed), self._workers.resume())

    async def sleep(self, *, keep_weights: bool) -> None:
        """Have those that share GPUs with ranks sleep; StallError if one takes far too long."""
        told = [engine.sleep(keep_weights=keep_weights) for engine in self._placed if engine.sleeps]
        await answered(asyncio.gather(*told), "engines on GPUs of ranks were asked to sleep", 2 * START_LIMIT_S)

    async def wake(self) -> None:
        """Have them serve again, now or when a pause ends."""
        await asyncio.gather(*(engine.wake() for engine in self._placed if engine.sleeps))

    def describe(self, activity: Activity) -> str:
        """The work on the rollout that `activity` is named after, and how far it is."""
        return self._workers.note_of(str(activity.name)) if activity.stage in (GENERATE, QUEUED) else ""

    def count_tokens_made(self) -> int:
        """Tokens that all workers' rollouts have got so far, as they said last; it never falls."""
        return sum(worker.num_tokens_made for worker in self._workers.ever)

    async def close(self) -> None:
        """Nothing: engines and workers are the cluster's, which may go on with another run."""
