"""How far a trainer in float32 is from an engine in bfloat16: a mixture of experts, with and without replay.

    python benchmarks/routing_replay.py [--seeds 3]

Tiny Qwen3-MoE models (4 layers, 16 experts, 4 of them a token) and dense Qwen3 models of the same sizes, with
random weights. The engine in the process makes 64 rollouts of 64 tokens in bfloat16; the same weights in
float32 compute the log probability of each token again, as a trainer does: with the router's own choice of
experts, and with the engine's. Prints a table of the differences in nats: mean, 99th percentile, largest, and
the mean of the squares over two, which is about the divergence of the two distributions.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from forebay.engines import RolloutController, TransformersEngine
from forebay.models.routing import Routing
from forebay.train.batch import TrainBatch
from forebay.train.collate import collate
from forebay.train.model.forward import response_logprobs
from forebay.train.packing import Packer
from forebay.types import RolloutState, SampleParams, Status

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}


def build(kind: str, seed: int) -> Any:
    """A model in bfloat16."""
    torch.manual_seed(seed)
    if kind == "dense":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
    return model.to(torch.bfloat16).eval()


async def generate(model: Any) -> list[list[RolloutState]]:
    """16 groups of 4 rollouts."""
    controller = RolloutController(TransformersEngine(model))
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 64, 8) for _ in range(16)]
    groups = [
        [
            RolloutState(
                [],
                rollout_id=f"{number}-{member}",
                group_id=number,
                prompt_ids=prompt,
                sample_params=SampleParams(max_tokens=64),
                reward={"score": 1.0},
            )
            for member in range(4)
        ]
        for number, prompt in enumerate(prompts)
    ]
    await asyncio.gather(*(controller.generate_sample(state) for group in groups for state in group))
    await controller.close()
    for group in groups:
        for state in group:
            state.status = Status.COMPLETED
    return groups


@torch.no_grad()
def differences(model: Any, groups: list[list[RolloutState]], *, replay: bool) -> np.ndarray:
    """By token."""
    batch = TrainBatch.from_groups(groups)
    Packer(8192).pack_pad_dispatch(batch)
    routing = Routing(model) if replay else None
    found = np.zeros(batch.num_response_tokens, np.float32)
    for pack in batch.packs[0][0]:
        micro = collate(batch, pack, pad_token_id=0, device=torch.device("cpu"))
        found[micro.token_index] = response_logprobs(model, micro, routing=routing).logprobs.numpy()
    return np.abs(found - batch.rollout_logprobs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    found: dict[str, list[np.ndarray]] = {"dense": [], "experts, the router's": [], "experts, replayed": []}
    for seed in range(seeds):
        for kind in ("dense", "experts"):
            model = build(kind, seed)
            exact = copy.deepcopy(model).float()
            groups = asyncio.run(generate(model))
            if kind == "dense":
                found[kind].append(differences(exact, groups, replay=False))
                continue
            found["experts, the router's"].append(differences(exact, groups, replay=False))
            found["experts, replayed"].append(differences(exact, groups, replay=True))
    print("| model | mean | 99th percentile | largest | mean square / 2 |\n|---|---|---|---|---|")
    for name, parts in found.items():
        each = np.concatenate(parts)
        numbers = each.mean(), np.quantile(each, 0.99), each.max(), (each**2).mean() / 2
        print(f"| {name} | {' | '.join(f'{number:.2g}' for number in numbers)} |")


if __name__ == "__main__":
    main()
