"""Supervised training on (prompt, response) pairs, to teach a model the format before it learns by reward.

::

    examples --seeded epochs of shuffled mini-batches--> cross-entropy of the response tokens --> AdamW
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from forebay.train.batch import Pack, TrainBatch
from forebay.train.collate import collate
from forebay.train.config import WarmupConfig
from forebay.train.model.forward import response_logprobs
from forebay.train.optimization import Optimizer
from forebay.train.packing import cut_sorted

Example = tuple[Sequence[int], Sequence[int]]


def supervised_warmup(
    model: nn.Module,
    examples: Sequence[Example],
    config: WarmupConfig,
    *,
    pad_token_id: int,
    seed: int = 0,
    token_budget: int = 16384,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train `model` in place and return the loss of each step: nats per response token.

    `examples` are (prompt ids, response ids); the response should end with the end-of-sequence token.
    `on_step(step, loss)` is called after each step, which count from 1. The same model, examples, config and
    seed give the same weights.

    Raises:
        ValueError: there are no examples, one has an empty prompt, or one is longer than `token_budget`.
    """
    batch = TrainBatch.from_examples(examples)
    longest = int(batch.lengths.max())
    if longest > token_budget:
        raise ValueError(f"an example has {longest} tokens, more than the token budget of {token_budget}")
    optimizer = Optimizer(model, lr=config.lr, schedule="linear", total_steps=config.steps)
    device = next(model.parameters()).device
    model.eval()
    losses = []
    for step, chosen in zip(range(config.steps), _mini_batches(batch, config.batch_size, seed), strict=False):
        num_tokens = int(batch.response_lengths[chosen].sum())
        loss = torch.zeros((), device=device)
        for pack in cut_sorted(batch, chosen, token_budget):
            micro = collate(batch, pack, pad_token_id=pad_token_id, device=device)
            part = -response_logprobs(model, micro).logprobs.sum() / max(1, num_tokens)
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        optimizer.step(step)
        losses.append(float(loss))
        if on_step is not None:
            on_step(step + 1, losses[-1])
    return losses


def _mini_batches(batch: TrainBatch, size: int, seed: int) -> Iterator[Pack]:
    """Endless shuffled passes over the examples; a pass ends with a smaller mini-batch if it must."""
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(batch.num_sequences)
        yield from np.split(order, range(size, len(order), size))
