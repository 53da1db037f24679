"""`RayCluster`: the parts of a run as Ray actors, placed together, kept up, and ended with the run.

::

    [cluster] arguments --> RayCluster --open--> Ray joined or started, placement group
                               |       --start--> trainer, engines, rollout workers, all at the same time
       controller, agent_loop, trainer
                               |
       a run loses a part  --> open, start: others in place of a lost trainer, and of engines and workers
                               |            that are gone for good; the rest stays
                               |
                            close: actors ended, room given back, Ray left as it was found
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from forebay.cluster.arguments import RayArguments
from forebay.cluster.calls import blocking_actor
from forebay.cluster.engines import EngineActor, EngineSpec, PlacedEngine
from forebay.cluster.library import Given, connect, import_ray, why
from forebay.cluster.placement import Plan, Room, plan_parts, reserve
from forebay.cluster.ranks import RankActor
from forebay.cluster.supervisor import Restarts, Supervised, all_started
from forebay.cluster.trainer import RayTrainer, TrainerActor, TrainerSpec
from forebay.cluster.workers import (
    ClusterController,
    PlacedWorker,
    RayAgentLoop,
    RolloutWorker,
    Workers,
    WorkerSpec,
)
from forebay.config import ConfigError, parse_config
from forebay.runs.config import RunConfig
from forebay.runs.placement import SERVERS, Listener, PartLost, RetryListener
from forebay.watching.activity import Activities
from forebay.watching.stalls import ANSWER_LIMIT_S, StallError, answered

logger = logging.getLogger(__name__)

MAX_CALLS = 10_000
"""Under way at one actor at a time: every group and request that waits is one."""


class RayCluster:
    """Where a run with ``cluster = "ray"`` has its trainer, engines, agents and judges.

    Invariants: an engine serves only with the run's present weights; a group whose worker ends is generated
    again from what it was; what is lost is counted; Ray is ended only if it was started here.

    >>> cluster = RayCluster(config, num_workers=2)
    >>> await cluster.open()
    >>> cluster.start(model_folder)
    >>> await cluster.close()

    Args:
        config: the run's.
        arguments: the fields of `RayArguments`.

    Raises:
        ConfigError: Ray is missing, or an argument does not fit.
    """

    def __init__(self, config: RunConfig, **arguments: Any) -> None:
        import_ray()
        settings = parse_config(RayArguments, arguments, source="cluster 'ray'")
        settings.check(config)
        self.max_restarts = settings.max_restarts
        self._config = config.model_copy(update={"output": config.output.resolve()})
        self._settings = settings
        self._given = Given.find(settings.address)
        self._shares_gpu = (
            config.produce.mode == "colocated"
            and config.engine.name not in SERVERS
            and settings.gpus_per_trainer == settings.gpus_per_engine == 1
            and config.train.ranks == 1
        )
        """Whether the first engine is on the trainer's GPU, with its weights alone while the trainer trains.
        Servers have one of their own."""
        self._plan = Plan()
        self._trains = True
        self._restarts = Restarts()
        self._is_ours = False
        """Whether this process joined or started Ray here, and so leaves it here."""
        self._room: Any = None
        """Ray's placement group."""
        self._actors: list[Any] = []
        self._trainer_actor: Any = None
        self._ranks: list[Any] = []
        self._trainer: RayTrainer | None = None
        self._engines: list[PlacedEngine] = []
        self._workers = Workers([])
        self._lost_trainer_because = ""

    def listen(self, on_retry: RetryListener | None = None, on_restart: Listener | None = None) -> None:
        """As `Cluster.listen`."""
        self._workers.on_retry = on_retry
        self._restarts.listen(on_restart)

    async def open(self, *, trains: bool = True) -> None:
        """Have room for every part.

        Raises:
            ConfigError: there is no cluster, or no room for the parts on it.
        """
        self._trains = trains
        if self._room is None:
            settings, joins = self._settings, self._given is not None
            self._plan = plan_parts(
                settings,
                cpus=settings.cpus or (1.0 if joins else 0.25),
                shares_gpu=self._shares_gpu,
                num_ranks=self._config.train.ranks if trains else 0,
            )
            # Ray only counts CPUs, so a small machine may be told to have as many as the parts ask for.
            num_cpus = max(math.ceil(self._plan.num_cpus), os.cpu_count() or 1)
            self._is_ours = connect(self._given, num_cpus=num_cpus)
            bundles, timeout_s = self._plan.bundles, settings.placement_timeout_s
            try:
                self._room = await asyncio.to_thread(
                    reserve, import_ray(), bundles, timeout_s=timeout_s, may_grow=joins
                )
            except BaseException:
                self._end()
                raise

    def start(self, model_folder: Path) -> None:
        """Have every part running; what runs already stays.

        A trainer that was lost is replaced; engines and workers are, as soon as they are lost.

        Raises:
            ConfigError: a part cannot be built.
            PartLost: one that was built before cannot be built again.
        """
        model_folder = model_folder.resolve()
        is_first = not self._engines
        if is_first:
            self._engines = [
                PlacedEngine(
                    EngineSpec(
                        **self._common(model_folder),
                        name=f"engine {number}",
                        number=number,
                        device=room.device,
                        serves_at_once=not self._trains,
                    ),
                    self._restarts.note,
                )
                for number, room in enumerate(self._plan.engines)
            ]
            self._workers.all = [
                PlacedWorker(
                    WorkerSpec(**self._common(model_folder), name=f"worker {number}"), self._restarts.note
                )
                for number in range(len(self._plan.workers))
            ]
            rooms = (*self._plan.engines, *self._plan.workers)
            for part, room in zip((*self._engines, *self._workers.all), rooms, strict=True):
                self._settle(part, room)
                part.use(self._new_actor(part))
        # Begun before the others are waited for: it loads its model while they load theirs.
        trainer = self._start_trainer(model_folder) if self._trains else {}
        try:
            if is_first:
                self._start_others(model_folder, trainer)
            if trainer:
                self._trainer = RayTrainer(self._trainer_actor, all_started(trainer)["trainer"])
        except ConfigError as error:
            if is_first:
                raise
            # It was built before, so it is no fault of the run file.
            raise PartLost(f"a part did not come back: {error}") from error
        if self._lost_trainer_because:
            self._restarts.note("trainer", self._lost_trainer_because)
            self._lost_trainer_because = ""

    def _start_others(self, model_folder: Path, trainer: Mapping[str, Any]) -> None:
        for worker in self._workers.all:
            # Meanwhile: the engines take longer.
            worker.actor.prepare.remote(model_folder)
        self._build(self._engines, trainer)
        # Asked here, because the workers' specs have it.
        contexts = all_started({e.name: e.actor.max_context_tokens.remote() for e in self._engines})
        for engine in self._engines:
            engine.max_context_tokens = contexts[engine.name]
        self._have_workers_follow()
        self._build(self._workers.all, {})

    def _settle(self, part: Supervised, room: Room) -> None:
        """Give a new part its place, and what it needs of others."""
        part.room, part.in_place = room, partial(self._in_place, part)
        if isinstance(part, PlacedWorker):
            part.on_end = self._forget

    def _new_actor(self, part: Supervised) -> Any:
        return self._actor(EngineActor if isinstance(part, PlacedEngine) else RolloutWorker, part.room)

    def _in_place(self, part: Supervised) -> None:
        """Another actor for a part whose own does not come back; workers use it as soon as it serves."""
        # Killed last, when the workers have been told of the new one.
        before = part.actor
        part.use(self._new_actor(part))
        self._have_workers_follow()
        self._kill(before)

    def _build(self, parts: Sequence[Supervised], also: Mapping[str, Any]) -> None:
        """Have new actors build what their parts' specs say; all are ended if one cannot.

        `also` has references that are waited for with them, so that the first failure of all shows at once.
        """
        starting = {part.name: part.actor.start.remote(part.spec) for part in parts}
        try:
            pids = all_started({**starting, **also})
        except ConfigError:
            for part in parts:
                self._kill(part.actor)
            raise
        for part in parts:
            part.begin(part.actor, pids[part.name])

    def _have_workers_follow(self) -> None:
        """Have all workers use the engines of now."""
        context = min(engine.max_context_tokens for engine in self._engines)
        for number, worker in enumerate(self._workers.all):
            # Each begins with another engine.
            first = number % len(self._engines)
            actors = tuple(engine.actor for engine in [*self._engines[first:], *self._engines[:first]])
            before = worker.spec
            worker.spec = replace(before, engines=actors, max_context_tokens=context)
            if worker.pid and worker.spec != before:
                # Whenever its process is there: it may just be starting again, which the part itself sees to.
                worker.actor.start.options(max_task_retries=-1).remote(worker.spec)

    def _forget(self, worker_name: str) -> None:
        for engine in self._engines:
            engine.forget(worker_name)

    def _common(self, model_folder: Path) -> dict[str, Any]:
        return {"config": self._config, "model_folder": model_folder, "search_path": tuple(sys.path)}

    def _actor(self, kind: type[Any], room: Room) -> Any:
        limits = {}
        # Ray does not make these anew: their state is in a checkpoint, to which the run goes back.
        if kind in (TrainerActor, RankActor):
            actor_class = blocking_actor(kind)
        else:
            actor_class = import_ray().remote(kind)
            limits = {"max_restarts": -1, "max_concurrency": MAX_CALLS}
        self._actors.append(actor_class.options(**room.options(self._room), **limits).remote())
        return self._actors[-1]

    def _kill(self, actor: Any) -> None:
        if actor in self._actors:
            self._actors.remove(actor)
            import_ray().kill(actor)

    def _start_trainer(self, model_folder: Path) -> dict[str, Any]:
        """The answer of a new trainer, by its name; none if there is one that is well.

        That one goes back with the run, which has it resume from a checkpoint; before the first of these it
        has trained nothing.
        """
        actors = [actor for actor in (self._trainer_actor, *self._ranks) if actor is not None]
        if self._trainer is not None:
            reason = self._trainer.lost_because or _silence_of(actors)
            if not reason:
                return {}
            self._lost_trainer_because = reason
        for actor in actors:
            self._kill(actor)
        self._trainer = None
        room, rank_rooms = self._plan.trainer, self._plan.ranks
        assert room is not None, "planned without a trainer"
        self._ranks = [self._actor(RankActor, rank_room) for rank_room in rank_rooms]
        self._trainer_actor = self._actor(TrainerActor, room)
        spec = TrainerSpec(
            **self._common(model_folder),
            name="trainer",
            device=(rank_rooms[0] if rank_rooms else room).device,
            ranks=tuple(self._ranks),
        )
        return {"trainer": self._trainer_actor.start.remote(spec)}

    def controller(self) -> ClusterController:
        """The controller that pauses and continues the engines and gives them weights."""
        return ClusterController(self._engines, self._workers)

    def agent_loop(self, task_name: str, *, held_out: bool, activities: Activities) -> RayAgentLoop:
        """The agent loop of a task, whose groups the workers generate and judge."""
        return RayAgentLoop(self._workers, (task_name, held_out), activities)

    def trainer(self) -> RayTrainer:
        """The trainer: as its constructor made it, or for a run that resumes."""
        assert self._trainer is not None, "started without a trainer"
        return self._trainer

    def counts(self) -> dict[str, float]:
        """Restarts by part, and groups and requests that were generated again, so far."""
        kinds = ("trainer", "engine", "worker")
        return {
            **{f"cluster/{kind}_restarts": float(self._restarts.counts[kind]) for kind in kinds},
            "cluster/groups_retried": float(self._workers.num_retries),
            "cluster/requests_retried": float(self._workers.count_retries()),
        }

    def pids(self) -> dict[str, int]:
        """The process of every part, by its name."""
        return {
            **(self._trainer.pids if self._trainer is not None else {}),
            **{part.name: part.pid for part in (*self._engines, *self._workers.all)},
        }

    async def close(self) -> None:
        """End every actor, give the room back, and end Ray if it was started here."""
        try:
            closing = [self._workers.close(), *(engine.close() for engine in self._engines)]
            ending = asyncio.gather(*closing, return_exceptions=True)
            errors = await answered(ending, "the cluster was asked to end", CLOSE_LIMIT_S)
            for error in filter(None, errors):
                logger.warning("a part of the cluster did not end well: %s", why(error))
        except StallError as error:
            logger.warning("%s", error)
        finally:
            self._end()

    def _end(self) -> None:
        for actor in self._actors:
            import_ray().kill(actor)
        if self._room is not None:
            import_module("ray.util.placement_group").remove_placement_group(self._room)
        if self._is_ours:
            import_ray().shutdown()
        self._room, self._is_ours = None, False
        self._actors, self._engines, self._workers.all = [], [], []


CLOSE_LIMIT_S = 30.0
"""For engines to end what they started; their processes end anyway."""


def _silence_of(actors: Sequence[Any]) -> str:
    """Why one of them gives no answer; empty if all do."""
    ray = import_ray()
    try:
        ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=ANSWER_LIMIT_S)
    # A time-out is one, too.
    except ray.exceptions.RayError as error:
        return why(error)
    return ""
