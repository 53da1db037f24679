"""Runs a run file's own loop on virtual time and reads off what happened.

::

    RunConfig, ClusterConfig --> World --run_separate | run_colocated--> SimulationResult

The first steps, in which the pipeline fills, are left out of times and shares; what became of groups and
tokens is counted over the whole run. The loop, the manager, the strategies, the buffer, the agent loops and
the controller are those that train; only devices are described (`forebay.simulation.world`). Evaluations,
checkpoints and the warm-up are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forebay.metrics import nearest_rank
from forebay.runs.colocated import run_colocated
from forebay.runs.config import EvalConfig, ProduceConfig, RunConfig
from forebay.runs.separate import run_separate
from forebay.simulation.cluster import ClusterConfig
from forebay.simulation.engine import Segment
from forebay.simulation.world import EnoughSteps, SimulationLoop, World, build_world
from forebay.types import RolloutState, Status
from forebay.watching.activity import SYNC, TRAIN, WAIT_BATCH, Activity

DEFAULT_STEPS = 50
WARM_UP_SHARE = 0.2
"""Of the steps: a run has its usual rhythm a few steps after the producer has its full lead."""
PAUSE = "pause"
"""The stage of a `Span`: production is asked to stop, and stops."""
_LOOPS = {"colocated": run_colocated, "separate": run_separate}


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """The numbers of one simulated run; times in (virtual) seconds."""

    steps: int
    step_s: float
    """From the end of a step to the end of the next, on average."""
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
    """Of a trained response."""
    token_lag: Lag
    group_lag: Lag
    stalest_mean: float
    """Mean over train steps of the stalest group."""
    generated: int
    """Groups taken up."""
    dropped: Mapping[str, int]
    """Groups, by reason."""
    made_tokens: int
    trained_tokens: int
    kept_tokens: int
    """Made and still there at the end, in the buffer or in flight."""
    slots: int
    """Of one engine."""
    step_ends_s: Sequence[float] = field(repr=False)
    segments: Sequence[Segment] = field(repr=False)
    spans: Sequence[Span] = field(repr=False)

    @property
    def steps_per_hour(self) -> float:
        """Train steps."""
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
        if not self.made_tokens:
            return 0.0
        return max(0.0, 1 - (self.trained_tokens + self.kept_tokens) / self.made_tokens)

    @property
    def dropped_share(self) -> float:
        """Share of the groups taken up that were dropped."""
        return sum(self.dropped.values()) / self.generated if self.generated else 0.0

    def numbers(self) -> dict[str, Any]:
        """Everything but the timeline, as JSON values."""
        lags = {"token_staleness": self.token_lag, "group_staleness": self.group_lag}
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            **{name: lag.numbers() for name, lag in lags.items()},
            "groups": self.generated,
            "dropped": dict(self.dropped),
        }


def simulate(
    config: RunConfig,
    cluster: ClusterConfig,
    *,
    steps: int = DEFAULT_STEPS,
    on_step: Callable[[], None] = lambda: None,
) -> SimulationResult:
    """Run `config` for so many train steps on `cluster`; `on_step` is called after each.

    Raises:
        ValueError: fewer than two steps.
        ProductionError: production cannot go on with these settings.

    >>> result = simulate(load_config(RunConfig, path), cluster, steps=20)             # doctest: +SKIP
    >>> result.step_s, result.token_lag.p95                                            # doctest: +SKIP
    (31.2, 1)
    """
    if steps < 2:
        raise ValueError(f"a step time needs at least 2 steps, got {steps}")
    config = _for_simulation(config, steps)
    with asyncio.Runner(loop_factory=SimulationLoop) as runner, tempfile.TemporaryDirectory() as folder:
        return runner.run(_simulate(config, cluster, Path(folder), on_step))


def synchronous(config: RunConfig) -> RunConfig:
    """The same workload, generation and training taking turns."""
    produce = ProduceConfig(
        filter=config.produce.filter, sync_weights_interval=config.produce.sync_weights_interval
    )
    tasks = [task.model_copy(update={"max_staleness": None}) for task in config.tasks]
    return config.model_copy(update={"produce": produce, "tasks": tasks})


def _for_simulation(config: RunConfig, steps: int) -> RunConfig:
    return config.model_copy(
        update={
            "steps": steps,
            "checkpoint_every": 0,
            "show_every": 0,
            "evaluate": EvalConfig(),
            "produce": config.produce.model_copy(update={"filter": "none"}),
        }
    )


async def _simulate(
    config: RunConfig, cluster: ClusterConfig, folder: Path, on_step: Callable[[], None]
) -> SimulationResult:
    world = build_world(config, cluster, folder, on_step)
    spans: list[Span] = []

    def ended(activity: Activity) -> None:
        if activity.stage in (TRAIN, SYNC, WAIT_BATCH):
            spans.append(Span(activity.stage, activity.start_s, activity.end_s))

    world.run.activities.listen(lambda _: None, ended)
    with contextlib.suppress(EnoughSteps):
        await _LOOPS[config.produce.mode](world.run)
    return await _read_off(world, cluster, spans)


async def _read_off(world: World, cluster: ClusterConfig, spans: list[Span]) -> SimulationResult:
    ends_s, trained = world.display.step_ends_s, world.trainer.steps
    skipped = max(1, int(len(ends_s) * WARM_UP_SHARE))
    start_s, end_s = ends_s[skipped - 1], ends_s[-1]
    usual = trained[skipped:]
    tokens_per_step = sum(step.num_tokens for step in usual) / len(usual)
    segments = [segment for engine in world.engines for segment in engine.segments]
    of_stage = {
        stage: busy_s([span for span in spans if span.stage == stage], start_s, end_s)
        for stage in (TRAIN, SYNC)
    }
    slot_s = cluster.engines * cluster.slots * (end_s - start_s)
    config, manager = world.run.config, world.run.manager
    balance = manager.ledger.balance(await manager.count_live())
    return SimulationResult(
        steps=len(ends_s),
        step_s=(end_s - start_s) / len(usual),
        generation_s=cluster.generation_s(tokens_per_step),
        training_s=cluster.training_s(tokens_per_step),
        engine_idle=max(0.0, 1 - busy_s(segments, start_s, end_s) / slot_s),
        trainer_idle=1 - of_stage[TRAIN] / (end_s - start_s),
        sync_share=of_stage[SYNC] / (end_s - start_s),
        mean_tokens=tokens_per_step / (config.batch_size * config.rollouts_per_prompt),
        token_lag=Lag.sum_of([step.token_staleness for step in trained]),
        group_lag=Lag.sum_of([step.group_staleness for step in trained]),
        stalest_mean=sum(max(step.group_staleness) for step in usual) / len(usual),
        generated=balance.generated,
        dropped=balance.dropped,
        made_tokens=sum(segment.num_tokens for segment in segments),
        trained_tokens=sum(step.num_tokens for step in trained),
        kept_tokens=await _kept_tokens(world),
        slots=cluster.slots,
        step_ends_s=ends_s,
        segments=segments,
        spans=[*spans, *_pauses(world)],
    )


def _pauses(world: World) -> list[Span]:
    """A pause ends where the next phase begins: what it was made for."""
    return [
        Span(PAUSE, start_s, end_s)
        for (name, start_s), (_, end_s) in pairwise(world.display.phases)
        if name == PAUSE
    ]


async def _kept_tokens(world: World) -> int:
    """Those of live groups; the run has ended, so all of them are in the buffer, which this empties."""
    buffer, total = world.run.manager.replay_buffer, 0
    for name in world.run.manager.task_names:
        for status in (Status.COMPLETED, Status.ABORTED):
            groups: list[list[RolloutState]] = await buffer.get(
                await buffer.count(name, status), name, status
            )
            total += sum(len(state.response_ids) for group in groups for state in group)
    return total


def busy_s(intervals: Sequence[Span] | Sequence[Segment], start_s: float, end_s: float) -> float:
    """The seconds of all `intervals` together that lie between the two times."""
    if not intervals:
        return 0.0
    times = np.array([(interval.start_s, interval.end_s) for interval in intervals])
    clipped = np.clip(times, start_s, end_s)
    return float((clipped[:, 1] - clipped[:, 0]).sum())


class Span(NamedTuple):
    """The run did something."""

    stage: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Lag:
    """How stale what was trained on was."""

    counts: Mapping[int, int]
    """How many tokens, or groups, by staleness."""

    @staticmethod
    def sum_of(counters: Sequence[Counter[int]]) -> Lag:
        """Several counts together."""
        return Lag(counts=sum(counters, Counter()))

    @property
    def mean(self) -> float:
        """0 if there are none."""
        total = sum(self.counts.values())
        return sum(lag * count for lag, count in self.counts.items()) / total if total else 0.0

    @property
    def p95(self) -> int:
        """The least staleness that 95% do not exceed."""
        return int(nearest_rank(list(self.counts), 95, counts=list(self.counts.values())))

    @property
    def max(self) -> int:
        """The most stale."""
        return max(self.counts, default=0)

    def numbers(self) -> dict[str, Any]:
        """As JSON values."""
        counts = {str(key): self.counts[key] for key in sorted(self.counts)}
        return {"mean": self.mean, "p95": self.p95, "max": self.max, "counts": counts}


_NUMBERS = (
    *("steps", "step_s", "steps_per_hour", "bound_s", "generation_s", "training_s", "over_bound"),
    *("engine_idle", "trainer_idle", "sync_share", "mean_tokens", "made_tokens", "trained_tokens"),
    "wasted_share",
)
"""Of `SimulationResult.numbers`, those that are plain."""
