"""A model small enough to train in milliseconds, and groups of rollouts for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forebay.types import RolloutState, Status

torch.set_num_threads(1)

VOCABULARY = 23


def build_model(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def build_groups(
    num_groups: int = 4, size: int = 4, *, seed: int = 0, masked: bool = False, same_prompt_length: bool = False
) -> list[list[RolloutState]]:
    """Groups with prompts of 2-5 tokens, responses of 1-7, random scores and engine logprobs."""
    random = np.random.default_rng(seed)
    groups = []
    for number in range(num_groups):
        prompt = random.integers(3, VOCABULARY, 4 if same_prompt_length else random.integers(2, 6))
        group = []
        for member in range(size):
            length = random.integers(1, 8)
            mask = random.integers(0, 2, length) if masked else np.ones(length)
            group.append(
                RolloutState(
                    [],
                    rollout_id=f"{number}.{member}",
                    group_id=number,
                    task_name="task",
                    prompt_ids=prompt,
                    response_ids=random.integers(3, VOCABULARY, length),
                    response_mask=mask,
                    logprobs=-random.random(length),
                    response_model_steps=np.zeros(length),
                    reward={"score": float(random.integers(0, 2))},
                    status=Status.COMPLETED,
                )
            )
        groups.append(group)
    return groups


@pytest.fixture
def model() -> LlamaForCausalLM:
    return build_model()


@pytest.fixture
def make_model() -> Callable[..., LlamaForCausalLM]:
    return build_model


@pytest.fixture
def make_groups() -> Callable[..., list[list[RolloutState]]]:
    return build_groups
