"""The verbs a run is made of. Each does one thing to a `Run` and can be called on its own.

::

    sync_weights -> evaluate
    repeat, colocated: produce -> fit -> forget_consumed -> sync_weights -> report
    repeat, separate:  next_batch -> fit -> forget_consumed -> report -> production_paused: sync_weights
            when due:  evaluate, begin_checkpoint
    finish

CPU-heavy work runs in the run's compute thread, so that the event loop stays free.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from forebay.agents import AgentLoop
from forebay.aio.tasks import outlast, unless
from forebay.config import ConfigError
from forebay.engines import EngineLost
from forebay.io.safe_files import publish, unfinished
from forebay.produce import ProduceBatchResult, ProductionError
from forebay.runs.build import Run
from forebay.runs.checkpoints import begin_checkpoint as begin_checkpoint
from forebay.runs.checkpoints import checkpoint, checkpoint_written, compute, limit_lag, phase
from forebay.runs.checkpoints import resume as resume
from forebay.runs.evaluation import due_sets as due_sets
from forebay.runs.evaluation import evaluate as evaluate
from forebay.runs.evaluation import evaluate_again, evaluation_ended
from forebay.runs.evaluation import evaluation_groups as evaluation_groups
from forebay.runs.evaluation import is_due as is_due
from forebay.runs.evaluation import sync_weights as sync_weights
from forebay.runs.record.events import name_groups
from forebay.runs.reporting import report as report
from forebay.runs.reporting import totals
from forebay.runs.rollouts import Rollouts
from forebay.runs.store import keeps_consumed
from forebay.runs.verify import WeightsDifferError
from forebay.train import OffPolicyError
from forebay.types import RolloutState
from forebay.watching.activity import TRAIN
from forebay.watching.stalls import StallError


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
        EngineLost, StallError: of an evaluation beside production that has failed meanwhile.
    """
    # Before the batch is taken: an error after it would lose its groups.
    if run.evaluating is not None and run.evaluating.done():
        await evaluation_ended(run)
    while True:
        # The manager registers its wait itself, for programs without a run too.
        with phase(run, "wait"):
            if run.turns is not None:
                await run.turns.generate()
            batch = await unless(run.stop, run.manager.get_batch(run.config.batch_size, train_step))
        if batch is None or batch.rollout_states:
            return batch
        async with production_paused(run):
            await sync_weights(run)


@contextlib.asynccontextmanager
async def production_paused(run: Run) -> AsyncIterator[None]:
    """Let the background producer rest: what is in flight waits in the buffer and goes on afterwards."""
    with phase(run, "pause"):
        await run.manager.pause_produce()
    yield
    # Not after an error: the run is then saved with production at rest.
    await run.manager.continue_produce(run.controller.model_step)


async def fit(run: Run, groups: list[list[RolloutState]]) -> dict[str, float]:
    """One train step on `groups`; its metrics.

    Raises:
        ConfigError: the trainer refuses the batch.
        FloatingPointError: the training diverged.
        EngineLost: all servers are lost for good.
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


async def begin(run: Run) -> None:
    """Hand the weights over, and try the held-out prompts, unless a resumed run has done that."""
    if run.evaluating_step is not None:
        await evaluate_again(run, run.evaluating_step)
    await sync_weights(run)
    if not run.evaluations and run.evaluating is None:
        await evaluate(run)
    # Where parts of the run can be lost: something to go back to before the first train step.
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
    if run.train_step > 0 and not between:
        path = await checkpoint(run)
        run.display.warning(f"train step {run.train_step} was the last; saved in {path}, to go on with --resume")


async def finish(run: Run) -> None:
    """Try the held-out prompts if the run is complete, save the last state and the model, and say where they are."""
    if run.train_step == run.config.steps:
        await evaluation_ended(run)
        # Unless the weights of now were tried already.
        if not run.evaluations or run.evaluations[-1]["train_step"] != run.train_step:
            await evaluate(run)
            await evaluation_ended(run)
    elif run.evaluating is not None and not run.evaluating.done():
        run.display.message(f"the evaluation of step {run.evaluating_step} is cut off; --resume does it again")
    final = await checkpoint(run)
    await compute(run, _publish_model, final / "trainer" / "model", run.folder / "model")
    run.display.summary(run.history, run.evaluations, await totals(run), run.folder)


def _publish_model(source: Path, target: Path) -> None:
    with unfinished(target) as temporary:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        publish(temporary, target)


async def close_rollouts(rollouts: Rollouts | Run) -> None:
    """Free agents, judges and engines."""
    loops = [runner.agent_loop for runner in rollouts.manager.task_runners]
    for loop in [*loops, *(eval_set.agent_loop for eval_set in rollouts.eval_sets)]:
        # A loop of the user's own may be anything that generates groups.
        if isinstance(loop, AgentLoop):
            await loop.close()
    for controller in filter(None, (rollouts.controller, rollouts.eval_controller)):
        await controller.close()


async def end_saving(run: Run, saving: asyncio.Task[None]) -> None:
    """Wait for the end of a checkpoint that was begun; warn if it failed, often by what ends the run, too."""
    await asyncio.wait([saving])
    if not saving.cancelled() and (error := saving.exception()) is not None:
        run.display.warning(f"the checkpoint that was begun last is not there: {error}")


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
            # All that follows is needed for it.
            stack.push_async_callback(end_saving, run, run.saving)
        if run.evaluating is not None:
            run.evaluating.cancel()
            stack.push_async_callback(outlast, run.evaluating)
