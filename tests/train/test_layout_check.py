"""Models whose layers carry a state from token to token: a layout is right for them, or refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as hf

from forebay.train import TrainConfig, TrainController
from forebay.train.model.trial import check_layout

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LINEAR = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
STATES = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
MODELS = {
    "qwen3_next": lambda: hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**SIZES, **LINEAR, **EXPERTS)),
    "qwen3_5_text": lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**SIZES, **LINEAR)),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=23, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "falcon_h1": lambda: hf.FalconH1ForCausalLM(
        hf.FalconH1Config(**SIZES, **STATES, mamba_d_ssm=32, mamba_d_head=8)
    ),
    "jamba": lambda: hf.JambaForCausalLM(
        hf.JambaConfig(
            **SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4,
            use_mamba_kernels=False,
        )
    ),
    "lfm2": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
    "recurrent_gemma": lambda: hf.RecurrentGemmaForCausalLM(
        hf.RecurrentGemmaConfig(**SIZES, lru_width=32, attention_window_size=32)
    ),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SIZES, head_dim=16, attn_implementation="eager")
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=23, n_embd=32, n_layer=2, n_head=2)),
}  # fmt: skip
REFUSED = {"qwen3_next", "qwen3_5_text", "mamba", "falcon_h1", "jamba", "recurrent_gemma", "lfm2"}


@pytest.mark.parametrize("kind", MODELS)
def test_states_that_leak_are_noticed_in_bfloat16_too(kind):
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    expected = pytest.raises(ValueError, match=r"^layout 'packed'") if kind in REFUSED else nullcontext()
    with torch.autocast("cpu", torch.bfloat16), expected:
        check_layout(model, "packed", torch.device("cpu"))


@pytest.mark.parametrize(("kind", "layer"), [("qwen3_next", "linear_attention"), ("lfm2", "conv")])
def test_ranks_share_out_no_sequence_whose_layers_carry_a_state(kind, layer):
    """Not left to the passes: in 16 bits they differ by less than those of a large model's kernels."""
    context: Any = object()
    with pytest.raises(ValueError, match=f"^parallel.context is wrong for .*'{kind}': layers of type '{layer}' carry"):
        check_layout(MODELS[kind](), "padded", torch.device("cpu"), context)


@pytest.mark.parametrize("layout", ["packed", "shared_prompt"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_layout_gives_the_logprobs_of_padded_rows_or_is_refused(kind, layout, make_groups):
    def trainer(layout: str) -> TrainController:
        torch.manual_seed(0)
        return TrainController(MODELS[kind]().eval(), TrainConfig(layout=layout), pad_token_id=0)

    plain = trainer("padded")
    expected = plain.compute_logprobs(plain.pack(make_groups()))
    if kind in REFUSED or (layout == "shared_prompt" and kind == "gemma2"):
        with pytest.raises(ValueError, match=f"^layout '{layout}' .* of type '{kind}'"):
            trainer(layout)
        return
    packed = trainer(layout)
    logprobs = packed.compute_logprobs(packed.pack(make_groups()))
    torch.testing.assert_close(torch.from_numpy(logprobs), torch.from_numpy(expected), atol=1e-4, rtol=0)
