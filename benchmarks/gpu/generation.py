"""Tokens per second of the in-process engine, of plain `generate`, and of transformers' continuous batching.

    mixed   256 requests, 64 prompts in groups of 4, responses of 32 to 512 tokens: rows come and go, and
            `generate` runs all of them to the longest
    equal   the same with 256 tokens each: nothing to schedule

The model has 0.5 B random weights in bfloat16. Tokens are those that were asked for. All sample from the
whole distribution; the engine returns log probabilities as well, and continuous batching is told to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerator import Bench, Row
from transformers import GenerationConfig

from forebay.engines import GenerateRequest, TransformersEngine
from forebay.types import SampleParams

SIZE = "0.5b"
BATCHING_LIMIT_S = 20.0
"""For continuous batching: one that has not ended by then made fewer tokens a second than its row says."""
Request = tuple[list[int], int]
"""Prompt ids and the number of tokens to make."""


def compare(bench: Bench) -> None:
    """All ways on both kinds of requests."""
    with asyncio.Runner() as runner:
        ways: dict[str, Callable[[list[Request]], Row]] = {
            "engine": partial(_engine_row, bench, runner),
            "plain generate": partial(_generate_row, bench),
            "continuous batching": partial(_batching_row, bench),
        }
        rows: dict[str, Row | None] = {}
        # What has a target first; and the engine: what the others take, or whether they end, is not up to Forebay.
        for kind in ("mixed", "equal"):
            requests = make_requests(bench, kind == "mixed")
            for way, work in ways.items():
                name = f"{kind}, {way}"
                rows[name] = bench.attempt(name, 20, partial(work, requests))
                own, other = rows["mixed, engine"], rows[name]
                if kind == "mixed" and way != "engine" and own is not None and other is not None:
                    ratio = own["tokens/s"] / other["tokens/s"]
                    # What had not ended is slower than its row.
                    if other.get("ended", True) or ratio >= 1:
                        bench.goal(f"generation over {way}", ratio)


def make_requests(bench: Bench, mixed: bool) -> list[Request]:
    generator = np.random.default_rng(0)
    vocabulary = bench.config(SIZE).vocab_size
    count, scale = (8, 8) if bench.tiny else (256, 256)
    requests = []
    for _ in range(count // 4):
        prompt = generator.integers(3, vocabulary, scale // 2).tolist()
        lengths = generator.integers(scale // 8, 2 * scale, 4) if mixed else [scale] * 4
        requests += [(prompt, int(length)) for length in lengths]
    return requests


def _dtype(bench: Bench) -> torch.dtype:
    return torch.float32 if bench.tiny else torch.bfloat16


def _row(
    bench: Bench, requests: list[Request], call: Callable[[], Any], warm_up: Callable[[], Any] | None = None
) -> Row:
    num_tokens = sum(length for _, length in requests)
    if warm_up is None:
        seconds = bench.seconds(call)
    else:
        warm_up()
        seconds = bench.seconds_of(call)
    return {"tokens": num_tokens, "seconds": seconds, "tokens/s": num_tokens / seconds, "peak GiB": bench.peak_gib()}


def _settings(length: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=length,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        pad_token_id=0,
    )


def _generate_row(bench: Bench, requests: list[Request]) -> Row:
    model = bench.model(SIZE, _dtype(bench))
    ids = torch.tensor([prompt for prompt, _ in requests], device=bench.device)
    longest = max(length for _, length in requests)
    # All its tokens cost the same, and take the most time of all that is here: a few warm it up, once is measured.
    many, few = (
        partial(model.generate, ids, attention_mask=torch.ones_like(ids), generation_config=_settings(length))
        for length in (longest, min(longest, 8))
    )
    return _row(bench, requests, many, few)


def _engine_row(bench: Bench, runner: asyncio.Runner, requests: list[Request]) -> Row:
    model = bench.model(SIZE, _dtype(bench))
    engine = TransformersEngine(model, max_batch=len(requests), device=str(bench.device))
    try:
        return _row(bench, requests, lambda: runner.run(by_engine(engine, requests)))
    finally:
        runner.run(engine.close())


async def by_engine(engine: TransformersEngine, requests: list[Request]) -> None:
    asked = [
        GenerateRequest(
            request_id=str(number),
            input_ids=np.array(prompt, np.int32),
            params=SampleParams(max_tokens=length),
            max_tokens=length,
            seed=number,
        )
        for number, (prompt, length) in enumerate(requests)
    ]
    for completion in await asyncio.gather(*(engine.generate(request) for request in asked)):
        if completion.finish_reason != "length":
            raise RuntimeError(f"a request ended with {completion.finish_reason}: {completion.error_msg}")


def _batching_row(bench: Bench, requests: list[Request]) -> Row:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = bench.model(SIZE, _dtype(bench))
    limits: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 64, "block_size": 32} if bench.tiny else {}
    settings = ContinuousBatchingConfig(return_logprobs=True, **limits)
    # The manager is kept, with its cache and CUDA graphs: what is timed is generation, as with the engine.
    with model.continuous_batching_context_manager(
        generation_config=_settings(max(length for _, length in requests)), continuous_batching_config=settings
    ) as manager:

        def generate(asked: list[Request]) -> bool:
            names = [manager.add_request(prompt, max_new_tokens=length) for prompt, length in asked]
            made, until_s = 0, time.monotonic() + min(BATCHING_LIMIT_S, bench.left_s() - 5)
            for _ in asked:
                result = manager.get_result(timeout=max(0.1, until_s - time.monotonic()))
                if result is None:
                    # Else leaving the context waits for all of them.
                    for name in names:
                        manager.cancel_request(name)
                    return False
                if result.error is not None:
                    raise RuntimeError(f"continuous batching made {made} tokens, then {result.error}")
                made += len(result.generated_tokens)
            if made != sum(length for _, length in asked):
                raise RuntimeError(f"continuous batching made {made} tokens")
            return True

        # A few short ones of each group warm it up: all of them would take as long again.
        if not generate([(prompt, 4) for prompt, _ in requests[:64]]):
            raise RuntimeError("continuous batching did not end 64 requests of 4 tokens")
        ended: list[bool] = []
        row = _row(bench, requests, lambda: ended.append(generate(requests)), lambda: None)
        return {**row, "ended": ended == [True]}
