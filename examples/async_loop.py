"""The separate run, written out: a background producer, and a training loop of your own beside it.

    python examples/async_loop.py recipes/demo_separate.toml steps=5 name=by_hand

Change any line: what is trained, when weights are handed over, what happens in between.
"""

import asyncio
import sys
from pathlib import Path

from forebay.config import load_config
from forebay.runs import RunConfig, build_run, steps
from forebay.runs.folder import new_folder
from forebay.runs.show.display import RunDisplay


async def train(config: RunConfig) -> list[dict[str, float]]:
    """Train and return the metrics of every step."""
    history = []
    with RunDisplay() as display:
        with new_folder(config, overwrite=True) as folder:
            run = build_run(config, folder, display)
        manager, trainer, controller = run.manager, run.trainer, run.controller
        await trainer.sync_weights(controller)
        producer = asyncio.create_task(manager.produce_loop(config.batch_size))
        try:
            await manager.continue_produce(controller.model_step)
            while len(history) < config.steps:
                # Wait for the batch. An empty one: all that is there, or can be made, is too old by now.
                batch = await manager.get_batch(config.batch_size, train_step=len(history) + 1)
                if batch.rollout_states:
                    # Train in a thread: the event loop, and with it the producer, goes on meanwhile.
                    trained = await asyncio.to_thread(trainer.fit, batch.rollout_states)
                    await manager.replay_buffer.commit(trainer.train_step)
                    history.append(trained.metrics)
                    oldest = max(state.seq_staleness for group in batch.rollout_states for state in group)
                    print(f"step {len(history)}: loss {trained.metrics['train/loss']:.4f}, staleness {oldest}")
                # Hand over the weights; what was in flight waits in the buffer and goes on with its tokens.
                await manager.pause_produce()
                await trainer.sync_weights(controller)
                await manager.continue_produce(controller.model_step)
            await manager.pause_produce()
            print("the books:", manager.ledger.balance(await manager.count_live()))
        finally:
            await manager.shutdown()
            await asyncio.gather(producer, return_exceptions=True)
            await steps.close(run)
    return history


if __name__ == "__main__":
    asyncio.run(train(load_config(RunConfig, Path(sys.argv[1]), sys.argv[2:])))
