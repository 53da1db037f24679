"""Runs a run file's own loop on virtual time and reads off what happened.

::

    RunConfig, ClusterConfig --> World --run_separate | run_colocated--> SimulationResult
                                                                   '--> a trace, as a real run's

The first steps, in which the pipeline fills, are left out of times and shares; what became of groups and
tokens is counted over the whole run. The loop, the manager, the strategies, the buffer, the agent loops and
the controller are those that train; only devices are described (`forebay.simulation.world`). The warm-up is
left out, and evaluations and checkpoints that the cluster says nothing of.
"""

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forebay.metrics import nearest_rank
from forebay.runs.build import Run
from forebay.runs.config import ProduceConfig, RunConfig
from forebay.runs.launch import LOOPS
from forebay.simulation.cluster import ClusterConfig
from forebay.simulation.world import EnoughSteps, SimulationLoop, World, build_world
from forebay.types import Status
from forebay.watching.activity import SYNC, TRAIN, Activity
from forebay.watching.trace import write_trace

DEFAULT_STEPS = 50
WARM_UP_SHARE = 0.2
"""The share of steps left out: a run has its rhythm a few steps after the producer has its full lead."""


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """The numbers of one simulated run; times in (virtual) seconds."""

    steps: int
    step_s: float
    """Seconds from the end of a step to the end of the next, on average."""
    generation_s: float
    """The step's trained tokens over the engines' full-batch rate: T_gen."""
    training_s: float
    engine_idle: float
    """Share of the slots that were empty."""
    trainer_idle: float
    """Share of the time in which it did not train."""
    sync_share: float
    """Share of the time in which weights were handed over."""
    mean_tokens: float
    """Mean length of a trained response, in tokens."""
    token_staleness: "Staleness"
    group_staleness: "Staleness"
    stalest_mean: float
    """Mean over train steps of the stalest group."""
    groups: int
    """Groups taken up."""
    dropped: Mapping[str, int]
    """Groups dropped, by reason."""
    made_tokens: int
    trained_tokens: int
    kept_tokens: int
    """Made and still there at the end, in the buffer or in flight."""
    engines: Mapping[str, float]
    """As in a run's metrics: ``engine_restarts``, the times that one came back after a failure, and
    ``retries`` of requests at another engine, since their own had failed or left."""

    @property
    def steps_per_hour(self) -> float:
        """Train steps in an hour of virtual time."""
        return 3600 / self.step_s

    @property
    def bound_s(self) -> float:
        """No schedule makes a step faster: the slower of generation and training."""
        return max(self.generation_s, self.training_s)

    @property
    def over_bound(self) -> float:
        """Step time over its lower bound."""
        return self.step_s / self.bound_s

    @property
    def wasted_share(self) -> float:
        """Share of the tokens made that nothing will train on."""
        return max(0.0, 1 - (self.trained_tokens + self.kept_tokens) / self.made_tokens)

    @property
    def dropped_share(self) -> float:
        """Share of the groups taken up that were dropped."""
        return sum(self.dropped.values()) / self.groups if self.groups else 0.0

    def numbers(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        derived = ("steps_per_hour", "bound_s", "over_bound", "wasted_share", "dropped_share")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def simulate(
    config: RunConfig, cluster: ClusterConfig, *, steps: int = DEFAULT_STEPS, trace: Path | None = None
) -> SimulationResult:
    """Run `config` for so many train steps on `cluster`.

    `trace` is where the timeline is written, in virtual time, in the format of a real run's trace.

    Raises:
        ValueError: fewer than two steps, or an engine is to leave and no other is up.
        ProductionError: production cannot go on with these settings.

    ::

        result = simulate(load_config(RunConfig, path), cluster, steps=20)
        result.step_s, result.token_staleness.p95  # (31.2, 1)
    """
    if steps < 2:
        raise ValueError(f"a step time needs at least 2 steps, got {steps}")
    config = config.model_copy(
        update={
            "steps": steps,
            # Nothing is computed: a GPU that the run file names may not be here.
            "device": "cpu",
            "checkpoint_every": config.checkpoint_every if cluster.checkpoint_s else 0,
            # The cluster says which share of the groups is rejected.
            "produce": config.produce.model_copy(update={"filter": "none"}),
        }
    )
    with asyncio.Runner(loop_factory=SimulationLoop) as runner, tempfile.TemporaryDirectory() as folder:
        return runner.run(_simulate(config, cluster, Path(folder), trace))


def synchronous(config: RunConfig) -> RunConfig:
    """The same workload, generation and training taking turns."""
    produce = ProduceConfig(filter=config.produce.filter, sync_weights_interval=config.produce.sync_weights_interval)
    # A synchronous run takes no bound of a single task: nothing in it is stale.
    tasks = [task.model_copy(update={"max_staleness": None}) for task in config.tasks]
    # Where nothing is produced beside training, nothing is tried beside it either.
    evaluate = config.evaluate.model_copy(update={"mode": "pause"})
    return config.model_copy(update={"produce": produce, "tasks": tasks, "evaluate": evaluate})


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """How stale the data was that was trained on."""

    mean: float
    p95: int
    """The least staleness that 95% do not exceed."""
    max: int
    counts: Mapping[int, int]
    """How many tokens, or groups, by staleness."""

    @staticmethod
    def of(counters: Sequence[Counter[int]]) -> "Staleness":
        """The distribution of several counts together."""
        counts = dict(sorted(sum(counters, Counter()).items()))
        return Staleness(
            mean=sum(lag * count for lag, count in counts.items()) / max(1, sum(counts.values())),
            p95=int(nearest_rank(list(counts), 95, counts=list(counts.values()))),
            max=max(counts, default=0),
            counts=counts,
        )


async def _simulate(config: RunConfig, cluster: ClusterConfig, folder: Path, trace: Path | None) -> SimulationResult:
    world = build_world(config, cluster, folder)
    num_engines = len(world.engines)
    ended: list[Activity] = []
    world.run.activities.listen(lambda _: None, ended.append)
    scaling = asyncio.create_task(_scale(world.run, cluster))
    with contextlib.suppress(EnoughSteps):
        await LOOPS[config.produce.mode](world.run)
    if scaling.done():
        scaling.result()
    if trace is not None:
        write_trace(trace, sorted(activity.span() for activity in ended))
    steps, trained = world.display.steps, world.trainer.steps
    # At least one: the time of a step counts from the end of the step before.
    skipped = max(1, int(len(steps) * WARM_UP_SHARE))
    start, end, usual = steps[skipped - 1], steps[-1], trained[skipped:]
    seconds = end.time_s - start.time_s
    tokens_per_step = sum(step.token_staleness.total() for step in usual) / len(usual)
    # On average: engines that join or leave count from then on.
    gained = sum(number * max(0.0, end.time_s - max(at_s, start.time_s)) for at_s, number in cluster.scale)
    described = cluster.model_copy(update={"engines": num_engines + gained / seconds})
    # Held-out prompts, where they were tried by the engines of production.
    tried = 0 if world.run.eval_controller else world.held_out_judge.num_tokens

    def share_of(stage: str) -> float:
        spans = [(done.start_s, done.end_s) for done in ended if done.stage == stage]
        return sum(max(0.0, min(to, end.time_s) - max(at, start.time_s)) for at, to in spans) / seconds

    balance = world.run.manager.ledger.balance(await world.run.manager.count_live())
    return SimulationResult(
        steps=len(steps),
        step_s=seconds / len(usual),
        generation_s=described.generation_s(tokens_per_step),
        training_s=cluster.training_s(tokens_per_step),
        # Sums of many times may be a little more than the whole.
        engine_idle=max(0.0, 1 - (end.slot_s - start.slot_s) / (described.engines * cluster.slots * seconds)),
        trainer_idle=1 - share_of(TRAIN),
        sync_share=share_of(SYNC),
        mean_tokens=tokens_per_step / (config.batch_size * config.rollouts_per_prompt),
        token_staleness=Staleness.of([step.token_staleness for step in trained]),
        group_staleness=Staleness.of([step.group_staleness for step in trained]),
        stalest_mean=sum(max(step.group_staleness) for step in usual) / len(usual),
        groups=balance.generated,
        dropped=balance.dropped,
        made_tokens=sum(engine.num_tokens for engine in world.engines) - tried,
        trained_tokens=sum(step.token_staleness.total() for step in trained),
        kept_tokens=await _kept_tokens(world),
        engines=world.run.controller.counts(),
    )


async def _scale(run: Run, cluster: ClusterConfig) -> None:
    """Have engines join and leave at their times."""
    for at_s, number in cluster.scale:
        await asyncio.sleep(at_s - asyncio.get_running_loop().time())
        await run.scale(f"engines={number:+d}")


async def _kept_tokens(world: World) -> int:
    """The tokens of live groups; the run has ended, so all of them are in the buffer."""
    live = {"status": {"$in": [Status.COMPLETED.value, Status.ABORTED.value]}}
    rows = await world.run.manager.replay_buffer.storage.get(live)
    return sum(len(state.response_ids) for row in rows for state in row.item)
