"""Time and memory of a train step of a model with random weights.

Usage: python benchmarks/gpu/training.py [--size 0.5b|1.5b] [--repeats 3] [--tiny --device cpu]

A step is `TrainController.fit` on 16 groups of 8 rollouts (prompts of 128-512 tokens, responses of 512 on
average and at most 2,048): packing, forward and backward passes, one AdamW step. Weights and moments are
float32, passes bfloat16 by autocast. TFLOP/s are those that the tokens of the batch need, 6 x parameters x
tokens: padding and recomputed activations count as waste.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerator import Bench, Rows, arguments, make_groups

from forebay.train import TrainConfig, TrainController

VARIANTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "padded, checkpointing": {"gradient_checkpointing": True},
    "padded, float32": {"dtype": "float32"},
    "packed": {"layout": "packed", "token_budget": 4096},
    "shared_prompt": {"layout": "shared_prompt"},
    "padded, LoRA 16": {"lora_rank": 16},
}


def measure(bench: Bench, variant: str) -> dict[str, Any]:
    budget = 512 if bench.tiny else 8192
    changes = VARIANTS[variant]
    if bench.tiny:
        changes = {**changes, "token_budget": budget}
    config = TrainConfig(**{"lr": 1e-6, "dtype": "bfloat16", "token_budget": budget, **changes})
    bench.forget_peak()
    model = bench.model()
    vocabulary, num_parameters = model.config.vocab_size, sum(p.numel() for p in model.parameters())
    trainer = TrainController(model, config, pad_token_id=0, device=bench.device)
    shape = {"prompt": 8, "response": 12} if bench.tiny else {"prompt": 256, "response": 512}
    groups = make_groups(4 if bench.tiny else 16, 8, vocabulary=vocabulary, **shape)
    batches = []
    seconds = bench.seconds(lambda: batches.append(trainer.fit(groups)))
    batch = batches[-1]
    return {
        "variant": variant,
        "parameters (M)": num_parameters / 1e6,
        "tokens": batch.num_tokens,
        "micro-batches": sum(len(packs) for ranks in batch.packs for packs in ranks),
        "padding": batch.metrics["train/padding"],
        "seconds": seconds,
        "tokens/s": batch.num_tokens / seconds,
        "TFLOP/s": 6 * num_parameters * batch.num_tokens / seconds / 1e12,
        "peak GiB": bench.peak_gib(),
    }


def main(given: Sequence[str] | None = None) -> None:
    bench = arguments(__doc__ or "", given)
    rows: Rows = [measure(bench, variant) for variant in VARIANTS]
    bench.report("Train step", rows)


if __name__ == "__main__":
    main()
