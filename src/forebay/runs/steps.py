"""The verbs a run is made of. Each does one thing to a `Run` and can be called on its own.

::

    sync_weights -> evaluate
    repeat, colocated: produce -> fit -> forget_consumed -> sync_weights -> report
    repeat, separate:  next_batch -> fit -> forget_consumed -> report -> production_paused: sync_weights
            when due:  evaluate, begin_checkpoint
    finish

CPU-heavy work runs in the run's compute thread, so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from forebay.agents import AgentLoop
from forebay.config import ConfigError
from forebay.engines import EngineLost
from forebay.produce import ProduceBatchResult, ProductionError
from forebay.runs.build import Run
from forebay.runs.checkpoints import begin_checkpoint as begin_checkpoint
from forebay.runs.checkpoints import checkpoint, checkpoint_written, compute, limit_lag, phase
from forebay.runs.checkpoints import resume as resume
from forebay.runs.folder import publish
from forebay.runs.placement import Cluster, PartLost
from forebay.runs.record.events import name_groups
from forebay.runs.reporting import group_counts as group_counts
from forebay.runs.reporting import raise_alarms, totals
from forebay.runs.reporting import report as report
from forebay.runs.rollouts import EvalSet, Rollouts
from forebay.runs.show.pictures import learning_curve
from forebay.runs.store import keeps_consumed
from forebay.runs.verify import WeightsDifferError
from forebay.train import OffPolicyError
from forebay.types import RolloutState, Status
from forebay.watching.activity import EVALUATE, SYNC, TRAIN, WAIT_BATCH
from forebay.watching.stalls import StallError, StallWatch

T = TypeVar("T")


async def sync_weights(run: Run) -> None:
    """Give the engines the trainer's weights; rollouts made from now on carry its model step."""
    with phase(run, "sync", SYNC):
        if run.turns is not None:
            await run.turns.sync()
        await run.trainer.sync_weights(run.controller)
        if run.weight_check is None:
            return
        # Engines that are not up take over the weights when they come back, unchecked.
        differences: list[float] = []
        for number, engine in run.controller.engines_up.items():
            if (states := await run.weight_check.probe(engine, number)) is not None:
                compared = await compute(run, run.weight_check.compare, number, states, run.trainer)
                differences.append(compared)
        metrics = {"sync/engines_unchecked": float(len(run.controller.engines) - len(differences))}
        if differences:
            metrics["sync/logprob_difference"] = max(differences)
        run.metrics.log(run.train_step, metrics)


async def produce(run: Run, train_step: int) -> ProduceBatchResult:
    """Generate, judge and take the batch of `train_step`."""
    with phase(run, "generate"):
        run.display.production(0, run.config.batch_size)
        if run.turns is not None:
            await run.turns.generate()
        return await run.manager.produce_batch(run.config.batch_size, train_step, run.controller.model_step)


async def next_batch(run: Run, train_step: int) -> ProduceBatchResult | None:
    """Wait for the batch of `train_step` from the background producer; None if a stop was requested first.

    Where only newer weights can help (all that is there, or can be made, is too old), they are handed over.

    Raises:
        ProductionError: the producer has ended, or nothing can make progress.
        StallError: nothing has moved for ``produce.stall_after_s``.
    """
    empty: list[ProduceBatchResult] = []
    while True:
        with phase(run, "wait", WAIT_BATCH):
            batch = await _unless_stopped(run, run.manager.get_batch(run.config.batch_size, train_step))
        if batch is None:
            return None
        if batch.rollout_states:
            for earlier in empty:
                batch.add_pauses_of(earlier)
            return batch
        empty.append(batch)
        async with production_paused(run):
            await sync_weights(run)


