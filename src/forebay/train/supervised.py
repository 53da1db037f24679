"""Supervised training on examples, by the trainer of the rollouts.

Its loss by token is the cross-entropy, and all else is as in a train step: packing, kernels, precision,
optimizer. A token counts the same whatever example it is in.

::

    examples --an order for each pass--> mini-batches --TrainController.train--> loss of each optimizer step
    held out --TrainController.compute_logprobs--> loss before the first pass and after each
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from forebay.train.batch import Example, TrainBatch
from forebay.train.config import TrainConfig, WarmupConfig
from forebay.train.controller import TrainController
from forebay.train.objective.losses import PolicyInputs, PolicyLoss


def supervised_warmup(
    model: nn.Module,
    examples: Sequence[Example],
    config: WarmupConfig,
    *,
    held_out: Sequence[Example] = (),
    pad_token_id: int,
    seed: int = 0,
    train: TrainConfig | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> tuple[list[float], list[float]]:
    """Train `model` in place on `examples`; the loss of each step, and of those `held_out`.

    The losses are in nats per trained token; that of the examples `held_out` is measured before the first
    pass over the others and after each (never without such examples).
    A response should end with the end-of-sequence token. Memory and precision are as `train` says
    (`WarmupConfig.trained_as`). `on_step(step, loss)` is called after each step, which count from 1. The same
    model, examples, settings and seed give the same weights.

    Raises:
        ValueError: there are no examples, one has an empty prompt, or one is longer than the token budget.
    """
    num_steps = config.num_steps(len(examples))
    settings = config.trained_as(train or TrainConfig())
    trainer = TrainController(model, settings, pad_token_id=pad_token_id, total_steps=num_steps)
    generator = np.random.default_rng(seed)
    losses, unseen = list[float](), list[float]()

    def measure() -> None:
        if held_out:
            batch = trainer.pack(TrainBatch.from_examples(held_out))
            found_R = trainer.compute_logprobs(batch)[batch.response_mask]
            unseen.append(-float(found_R.mean()))

    while trainer.train_step < num_steps:
        measure()
        order = generator.permutation(len(examples))
        # A pass over the examples ends with a smaller mini-batch if it must.
        parts = np.split(order, range(config.batch_size, len(order), config.batch_size))
        # The steps may end before the pass does.
        for chosen in parts[: num_steps - trainer.train_step]:
            batch = trainer.pack(TrainBatch.from_examples(examples[index] for index in chosen))
            # In place of an estimator's, since examples have no rewards.
            batch.advantages = batch.response_mask.astype(np.float32)
            losses.append(trainer.train(batch).metrics["train/loss"])
            if on_step is not None:
                on_step(trainer.train_step, losses[-1])
    measure()
    return losses, unseen


def cross_entropy(inputs: PolicyInputs, config: TrainConfig) -> PolicyLoss:
    """Minus the log probability of each token, times its advantage: 1 on the tokens to learn."""
    unclipped_N = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
    return PolicyLoss(-inputs.advantages * inputs.logprobs, unclipped_N, unclipped_N)
