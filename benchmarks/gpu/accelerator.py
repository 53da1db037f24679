"""What the steps of `run_all.py` share: device, models with random weights, clocks, and lines of results.

::

    Bench.attempt(case, needs_s, work) --work() gives a row, fails, or there is no time--> Bench.write(line)

Times are wall seconds between two synchronizations of the device, the median of `repeats` after a warm-up.
Memory is the most that torch had allocated at once on the device; on a CPU it is the most that the process
had resident, which says nothing. Model sizes are those of Qwen2.5 and Qwen3; weights are random.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from forebay.types import RolloutState, Status

Row = dict[str, Any]
Line = dict[str, Any]

SIZES: Mapping[str, Mapping[str, Any]] = {
    "0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "qwen2",
        "vocab_size": 199,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
}


class Unavailable(Exception):
    """This version or this machine has not what a case measures."""


@dataclass(kw_only=True)
class Bench:
    """One step on one device."""

    device: torch.device
    until_s: float
    """By `time.monotonic`: the step is ended then."""
    write: Callable[[Line], None]
    """Keeps a line; it is safe when this returns."""
    folder: Path
    """Scratch."""
    repeats: int = 2

    @property
    def tiny(self) -> bool:
        """Whether only the code is tried, on a CPU."""
        return self.device.type == "cpu"

    def left_s(self) -> float:
        """Seconds that the step has left."""
        return self.until_s - time.monotonic()

    def goal(self, name: str, value: float) -> None:
        """Keep a measure that has a target; see `run_all.GOALS`."""
        self.write({"goal": name, "value": value})

    def attempt(self, case: str, needs_s: float, work: Callable[[], Row]) -> Row | None:
        """Keep the row that `work` gives, or why there is none (None then); a failure ends only this case."""
        if not self.tiny and self.left_s() < needs_s:
            reason = f"needs about {needs_s:.0f} s, {self.left_s():.0f} s are left"
            self.write({"case": case, "skipped": reason})
            return None
        self.forget_peak()
        try:
            row = work()
        except Unavailable as error:
            self.write({"case": case, "skipped": str(error)})
            return None
        # Whatever a case does, the others are worth having.
        except Exception as error:
            traceback.print_exc()
            self.write({"case": case, "failed": in_one_line(error)})
            return None
        self.write({"case": case, "row": row})
        return row

    def config(self, size: str) -> Any:
        """transformers' config of a model of `size`; in CPU mode of a toy."""
        settings = dict(SIZES["tiny" if self.tiny else size])
        return AutoConfig.for_model(
            settings.pop("model_type"),
            **settings,
            max_position_embeddings=32768,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )

    def model(self, size: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
        """A model with random weights; `settings` as of `from_config`."""
        torch.manual_seed(0)
        with self.device:
            made = AutoModelForCausalLM.from_config(self.config(size), dtype=dtype, **settings)
        return made.eval()

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """The median of `repeats` calls, after one to warm up; fewer calls where time is short, or on a CPU."""
        if not self.tiny:
            call()
        times: list[float] = []
        while len(times) < self.repeats and not (times and self.left_s() < 2 * times[-1]):
            times.append(self.seconds_of(call))
        return statistics.median(times)

    def seconds_of(self, call: Callable[[], Any]) -> float:
        """One call."""
        self.synchronize()
        started_s = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - started_s

    def forget_peak(self) -> None:
        """Free what nobody holds, and count the most memory from here on."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float:
        """The most memory since `forget_peak`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return kib / (2**30 if sys.platform == "darwin" else 2**20)


def in_one_line(error: BaseException) -> str:
    """Its type and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def describe_machine(device: torch.device) -> dict[str, str]:
    """Hardware and versions."""
    found = {"device": platform.processor() or platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = {
            "device": f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)",
            "driver": _driver(),
            "CUDA": str(torch.version.cuda),
        }
    found |= {"cores": str(os.cpu_count()), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in ("triton", "peft"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = "none"
    return found


def _driver() -> str:
    try:
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Release Build ..."
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), "unknown")


def make_groups(
    num_groups: int, size: int, *, prompt: int, response: int, vocabulary: int, equal: bool = False, seed: int = 0
) -> list[list[RolloutState]]:
    """Groups whose responses have about `response` tokens on average: log-normal, as chains of thought are,
    and cut at four times that, as a generation budget does. `equal`: all lengths as given."""
    generator = np.random.default_rng(seed)
    groups = []
    for number in range(num_groups):
        length = prompt if equal else max(1, int(generator.integers(prompt // 2, 2 * prompt)))
        prompt_ids = generator.integers(3, vocabulary, length)
        # A log-normal's mean is exp(mu + sigma^2 / 2).
        drawn = generator.lognormal(np.log(response) - 0.32, 0.8, size)
        lengths = [response] * size if equal else np.clip(drawn.astype(int), 1, 4 * response).tolist()
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
                    # Both scores are in every group: none is without a signal.
                    reward={"score": float(member % 2)},
                    status=Status.COMPLETED,
                )
                for member, length in enumerate(lengths)
            ]
        )
    return groups
