"""Runs a run file's own loop on virtual time and reads off what happened.

::

    RunConfig, ClusterConfig --> World --run_separate | run_colocated--> SimulationResult

The loop, the manager, the strategies, the buffer, the agent loops and the controller are those that train;
only devices are stand-ins (`forebay.simulation.world`). Evaluations, checkpoints and the warm-up are left
out.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from forebay.runs.colocated import run_colocated
from forebay.runs.config import EvalConfig, ProduceConfig, RunConfig
from forebay.runs.separate import run_separate
from forebay.simulation.cluster import ClusterConfig
from forebay.simulation.result import (
    PAUSE,
    WARM_UP_SHARE,
    SimulationResult,
    Span,
    SpanRecorder,
    add_up,
    busy_s,
    idle_slots,
)
from forebay.simulation.simulated_parts import EnoughSteps, SimulationLoop
from forebay.simulation.world import World, build_world
from forebay.types import RolloutState, Status
from forebay.watching.activity import SYNC, TRAIN, WAIT_BATCH

DEFAULT_STEPS = 50
_LOOPS = {"colocated": run_colocated, "separate": run_separate}


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
    recorder = SpanRecorder((TRAIN, SYNC, WAIT_BATCH))
    world.run.activities.listen(recorder.began, recorder.ended)
    with contextlib.suppress(EnoughSteps):
        await _LOOPS[config.produce.mode](world.run)
    return await _read_off(world, cluster, recorder)


async def _read_off(world: World, cluster: ClusterConfig, recorder: SpanRecorder) -> SimulationResult:
    ends_s, trained = world.display.step_ends_s, world.trainer.steps
    skipped = max(1, int(len(ends_s) * WARM_UP_SHARE))
    start_s, end_s = ends_s[skipped - 1], ends_s[-1]
    usual = trained[skipped:]
    tokens_per_step = sum(step.num_tokens for step in usual) / len(usual)
    segments = [segment for engine in world.engines for segment in engine.segments]
    of_stage = {
        stage: busy_s([span for span in recorder.spans if span.stage == stage], start_s, end_s)
        for stage in (TRAIN, SYNC)
    }
    config, manager = world.run.config, world.run.manager
    balance = manager.ledger.balance(await manager.count_live())
    return SimulationResult(
        steps=len(ends_s),
        step_s=(end_s - start_s) / len(usual),
        generation_s=cluster.generation_s(tokens_per_step),
        training_s=cluster.training_s(tokens_per_step),
        engine_idle=idle_slots(segments, cluster, start_s, end_s),
        trainer_idle=1 - of_stage[TRAIN] / (end_s - start_s),
        sync_share=of_stage[SYNC] / (end_s - start_s),
        mean_tokens=tokens_per_step / (config.batch_size * config.rollouts_per_prompt),
        token_lag=add_up([step.token_staleness for step in trained]),
        group_lag=add_up([step.group_staleness for step in trained]),
        stalest_mean=sum(max(step.group_staleness) for step in usual) / len(usual),
        generated=balance.generated,
        dropped=balance.dropped,
        made_tokens=sum(segment.num_tokens for segment in segments),
        trained_tokens=sum(step.num_tokens for step in trained),
        kept_tokens=await _kept_tokens(world),
        slots=cluster.slots,
        step_ends_s=ends_s,
        segments=segments,
        spans=[*recorder.spans, *_pauses(world)],
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
