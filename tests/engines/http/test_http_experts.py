"""Experts of a mixture that a server states with the end of an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from forebay.engines.servers.dialects import RETURN_EXPERTS, Dialect

WEIGHTS = [("w", torch.ones(2))]


@pytest.fixture
async def vllm(start_fake, fake_kinds):
    return await start_fake(fake_kinds["FakeVLLM"])


def experts_of(job: Any) -> Any:
    """For each token but the last: its number, and the step of the weights that computed it here."""
    step = 0 if job.made[-1] == 10 else 1
    numbers = np.arange(len(job.prompt) + len(job.made) - 1, dtype=np.int32)
    return np.stack([numbers, np.full_like(numbers, step)], axis=-1)[:, None]


async def test_a_server_states_the_experts_of_all_tokens_with_the_end(vllm, connect, ask):
    vllm.dialect, vllm.experts = Dialect(options=[RETURN_EXPERTS]), experts_of
    engine = connect(vllm, dialect=vllm.dialect)
    await engine.bring_up()
    completion = await engine.generate(ask())
    length = len(ask().input_ids) + len(completion.response_ids) - 1
    assert completion.routed_experts.dtype == np.int8
    assert completion.routed_experts[:, 0, 0].tolist() == list(range(length))
    assert {call for call in vllm.calls if "generate" in call} == {"POST /inference/v1/generate"}


async def test_tokens_that_older_weights_made_keep_the_experts_of_then(vllm, connect, ask):
    vllm.dialect, vllm.experts, vllm.auto = Dialect(options=[RETURN_EXPERTS]), experts_of, False
    engine = connect(vllm, dialect=vllm.dialect)
    await engine.bring_up()
    running = asyncio.create_task(engine.generate(ask()))
    await vllm.has_jobs(1)
    vllm.make(2)
    loading = asyncio.create_task(engine.load_weights(WEIGHTS, 1))
    await loading
    await vllm.has_jobs(1)
    vllm.make(2)
    completion = await running
    assert completion.model_steps.tolist() == [0, 0, 1, 1]
    known = len(ask().input_ids) + 1
    assert completion.routed_experts[:, 0, 1].tolist() == [0] * known + [1] * 2
