"""Tokens per second of Forebay's engine and of the same model's plain `generate`.

Usage: python benchmarks/gpu/generation.py [--size 0.5b|1.5b] [--repeats 3] [--tiny --device cpu]

    equal   64 prompts in groups of 4, all responses of 256 tokens: nothing to schedule
    mixed   responses of 32 to 512 tokens: rows come and go, `generate` runs all to the longest

Weights are bfloat16 (tiny: float32). Tokens are those that were asked for. Both sample from the whole
distribution; the engine returns logprobs as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerator import Bench, Rows, arguments
from transformers import GenerationConfig

from forebay.engines import GenerateRequest, TransformersEngine
from forebay.types import SampleParams

Request = tuple[list[int], int]
"""Prompt ids and the number of tokens to make."""


def make_requests(bench: Bench, vocabulary: int, mixed: bool) -> list[Request]:
    generator = np.random.default_rng(0)
    count, scale = (8, 8) if bench.tiny else (256, 256)
    requests = []
    for _ in range(count // 4):
        prompt = generator.integers(3, vocabulary, scale // 2).tolist()
        lengths = generator.integers(scale // 8, 2 * scale, 4) if mixed else [scale] * 4
        requests += [(prompt, int(length)) for length in lengths]
    return requests


def by_generate(model: Any, requests: list[Request]) -> None:
    config = GenerationConfig(
        max_new_tokens=max(length for _, length in requests),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        pad_token_id=0,
    )
    ids = torch.tensor([prompt for prompt, _ in requests], device=model.device)
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)


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
        assert completion.finish_reason == "length", completion.error_msg


def compare(bench: Bench, name: str) -> Rows:
    model = bench.model(torch.float32 if bench.tiny else torch.bfloat16)
    requests = make_requests(bench, model.config.vocab_size, name == "mixed")
    num_tokens = sum(length for _, length in requests)
    rows: Rows = []
    with asyncio.Runner() as runner:
        bench.forget_peak()
        plain_s = bench.seconds(lambda: by_generate(model, requests))
        rows.append(_row(name, "model.generate", num_tokens, plain_s, plain_s, bench.peak_gib()))
        bench.forget_peak()
        engine = TransformersEngine(model, max_batch=len(requests), device=str(bench.device))
        engine_s = bench.seconds(lambda: runner.run(by_engine(engine, requests)))
        rows.append(_row(name, "forebay engine", num_tokens, engine_s, plain_s, bench.peak_gib()))
        runner.run(engine.close())
    return rows


def _row(
    case: str, way: str, num_tokens: int, seconds: float, plain_s: float, peak_gib: float
) -> dict[str, Any]:
    return {
        "case": case,
        "way": way,
        "tokens": num_tokens,
        "seconds": seconds,
        "tokens/s": num_tokens / seconds,
        "ratio": plain_s / seconds,
        "peak GiB": peak_gib,
    }


def main(given: Sequence[str] | None = None) -> None:
    bench = arguments(__doc__ or "", given)
    bench.report("Generation", [row for name in ("equal", "mixed") for row in compare(bench, name)])


if __name__ == "__main__":
    main()
