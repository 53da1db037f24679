"""Models that the engine would serve wrongly are refused."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from forebay.engines import TransformersEngine
from forebay.engines.local.batch import DecodeBatch

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def mistral(window: int | None):
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window, max_position_embeddings=64))


def test_a_window_shorter_than_the_context_is_refused():
    with pytest.raises(ValueError, match=r"last 32 tokens only, but the context is 64; .* 32 or less"):
        TransformersEngine(mistral(32))
    for engine in (TransformersEngine(mistral(32), max_context_tokens=32), TransformersEngine(mistral(None))):
        assert engine.max_context_tokens in (32, 64)


def test_layers_without_plain_attention_are_refused(make_model):
    model = make_model("qwen2")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="has linear_attention layers"):
        TransformersEngine(model)
    windowed = make_model("qwen2", use_sliding_window=True, sliding_window=100, max_window_layers=1)
    with pytest.raises(ValueError, match="last 100 tokens only"):
        TransformersEngine(windowed)
    assert TransformersEngine(windowed, max_context_tokens=100).max_context_tokens == 100


def test_positions_that_depend_on_the_batch_are_refused(make_model):
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 80}
    with pytest.raises(ValueError, match=r"'dynamic' rope.* 80 or less"):
        TransformersEngine(make_model("llama", rope_parameters=rope))


def test_a_model_that_cannot_take_the_mask_is_refused():
    # Bloom counts positions in a two-dimensional mask.
    config = BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)
    with pytest.raises(ValueError, match="BloomForCausalLM cannot decode in a batch with a cache"):
        TransformersEngine(BloomForCausalLM(config), max_context_tokens=64)


@pytest.mark.parametrize("seed", range(4))
def test_weights_of_16_bits_are_taken_whose_logits_are_those_of_large_models(make_model, seed):
    """They lie 1/4 apart, so a batch and a pass alone differ by more than 0.2 nats at some token."""
    model = make_model("qwen2", num_hidden_layers=8, initializer_range=0.1, hidden_size=128, vocab_size=2000)
    torch.manual_seed(seed)
    model.requires_grad_(False).lm_head.weight.normal_(std=1.2)
    TransformersEngine(model.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_a_model_that_ignores_what_it_is_told_is_refused(llama, monkeypatch, ignored, dtype):
    llama.to(dtype)
    forward = llama.forward
    monkeypatch.setattr(llama, "forward", lambda **kwargs: forward(**(kwargs | {ignored: None})))
    with pytest.raises(ValueError, match="decodes differently in a batch than alone"):
        TransformersEngine(llama)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_token_that_is_off_shows_where_numbers_are_exact(llama, monkeypatch, dtype):
    """The mean over a row would hide it, as it is to hide the rounding of 16 bits."""
    step, num_off = DecodeBatch.step, 0

    def off(self, *arguments):
        nonlocal num_off
        ended = step(self, *arguments)
        for _, completion in ended:
            completion.logprobs[-1] += 2.5e-3
            num_off += 1
        return ended

    monkeypatch.setattr(DecodeBatch, "step", off)
    with contextlib.nullcontext() if dtype == torch.bfloat16 else pytest.raises(ValueError, match=r"by 0\.002"):
        TransformersEngine(llama.to(dtype))
    assert num_off == 3


def test_encoder_decoders_are_refused():
    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="is an encoder-decoder"):
        TransformersEngine(T5ForConditionalGeneration(config), max_context_tokens=64)


@pytest.mark.parametrize("context", [1, 161])
def test_a_context_the_model_cannot_have_is_refused(llama, context):
    with pytest.raises(ValueError, match=f"max_context_tokens is {context}.* at most the model's 160"):
        TransformersEngine(llama, max_context_tokens=context)


def test_the_light_names_load_no_torch():
    code = (
        "import sys, forebay.engines as e, forebay.models as m, forebay.testing;"
        "e.build_engines, e.RolloutController, m.ModelConfig(source='tiny');"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
