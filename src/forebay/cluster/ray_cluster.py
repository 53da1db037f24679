"""`RayCluster`: the parts of a run as Ray actors, placed together, kept up, and ended with the run.

::

    [cluster] arguments --> RayCluster --open--> Ray joined or started, placement group, buffer
                               |       --start--> trainer, engines, rollout workers, all at the same time
       controller, agent_loop, trainer, buffer
                               |
       a run loses its trainer --> open, start: an empty buffer, a new trainer; engines and workers stay
                               |
                            close: actors ended, room given back, Ray left as it was found
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from forebay.activity import Activities
from forebay.cluster.engine_actor import EngineActor, EngineSpec
from forebay.cluster.engines import PlacedEngine
from forebay.cluster.library import Connection, connect, import_ray, why
from forebay.cluster.placed_buffer import PlacedBuffer
from forebay.cluster.placement import Plan, Reservation, Room, plan_parts
from forebay.cluster.ranks import RankActor
from forebay.cluster.rollout_worker import RolloutWorker, WorkerSpec
from forebay.cluster.supervisor import START_LIMIT_S
from forebay.cluster.trainer import RayTrainer, TrainerActor, TrainerSpec
from forebay.cluster.workers import ClusterController, PlacedWorker, RayAgentLoop, Workers
from forebay.config import ConfigError
from forebay.engines import RolloutController
from forebay.replay import ReplayBuffer
from forebay.runs.config import RunConfig
from forebay.runs.placement import PartLost
from forebay.stalls import StallError, answered

logger = logging.getLogger(__name__)

MAX_CALLS = 10_000
"""Under way at one actor at a time: every group and request that waits is one."""

CLOSE_LIMIT_S = 30.0
"""For engines to end what they started; their processes end anyway."""


class RayCluster:
    """Where a run with ``cluster = "ray"`` has its trainer, engines, agents and judgers.

    Invariants: an engine serves only with the run's present weights; a group whose worker ends is generated
    again from what it was; what is lost is counted; Ray is ended only if it was started here.

    >>> cluster = RayCluster(config, num_workers=2)
    >>> await cluster.open()
    >>> cluster.start(model_folder)
    >>> await cluster.close()

    Args:
        config: the run's.
        num_engines: processes with an engine each.
        num_workers: processes with agent loops and judgers.
        cpus: logical CPUs that each part asks for; None: a quarter on a cluster that is started here, else 1.
        gpus_per_engine: in a colocated run with 1 for both, the first engine shares the trainer's.
        gpus_per_trainer: likewise; of a trainer on several ranks, for each rank.
        address: of a running cluster ("auto": this machine's); None: ``RAY_ADDRESS``, else one is started.
        buffer: "actor": in a process of its own, on an SQLite file; "driver": in the run's own process.
        placement_timeout_s: how long to wait for room.
        max_restarts: how often the run may lose its trainer without a finished train step in between.

    Raises:
        ConfigError: Ray is missing, or an argument does not fit.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        num_engines: int = 1,
        num_workers: int = 1,
        cpus: float | None = None,
        gpus_per_engine: float = 0,
        gpus_per_trainer: float = 0,
        address: str | None = None,
        buffer: str = "actor",
        placement_timeout_s: float = 60.0,
        max_restarts: int = 3,
    ) -> None:
        import_ray()
        _check_count("num_engines", num_engines, 1)
        _check_count("num_workers", num_workers, 1)
        _check_count("max_restarts", max_restarts, 0)
        _check_share("gpus_per_engine", gpus_per_engine)
        _check_share("gpus_per_trainer", gpus_per_trainer)
        if buffer not in ("actor", "driver"):
            raise ConfigError(f"cluster.arguments.buffer must be 'actor' or 'driver', got {buffer!r}")
        if buffer == "actor" and config.record:
            raise ConfigError(
                "record = true notes what the buffer does, which has to be in this process for that: set "
                "cluster.arguments.buffer to 'driver'"
            )
        if cpus is not None and not cpus > 0:
            raise ConfigError(f"cluster.arguments.cpus must be positive, got {cpus!r}")
        colocated = config.produce.mode == "colocated"
        shares_gpu = colocated and gpus_per_trainer == gpus_per_engine == 1 == config.train.ranks
        self.max_restarts = max_restarts
        self.num_trainer_restarts = 0
        self._config = config.model_copy(update={"output": config.output.resolve()})
        self._address = address
        self._placement_timeout_s = placement_timeout_s
        joins = address is not None or "RAY_ADDRESS" in os.environ
        self._may_grow = joins
        self._plan = plan_parts(
            num_engines,
            num_workers,
            cpus=cpus if cpus is not None else 1.0 if joins else 0.25,
            gpus_per_engine=gpus_per_engine,
            gpus_per_trainer=gpus_per_trainer,
            shares_gpu=shares_gpu,
            num_ranks=config.train.ranks,
        )
        self._sleeps = shares_gpu
        self._trains = True
        self._has_buffer_actor = buffer == "actor"
        self._buffer: PlacedBuffer | None = None
        self._num_buffer_restarts = 0
        """Of earlier buffers."""
        self._connection: Connection | None = None
        self._reservation: Reservation | None = None
        self._actors: list[Any] = []
        self._trainer_actor: Any = None
        self._ranks: list[Any] = []
        self._trainer: RayTrainer | None = None
        self._engines: list[PlacedEngine] = []
        self._workers = Workers([])

    @property
    def on_retry(self) -> Callable[[str | None, str | int | None, str], None]:
        """Told that a group is generated again: its task, its id, why."""
        return self._workers.on_retry

    @on_retry.setter
    def on_retry(self, on_retry: Callable[[str | None, str | int | None, str], None]) -> None:
        self._workers.on_retry = on_retry

    async def open(self, *, trains: bool = True) -> None:
        """Have room for every part, and an empty buffer.

        Raises:
            ConfigError: there is no cluster, or no room for the parts on it.
        """
        self._trains = trains
        if self._reservation is None:
            self._reserve(self._plan if trains else self._plan.without_trainer())
        if self._buffer is not None:
            self._num_buffer_restarts += self._buffer.num_restarts
            await self._buffer.close()
            self._buffer = None
        if trains and self._has_buffer_actor:
            replay = self._config.replay
            self._buffer = await PlacedBuffer.start(
                self._config.folder,
                policy="staleness" if self._config.produce.is_async else "fifo",
                limit=replay.limit,
                keep_consumed=replay.keep_consumed,
            )

    def _reserve(self, plan: Plan) -> None:
        num_cpus = max(math.ceil(plan.num_cpus), os.cpu_count() or 1)
        self._connection = connect(self._address, num_cpus=num_cpus)
        try:
            self._reservation = Reservation.make(
                self._connection.ray,
                plan.bundles,
                timeout_s=self._placement_timeout_s,
                may_grow=self._may_grow,
            )
        except BaseException:
            self._end()
            raise
        self._plan = plan

    def start(self, model_folder: Path) -> None:
        """Have every part running; what runs already stays, except the trainer, which begins anew.

        Raises:
            ConfigError: a part cannot be built.
            PartLost: an engine or a worker is gone for good.
        """
        model_folder = model_folder.resolve()
        if not self._engines:
            self._start_all(model_folder)
        elif self._trains:
            self._check_none_is_gone()
            self._start_trainer_again(model_folder)

    def _check_none_is_gone(self) -> None:
        supervisors = [*(e.supervisor for e in self._engines), *(w.supervisor for w in self._workers.all)]
        for supervisor in supervisors:
            if supervisor.gone is not None:
                raise supervisor.gone

    def _start_all(self, model_folder: Path) -> None:
        ray, plan = import_ray(), self._plan
        trainer = self._create_trainer(model_folder) if self._trains else None
        engines = self._create_engines(plan.engines, model_folder, serve_at_once=not self._trains)
        workers = [self._actor(RolloutWorker, room) for room in plan.workers]
        for worker in workers:
            worker.prepare.remote(model_folder)
        facts = _all_started(
            ray, {f"engine {spec.number}": actor.start.remote(spec) for spec, actor in engines}
        )
        self._engines = [PlacedEngine(spec, actor, facts[f"engine {spec.number}"]) for spec, actor in engines]
        context = min(engine.max_context_tokens for engine in self._engines)
        handles = tuple(actor for _, actor in engines)
        specs = [
            WorkerSpec(
                config=self._config,
                model_folder=model_folder,
                name=f"worker {i}",
                search_path=tuple(sys.path),
                engines=handles,
                max_context_tokens=context,
            )
            for i in range(len(workers))
        ]
        placed = list(zip(specs, workers, strict=True))
        facts = _all_started(ray, {spec.name: actor.start.remote(spec) for spec, actor in placed})
        self._workers = Workers([self._placed(spec, actor, facts[spec.name]) for spec, actor in placed])
        if trainer is not None:
            self._trainer = RayTrainer(
                self._trainer_actor, _all_started(ray, {"trainer": trainer})["trainer"]
            )

    def _create_engines(
        self, rooms: Sequence[Room], model_folder: Path, *, serve_at_once: bool
    ) -> list[tuple[EngineSpec, Any]]:
        specs = [
            EngineSpec(
                config=self._config,
                model_folder=model_folder,
                number=number,
                search_path=tuple(sys.path),
                device=_device(room),
                serves_at_once=serve_at_once,
                sleeps=self._sleeps,
            )
            for number, room in enumerate(rooms)
        ]
        return [(spec, self._actor(EngineActor, room)) for spec, room in zip(specs, rooms, strict=True)]

    def _placed(self, spec: WorkerSpec, actor: Any, pid: int) -> PlacedWorker:
        def forget() -> None:
            for engine in self._engines:
                engine.forget(spec.name)

        return PlacedWorker(spec, actor, pid, on_end=forget)

    def _actor(self, kind: type[Any], room: Room, *, restarts: bool = True) -> Any:
        assert self._reservation is not None
        limits = {"max_restarts": -1, "max_concurrency": MAX_CALLS} if restarts else {}
        options = {**self._reservation.options(room), **limits}
        self._actors.append(import_ray().remote(kind).options(**options).remote())
        return self._actors[-1]

    def _create_trainer(self, model_folder: Path) -> Any:
        room, rank_rooms = self._plan.trainer, self._plan.ranks
        self._ranks = [self._actor(RankActor, rank_room, restarts=False) for rank_room in rank_rooms]
        self._trainer_actor = self._actor(TrainerActor, room, restarts=False)
        spec = TrainerSpec(
            config=self._config,
            model_folder=model_folder,
            search_path=tuple(sys.path),
            device=_device(rank_rooms[0] if rank_rooms else room),
            ranks=tuple(self._ranks),
        )
        return self._trainer_actor.start.remote(spec)

    def _start_trainer_again(self, model_folder: Path) -> None:
        ray = import_ray()
        for actor in (self._trainer_actor, *self._ranks):
            self._actors.remove(actor)
            ray.kill(actor)
        self.num_trainer_restarts += 1
        starting = {"trainer": self._create_trainer(model_folder)}
        try:
            self._trainer = RayTrainer(self._trainer_actor, _all_started(ray, starting)["trainer"])
        except ConfigError as error:
            # It was built before, so it is no fault of the run file.
            raise PartLost(f"the trainer did not come back: {error}") from error

    def controller(self) -> RolloutController:
        """What pauses and continues the engines and gives them weights."""
        return ClusterController(self._engines, self._workers)

    def agent_loop(self, task_name: str, *, held_out: bool, activities: Activities) -> RayAgentLoop:
        """What has the groups of a task generated and judged by the workers."""
        return RayAgentLoop(self._workers, (task_name, held_out), activities)

    def trainer(self) -> RayTrainer:
        """The trainer, as its constructor made it."""
        assert self._trainer is not None, "started without a trainer"
        return self._trainer

    def buffer(self, build: Callable[[], ReplayBuffer]) -> ReplayBuffer:
        """The buffer that `open` has started, or one in this process."""
        # Its methods are those of a `ReplayBuffer`.
        return build() if self._buffer is None else cast("ReplayBuffer", self._buffer.client)

    def counts(self) -> dict[str, float]:
        """Restarts by part, and groups that were generated again, so far."""
        return {
            "cluster/trainer_restarts": float(self.num_trainer_restarts),
            "cluster/engine_restarts": float(sum(e.supervisor.num_restarts for e in self._engines)),
            "cluster/worker_restarts": float(sum(w.supervisor.num_restarts for w in self._workers.all)),
            "cluster/buffer_restarts": float(
                self._num_buffer_restarts + (self._buffer.num_restarts if self._buffer is not None else 0)
            ),
            "cluster/groups_retried": float(self._workers.num_retries),
        }

    def pids(self) -> dict[str, int]:
        """The process of every part, by its name."""
        return {
            **(self._trainer.pids if self._trainer is not None else {}),
            **{engine.supervisor.name: engine.facts.pid for engine in self._engines},
            **{worker.supervisor.name: worker.pid for worker in self._workers.all},
            **({"buffer": self._buffer.pid()} if self._buffer is not None else {}),
        }

    async def close(self) -> None:
        """End every actor, give the room back, and end Ray if it was started here."""
        try:
            closing = [self._workers.close(), *(engine.close() for engine in self._engines)]
            if self._buffer is not None:
                closing.append(self._buffer.close())
            ending = asyncio.gather(*closing, return_exceptions=True)
            errors = await answered(ending, "the cluster was asked to end", CLOSE_LIMIT_S)
            for error in filter(None, errors):
                logger.warning("a part of the cluster did not end well: %s", why(error))
        except StallError as error:
            logger.warning("%s", error)
        finally:
            self._end()

    def _end(self) -> None:
        if self._connection is None:
            return
        for actor in self._actors:
            self._connection.ray.kill(actor)
        if self._reservation is not None:
            self._reservation.release()
        self._connection.close()
        self._connection = self._reservation = None
        self._actors, self._engines, self._workers = [], [], Workers([])


def _all_started(ray: Any, starting: dict[str, Any]) -> dict[str, Any]:
    """What every part says once it is built, by name.

    Raises:
        ConfigError: one of them cannot be built, or takes too long.
    """
    _, waiting = ray.wait(list(starting.values()), num_returns=len(starting), timeout=START_LIMIT_S)
    facts = {}
    for name, ref in starting.items():
        if ref in waiting:
            raise ConfigError(f"cluster: {name} was not there after {START_LIMIT_S:g} s")
        try:
            facts[name] = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise ConfigError(f"cluster: {name} cannot be built: {error}") from error
        except ray.exceptions.RayError as error:
            raise ConfigError(f"cluster: {name} ended as it was started: {why(error)}") from error
    return facts


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"cluster.arguments.{name} must be a number from {least} up, got {value!r}")


def _check_share(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or value < 0 or (value > 1 and value != int(value)):
        raise ConfigError(
            f"cluster.arguments.{name} must be a share of a GPU or a whole number of GPUs, got {value!r}"
        )


def _device(room: Room) -> str:
    return "cuda" if room.gpus else "cpu"
