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

import asyncio
import contextlib
import logging
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

from forebay.cluster import workers
from forebay.cluster.arguments import RayArguments
from forebay.cluster.calls import blocking_actor
from forebay.cluster.engines import EngineSpec, PlacedEngine
from forebay.cluster.library import MAX_CALLS, Given, connect, import_ray, on_node, why
from forebay.cluster.placement import STRATEGIES, Plan, Room, plan_parts, reserve
from forebay.cluster.ranks import RankActor
from forebay.cluster.rollout_worker import WorkerSpec
from forebay.cluster.supervisor import BEAT_EVERY_S, START_LIMIT_S, Restarts, Supervised, all_started
from forebay.cluster.trainer import RayTrainer, TrainerActor, TrainerSpec
from forebay.config import ConfigError, parse_config
from forebay.engines.members import judge, scale
from forebay.io.elsewhere import files_to_see, missing
from forebay.runs.config import RunConfig
from forebay.runs.placement import SERVERS, Listener, PartLost, RetryListener, num_sharing, takes_turns, tries_beside
from forebay.watching.activity import Activities, loop_time
from forebay.watching.stalls import ANSWER_LIMIT_S, StallError, answered

logger = logging.getLogger(__name__)


class RayCluster:
    """Where a run with ``cluster = "ray"`` has its trainer, engines, agents and judges.

    Invariants: an engine serves only with the run's present weights; a group whose worker ends is generated
    again from what it was; what is lost is counted; Ray is ended only if it was started here.

    ::

        cluster = RayCluster(config, num_workers=2)
        await cluster.open()
        cluster.start(model_folder)
        await cluster.close()

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
        if takes_turns(config) and config.engine.arguments.get("memory_share") is None:
            # Only the cluster knows its GPUs, and a server would take nearly all of one.
            raise ConfigError(
                "servers on GPUs of ranks need engine.arguments.memory_share, which forebay plan says; "
                "gpus_per_trainer = 0.9 in cluster.arguments gives them GPUs of their own"
            )
        self.max_restarts = settings.max_restarts
        self._config = config.model_copy(update={"output": config.output.resolve()})
        self._settings = settings
        self._given = Given.find(settings.address)
        self._plan = Plan()
        self._restarts = Restarts()
        self._is_ours = False
        """Whether this process joined or started Ray here, and so leaves it here."""
        self._groups: dict[str, Any] = {}
        """Ray's placement groups, by kind of part; that of a part that joined, by the group's id."""
        self._actors: list[Any] = []
        self._trainer_actors: list[Any] = []
        """The trainer's own actor, and those of its ranks."""
        self._trainer: RayTrainer | None = None
        self._engines: list[PlacedEngine] = []
        self._workers = workers.Workers([])
        self._eval_engines: list[PlacedEngine] = []
        self._eval_workers = workers.Workers([])
        """With the engine above, for evaluations beside production, if there are any."""
        self._lost_trainer_because = ""
        self._free: defaultdict[type, list[Room]] = defaultdict(list)
        """Rooms of parts that have left, by the parts' type."""
        self._model_folder = Path()
        self._judged_s = -math.inf
        self._num_ever: Counter[str] = Counter()
        """Parts that there have been, "engine" or "worker": a number is given once."""

    def listen(self, on_retry: RetryListener | None = None, on_restart: Listener | None = None) -> None:
        """Tell these of groups generated again and of parts that came back."""
        self._workers.on_retry = self._eval_workers.on_retry = on_retry
        self._restarts.listen(on_restart)

    async def open(self, *, trains: bool = True) -> None:
        """Have room for every part.

        Raises:
            ConfigError: there is no cluster, or no room for the parts on it.
        """
        if self._engines:
            # Of a run that goes back: the ranks of the next have the GPUs first. Before that, because a server may
            # be waiting for the weights of a trainer that hangs.
            await asyncio.to_thread(self._end_lost_trainer)
            await self.controller().sleep(keep_weights=True)
        if not self._groups:
            self._plan = plan_parts(
                self._settings,
                # Those for evaluations are the last of several, else one more.
                least=1 + (trains and tries_beside(self._config)),
                cpus=self._settings.cpus or (0.25 if self._given is None else 1.0),
                sharing=num_sharing(self._config) if trains else 0,
                num_ranks=self._config.train.ranks if trains else 0,
            )
            # Ray only counts CPUs, so a small machine may be told to have as many as the parts ask for.
            bundles = self._plan.every_bundle
            num_cpus = max(math.ceil(sum(bundle["CPU"] for bundle in bundles)), os.cpu_count() or 1)
            self._is_ours = connect(self._given, num_cpus=num_cpus)
            try:
                self._groups = await self._reserve(self._plan)
                has_gpus = import_ray().cluster_resources().get("GPU", 0)
            except BaseException:
                self._end()
                raise
            if has_gpus and self._config.device != "cpu" and not any("GPU" in bundle for bundle in bundles):
                logger.warning(
                    "the cluster has GPUs, and no part of the run asks for one, so it computes on the CPU: "
                    "set gpus_per_trainer and gpus_per_engine in cluster.arguments"
                )

    async def _reserve(self, plan: Plan) -> dict[str, Any]:
        ray, timeout_s, may_grow = import_ray(), self._settings.placement_timeout_s, self._given is not None
        return await asyncio.to_thread(reserve, ray, plan, timeout_s=timeout_s, may_grow=may_grow)

    def start(self, model_folder: Path) -> None:
        """Have every part running; what runs already stays.

        A trainer that was lost is replaced; engines and workers are, as soon as they are lost.

        Raises:
            ConfigError: a part cannot be built, or a machine does not see the run's folder or the model's.
            PartLost: one that was built before cannot be built again.
        """
        self._model_folder = model_folder.resolve()
        is_first = not self._engines
        if is_first:
            check_nodes(self._config.folder, self._model_folder)
            for room in self._plan.engines:
                self._add(self._engines, room)
            for room in self._plan.workers:
                self._add(self._workers.all, room)
        # Begun before the others are waited for: it loads its model while they load theirs.
        trainer = self._start_trainer() if self._plan.trainer is not None else {}
        try:
            if is_first:
                self._start_others(trainer)
            if trainer:
                pids = all_started(trainer)["trainer"]
                self._trainer = RayTrainer(self._trainer_actors[0], pids, self._config.train.overlong)
        except ConfigError as error:
            if is_first:
                raise
            # It was built before, so it is no fault of the run file.
            raise PartLost(f"a part did not come back: {error}") from error
        if self._lost_trainer_because:
            self._restarts.note("trainer", self._lost_trainer_because)
            self._lost_trainer_because = ""

    def _start_others(self, trainer: Mapping[str, Any]) -> None:
        for worker in self._workers.all:
            # Meanwhile: the engines take longer.
            worker.actor.prepare.remote(self._model_folder)
        self._build(self._engines, trainer)
        # Asked here, because the workers' specs have it.
        facts = all_started({e.name: e.actor.facts.remote() for e in self._engines})
        for engine in self._engines:
            engine.max_context_tokens, takes_adapters, engine.takes_buckets = facts[engine.name]
            engine.takes_adapters &= takes_adapters
        every_worker = list(self._workers.all)
        if self._plan.trainer is not None and tries_beside(self._config):
            self._eval_engines.append(self._engines.pop())
            self._eval_workers.all.append(self._workers.all.pop())
        self._have_workers_follow()
        self._build(every_worker, {})

    def _add(self, them: list[Any], room: Room) -> Any:
        """One more engine or worker, with its place, its actor, and what it needs of others."""
        kind = "engine" if them is self._engines else "worker"
        shared = self._common() | {"name": f"{kind} {self._num_ever[kind]}"}
        self._num_ever[kind] += 1
        part: PlacedEngine | workers.PlacedWorker
        if them is self._engines:
            spec = EngineSpec(**shared, device=room.device, serves_at_once=self._plan.trainer is None)
            part = PlacedEngine(spec, self._restarts.note)
            part.sleeps = room.group == "trainer" and self._config.engine.name in SERVERS
            part.on_work = self._judge
        else:
            part = workers.PlacedWorker(WorkerSpec(**shared), self._restarts.note)
            part.on_end = self._forget
        part.room, part.in_place = room, partial(self._in_place, part)
        part.use(self._actor(part.kind, room))
        them.append(part)
        return part

    def _in_place(self, part: Supervised) -> None:
        """Another actor for a part whose own does not come back; workers use it as soon as it serves."""
        # Killed last, when the workers have been told of the new one.
        before = part.actor
        part.use(self._actor(part.kind, part.room))
        self._have_workers_follow()
        self._kill(before)

    def _build(self, parts: Sequence[Supervised], also: Mapping[str, Any]) -> None:
        """Have new actors build what their parts' specs say.

        `also` has references that are waited for with them, so that the first failure of all shows at once.
        """
        pids = all_started({part.name: part.actor.start.remote(part.spec) for part in parts} | dict(also))
        for part in parts:
            part.begin(part.actor, pids[part.name])

    def _have_workers_follow(self) -> list[Any]:
        """Have all workers use the engines of now; Ray's references of their answers."""
        answers = []
        context = min(engine.max_context_tokens for engine in self._engines)
        for engines, them in ((self._engines, self._workers), (self._eval_engines, self._eval_workers)):
            shares = workers.shares(len(them.all), [engine.judged.slowness for engine in engines])
            for share, worker in zip(cycle(shares), them.ever):
                actors = tuple((engines[place].actor, times) for place, times in share)
                before, worker.spec = worker.spec, replace(worker.spec, engines=actors, max_context_tokens=context)
                if worker.pid and worker.spec != before:
                    # Whenever its process is there: it may just be starting again, which the part itself sees to.
                    answers.append(worker.actor.start.options(max_task_retries=-1).remote(worker.spec))
        return answers

    def _judge(self) -> None:
        """Have workers leave stragglers alone; when any engine has said how fast it is."""
        if loop_time() >= self._judged_s + BEAT_EVERY_S:
            self._judged_s = loop_time()
            if judge({engine.name: engine.judged for engine in self._engines if engine.is_up}):
                self._have_workers_follow()

    def _forget(self, worker_name: str) -> None:
        for engine in (*self._engines, *self._eval_engines):
            engine.forget(worker_name)

    def _common(self) -> dict[str, Any]:
        return {"config": self._config, "model_folder": self._model_folder, "search_path": tuple(sys.path)}

    def _actor(self, kind: type[Any], room: Room) -> Any:
        # Ray does not make these anew: their state is in a checkpoint, to which the run goes back.
        blocks = kind in (TrainerActor, RankActor)
        limits = {} if blocks else {"max_restarts": -1, "max_concurrency": MAX_CALLS}
        actor_class = blocking_actor(kind) if blocks else import_ray().remote(kind)
        lenders = [(self._engines[room.lender[0]].actor, room.lender[1])] if room.lender else []
        self._actors.append(actor_class.options(**room.options(self._groups), **limits).remote(*lenders))
        return self._actors[-1]

    def _kill(self, actor: Any) -> None:
        if actor in self._actors:
            self._actors.remove(actor)
            import_ray().kill(actor)

    def _end_lost_trainer(self) -> None:
        """End what is left of a trainer that is lost, or gives no answer, or could not be started again."""
        if self._trainer is not None:
            self._lost_trainer_because = self._trainer.lost_because or _silence_of(self._trainer_actors)
            if not self._lost_trainer_because:
                return
        self._trainer = None
        for actor in self._trainer_actors:
            self._kill(actor)

    def _start_trainer(self) -> dict[str, Any]:
        """The answer of a new trainer, by its name; none if there is one that is well.

        That one goes back with the run, which has it resume from a checkpoint; before the first of these it
        has trained nothing.
        """
        if self._trainer is not None:
            # With all that it may have moved away for engines, which sleep.
            self._trainer.onload()
            return {}
        room, rank_rooms = self._plan.trainer, self._plan.ranks
        assert room is not None, "planned without a trainer"
        ranks = [self._actor(RankActor, rank_room) for rank_room in rank_rooms]
        self._trainer_actors = [self._actor(TrainerActor, room), *ranks]
        device = (rank_rooms[0] if rank_rooms else room).device
        spec = TrainerSpec(**self._common(), name="trainer", device=device, ranks=tuple(ranks))
        return {"trainer": self._trainer_actors[0].start.remote(spec)}

    async def scale(self, parts: str, change: str) -> str:
        """Have ``engines`` or ``workers`` join or leave; see `forebay.engines.members.scale`.

        One that joins has room of its own, for which the cluster may grow; the call does not wait for it. The
        requests of an engine that leaves go on elsewhere; a worker leaves once its groups have ended.

        Raises:
            ValueError: it is something else, or so many cannot leave.
            ConfigError: there is no room.
        """
        known: dict[str, list[Any]] = {"engines": self._engines, "workers": self._workers.all}
        if parts not in known:
            raise ValueError(f"write engines=+2 or workers=+2, got {parts!r}")
        if "://" in change or (parts == "engines" and "urls" in self._config.engine.arguments):
            raise ValueError("on a cluster one engine drives all servers that run already: see urls")
        return await scale(known[parts], change, lambda _: self._join(known[parts]), self._leave)

    async def _join(self, them: list[Any]) -> None:
        is_engine = isinstance(them[0], PlacedEngine)
        free = self._free[type(them[0])]
        if not free:
            counts = {"num_engines": int(is_engine), "num_workers": int(not is_engine)}
            asked, cpus = self._settings.model_copy(update=counts), self._plan.workers[0].cpus
            plan = plan_parts(asked, cpus=cpus, num_ranks=0)
            (group,) = (await self._reserve(plan)).values()
            self._groups[group_id := group.id.hex()] = group
            free += [replace(room, group=group_id) for room in (*plan.engines, *plan.workers)]
        if not them:
            # The run was closed over the wait for room, which is given back.
            self._end()
            raise ConfigError("the run has ended")
        first, part = them[0], self._add(them, free.pop())
        part.is_paused = first.is_paused
        if is_engine:
            part.weights, part.max_context_tokens = first.weights, first.max_context_tokens
            part.takes_adapters, part.takes_buckets = first.takes_adapters, first.takes_buckets
        part.watch()
        self._have_workers_follow()

    async def _leave(self, part: Any) -> None:
        if part.room.group == "trainer":
            raise ValueError(f"{part.name} shares GPUs with ranks, and stays as long as they do")
        # Until its work is elsewhere: an end or a hang meanwhile must not hold it up.
        part.watch()
        with contextlib.suppress(StallError):
            if isinstance(part, PlacedEngine):
                self._engines.remove(part)
                following = asyncio.gather(*self._have_workers_follow(), return_exceptions=True)
                await answered(following, f"workers were asked to do without {part.name}", START_LIMIT_S)
            else:
                await self._workers.leave(part)
                self._have_workers_follow()
        with contextlib.suppress(import_ray().exceptions.RayError, StallError):
            await answered(part.close(), f"{part.name} was asked to leave", CLOSE_LIMIT_S)
        part.is_up, part.pid = False, 0
        self._kill(part.actor)
        if part.room.group in self._plan.bundles:
            # It stays a part of the kind's first placement group.
            self._free[type(part)].append(part.room)
        elif (group := self._groups.pop(part.room.group, None)) is not None:
            import_module("ray.util.placement_group").remove_placement_group(group)

    def controller(self) -> workers.ClusterController:
        """The controller that pauses and continues the engines and gives them weights."""
        return workers.ClusterController(self._engines, self._workers, self.scale)

    def eval_controller(self) -> workers.ClusterController | None:
        """The same for evaluations beside production; None: they pause it."""
        engines = self._eval_engines
        return workers.ClusterController(engines, self._eval_workers, self.scale) if engines else None

    def agent_loop(self, task_name: str, *, held_out: bool, activities: Activities) -> workers.RayAgentLoop:
        """The agent loop of a task, whose groups the workers generate and judge."""
        them = self._eval_workers if held_out and self._eval_engines else self._workers
        return workers.RayAgentLoop(them, (task_name, held_out), activities)

    def trainer(self) -> RayTrainer:
        """The trainer: as its constructor made it, or for a run that resumes."""
        assert self._trainer is not None, "started without a trainer"
        return self._trainer

    def counts(self) -> dict[str, float]:
        """Restarts by part, and groups and requests that were generated again, so far."""
        both = self._workers, self._eval_workers
        return {
            **{f"cluster/{kind}_restarts": float(self._restarts.counts[kind]) for kind in STRATEGIES},
            "cluster/groups_retried": float(sum(them.num_retries for them in both)),
            "cluster/requests_retried": float(sum(worker.num_retries for them in both for worker in them.ever)),
        }

    async def close(self) -> None:
        """End every actor, give the room back, and end Ray if it was started here."""
        try:
            closing = [them.close() for them in (self._workers, self._eval_workers)]
            closing += [engine.close() for engine in (*self._engines, *self._eval_engines)]
            ending = asyncio.gather(*closing, return_exceptions=True)
            for error in filter(None, await answered(ending, "the cluster was asked to end", CLOSE_LIMIT_S)):
                logger.warning("a part of the cluster did not end well: %s", why(error))
        except StallError as error:
            logger.warning("%s", error)
        finally:
            self._end()

    def _end(self) -> None:
        for actor in self._actors:
            import_ray().kill(actor)
        for group in self._groups.values():
            import_module("ray.util.placement_group").remove_placement_group(group)
        if self._is_ours:
            import_ray().shutdown()
        self._is_ours = False
        # Emptied, not replaced, so that a part that is just joining notices.
        parts = (self._engines, self._workers.all, self._eval_engines, self._eval_workers.all)
        for gone in (self._actors, self._groups, self._free, self._num_ever, *parts):
            gone.clear()


