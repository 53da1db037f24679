"""Whether several ranks train as one: kinds of models by layouts of ranks, and a checkpoint on fewer ranks.

    python benchmarks/rank_gradients.py [--ranks 4] [--layout packed]

Each cell is the largest difference of a gradient after one train step, over the largest entry of that
gradient, read from AdamW's first moments in a checkpoint; or the sentence by which the layout is refused.
The last line saves on all ranks and resumes on half of them and on one: weights must be equal to the bit.
"""

from __future__ import annotations

import argparse
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from forebay.models.images import IMAGES
from forebay.train import LocalRanks, TrainConfig, TrainController
from forebay.types import RolloutState, Status

SIZES: dict[str, Any] = {
    "vocab_size": 63, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
SHAPES = runpy.run_path(str(Path(__file__).parents[1] / "recipes" / "shapes" / "shapes.py"))
PROCESSOR = Path(tempfile.mkdtemp(prefix="rank-gradients-"))
PLACEHOLDER = SIZES["vocab_size"]
"""Of images, each of which takes `PLACEHOLDERS` tokens."""
PLACEHOLDERS = 16
SEES: dict[str, Any] = {
    "vision_config": {
        "model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.1,
    },
    "text_config": Qwen3Config(**{**SIZES, "vocab_size": PLACEHOLDER + 1}),
    "image_token_id": PLACEHOLDER, "vision_feature_select_strategy": "default", "vision_feature_layer": -1,
    "initializer_range": 0.1,
}  # fmt: skip
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dense": (Qwen3ForCausalLM, Qwen3Config(**SIZES), {}),
    "tied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True), {}),
    "LoRA": (Qwen3ForCausalLM, Qwen3Config(**SIZES), {"lora_rank": 4}),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS), {}),
    "hybrid attention": (Qwen3NextForCausalLM, Qwen3NextConfig(**SIZES, **EXPERTS, **LINEAR), {}),
    "images": (LlavaForConditionalGeneration, LlavaConfig(**SEES), {}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {}, "FSDP x tensor": {"tensor": 2}, "hybrid": {"replicas": 2}, "FSDP x context": {"context": 2},
    "context": {"context": 4}, "tensor x context": {"tensor": 2, "context": 2},
    "hybrid x context": {"replicas": 2, "context": 2}, "experts": {"tensor": "experts"},
    "hybrid x experts": {"replicas": 2, "tensor": "experts"},
    "context x experts": {"context": 2, "tensor": "experts"},
}  # fmt: skip


def groups(kind: str) -> list[list[RolloutState]]:
    """Prompts of 2 to 5 tokens, responses of 1 to 12; of the kind with images one prompt has two, and one none."""
    random = np.random.default_rng(0)
    made = []
    pictures = [row["image"] for row in SHAPES["questions"](size=2)]
    for number in range(4):
        prompt = random.integers(3, 63, random.integers(2, 6))
        lengths = random.integers(1, 13, 4)
        shown = [[], pictures, pictures[:1], pictures[1:]][number] if kind == "images" else []
        prompt = np.concatenate([np.full(PLACEHOLDERS * len(shown), PLACEHOLDER), prompt])
        made.append(
            [
                RolloutState(
                    [],
                    rollout_id=f"{number}.{member}",
                    group_id=number,
                    task_name="task",
                    prompt_ids=prompt,
                    response_ids=random.integers(3, 63, length),
                    logprobs=-random.random(length),
                    response_model_steps=np.zeros(length),
                    mm_info={IMAGES: shown} if shown else None,
                    reward={"score": float(random.integers(0, 2))},
                    status=Status.COMPLETED,
                )
                for member, length in enumerate(lengths)
            ]
        )
    return made


def state(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    reader = HuggingFaceStorageReader(str(folder / "state"))
    found: Any = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.zeros(value.size, dtype=value.properties.dtype) for name, value in found.items()}
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


PACKING: dict[str, Any] = {"layout": "padded"}


def trainer(kind: str, ranks: LocalRanks | None, layout: dict[str, Any]) -> TrainController:
    """A fresh one, the same every time."""
    model_class, config, settings = KINDS[kind]
    torch.manual_seed(0)
    train: dict[str, Any] = {"lr": 1e-3, "token_budget": 64, **PACKING, **settings}
    if ranks is not None:
        train |= {"ranks": ranks.num_ranks, "parallel": layout}
    model = model_class(config)
    # Whose processor it has, if it has one.
    model.name_or_path = str(PROCESSOR)
    torch.manual_seed(1)
    return TrainController(model.eval(), TrainConfig(**train), pad_token_id=0, ranks=ranks)


def step(kind: str, ranks: LocalRanks | None, layout: dict[str, Any], folder: Path) -> Any:
    """The checkpoint after one train step; or why it is refused."""
    try:
        trained = trainer(kind, ranks, layout)
        trained.fit(groups(kind))
    except ValueError as error:
        is_config = isinstance(error, ValidationError)
        return f"refused: {error.errors()[0]['ctx']['error'] if is_config else error}"
    trained.save(folder)
    return state(folder)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of gradients, relative to the largest entry of each."""
    assert one.keys() == other.keys()
    # A bias of keys moves all scores of a query alike, so that its gradient is 0 but for rounding.
    names = [name for name in one if name.endswith("|exp_avg") and one[name].any() and "k_proj.bias" not in name]
    return max(float((one[n] - other[n]).abs().max() / one[n].abs().max()) for n in names)


def check_resume(ranks: dict[int, LocalRanks | None], scratch: Path) -> None:
    """Resume what the dense model saved on the most of these ranks, and print that nothing differs."""
    folder, losses = scratch / "dense" / "FSDP x tensor", []
    saved = state(folder)
    for where in ranks.values():
        resumed = trainer("dense", where, {"tensor": 2} if where is ranks[max(ranks)] else {})
        resumed.resume(folder)
        resumed.save(scratch / "again")
        again = state(scratch / "again")
        assert all(torch.equal(again[name], value) for name, value in saved.items())
        losses.append(resumed.fit(groups("dense")).metrics["train/loss"])
    print(f"resumed on {', '.join(map(str, ranks))}: weights bit-equal; next losses {losses}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--layout", choices=["padded", "packed"], default="padded")
    num_ranks, kinds, PACKING["layout"] = vars(parser.parse_args()).values()
    SHAPES["write_model"](PROCESSOR)
    ranks, fewer = LocalRanks(num_ranks, threads=1), LocalRanks(num_ranks // 2, threads=1)
    print(f"| {num_ranks} ranks | {' | '.join(LAYOUTS)} |\n|---|{'---|' * len(LAYOUTS)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for kind in kinds:
            folder = Path(scratch, kind)
            one = step(kind, None, {}, folder / "one")
            cells = []
            for name, layout in LAYOUTS.items():
                got = step(kind, ranks, layout, folder / name)
                cells.append(got if isinstance(got, str) else f"{difference(one, got):.0e}")
            print(f"| {kind} | {' | '.join(cells)} |", flush=True)
        if "dense" in kinds:
            check_resume({num_ranks: ranks, num_ranks // 2: fewer, 1: None}, Path(scratch))
    ranks.close()
    fewer.close()
    shutil.rmtree(PROCESSOR)


if __name__ == "__main__":
    main()
