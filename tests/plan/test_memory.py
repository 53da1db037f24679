"""A plan's memory against what the same step allocates, counted by torch's own allocator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from remembered import remembered as step_memory
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, LlavaConfig, Qwen3Config, Qwen3MoeConfig

from forebay.config import ConfigError
from forebay.plan.memory import MemoryPeak, fill_numbers
from forebay.train import TrainConfig
from forebay.train.batch import TrainBatch
from forebay.train.learner import Learner
from forebay.train.packing import Packer

MODELS: dict[str, Any] = {
    # Many words: the logits are most of it. Their head works by chunks.
    "llama": LlamaConfig(
        vocab_size=32_000,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen3": Qwen3Config(
        vocab_size=2000,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    ),
    # Attention and feed-forward side by side, biases, and no grouped heads.
    "gpt_neox": GPTNeoXConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    ),
    # Experts by a grouped product, which torch refuses for fake tensors in float32.
    "qwen3_moe": Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=64,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
    ),
}
CASES = [
    ("llama", {}),
    ("qwen3", {}),
    ("gpt_neox", {}),
    ("qwen3", {"gradient_checkpointing": True}),
    ("qwen3", {"dtype": "bfloat16", "layout": "packed"}),
    ("llama", {"layout": "shared_prompt", "kl_coef": 0.1}),
    ("qwen3", {"lora_rank": 8}),
    ("qwen3", {"frozen": ["model.layers.0", "*embed_tokens"]}),
    ("qwen3_moe", {"dtype": "bfloat16"}),
    ("gpt_neox", {"advantage": "gae", "critic_lr": 1e-4}),
]


def total(step) -> int:
    return sum(step.parts.values())


def batch() -> TrainBatch:
    """Two micro-batches of 512 tokens."""
    return TrainBatch.from_examples(([group] * 32, [1] * 96) for group in range(2) for _ in range(4))


def measured_bytes(model_config: Any, config: TrainConfig) -> int:
    """The peak of the second optimizer step, by the profiler's record of the CPU allocator."""
    torch.manual_seed(0)
    learner = Learner(AutoModelForCausalLM.from_config(model_config), config, pad_token_id=0)
    full = fill_numbers(batch())
    packs = Packer(config.token_budget, layout=config.layout).pack_pad_dispatch(full).packs[0][0]
    learner.rehearse(full, packs[:1])
    models = [model for model in (learner.model, learner.critic, learner.ref_model) if model is not None]
    kept = [parameter for model in models for parameter in model.parameters()] + list(learner.moments())
    base = sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        learner.rehearse(full, packs)
    assert record.profiler is not None
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return base + int(np.cumsum(sizes).max())


# Of torch before 2.13, at every use of the profiler.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize(("kind", "settings"), CASES, ids=lambda case: str(case))
def test_a_plan_is_within_a_tenth_of_the_allocations(kind: str, settings: dict[str, Any]) -> None:
    config = TrainConfig(token_budget=512, **settings)
    planned = step_memory(MODELS[kind], config, batch())
    assert total(planned) == pytest.approx(measured_bytes(MODELS[kind], config), rel=0.1)


def test_parts_are_exact_where_they_follow_from_the_sizes() -> None:
    planned = step_memory(MODELS["qwen3"], TrainConfig(token_budget=512), batch())
    weights = 4 * planned.num_parameters
    assert planned.parts["weights"] == planned.parts["gradients"] == weights
    # AdamW's two moments, and a step count by parameter.
    assert planned.parts["moments"] == pytest.approx(2 * weights, rel=1e-3)
    # Two operations for each weight of a matrix and token, forward once and backward twice, and attention's. The
    # embedding is no matrix of a product, and the head is one for trained tokens alone.
    assert planned.work.flop / planned.tokens == pytest.approx(6 * (planned.num_parameters - 2000 * 128), rel=0.15)


def test_frozen_weights_have_neither_gradients_nor_moments() -> None:
    planned = step_memory(MODELS["qwen3"], TrainConfig(token_budget=512, frozen=("*layers",)), batch())
    outside = 4 * (2 * 2000 * 128 + 128)
    assert planned.parts["gradients"] == planned.gradient_bytes == outside
    assert planned.parts["moments"] == pytest.approx(2 * outside, rel=1e-3)
    assert planned.parts["weights"] == 4 * planned.num_parameters > 2 * outside
    with pytest.raises(ConfigError, match=r"train\.frozen: 'lauers' is the name of no weight"):
        step_memory(MODELS["qwen3"], TrainConfig(frozen=("lauers",)), batch())


def test_a_tower_for_images_has_gradients_and_moments_though_text_is_planned() -> None:
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower |= {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7}
    config = LlavaConfig(vision_config=tower, text_config=MODELS["qwen3"].to_dict(), image_token_id=9)
    planned = step_memory(config, TrainConfig(token_budget=512), batch())
    weights = 4 * planned.num_parameters
    assert planned.parts["gradients"] == planned.gradient_bytes == weights
    assert planned.parts["moments"] == pytest.approx(2 * weights, rel=1e-3)
    frozen = step_memory(config, TrainConfig(token_budget=512, frozen=("model.vision_tower",)), batch())
    assert frozen.parts["gradients"] == frozen.gradient_bytes < weights
    assert frozen.parts["moments"] == pytest.approx(2 * frozen.gradient_bytes, rel=1e-3)
    ranks = step_memory(config, TrainConfig(token_budget=512, ranks=2), batch())
    assert ranks.parts["moments"] == pytest.approx(weights, rel=1e-3)


