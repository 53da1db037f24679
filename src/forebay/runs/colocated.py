"""The colocated run: generation and training take turns on the same machine.

::

    sync weights -> evaluate
      +-> produce a batch -> fit -> sync weights -> report -> evaluate / checkpoint when due -+
      +---------------------------------------------------------------------------------------+
    evaluate -> save -> summary

The rollouts of train step i are made by the weights of model step i - 1: staleness 0, on-policy, as long as
weights are synced after every step. To change the loop, copy this page; ``examples/low_level_loop.py`` does
the same from smaller steps.
"""

from forebay.runs import steps
from forebay.runs.build import Run


async def run_colocated(run: Run) -> None:
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
    config = run.config
    try:
        await steps.begin(run)
        while run.train_step < config.steps and not run.stop.is_set():
            train_step = run.train_step + 1
            batch = await steps.produce(run, train_step)
            metrics = await steps.fit(run, batch.rollout_states)
            await steps.forget_consumed(run, train_step)
            # Before the report: the hand-over is a part of the step, and of its seconds.
            if steps.is_due(train_step, run.sync_interval):
                await steps.sync_weights(run)
            steps.report(run, train_step, batch, metrics)
            steps.guard(run, train_step, metrics)
            if due := steps.due_sets(run, train_step):
                await steps.evaluate(run, due)
            if steps.is_due(train_step, config.checkpoint_every):
                await steps.begin_checkpoint(run)
        await steps.finish(run)
    except steps.RESCUED as error:
        await steps.rescue(run, error)
        raise
    finally:
        await steps.close(run)
