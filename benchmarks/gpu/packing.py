"""How full the packs are, how even the ranks, and what a fuller pack is worth.

Usage: python benchmarks/gpu/packing.py [--size 0.5b|1.5b] [--repeats 3] [--tiny --device cpu]

64 groups of 8 rollouts (as in training.py) are cut into micro-batches of 16,384 cells. A cell holds a token
or padding; `naive` takes the rollouts as they come, as many to a micro-batch as fit if each were the longest.
Balance is the mean load of 8 ranks over the largest. The last column is a forward pass over everything: with
shared prompts a batch needs fewer cells than it has tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerator import Bench, arguments, make_groups

from forebay.train import Packer, TrainBatch, TrainConfig, TrainController
from forebay.train.packing import num_cells

NUM_RANKS = 8


def naive(batch: TrainBatch, budget: int) -> TrainBatch:
    rows = max(1, budget // int(batch.lengths.max()))
    order = np.arange(batch.num_sequences)
    batch.layout, batch.packs = "padded", [[np.split(order, range(rows, len(order), rows))]]
    return batch


def balance(batch: TrainBatch, layout: str, budget: int) -> float:
    """The mean load over the largest, in cells."""
    Packer(budget, NUM_RANKS, layout).pack_pad_dispatch(batch)  # type: ignore[arg-type]
    loads = [sum(num_cells(batch, pack, batch.layout) for pack in packs) for packs in batch.packs[0]]
    return float(np.mean(loads)) / max(loads)


def measure(
    bench: Bench, trainer: TrainController, batch: TrainBatch, name: str, budget: int
) -> dict[str, Any]:
    if name == "naive":
        even = float("nan")
        started_s = time.perf_counter()
        naive(batch, budget)
    else:
        even = balance(batch, name, budget)
        started_s = time.perf_counter()
        Packer(budget, layout=name).pack_pad_dispatch(batch)  # type: ignore[arg-type]
    packing_s = time.perf_counter() - started_s
    packs = batch.packs[0][0]
    cells = sum(num_cells(batch, pack, batch.layout) for pack in packs)
    seconds = bench.seconds(lambda: trainer.compute_old_logprobs(batch))
    return {
        "layout": name,
        "tokens": batch.num_tokens,
        "cells": cells,
        "tokens/cell": batch.num_tokens / cells,
        "micro-batches": len(packs),
        f"balance of {NUM_RANKS}": even,
        "packing ms": packing_s * 1e3,
        "forward tokens/s": batch.num_tokens / seconds,
    }


def main(given: Sequence[str] | None = None) -> None:
    bench = arguments(__doc__ or "", given)
    model = bench.model(torch.float32 if bench.tiny else torch.bfloat16)
    shape = {"prompt": 8, "response": 12} if bench.tiny else {"prompt": 256, "response": 512}
    groups = make_groups(8 if bench.tiny else 64, 8, vocabulary=model.config.vocab_size, **shape)
    batch = TrainBatch.from_groups(groups)
    budget = 512 if bench.tiny else 16384
    trainer = TrainController(model, TrainConfig(), pad_token_id=0, device=bench.device)
    names = ("naive", "padded", "packed", "shared_prompt")
    bench.report("Packing", [measure(bench, trainer, batch, name, budget) for name in names])


if __name__ == "__main__":
    main()
