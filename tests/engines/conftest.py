"""Tiny random decoders of several architectures, and requests for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from forebay.engines import GenerateRequest
from forebay.types import SampleParams

VOCAB_SIZE = 61

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    # Larger than usual, so that distributions are far from uniform and mistakes show.
    "initializer_range": 0.3,
}


def _make_model(kind: str, **changes: Any) -> Any:
    """A random model; the same arguments give the same weights."""
    torch.manual_seed(7)
    sizes = _SIZES | changes
    if kind == "llama":
        config = LlamaConfig(intermediate_size=64, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
        model = LlamaForCausalLM(config)
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(intermediate_size=64, num_key_value_heads=2, **sizes))
    elif kind == "gpt_neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(intermediate_size=64, **sizes))
    else:
        assert kind == "gpt2"
        model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))
    return model.eval()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    return _make_model


@pytest.fixture
def llama() -> Any:
    return _make_model("llama")


@pytest.fixture(scope="session")
def make_request() -> Callable[..., GenerateRequest]:
    def make(
        input_ids: Any, request_id: str = "r", *, seed: int = 0, max_tokens: int = 8, **params: Any
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=request_id,
            input_ids=np.asarray(input_ids, np.int32),
            params=SampleParams(**({"max_tokens": max_tokens} | params)),
            max_tokens=max_tokens,
            seed=seed,
        )

    return make
