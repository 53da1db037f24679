"""Many requests on a CPU, three ways: model.generate, transformers' continuous batching, Forebay's engine.

Usage: python benchmarks/engine_batching.py [--size tiny|135m] [--repeats 3] [--threads 1]

    equal   all prompts of 12 tokens in groups of 8, all responses of one length: nothing to schedule
    mixed   prompts of 4 to 48 tokens, responses of 4 to 64 (135m: 32): rows come and go

Tokens are those that were asked for; `generate` has one length for a batch, so in `mixed` it makes more and
throws them away. CPU seconds are those of the whole process. The runs take turns, and the median is printed.

What transformers' continuous batching (generate_batch, ContinuousBatchingManager) has of the engine's
contract, in 5.23: logprobs of the sampled distribution yes; a pause for new weights yes, but no label of
which weights made a token; seeds one for all requests, so what a request draws depends on what runs beside
it; a cancelled request gives nothing back; an error in a forward pass ends the manager and all requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from forebay.engines import Completion, GenerateRequest, TransformersEngine
from forebay.types import SampleParams

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 100,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}
NUM_REQUESTS = {"tiny": 256, "135m": 32}
EQUAL_TOKENS = {"tiny": 16, "135m": 32}
MIXED_TOKENS = {"tiny": (4, 8, 16, 64), "135m": (4, 8, 16, 32)}
GROUP_SIZE = 8

Request = tuple[list[int], int]
"""Prompt ids and the number of tokens to make."""


def make_model(size: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def equal_requests(size: str) -> list[Request]:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 100, 12).tolist() for _ in range(NUM_REQUESTS[size] // GROUP_SIZE)]
    return [(prompt, EQUAL_TOKENS[size]) for prompt in prompts for _ in range(GROUP_SIZE)]


def mixed_requests(size: str) -> list[Request]:
    generator = np.random.default_rng(1)
    return [
        (generator.integers(3, 100, generator.integers(4, 49)).tolist(), int(generator.choice(MIXED_TOKENS[size])))
        for _ in range(NUM_REQUESTS[size])
    ]


def sampling(max_new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=True, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )


def by_generate(model: Any, requests: list[Request]) -> None:
    longest = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    model.generate(ids, attention_mask=mask, generation_config=sampling(max(count for _, count in requests)))


def by_continuous_batching(model: Any, requests: list[Request]) -> None:
    blocks = sum(-(-(len(prompt) + count) // 32) for prompt, count in requests)
    config = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=blocks + 8,
        max_batch_tokens=4096,
        max_requests_per_batch=len(requests),
        return_logprobs=True,
    )
    with model.continuous_batching_context_manager(
        generation_config=sampling(max(count for _, count in requests)),
        continuous_batching_config=config,
        persistent_manager=True,
    ) as manager:
        for prompt, count in requests:
            manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1)
        made = 0
        while made < len(requests):
            result = manager.get_result(timeout=60)
            assert result is not None, "no result within a minute"
            assert result.error is None, result.error
            made += 1


def engine_requests(requests: list[Request]) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=str(i),
            input_ids=np.array(prompt, np.int32),
            params=SampleParams(max_tokens=count),
            max_tokens=count,
            seed=i,
        )
        for i, (prompt, count) in enumerate(requests)
    ]


async def by_engine(engine: TransformersEngine, requests: list[GenerateRequest]) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(size: str, name: str, requests: list[Request], repeats: int) -> None:
    model, paged_model = make_model(size), make_model(size)
    engine = TransformersEngine(model, max_batch=len(requests))
    asked = engine_requests(requests)
    with asyncio.Runner() as runner:
        ways: dict[str, Callable[[], Any]] = {
            "model.generate": lambda: by_generate(model, requests),
            "continuous batching": lambda: by_continuous_batching(paged_model, requests),
            "forebay engine": lambda: runner.run(by_engine(engine, asked)),
        }
        for way in ways.values():
            way()
        times: dict[str, list[tuple[float, float]]] = {label: [] for label in ways}
        for _ in range(repeats):
            for label, way in ways.items():
                times[label].append(timed(way))
        together = runner.run(by_engine(engine, asked))
        alone = [runner.run(engine.generate(request)) for request in asked[:: len(asked) // 4]]
        runner.run(engine.close())
    paged_model.destroy_cached_continuous_batching_manager()
    report(name, times, num_tokens=sum(count for _, count in requests))
    same = all(
        np.array_equal(one.logprobs, other.logprobs) and np.array_equal(one.response_ids, other.response_ids)
        for one, other in zip(alone, together[:: len(asked) // 4], strict=True)
    )
    print(f"    engine alone and in company: {'the same to the bit' if same else 'not the same bits'}")


def report(name: str, times: dict[str, list[tuple[float, float]]], num_tokens: int) -> None:
    print(f"\n  {name}: {num_tokens} tokens asked for")
    print(f"    {'':22}{'wall s':>9}{'CPU s':>9}{'tokens/CPU s':>14}{'ratio':>8}")
    baseline = statistics.median(cpu for _, cpu in times["model.generate"])
    for label, pairs in times.items():
        wall = statistics.median(wall for wall, _ in pairs)
        cpu = statistics.median(cpu for _, cpu in pairs)
        print(f"    {label:22}{wall:9.2f}{cpu:9.2f}{num_tokens / cpu:14.0f}{baseline / cpu:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    parameters = sum(parameter.numel() for parameter in make_model(arguments.size).parameters())
    print(
        f"{arguments.size}: {parameters / 1e6:.1f} M parameters, float32, {arguments.threads} thread(s), "
        f"{os.cpu_count()} cores, {platform.machine()}, python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}; median of {arguments.repeats}"
    )
    for name, requests in (("equal", equal_requests), ("mixed", mixed_requests)):
        compare(arguments.size, name, requests(arguments.size), arguments.repeats)


if __name__ == "__main__":
    main()
