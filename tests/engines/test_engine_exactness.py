"""What the engine returns is what the model says, whatever runs beside it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from forebay.engines import Completion, GenerateRequest, TransformersEngine

KINDS = ["llama", "qwen2", "gpt_neox", "gpt2"]
LENGTHS = [1, 2, 3, 17, 32, 33, 34, 70]


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 61, length).tolist() for length in lengths]


async def generate_all(engine: TransformersEngine, requests: list[GenerateRequest]) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def plain_logprobs(model: Any, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """Log-softmax, at the request's temperature, of one forward pass without cache."""
    ids = torch.from_numpy(np.concatenate([request.input_ids, completion.response_ids]).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(request.input_ids) - 1 : -1]
    temperature = request.params.temperature or 1.0
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return logprobs.gather(1, ids[len(request.input_ids) :, None])[:, 0].numpy()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
async def test_greedy_tokens_are_those_of_generate(kind, attention, make_model, make_request):
    model = make_model(kind, attn_implementation=attention)
    engine = TransformersEngine(model)
    requests = [make_request(ids, str(i), max_tokens=12, temperature=0.0) for i, ids in enumerate(prompts(LENGTHS))]
    for request, completion in zip(requests, await generate_all(engine, requests), strict=True):
        alone = model.generate(
            torch.from_numpy(request.input_ids.astype(np.int64))[None],
            attention_mask=torch.ones(1, len(request.input_ids), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )
        assert completion.response_ids.tolist() == alone[0, len(request.input_ids) :].tolist()
        assert completion.finish_reason == "length"
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=1e-4)
    await engine.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_logprobs_are_those_of_a_plain_forward_while_rows_join_and_leave(kind, make_model, make_request):
    model = make_model(kind)
    # Three places for sixteen requests of different lengths and budgets: rows join and leave all the time.
    engine = TransformersEngine(model, max_batch=3, prefill_tokens=64)
    requests = [
        make_request(ids, str(i), seed=i, max_tokens=3 + 5 * (i % 4), temperature=0.7)
        for i, ids in enumerate(prompts(LENGTHS * 2))
    ]
    completions = await generate_all(engine, requests)
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.response_ids) == request.max_tokens
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=1e-4)
    await engine.close()


@pytest.mark.parametrize("max_batch", [1, 5, 64])
async def test_a_request_draws_the_same_whatever_runs_beside_it(max_batch, llama, make_request):
    requests = [
        make_request(ids, str(i), seed=i % 3, max_tokens=4 + i % 9) for i, ids in enumerate(prompts(LENGTHS * 2))
    ]
    alone = TransformersEngine(llama)
    expected = [await alone.generate(request) for request in requests]
    beside = TransformersEngine(llama, max_batch=max_batch, prefill_tokens=100)
    for one, other in zip(expected, await generate_all(beside, requests), strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    await alone.close()
    await beside.close()


async def test_requests_that_share_a_prompt_share_its_prefill(llama, make_request, monkeypatch):
    engine = TransformersEngine(llama)
    prefilled = []
    forward = llama.base_model.forward

    def counting(*args, **kwargs):
        prefilled.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(llama.base_model, "forward", counting)
    prompt = prompts([40])[0]
    group = [make_request(prompt, str(i), seed=i, max_tokens=6) for i in range(6)]
    completions = await generate_all(engine, [*group, make_request(prompt[:37], "other", max_tokens=1)])
    assert [shape for shape in prefilled if shape[1] > 1] == [(2, 48)]
    monkeypatch.undo()
    assert len({tuple(completion.response_ids) for completion in completions}) > 1
    for request, completion in zip(group, completions, strict=False):
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(llama, request, completion), atol=1e-4)
    await engine.close()


async def test_a_prompt_longer_than_the_prefill_budget_goes_alone(llama, make_request):
    engine = TransformersEngine(llama, prefill_tokens=1)
    requests = [make_request(ids, str(i), max_tokens=4) for i, ids in enumerate(prompts([5, 70, 100]))]
    for request, completion in zip(requests, await generate_all(engine, requests), strict=True):
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(llama, request, completion), atol=1e-4)
    await engine.close()


async def test_in_sixteen_bits_it_agrees_to_that_precision(make_model, make_request):
    model = make_model("llama").to(torch.bfloat16)
    engine = TransformersEngine(model)
    requests = [make_request(ids, str(i), seed=i) for i, ids in enumerate(prompts([3, 40]))]
    for request, completion in zip(requests, await generate_all(engine, requests), strict=True):
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=0.3)
    await engine.close()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
async def test_a_context_that_is_no_round_number_can_be_used_up(kind, make_model, make_request):
    model = make_model(kind, max_position_embeddings=99)
    engine = TransformersEngine(model)
    requests = [make_request(ids, str(i), max_tokens=50) for i, ids in enumerate(prompts([98, 97, 80]))]
    for request, completion in zip(requests, await generate_all(engine, requests), strict=True):
        assert len(request.input_ids) + len(completion.response_ids) == 99
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=1e-4)
    await engine.close()


async def test_the_context_ends_a_response(llama, make_request):
    engine = TransformersEngine(llama, max_context_tokens=40)
    completion = await engine.generate(make_request(prompts([35])[0], max_tokens=50))
    assert (len(completion.response_ids), completion.finish_reason) == (5, "length")
    await engine.close()
