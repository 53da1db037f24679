"""`RayCluster`: the parts of a run as Ray actors, placed together, kept up, and ended with the run.

::

    [cluster] arguments --> RayCluster --start--> Ray joined or started --> placement group --> actors
                               |                                            trainer, engines, rollout workers
       controller, agent_loop, trainer, buffer                              all of them start at the same time
                               |
       a run loses its trainer --> start again: a new trainer; engines and workers stay
                               |
                            close: actors ended, room given back, Ray left as it was found
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.activity import Activities
from forebay.cluster.engine_actor import EngineActor, EngineSpec
from forebay.cluster.engines import PlacedEngine
from forebay.cluster.library import Connection, connect, import_ray, why
from forebay.cluster.placement import Reservation, Room, plan_parts
from forebay.cluster.rollout_worker import RolloutWorker, WorkerSpec
from forebay.cluster.supervisor import START_LIMIT_S
from forebay.cluster.trainer import RayTrainer, TrainerActor
from forebay.cluster.workers import ClusterController, PlacedWorker, RayAgentLoop, Workers
from forebay.config import ConfigError
from forebay.engines import RolloutController
from forebay.replay import ReplayBuffer
from forebay.runs.config import RunConfig
from forebay.stalls import StallError, answered

logger = logging.getLogger(__name__)

MAX_CALLS = 10_000
"""Under way at one actor at a time: every group and request that waits is one."""

CLOSE_LIMIT_S = 30.0
"""For engines to end what they started; their processes end anyway."""

_STORE_MODELS = 6
"""The object store has room for this many copies of the weights: those in use, those on their way, and air."""
_STORE_FLOOR_BYTES = 256 << 20
"""Batches and results of small models."""


class RayCluster:
    """Where a run with ``cluster = "ray"`` has its trainer, engines, agents and judgers.

    Invariants: an engine serves only with the run's present weights; a group whose worker ends is generated
    again from what it was; what is lost is counted; Ray is ended only if it was started here.

    >>> cluster = RayCluster(config, num_workers=2)
    >>> cluster.start(model_folder, trains=True)
    >>> await cluster.close()

    Args:
        config: the run's.
        num_engines: processes with an engine each.
        num_workers: processes with agent loops and judgers.
        cpus: logical CPUs that each part asks for; None: a quarter on a cluster that is started here, else 1.
        gpus_per_engine: in a colocated run with 1 for both, the first engine shares the trainer's.
        gpus_per_trainer: likewise.
        address: of a running cluster ("auto": this machine's); None: ``RAY_ADDRESS``, else one is started.
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
        placement_timeout_s: float = 60.0,
        max_restarts: int = 3,
    ) -> None:
        import_ray()
        at_least = {"num_engines": 1, "num_workers": 1, "max_restarts": 0}
        for name, value in {
            "num_engines": num_engines,
            "num_workers": num_workers,
            "max_restarts": max_restarts,
        }.items():
            if not isinstance(value, int) or value < at_least[name]:
                raise ConfigError(
                    f"cluster.arguments.{name} must be a number from {at_least[name]} up, got {value!r}"
                )
        if cpus is not None and not cpus > 0:
            raise ConfigError(f"cluster.arguments.cpus must be positive, got {cpus!r}")
        colocated = config.produce.mode == "colocated"
        shares_gpu = colocated and gpus_per_trainer == gpus_per_engine == 1
        for name, amount in {
            "gpus_per_engine": gpus_per_engine,
            "gpus_per_trainer": gpus_per_trainer,
        }.items():
            if not (0 <= amount < 1 or amount == int(amount)):
                raise ConfigError(
                    f"cluster.arguments.{name} must be a share or a whole number, got {amount!r}"
                )
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
        )
        self._sleeps = shares_gpu
        self._connection: Connection | None = None
        self._reservation: Reservation | None = None
        self._actors: list[Any] = []
        self._trainer_actor: Any = None
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

    def start(self, model_folder: Path, *, trains: bool) -> None:
        """Have every part running; what runs already stays, except the trainer, which begins anew.

        Raises:
            ConfigError: there is no room, or a part cannot be built.
        """
        model_folder = model_folder.resolve()
        try:
            if self._reservation is None:
                self._start_all(model_folder, trains=trains)
            elif trains:
                self._start_trainer_again(model_folder)
        except BaseException:
            self._end()
            raise

    def _start_all(self, model_folder: Path, *, trains: bool) -> None:
        plan = self._plan if trains else self._plan.without_trainer()
        num_cpus = max(math.ceil(plan.num_cpus), os.cpu_count() or 1)
        self._connection = connect(self._address, num_cpus=num_cpus, store_bytes=_store_bytes(model_folder))
        ray = self._connection.ray
        self._reservation = Reservation.make(
            ray, plan.bundles, timeout_s=self._placement_timeout_s, may_grow=self._may_grow
        )
        starting: dict[str, Any] = {}
        if trains:
            starting["the trainer"] = self._create_trainer(model_folder)
        engines = [
            self._actor(
                EngineActor, room, EngineSpec(self._config, model_folder, i, _device(room), self._sleeps)
            )
            for i, room in enumerate(plan.engines)
        ]
        starting |= {f"engine {i}": actor.start.remote() for i, actor in enumerate(engines)}
        names = [f"worker {i}" for i in range(len(plan.workers))]
        workers = [
            self._actor(RolloutWorker, room, WorkerSpec(self._config, model_folder, name, tuple(engines)))
            for name, room in zip(names, plan.workers, strict=True)
        ]
        starting |= {name: actor.start.remote() for name, actor in zip(names, workers, strict=True)}
        facts = _all_started(ray, starting)
        if trains:
            self._trainer = RayTrainer(self._trainer_actor, facts["the trainer"])
        self._engines = [PlacedEngine(i, actor, facts[f"engine {i}"]) for i, actor in enumerate(engines)]
        self._workers = Workers(
            [
                self._placed_worker(name, actor, facts[name])
                for name, actor in zip(names, workers, strict=True)
            ]
        )

    def _placed_worker(self, name: str, actor: Any, pid: int) -> PlacedWorker:
        def forget() -> None:
            for engine in self._engines:
                engine.forget(name)

        return PlacedWorker(name, actor, pid, on_end=forget)

    def _actor(self, kind: type[Any], room: Room, *arguments: Any, restarts: bool = True) -> Any:
        assert self._reservation is not None
        limits = {"max_restarts": -1, "max_concurrency": MAX_CALLS} if restarts else {}
        options = {**self._reservation.options(room), **limits}
        self._actors.append(import_ray().remote(kind).options(**options).remote(*arguments))
        return self._actors[-1]

    def _create_trainer(self, model_folder: Path) -> Any:
        room = self._plan.trainer
        self._trainer_actor = self._actor(
            TrainerActor, room, self._config, model_folder, _device(room), restarts=False
        )
        return self._trainer_actor.start.remote()

    def _start_trainer_again(self, model_folder: Path) -> None:
        ray = import_ray()
        self._actors.remove(self._trainer_actor)
        ray.kill(self._trainer_actor)
        facts = _all_started(ray, {"the trainer": self._create_trainer(model_folder)})
        self._trainer = RayTrainer(self._trainer_actor, facts["the trainer"])
        self.num_trainer_restarts += 1

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
        """The buffer, in this process."""
        return build()

    def counts(self) -> dict[str, float]:
        """Restarts by part, and groups that were generated again, so far."""
        return {
            "cluster/trainer_restarts": float(self.num_trainer_restarts),
            "cluster/engine_restarts": float(sum(e.supervisor.num_restarts for e in self._engines)),
            "cluster/worker_restarts": float(sum(w.supervisor.num_restarts for w in self._workers.all)),
            "cluster/groups_retried": float(self._workers.num_retries),
        }

    def pids(self) -> dict[str, int]:
        """The process of every part, by its name."""
        return {
            **({"trainer": self._trainer.pid} if self._trainer is not None else {}),
            **{engine.supervisor.name: engine.facts.pid for engine in self._engines},
            **{worker.supervisor.name: worker.pid for worker in self._workers.all},
        }

    async def close(self) -> None:
        """End every actor, give the room back, and end Ray if it was started here."""
        try:
            closing = [self._workers.close(), *(engine.close() for engine in self._engines)]
            errors = await answered(
                asyncio.gather(*closing, return_exceptions=True),
                "the cluster was asked to end",
                CLOSE_LIMIT_S,
            )
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
    ready, waiting = ray.wait(list(starting.values()), num_returns=len(starting), timeout=START_LIMIT_S)
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


def _device(room: Room) -> str:
    return "cuda" if room.gpus else "cpu"


def _store_bytes(model_folder: Path) -> int:
    weights = sum(path.stat().st_size for path in model_folder.glob("*.safetensors"))
    return _STORE_FLOOR_BYTES + _STORE_MODELS * weights
