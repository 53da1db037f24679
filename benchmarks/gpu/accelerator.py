"""What the GPU benchmarks share: arguments, the machine's description, models with random weights, clocks.

::

    arguments(doc) --refuses without a GPU--> Bench(device, size, repeats)
    Bench.model() -> random weights   Bench.seconds(call) -> median   Bench.report(title, rows) -> table, JSON

Times are wall seconds between two synchronizations of the device, the median of `repeats` after a warm-up.
Memory is the most that torch had allocated at once on the device; on a CPU the most the process had resident
so far. With --record the rows are added to a JSON file together with hardware and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

from forebay.types import RolloutState, Status

SIZES: dict[str, dict[str, Any]] = {
    # The shapes of Qwen2.5, which many runs of this size train.
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 199,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}

Rows = list[dict[str, Any]]


@dataclass(kw_only=True)
class Bench:
    """One benchmark on one device."""

    device: torch.device
    size: str
    repeats: int
    record: Path | None

    @property
    def tiny(self) -> bool:
        return self.size == "tiny"

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        torch.manual_seed(0)
        config = Qwen2Config(
            **SIZES[self.size],
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        with self.device:
            return Qwen2ForCausalLM(config).to(self.device, dtype).eval()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """The median of `repeats` calls, after one to warm up."""
        call()
        times = []
        for _ in range(self.repeats):
            self.synchronize()
            started_s = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - started_s)
        return statistics.median(times)

    def forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return kib / (2**30 if sys.platform == "darwin" else 2**20)

    def report(self, title: str, rows: Rows) -> None:
        """Print the rows as a table, and keep them if that was asked for."""
        print(f"\n## {title}\n")
        described = ", ".join(f"{name} {value}" for name, value in machine(self.device).items())
        print(f"{self.size}, median of {self.repeats}; {described}\n")
        names = list(rows[0])
        print("| " + " | ".join(names) + " |")
        print("|" + "---|" * len(names))
        for row in rows:
            print("| " + " | ".join(_shown(row[name]) for name in names) + " |")
        if self.record is not None:
            kept = json.loads(self.record.read_text()) if self.record.exists() else []
            kept.append({"title": title, "size": self.size, "machine": machine(self.device), "rows": rows})
            self.record.write_text(json.dumps(kept, indent=2) + "\n")


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def machine(device: torch.device) -> Mapping[str, str]:
    """Hardware and versions."""
    found = {
        "device": platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
        found["CUDA"] = str(torch.version.cuda)
    return found


def arguments(doc: str, given: Sequence[str] | None = None) -> Bench:
    """Read the command line; end the program with a message where there is no GPU and none was waived."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[size for size in SIZES if size != "tiny"], default="0.5b")
    parser.add_argument("--tiny", action="store_true", help="a toy model and little work: only a test")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ..., or cpu together with --tiny")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--record", type=Path, help="a JSON file that the results are added to")
    read = parser.parse_args(given)
    device = torch.device(read.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(
            2, f"{parser.prog}: torch {torch.__version__} sees no GPU here; try --tiny --device cpu\n"
        )
    if device.type == "cpu" and not read.tiny:
        parser.exit(2, f"{parser.prog}: a {read.size} model is too slow on a CPU; add --tiny\n")
    transformers.logging.set_verbosity_error()
    return Bench(
        device=device, size="tiny" if read.tiny else read.size, repeats=read.repeats, record=read.record
    )


def make_groups(
    num_groups: int, size: int, *, prompt: int, response: int, vocabulary: int, seed: int = 0
) -> list[list[RolloutState]]:
    """Groups whose responses have about `response` tokens on average: log-normal, as chains of thought are,
    and cut at four times that, as a generation budget does."""
    generator = np.random.default_rng(seed)
    groups = []
    for number in range(num_groups):
        prompt_ids = generator.integers(3, vocabulary, max(1, generator.integers(prompt // 2, 2 * prompt)))
        # A log-normal's mean is exp(mu + sigma^2 / 2).
        lengths = generator.lognormal(np.log(response) - 0.32, 0.8, size)
        lengths = np.clip(lengths.astype(int), 1, 4 * response)
        groups.append(
            [
                RolloutState(
                    [],
                    rollout_id=f"{number}.{member}",
                    group_id=number,
                    prompt_ids=prompt_ids,
                    response_ids=generator.integers(3, vocabulary, length),
                    logprobs=-generator.random(length),
                    response_model_steps=np.zeros(length),
                    reward={"score": float(generator.integers(0, 2))},
                    status=Status.COMPLETED,
                )
                for member, length in enumerate(lengths)
            ]
        )
    return groups
