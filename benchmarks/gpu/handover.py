"""The hand-over of weights against the device's copy speed; log probabilities of trainer and engine.

`TrainController.sync_weights` to a `RolloutController` with one engine on the same device, whose weights may
be of another dtype. The copy it is measured against moves as many bytes, from one tensor to another, with
the same cast. Share: the copy's seconds over the hand-over's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerator import Bench, Row, make_groups
from training import make_trainer

from forebay.engines import GenerateRequest, RolloutController, TransformersEngine
from forebay.train import TrainConfig
from forebay.types import SampleParams

SIZE = "1.5b"
CASES: Mapping[str, tuple[torch.dtype, Mapping[str, Any]]] = {
    "float32 to bfloat16": (torch.bfloat16, {}),
    "float32 to float32": (torch.float32, {}),
    "LoRA merged, bfloat16": (torch.bfloat16, {"lora_rank": 16}),
}


def hand_over(bench: Bench) -> None:
    """Every kind of hand-over, then the two log probabilities."""
    for case, (held, keys) in CASES.items():
        row = bench.attempt(case, 8, partial(_measure, bench, held, keys))
        if row is not None and case == "float32 to bfloat16":
            bench.goal("hand-over, share of copy speed", row["share"])
    for dtype in ("bfloat16", "float32"):
        bench.attempt(f"log probabilities, passes in {dtype}", 10, partial(_log_probabilities, bench, dtype))


def _measure(bench: Bench, held: torch.dtype, keys: Mapping[str, Any]) -> Row:
    engine_dtype: Any = str(held).removeprefix("torch.")
    trainer = make_trainer(bench, SIZE, TrainConfig(**keys), engine_dtype=engine_dtype)
    engine = TransformersEngine(bench.model(SIZE, held), device=str(bench.device), takes_adapters=False)
    controller = RolloutController(engine)
    trained = torch.bfloat16 if keys else torch.float32
    num_weights = sum(weight.numel() for weight in engine._model.parameters())
    source = torch.ones(num_weights, dtype=trained, device=bench.device)
    target = torch.empty(num_weights, dtype=held, device=bench.device)
    copy_s = bench.seconds(lambda: target.copy_(source))
    with asyncio.Runner() as runner:
        seconds = bench.seconds(lambda: runner.run(trainer.sync_weights(controller)))
        runner.run(controller.close())
    moved = num_weights * (source.element_size() + target.element_size())
    return {
        "weights (B)": num_weights / 1e9,
        "copy ms": copy_s * 1e3,
        "copy GB/s": moved / copy_s / 1e9,
        "hand-over ms": seconds * 1e3,
        "hand-over GB/s": moved / seconds / 1e9,
        "share": copy_s / seconds,
    }


def _log_probabilities(bench: Bench, dtype: Any) -> Row:
    """An engine in bfloat16 generates; the trainer passes over the same tokens, in bfloat16 or in float32."""
    config = TrainConfig(dtype=dtype, layout="packed", token_budget=8192)
    trainer = make_trainer(bench, SIZE, config, engine_dtype="bfloat16")
    # Random weights give nearly equal logits, among which errors do not show. This makes them differ by 3.
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(3 / (0.02 * trainer.model.config.hidden_size**0.5))
    engine = TransformersEngine(bench.model(SIZE, torch.bfloat16), device=str(bench.device))
    controller = RolloutController(engine)
    num_tokens = 8 if bench.tiny else 256
    vocabulary = bench.config(SIZE).vocab_size
    groups = make_groups(8, 4, prompt=num_tokens, response=1, vocabulary=vocabulary, equal=True)

    async def generate() -> None:
        await trainer.sync_weights(controller)
        states = [state for group in groups for state in group]
        asked = [
            GenerateRequest(
                request_id=state.rollout_id,
                input_ids=np.asarray(state.prompt_ids, np.int32),
                params=SampleParams(max_tokens=num_tokens),
                max_tokens=num_tokens,
                seed=number,
            )
            for number, state in enumerate(states)
        ]
        for state, made in zip(states, await asyncio.gather(*(engine.generate(one) for one in asked)), strict=True):
            state.response_ids, state.logprobs = made.response_ids, made.logprobs
            state.response_mask = np.ones(len(made.response_ids))
            state.response_model_steps = np.zeros(len(made.response_ids))
        await controller.close()

    asyncio.run(generate())
    batch = trainer.pack(groups)
    ratio = trainer.compute_logprobs(batch).astype(np.float64) - batch.rollout_logprobs
    weights = np.exp(ratio)
    return {
        "tokens": len(ratio),
        "mean logprob": float(batch.rollout_logprobs.mean()),
        "mean difference": float(np.abs(ratio).mean()),
        "p99": float(np.quantile(np.abs(ratio), 0.99)),
        "largest": float(np.abs(ratio).max()),
        # Schulman's k3 of engine from trainer.
        "KL": float((weights - 1 - ratio).mean()),
        "effective share": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
    }