async def _unless_stopped(run: Run, waiting: Coroutine[Any, Any, T]) -> T | None:
    """The result of `waiting`; None, and `waiting` cancelled, if a stop is requested before."""
    stop, work = asyncio.create_task(run.stop.wait()), asyncio.create_task(waiting)
    try:
        await asyncio.wait([stop, work], return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (stop, work):
            task.cancel()
        await asyncio.gather(stop, work, return_exceptions=True)


@contextlib.asynccontextmanager
async def production_paused(run: Run) -> AsyncIterator[None]:
    """Let the background producer rest: what is in flight waits in the buffer and goes on afterwards."""
    with phase(run, "pause"):
        await run.manager.pause_produce()
    yield
    await run.manager.continue_produce(run.controller.model_step)


async def fit(run: Run, groups: list[list[RolloutState]]) -> dict[str, float]:
    """One train step on `groups`; its metrics.

    Raises:
        ConfigError: the trainer refuses the batch.
        FloatingPointError: the training diverged.
        EngineLost: the server on the trainer's GPU is lost for good.
    """
    if run.saving is not None and run.saving.done():
        await checkpoint_written(run)
    try:
        with phase(run, "train", TRAIN):
            thresholds = None
            if run.config.produce.staleness_rule == "mask":
                # The staleness, by task, from which tokens are left out of the loss.
                lags = {part.task_name: part.produce_strategy.max_lag for part in run.manager.task_runners}
                thresholds = {name: lag for name, lag in lags.items() if lag is not None}
            if run.record is not None:
                step, names = run.train_step + 1, name_groups(groups)
                run.record.note("train", train_step=step, groups=names, thresholds=thresholds)
            if run.turns is not None:
                # Weights that are replaced before the next rollout need not be kept, but for adapters' base.
                is_replaced = is_due(run.train_step + 1, run.sync_interval)
                await run.turns.train(keep_weights=not is_replaced or run.controller.takes_adapters)
            fit_step = partial(run.trainer.fit, stale_thresholds=thresholds)
            batch = await compute(run, fit_step, groups)
    except (ValueError, FloatingPointError, EngineLost) as error:
        # A train step that did not happen: its batch is live again.
        await run.manager.give_back(groups, run.train_step + 1)
        if isinstance(error, EngineLost):
            raise
        kind = ConfigError if isinstance(error, ValueError) else FloatingPointError
        raise kind(f"the trainer, in train step {run.train_step + 1}: {error}") from error
    run.learned = None if run.rollouts_history is None else batch
    return batch.metrics


def guard(run: Run, train_step: int, metrics: dict[str, float]) -> None:
    """Look at how far the rollouts were from the policy, and do what ``train.guard`` says.

    To lower the lag, what may be stale is halved, and weights are synced at least that often.

    Raises:
        OffPolicyError: a measure left its band, and the guard stops the run.
    """
    action, message = run.guard.check(train_step, metrics)
    if action == "none":
        return
    if action == "lower_lag":
        lag = max(runner.produce_strategy.max_lag or 1 for runner in run.manager.task_runners)
        limit = max(1, lag // 2)
        limit_lag(run, limit)
        message += f"; rollouts may now be {limit} train steps behind, before: {lag}"
    run.display.warning(message)


async def forget_consumed(run: Run, train_step: int) -> None:
    """Drop what was consumed up to `train_step`, unless a run that loses a part can ask for it again.

    Then it stays until a checkpoint covers it.
    """
    if not keeps_consumed(run.config):
        await run.manager.replay_buffer.commit(train_step)
    # The report of this step tells of the buffer as it is now.
    await run.status.count_buffer()


async def evaluate(run: Run, label: str) -> dict[str, float]:
    """Try the held-out prompts with the weights of the latest train step; {} without any.

    Nothing else may be generated meanwhile: a background producer is paused first.

    Raises:
        PartLost: no engine or no worker of the cluster is left.
    """
    if not run.eval_sets:
        return {}
    if run.controller.model_step != run.trainer.model_step:
        await sync_weights(run)
    with phase(run, "evaluate", EVALUATE):
        if run.turns is not None:
            await run.turns.generate()
        await run.controller.continue_generation()
        try:
            groups = await evaluation_groups(run.eval_sets, run.manager.stall_watch)
        finally:
            await run.controller.pause_generation()
    refuse_failed(groups, run.cluster)
    metrics = run.evaluator.evaluate(groups)
    metrics |= raise_alarms(run, {"train_step": run.train_step, **metrics})
    run.evaluations.append({"train_step": run.train_step, **metrics})
    run.metrics.log(run.train_step, metrics)
    run.display.evaluation(label, metrics)
    if run.rollouts_history is not None:
        run.rollouts_history.left(groups, "evaluated", train_step=run.train_step)
    return metrics


async def evaluation_groups(
    eval_sets: list[EvalSet], stall_watch: StallWatch | None = None
) -> list[list[RolloutState]]:
    """A judged group for every held-out prompt; all are generated at once.

    Raises:
        StallError: none of them has been finished for too long.
    """
    work = [
        eval_set.agent_loop.generate_group(group)
        for eval_set in eval_sets
        for group in await eval_set.groups()
    ]
    watched = contextlib.nullcontext() if stall_watch is None else stall_watch.guard()
    async with watched, asyncio.TaskGroup() as task_group:
        tasks = [task_group.create_task(coroutine) for coroutine in work]
        if stall_watch is not None:
            for task in tasks:
                task.add_done_callback(lambda _: stall_watch.progressed())
    return [task.result() for task in tasks]


def refuse_failed(groups: Iterable[Iterable[RolloutState]], cluster: Cluster | None) -> None:
    """Refuse rollouts that failed for want of an engine or a worker: they say nothing about the model.

    Raises:
        PartLost: rollouts failed, and no engine or no worker is left.
    """
    if cluster is None or not (lost := cluster.none_is_left()):
        return
    if any(state.status is Status.FAILED for group in groups for state in group):
        raise PartLost(lost)


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps (0: never) is due after `step`."""
    return every > 0 and step % every == 0


async def first_checkpoint(run: Run) -> None:
    """Where parts of the run can be lost: something to go back to before the first train step."""
    if run.cluster is not None and run.train_step == 0:
        await checkpoint(run)


RESCUED = (
    EngineLost,
    ProductionError,
    StallError,
    OffPolicyError,
    WeightsDifferError,
    FloatingPointError,
    ConfigError,
)
"""Errors that end a run whose last finished step is sound; it is saved."""


async def rescue(run: Run, error: Exception) -> None:
    """Save the last finished step of a run that failed with `error`, if there is one to save."""
    run.has_failed = True
    if run.live_file is not None:
        run.live_file.note("error", f"{type(error).__name__}: {error}")
    # After an optimizer step that failed and was not the step's first, the weights belong to no step.
    between = isinstance(error, FloatingPointError | ConfigError) and (
        run.config.train.optimizer_steps > 1 or run.config.train.uses_critic
    )
    # Groups that failed for want of an engine must not be in the checkpoint that the run goes back to.
    is_damaged = run.cluster is not None and run.cluster.none_is_left()
    if run.train_step > 0 and not between and not is_damaged:
        path = await checkpoint(run)
        run.display.warning(
            f"train step {run.train_step} was the last; saved in {path}, to go on with --resume"
        )


async def finish(run: Run) -> None:
    """Save the last state, the model and the picture, and say where they are."""
    final = await checkpoint(run)
    await compute(run, _publish_model, final / "trainer" / "model", run.folder / "model")
    if run.history:
        await compute(run, learning_curve, run.history, run.evaluations, run.folder / "learning_curve.png")
    run.display.summary(run.history, run.evaluations, await totals(run), run.folder)


def _publish_model(source: Path, target: Path) -> None:
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    shutil.rmtree(target, ignore_errors=True)
    publish(temporary, target)


async def close_rollouts(rollouts: Rollouts | Run) -> None:
    """Free agents, judges and engines."""
    loops = [runner.agent_loop for runner in rollouts.manager.task_runners]
    for loop in [*loops, *(eval_set.agent_loop for eval_set in rollouts.eval_sets)]:
        # A loop of the user's own may be anything that generates groups.
        if isinstance(loop, AgentLoop):
            await loop.close()
    await rollouts.controller.close()


async def close(run: Run) -> None:
    """Free engines, sinks and the compute thread: all of them, also if one raises (a full disk, say)."""
    async with contextlib.AsyncExitStack() as stack:
        # In reverse order.
        stack.callback(run.compute_thread.shutdown)
        stack.push_async_callback(compute, run, run.trainer.close)
        stack.callback(run.display.close)
        stack.callback(run.manager.ledger.close)
        stack.push_async_callback(run.manager.replay_buffer.close)
        if run.cluster is not None:
            # Restarts from here on are told to the run that goes on, if one does.
            stack.callback(run.cluster.listen)
        stack.callback(run.metrics.close)
        stack.push_async_callback(close_rollouts, run)
        for writer in (run.record, run.rollouts_history):
            if writer is not None:
                stack.callback(writer.close)
        if run.live_file is not None:
            state = "finished" if run.train_step >= run.config.steps else "stopped"
            stack.callback(run.live_file.close, "failed" if run.has_failed else state)
        if run.saving is not None:
            # Whether it succeeds or not: all that follows is needed for it.
            stack.push_async_callback(asyncio.wait, [run.saving])


def is_evaluated(run: Run) -> bool:
    """Whether the current weights were tried already."""
    return bool(run.evaluations) and run.evaluations[-1]["train_step"] == run.train_step
