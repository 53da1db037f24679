"""The same training run by Forebay and by TRL's GRPOTrainer, on a CPU, one thread each.

Usage: python benchmarks/train_vs_trl.py [--size 1m,5m] [--seeds 3] [--trl-python PATH] ...

    tiny Llama (1 M, 5 M parameters) --supervised warm-up--> weights, tokenizer, prompts (sort 8 letters)
        |                                                          |
        +--> forebay_side.py, this Python                          +--> trl_side.py, TRL's own environment
        |       produce, fit, sync_weights, report                 |       GRPOTrainer.train
        +--> CPU and wall seconds, rewards, prompts of every step <+
                 --> checks: same prompts; same weights after training on the same rollouts
                 --> benchmarks/results/train_vs_trl.{md,json}, docs/pictures/train_vs_trl.png

Each run is a process of its own, one at a time, the sides in turn. TRL's environment (``benchmarks/.envs/trl``,
some 1.5 GB) is made when it is missing, unless ``--trl-python`` names one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import train_vs_trl_report as report
from forebay.judges import JudgeConfig
from forebay.models import ModelConfig, TinyConfig, load_tokenizer, resolve_model
from forebay.produce import DataConfig, Sampler, load_prompts
from forebay.replay import SyncReplayBufferConfig
from forebay.runs.build import warm_up
from forebay.runs.config import RunConfig, TaskConfig
from forebay.runs.display import RunDisplay
from forebay.train import WarmupConfig
from forebay.train.optimisation import BETAS
from forebay.types import SampleParams
from side_by_side import Job

HERE = Path(__file__).parent
ROOT = HERE.parent
TRL_ENVIRONMENT = HERE / ".envs" / "trl"
TRL_VERSION = "1.16.0"
RESULTS = HERE / "results" / "train_vs_trl.json"
PICTURE = ROOT / "docs" / "pictures" / "train_vs_trl.png"

SIDES = ("forebay", "trl")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TASK, TASK_LENGTH = "sorting", 8
NUM_PROMPTS = 4000
MAX_TOKENS = 12
"""Eight letters and the end token, and some room for responses that are too long."""
MODEL_SEED = 0
WARMUP_BATCH = 64
MAX_GRAD_NORM, CLIP, ADAM_EPS = 1.0, 0.2, 1e-8
UNTIMED_STEPS = 3
"""Steps at the beginning that do not count: first calls allocate, compile and cache."""
REPLAYED_STEPS = 3
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and how it is trained."""

    hidden_size: int
    num_layers: int
    num_heads: int
    warmup_steps: int
    steps: int
    lr: float
    micro_batch: dict[str, int]
    """By side, the fastest of those that ``--sweep`` tries; see `Job`."""


SIZES = {
    "1m": Size(
        hidden_size=144,
        num_layers=4,
        num_heads=4,
        warmup_steps=60,
        steps=100,
        lr=3e-4,
        micro_batch={"forebay": 2048, "trl": 128},
    ),
    "5m": Size(
        hidden_size=288,
        num_layers=5,
        num_heads=6,
        warmup_steps=40,
        steps=40,
        lr=2e-4,
        micro_batch={"forebay": 2048, "trl": 128},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all runs of one size start from."""

    name: str
    size: Size
    folder: Path
    model: Path
    data: DataConfig
    prompts_per_step: int
    group_size: int
    python: dict[str, str]
    """By side."""


def prepare(name: str, options: argparse.Namespace, python: dict[str, str], work: Path) -> Bench:
    """The warmed-up weights, the tokenizer and the prompts of one size."""
    size, folder = SIZES[name], work / name
    folder.mkdir(parents=True)
    data = DataConfig(source=str(folder / "prompts.jsonl"))
    task = DataConfig(source=TASK, arguments={"length": TASK_LENGTH}, size=NUM_PROMPTS)
    write_jsonl(Path(folder / "prompts.jsonl"), [as_row(prompt) for prompt in load_prompts(task)])
    tiny = TinyConfig(
        hidden_size=size.hidden_size,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        alphabet=LETTERS + "=",
    )
    config = RunConfig(
        name=name,
        seed=MODEL_SEED,
        steps=0,
        batch_size=1,
        rollouts_per_prompt=1,
        model=ModelConfig(source="tiny", max_context=32, tiny=tiny),
        tasks=[TaskConfig(name=TASK, data=data, judge=JudgeConfig(name="exact_match"))],
        warmup=WarmupConfig(steps=size.warmup_steps, batch_size=WARMUP_BATCH),
    )
    fresh = resolve_model(config.model, cache_dir=folder / "cache", seed=MODEL_SEED)
    with RunDisplay() as display:
        model = warm_up(config, fresh, folder / "model", display)
    return Bench(
        name=name,
        size=size,
        folder=folder,
        model=model,
        data=data,
        prompts_per_step=options.prompts,
        group_size=options.group,
        python=python,
    )


def as_row(prompt: Any) -> dict[str, str]:
    return {"prompt": prompt.message[-1]["content"], "answer": prompt.reward_model["ground_truth"]}


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


async def drawn_prompts(bench: Bench, seed: int, num_prompts: int) -> list[dict[str, str]]:
    """The prompts of a run in the order in which Forebay's sampler draws them, chat template applied."""
    sampler = Sampler(
        load_prompts(bench.data),
        SyncReplayBufferConfig().build(),
        task_name=TASK,
        prompt_repeat_k=1,
        seed=seed,
    )
    tokenizer = load_tokenizer(bench.model)
    groups = [await sampler.sample(TASK) for _ in range(num_prompts)]
    texts = tokenizer.apply_chat_template(
        [group[0].message for group in groups], tokenize=False, add_generation_prompt=True
    )
    answers = [group[0].reward_model["ground_truth"] for group in groups]
    return [{"prompt": text, "answer": answer} for text, answer in zip(texts, answers, strict=True)]


def make_job(bench: Bench, side: str, seed: int, steps: int, **changes: Any) -> Job:
    """The job of one side; the folder is named like the run."""
    folder = bench.folder / f"{side}-seed{seed}-{len(list(bench.folder.iterdir()))}"
    folder.mkdir()
    prompts = Path(bench.data.source)
    if side == "trl":
        prompts = folder / "prompts.jsonl"
        write_jsonl(prompts, asyncio.run(drawn_prompts(bench, seed, steps * bench.prompts_per_step)))
    job = Job(
        model=str(bench.model),
        prompts=str(prompts),
        folder=str(folder),
        seed=seed,
        steps=steps,
        prompts_per_step=bench.prompts_per_step,
        group_size=bench.group_size,
        max_tokens=MAX_TOKENS,
        lr=bench.size.lr,
        betas=BETAS,
        eps=ADAM_EPS,
        max_grad_norm=MAX_GRAD_NORM,
        clip=CLIP,
        micro_batch=bench.size.micro_batch[side],
    )
    return replace(job, **changes)


def run_side(bench: Bench, side: str, job: Job) -> dict[str, Any]:
    """Run one side in a process of its own and return what it measured."""
    folder = Path(job.folder)
    job.save(folder / "job.json")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= ONE_THREAD | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [bench.python[side], str(HERE / f"{side}_side.py"), str(folder / "job.json")]
    with (folder / "log.txt").open("w") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        tail = "\n".join((folder / "log.txt").read_text().splitlines()[-25:])
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{tail}")
    result: dict[str, Any] = json.loads(job.result.read_text(encoding="utf-8"))
    return result
