"""The colocated run, written out from the low-level training steps.

    python examples/low_level_loop.py recipes/demo_tiny.toml steps=5 name=by_hand

It trains the same batches to the same losses as ``forebay train`` with the same run file; change any line.
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
        try:
            await run.trainer.sync_weights(run.controller)

            for train_step in range(1, config.steps + 1):
                # Rollouts: the manager samples prompts, generates, judges, filters and takes the batch.
                produced = await run.manager.produce_batch(
                    config.batch_size, train_step, model_step=run.controller.model_step
                )

                # Training: packing comes first, then whatever the loss needs, then the update.
                batch = run.trainer.pack(produced.rollout_states)
                if config.train.uses_critic:
                    batch = run.trainer.compute_values(batch)
                # A divergence in the rewards comes from the two passes below.
                if not config.train.kl_in_reward:
                    batch = run.trainer.compute_advantages(batch)
                if config.train.needs_old_logprobs:
                    batch = run.trainer.compute_old_logprobs(batch)
                if config.train.uses_reference:
                    batch = run.trainer.compute_ref_logprobs(batch)
                if config.train.kl_in_reward:
                    batch = run.trainer.compute_advantages(batch)
                batch = run.trainer.train(batch)

                # Trained: the buffer may forget these groups.
                await run.manager.replay_buffer.commit(train_step)

                # The engine generates the next batch with these weights.
                await run.trainer.sync_weights(run.controller)
                scores = [state.reward["score"] for group in produced.rollout_states for state in group]
                history.append(batch.metrics)
                print(f"step {train_step}: reward {sum(scores) / len(scores):.3f}")
        finally:
            await steps.close(run)
    return history


if __name__ == "__main__":
    asyncio.run(train(load_config(RunConfig, Path(sys.argv[1]), sys.argv[2:])))
