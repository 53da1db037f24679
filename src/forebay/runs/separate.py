"""The separate run: a background producer and the trainer work at the same time.

::

    produce_loop (background)   groups --> replay buffer --> next_batch
                                                                |
    sync -> evaluate --+-> next_batch -> fit -> forget_consumed +-> report --+
                       |      ^ waits for the deciding put                   |
                       |   when due: sync and evaluate, production pauses; checkpoint, it goes on
                       +-----------------------------------------------------+
    evaluate -> save -> summary -> shutdown

    consumes: batches                   waits for: a batch, or a weight sync it makes itself
    woken by: the put that completes the batch, the end of the producer, a stop, the stall watch
    produces: train steps

A pause leaves every unfinished group in the buffer, ABORTED with its tokens; nothing is thrown away. While
the held-out prompts are tried the producer rests and the weights stay as they are, unless they are tried
beside production (`forebay.runs.evaluation`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from forebay.runs import steps
from forebay.runs.build import Run
from forebay.watching.stalls import StallError


async def run_separate(run: Run) -> None:
    """Train until ``config.steps`` steps are done or a stop was requested; then save and summarize.

    Raises:
        ProductionError: rollouts cannot be produced any more; the last finished step is saved.
        StallError: nothing has moved for ``produce.stall_after_s``; the last finished step is saved.
        OffPolicyError: the rollouts left the bands of the guard, which stops the run; the last finished step
            is saved.
        FloatingPointError: the training diverged; the last finished step is saved where it still exists.
        ConfigError: the trainer refuses a batch; the last finished step is saved.
        PartLost, ConnectionLost: a part on a cluster has ended that a checkpoint brings back; the last one is
            the last state.
    """
    try:
        await steps.begin(run)
        async with _producer(run):
            try:
                await _train(run)
                await steps.finish(run)
            except steps.RESCUED as error:
                if isinstance(error, StallError):
                    # Work that has not moved for so long will not stop by itself either.
                    await run.manager.shutdown()
                else:
                    await run.manager.pause_produce()
                await steps.rescue(run, error)
                raise
    finally:
        await steps.close(run)


async def _train(run: Run) -> None:
    config = run.config
    while run.train_step < config.steps and not run.stop.is_set():
        train_step = run.train_step + 1
        batch = await steps.next_batch(run, train_step)
        if batch is None:
            break
        metrics = await steps.fit(run, batch.rollout_states)
        await steps.forget_consumed(run, train_step)
        # Before the guard may lower the interval: `fit` let servers forget weights if this sync is due.
        sync = steps.is_due(train_step, run.sync_interval)
        steps.report(run, train_step, batch, metrics)
        steps.guard(run, train_step, metrics)
        await _after_step(run, train_step, sync=sync)
    await run.manager.pause_produce()


async def _after_step(run: Run, train_step: int, *, sync: bool) -> None:
    """Do the work that is due after a step; production rests for a sync and an evaluation, not for a save."""
    config = run.config
    due = steps.due_sets(run, train_step)
    if due and run.eval_controller is not None:
        # Only begun, with the weights that the trainer has: production goes on.
        await steps.evaluate(run, due)
        due = []
    # The last one is made where production has come to its end.
    is_last = train_step == config.steps or run.stop.is_set()
    save = steps.is_due(train_step, config.checkpoint_every) and not is_last
    rests = bool(due) or (sync and not config.produce.in_flight_update)
    async with steps.production_paused(run) if rests else contextlib.nullcontext():
        if sync:
            await steps.sync_weights(run)
        if sync and not rests:
            await run.manager.continue_produce(run.controller.model_step)
        if due:
            await steps.evaluate(run, due)
        if save:
            # Begun where nothing is in flight, if production rests anyway, so that interrupted rollouts are
            # saved with their tokens; it is written while production goes on.
            await steps.begin_checkpoint(run)


@contextlib.asynccontextmanager
async def _producer(run: Run) -> AsyncIterator[None]:
    """The background producer, for as long as the block lasts; what ends it shows in `get_batch`."""
    # First: engines that rest, as after an evaluation, would answer its first requests with an abort.
    await run.manager.continue_produce(run.controller.model_step)
    producer = asyncio.create_task(run.manager.produce_loop(run.config.batch_size), name="producer")
    try:
        yield
    finally:
        await run.manager.shutdown()
        await asyncio.gather(producer, return_exceptions=True)