def check_nodes(run_folder: Path, model_folder: Path) -> None:
    """Find out whether all machines see both folders under the paths that this one has for them.

    Raises:
        ConfigError: one of them does not, or cannot be asked.
    """
    ray = import_ray()
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    run_folder.mkdir(parents=True, exist_ok=True)
    with files_to_see(run_folder, model_folder) as sizes:
        look, asked = ray.remote(num_cpus=0)(missing), {}
        for node in others:
            name = f"machine {node['NodeName']} (node {node['NodeID'][:8]})"
            asked[name] = look.options(scheduling_strategy=on_node(node["NodeID"])).remote(sizes)
        for name, path in all_started(asked).items():
            if path is not None:
                raise ConfigError(
                    f"{name} does not see the folder {os.path.dirname(path)!r} as this machine does: mount it "
                    f"there under the same path, or take that machine off the cluster"
                )


CLOSE_LIMIT_S = 30.0
"""The time that engines get to end what they started; their processes end anyway."""


def _silence_of(actors: Sequence[Any]) -> str:
    """Why one of them gives no answer; empty if all do."""
    try:
        import_ray().get([actor.__ray_ready__.remote() for actor in actors], timeout=ANSWER_LIMIT_S)
    # A time-out is one, too.
    except import_ray().exceptions.RayError as error:
        return why(error)
    return ""
