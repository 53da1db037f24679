"""Loss and gradient of one step of the presets ``dapo`` and ``gspo`` beside TRL's, on the same batch.

Usage: python benchmarks/first_step_vs_trl.py     (an environment with both: pip install forebay trl)

Rollouts, scores and old log probabilities (those of the model, with noise, so that clips act) are drawn once.
Forebay makes a train step of them; TRL's `GRPOTrainer` computes its loss of the same tokens. Advantages are
Forebay's on both sides: TRL adds 1e-4 to the deviation of a group and Forebay 1e-6. Everything is float32 on
a CPU.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl_side import METHODS

from forebay.train import TrainBatch, TrainConfig, TrainController
from forebay.types import RolloutState, Status

VOCABULARY, NOISE = 23, {"dapo": 0.3, "gspo": 1e-3}


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def build_groups() -> list[list[RolloutState]]:
    random = np.random.default_rng(0)
    groups = []
    for number in range(4):
        prompt = random.integers(3, VOCABULARY, random.integers(2, 6))
        group = [
            RolloutState(
                [], rollout_id=f"{number}.{member}", group_id=number, prompt_ids=prompt,
                response_ids=random.integers(3, VOCABULARY, random.integers(1, 8)),
                reward={"score": float(random.integers(0, 2))}, status=Status.COMPLETED,
            )
            for member in range(4)
        ]  # fmt: skip
        groups.append(group)
    return groups


def forebay_step(preset: str, model: LlamaForCausalLM) -> tuple[TrainBatch, list[torch.Tensor]]:
    """The batch with what was computed for it, and the gradient of the step."""
    # One optimizer step, whose gradient is to be seen as it is.
    settings = {"mini_batches": 1, "schedule": "constant", "max_grad_norm": 0.0, "token_budget": 40}
    trainer = TrainController(model, TrainConfig(preset=preset, **settings), pad_token_id=0)
    batch = trainer.compute_old_logprobs(trainer.compute_advantages(trainer.pack(build_groups())))
    noise = np.random.default_rng(1).normal(0, NOISE[preset], batch.num_response_tokens)
    batch.old_logprobs = (batch.old_logprobs + noise).astype(np.float32)
    taken: list[torch.Tensor] = []
    optimizer: Any = trainer.learner._optimizer
    optimizer.step = lambda step: taken.extend(p.grad.clone() for p in model.parameters()) or 0.0
    return trainer.train(batch), taken


def trl_loss(preset: str, model: LlamaForCausalLM, batch: TrainBatch) -> torch.Tensor:
    """TRL's loss of the batch."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, "t1")),
        pad_token="t0", eos_token="t2",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, beta=0.0, use_cpu=True, bf16=False, report_to="none",
            per_device_train_batch_size=4, num_generations=4, **METHODS[preset],
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, processing_class=tokenizer, reward_funcs=lambda completions, **_: [0.0],
            args=config, train_dataset=Dataset.from_list([{"prompt": "t5"}]),
        )  # fmt: skip
    model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    ends = batch.token_starts + batch.prompt_lengths
    prompts = [batch.input_ids[a:b] for a, b in zip(batch.token_starts, ends, strict=True)]
    given = [batch.input_ids[a : a + n] for a, n in zip(ends, batch.response_lengths, strict=True)]
    olds = batch.by_sequence(batch.old_logprobs)
    inputs = {
        "prompt_ids": rows(prompts, right=False).long(),
        "prompt_mask": rows([np.ones(len(part)) for part in prompts], right=False).long(),
        "completion_ids": rows(given).long(),
        "completion_mask": rows([np.ones(len(part)) for part in given]).long(),
        "old_per_token_logps": rows(olds),
        "advantages": torch.tensor([part[0] for part in batch.by_sequence(batch.advantages)]),
        "num_items_in_batch": torch.tensor(float(batch.response_lengths.sum())),
    }
    return trainer._compute_loss(model, inputs)


def rows(parts: list[np.ndarray], *, right: bool = True) -> torch.Tensor:
    """The parts as rows, padded with 0 on the right or on the left."""
    width = max(map(len, parts))
    pads = [(0, width - len(part)) if right else (width - len(part), 0) for part in parts]
    return torch.from_numpy(np.stack([np.pad(part, pad) for part, pad in zip(parts, pads, strict=True)])).float()


def main() -> None:
    print("| preset | loss | TRL's | difference | of a gradient | largest gradient | tokens clipped |")
    print("|---|---|---|---|---|---|---|")
    for preset in NOISE:
        ours = build_model()
        theirs = copy.deepcopy(ours)
        batch, gradient = forebay_step(preset, ours)
        loss = trl_loss(preset, theirs, batch)
        loss.backward()
        theirs_loss = float(loss.detach())
        pairs = zip(gradient, theirs.parameters(), strict=True)
        gaps = [float((mine - other.grad).abs().max()) for mine, other in pairs]
        mine, clipped = batch.metrics["train/policy_loss"], batch.metrics["train/clip_share"]
        difference, largest = (abs(mine - float(loss.detach())), max(float(part.abs().max()) for part in gradient))
        print(
            f"| `{preset}` | {mine:.7f} | {theirs_loss:.7f} | {difference:.1e} | {max(gaps):.1e} "
            f"| {largest:.2f} | {clipped:.0%} |"
        )
        assert difference < 1e-5, difference
        assert max(gaps) < 1e-5, gaps


if __name__ == "__main__":
    main()