def test_a_divergence_over_the_likeliest_tokens_is_planned() -> None:
    config = TrainConfig(token_budget=512, kl_coef=0.1)
    top = config.model_copy(update={"kl_estimator": "top_64"})
    plain, planned = (step_memory(MODELS["llama"], each, batch(), teacher=MODELS["qwen3"]) for each in (config, top))
    assert planned.parts["reference"] == plain.parts["reference"]
    # The student's and the teacher's 64 numbers by trained token.
    assert total(planned) > total(plain)


@pytest.mark.parametrize("kind", ["cpu", "8bit"])
def test_moments_elsewhere_or_shorter_are_planned(kind: Any) -> None:
    if kind == "8bit":
        pytest.importorskip("bitsandbytes")
    full = step_memory(MODELS["qwen3"], TrainConfig(token_budget=512), batch())
    planned = step_memory(MODELS["qwen3"], TrainConfig(token_budget=512, moments=kind), batch())
    share = 0 if kind == "cpu" else (1 + 4 / 256) / 4
    assert planned.parts.get("moments", 0) == pytest.approx(share * full.parts["moments"], rel=0.05)
    assert total(planned) == pytest.approx(total(full) - (1 - share) * full.parts["moments"], rel=0.01)


def test_replicas_hold_copies_and_tensor_ranks_all_of_the_embeddings() -> None:
    def parts(**parallel: int) -> Any:
        config = TrainConfig(token_budget=512, ranks=4, parallel=parallel)
        return step_memory(MODELS["qwen3"], config, batch()).parts

    sliced, copied, split = parts(), parts(replicas=2), parts(tensor=2)
    for kind in ("weights", "gradients", "moments"):
        assert copied[kind] == pytest.approx(2 * sliced[kind], abs=2)
    # Embeddings, head and the last norm are shared out over two ranks, not over four.
    outside = 4 * (2 * 2000 * 128 + 128)
    assert split["weights"] == pytest.approx(sliced["weights"] + outside / 4, abs=2)
    layers = sliced["gathered layers"] - 2 * outside
    assert split["gathered layers"] == 2 * outside + layers // 2


def test_experts_that_stay_on_their_rank_are_not_gathered() -> None:
    def gathered(**parallel: Any) -> int:
        config = TrainConfig(token_budget=512, ranks=4, parallel=parallel)
        return step_memory(MODELS["qwen3_moe"], config, batch()).parts["gathered layers"]

    # Three matrices of each expert, in float32; this layer, the next one, and gradients.
    experts = 3 * 4 * 8 * 3 * 64 * 128
    assert gathered(tensor="experts") == gathered() - experts * 3 // 4
    assert gathered(tensor="experts", replicas=2) == gathered(replicas=2) - experts // 2


def test_ranks_gather_in_bfloat16_and_keep_slices_in_float32() -> None:
    def parts(dtype: Any) -> Any:
        config = TrainConfig(token_budget=512, ranks=2, dtype=dtype, kl_coef=0.1)
        return step_memory(MODELS["qwen3"], config, batch()).parts

    whole, half = parts("float32"), parts("bfloat16")
    for kind in ("weights", "reference", "gradients", "moments"):
        assert half[kind] == pytest.approx(whole[kind], rel=1e-3)
    # Gradients are summed up in float32.
    assert whole["gathered layers"] / 2 < half["gathered layers"] < whole["gathered layers"]
    assert half["activations"] < 0.7 * whole["activations"]


def test_ranks_hold_what_lies_below_adapters_in_the_precision_of_their_passes() -> None:
    def parts(held: Any, ranks: int = 2) -> Any:
        config = TrainConfig(token_budget=512, ranks=ranks, dtype="bfloat16", lora_rank=2)
        return step_memory(MODELS["qwen3"], config, batch(), held=held).parts

    whole, half, one = parts("float32"), parts("bfloat16"), parts("bfloat16", ranks=1)
    assert half["weights"] == pytest.approx(whole["weights"] / 2, rel=0.1)
    assert half["weights"] == pytest.approx(one["weights"] / 2)
    assert half["gathered layers"] < 0.6 * whole["gathered layers"]


def test_a_planned_model_has_no_content() -> None:
    huge = LlamaConfig(
        vocab_size=128_000,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=2,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    planned = step_memory(huge, TrainConfig(token_budget=512, dtype="bfloat16"), batch())
    # More than the machines that run this test have.
    assert total(planned) > 45e9


def test_the_peak_counts_what_is_there_at_the_same_time() -> None:
    with MemoryPeak(vocabulary=7) as memory:
        first = torch.zeros(1000)
        del first
        second, logits = torch.zeros(500), torch.zeros(100, 7)
        layer = nn.Linear(10, 10)
        # At the next operation, a view that allocates nothing, the weights are known as such.
        memory.assign(layer.parameters(), "weights")
        view = second[10:]
        del logits
    # The first 4000 bytes were gone when the others came.
    assert memory.peak == {"activations": 2440, "logits": 2800}
    memory.reset()
    assert memory.peak == {"activations": 2000, "logits": 0, "weights": 440}
    del view, second
    memory.reset()
    assert memory.peak["activations"] == 0
