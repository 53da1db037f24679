"""The same training run by Forebay and by TRL's GRPOTrainer, on a CPU, one thread each.

Usage: python benchmarks/train_vs_trl.py [--size 1m,5m] [--seeds 3] [--trl-python PATH]

    tiny Llama (1 M, 5 M parameters) --supervised warm-up--> weights, tokenizer; prompts (sort letters)
        |                                                          |
        +--> forebay_side.py, this Python                          +--> trl_side.py, TRL's own environment
        |       produce, fit, sync_weights, report                 |       GRPOTrainer.train
        +--> CPU and wall seconds, rewards, prompts of every step <+
                 |
                 v
    checks: equal prompts in every step; equal weights after training on equal rollouts
    benchmarks/results/train_vs_trl.{md,json}, docs/pictures/train_vs_trl.png

Every run is a process of its own, one at a time, the sides in turn. TRL's environment (benchmarks/.envs/trl,
1.5 GB) is made when it is missing, unless --trl-python names one. --sweep only times the micro-batch sizes
that both sides can choose; --render only writes the page and the picture again from the JSON file.
``presets_vs_trl.py`` compares the final scores of whole methods with the same two sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import train_vs_trl_report as report
from safetensors.torch import load_file
from side_by_side import SIDES, Job

from forebay.judges import JudgeConfig
from forebay.models import ModelConfig, TinyConfig, load_tokenizer, resolve_model
from forebay.produce import DataConfig, Sampler, load_prompts
from forebay.replay import SyncReplayBufferConfig
from forebay.runs.build import warm_up
from forebay.runs.config import RunConfig, TaskConfig, WarmupTable
from forebay.runs.rollouts import load_data
from forebay.runs.show.display import RunDisplay
from forebay.train.config import ADAM

HERE = Path(__file__).parent
TRL_ENVIRONMENT = HERE / ".envs" / "trl"
TRL_VERSION = "1.16.0"
CONSTRAINTS = HERE.parent / "constraints.txt"
RESULTS = HERE / "results" / "train_vs_trl.json"
PICTURE = HERE.parent / "docs" / "pictures" / "train_vs_trl.png"

ALPHABET = "abcdefghijklmnopqrstuvwxyz="
NUM_LETTERS = 8
"""Different letters in the strings to sort: few enough that 100 steps show a rising curve."""
MIXED_LENGTHS, EQUAL_LENGTHS = (4, 12), (8, 8)
"""Letters of a string. Real prompts and responses differ in length; equal ones are where padding is free."""
NUM_PROMPTS = 4000
SPARE_TOKENS = 3
"""Room in a response after the right answer and its end token."""
MODEL_SEED = 0
MAX_GRAD_NORM, CLIP, ADAM_EPS = 1.0, 0.2, 1e-8
UNTIMED_STEPS = 3
"""Steps at the beginning of a run that do not count: first calls allocate and cache."""
REPLAYED_STEPS = 3
SWEEP_STEPS, EQUAL_LENGTH_STEPS = UNTIMED_STEPS + 4, UNTIMED_STEPS + 12
SWEEP = {"forebay": (1024, 2048, 4096), "trl": (128, 64, 32)}
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
    """By side, see `Job`; chosen from short runs of `SWEEP`."""


SIZES = {
    "1m": Size(
        hidden_size=144,
        num_layers=4,
        num_heads=4,
        warmup_steps=60,
        steps=100,
        lr=2e-4,
        micro_batch={"forebay": 4096, "trl": 64},
    ),
    "5m": Size(
        hidden_size=288,
        num_layers=5,
        num_heads=6,
        warmup_steps=40,
        steps=50,
        lr=1e-4,
        micro_batch={"forebay": 4096, "trl": 64},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the runs of one size and one set of prompts start from."""

    size: Size
    folder: Path
    model: Path
    data: DataConfig
    max_tokens: int
    prompts_per_step: int
    group_size: int
    python: dict[str, str]
    """By side."""


# The model and the prompts


def prepare(size: Size, letters: tuple[int, int], options: argparse.Namespace, folder: Path) -> Bench:
    """The warmed-up weights, the tokenizer and the prompts, in `folder`."""
    data = write_problems(letters, folder / "prompts.jsonl")
    return Bench(
        size=size,
        folder=folder,
        model=warmed_up_model(size, data, folder),
        data=data,
        max_tokens=letters[1] + 1 + SPARE_TOKENS,
        prompts_per_step=options.prompts,
        group_size=options.group,
        python={"forebay": sys.executable, "trl": options.trl_python},
    )


def write_problems(letters: tuple[int, int], path: Path) -> DataConfig:
    """Sorting problems, equally many of every length from the first to the second of `letters`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, problems(letters))
    return DataConfig(source=str(path))


def problems(letters: tuple[int, int], more: int = 0) -> list[tuple[str, str]]:
    """Prompt and answer of those problems, with `more` of each length."""
    lengths = range(letters[0], letters[1] + 1)
    prompts = [
        prompt
        for length in lengths
        for prompt in load_prompts(
            DataConfig(
                source="sorting",
                arguments={"length": length, "letters": NUM_LETTERS},
                size=min(NUM_PROMPTS // len(lengths) + more, NUM_LETTERS**length),
            )
        )
    ]
    return [(prompt.message[-1]["content"], answer_of(prompt)) for prompt in prompts]


def answer_of(prompt: Any) -> str:
    answer: str = prompt.reward_model["ground_truth"]
    return answer


def write_jsonl(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    lines = (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows)
    path.write_text("".join(lines), encoding="utf-8")


def warmed_up_model(size: Size, data: DataConfig, folder: Path) -> Path:
    tiny = TinyConfig(
        hidden_size=size.hidden_size, num_layers=size.num_layers, num_heads=size.num_heads, alphabet=ALPHABET
    )
    config = RunConfig(
        name="warmup",
        seed=MODEL_SEED,
        steps=0,
        batch_size=1,
        rollouts_per_prompt=1,
        model=ModelConfig(source="tiny", max_context=64, tiny=tiny),
        tasks=[TaskConfig(name="sorting", data=data, judge=JudgeConfig(name="exact_match"))],
        warmup=WarmupTable(steps=size.warmup_steps),
    )
    fresh = resolve_model(config.model, cache_dir=folder / "cache", seed=MODEL_SEED)
    with RunDisplay() as display:
        return warm_up(config, fresh, folder / "model", display, load_data(config))


async def drawn_prompts(bench: Bench, seed: int, num_prompts: int) -> list[tuple[str, str]]:
    """Prompt, chat template applied, and answer, in the order in which Forebay's sampler draws them."""
    sampler = Sampler(
        load_prompts(bench.data), SyncReplayBufferConfig().build(), task_name="sorting", prompt_repeat_k=1, seed=seed
    )
    groups = [await sampler.sample("sorting") for _ in range(num_prompts)]
    texts = load_tokenizer(bench.model).apply_chat_template(
        [group[0].message for group in groups], tokenize=False, add_generation_prompt=True
    )
    return [(text, answer_of(group[0])) for text, group in zip(texts, groups, strict=True)]


# One run of one side


def run_side(bench: Bench, side: str, label: str, *, seed: int = 0, steps: int, **changes: Any) -> Any:
    """Train in a process of its own; what it measured. `changes` are fields of the `Job`."""
    job = make_job(bench, side, bench.folder / f"{label}-{side}-{seed}", seed=seed, steps=steps)
    job = replace(job, **changes)
    folder = Path(job.folder)
    job.save(folder / "job.json")
    environment = dict(os.environ)
    if side == "trl":
        environment.pop("PYTHONPATH", None)
    environment |= ONE_THREAD | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [bench.python[side], str(HERE / f"{side}_side.py"), str(folder / "job.json")]
    with (folder / "log.txt").open("w") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        tail = "\n".join((folder / "log.txt").read_text(encoding="utf-8").splitlines()[-25:])
        raise SystemExit(f"{shlex.join(command)} ended with {code}:\n{tail}")
    return json.loads(job.result.read_text(encoding="utf-8"))


def make_job(bench: Bench, side: str, folder: Path, *, seed: int, steps: int) -> Job:
    folder.mkdir()
    prompts = Path(str(bench.data.source))
    if side == "trl":
        prompts = folder / "prompts.jsonl"
        write_jsonl(prompts, asyncio.run(drawn_prompts(bench, seed, steps * bench.prompts_per_step)))
    return Job(
        model=str(bench.model),
        prompts=str(prompts),
        folder=str(folder),
        seed=seed,
        steps=steps,
        prompts_per_step=bench.prompts_per_step,
        group_size=bench.group_size,
        max_tokens=bench.max_tokens,
        lr=bench.size.lr,
        betas=ADAM[:2],
        eps=ADAM_EPS,
        max_grad_norm=MAX_GRAD_NORM,
        clip=CLIP,
        micro_batch=bench.size.micro_batch[side],
    )


def run_both(bench: Bench, label: str, *, seed: int, steps: int, **changes: Any) -> dict[str, Any]:
    """Both sides with one seed, by side; every other seed TRL goes first. `changes` are of the `Job`."""
    results = {}
    for side in SIDES if seed % 2 == 0 else reversed(SIDES):
        results[side] = run_side(bench, side, label, seed=seed, steps=steps, **changes)
        rate = bench.prompts_per_step * bench.group_size / mean_step(results[side])
        print(f"  {label}, seed {seed}, {side}: {rate:.0f} samples per CPU second", flush=True)
    prompts = [results[side].pop("prompt_ids") for side in SIDES]
    for step, (ours, theirs) in enumerate(zip(*prompts, strict=True), start=1):
        assert ours == theirs, f"step {step} has other prompts: {ours} and {theirs}"
    return {side: {"seed": seed, **results[side]} for side in SIDES}


def mean_step(result: dict[str, Any]) -> float:
    """CPU seconds."""
    marks = result["cpu_s"][UNTIMED_STEPS:]
    return float((marks[-1] - marks[0]) / (len(marks) - 1))


# Checks and measurements


def replay(bench: Bench, **changes: Any) -> dict[str, Any]:
    """Let TRL train on Forebay's own rollouts: the same losses must move the same weights the same way.

    `changes` are fields of the `Job`.
    """
    recording = str(bench.folder / "recording.json")
    results, moved = {}, {}
    start = load_file(bench.model / "model.safetensors")
    for side in SIDES:
        results[side] = run_side(bench, side, "replay", steps=REPLAYED_STEPS, recording=recording, **changes)
        end = load_file(bench.folder / f"replay-{side}-0" / "trained" / "model.safetensors")
        moved[side] = torch.cat([(end[name] - start[name]).flatten().double() for name in sorted(start)])
    ours, theirs = (results[side] for side in SIDES)
    norms = list(zip(ours["grad_norm"], theirs["grad_norm"], strict=True))
    found = {
        "steps": REPLAYED_STEPS,
        "reward_difference": max(abs(a - b) for a, b in zip(ours["reward"], theirs["reward"], strict=True)),
        "grad_norm_difference": max(abs(a - b) / b for a, b in norms),
        "weight_change_cosine": float(torch.cosine_similarity(moved["forebay"], moved["trl"], dim=0)),
        "weight_change_ratio": float(moved["forebay"].norm() / moved["trl"].norm()),
    }
    print(f"  on the same rollouts: {found}", flush=True)
    return found


def measure(name: str, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Everything about one size."""
    size = SIZES[name] if options.steps is None else replace(SIZES[name], steps=options.steps)
    print(f"{name}:", flush=True)
    bench = prepare(size, MIXED_LENGTHS, options, work / name)
    equal = replace(
        bench,
        data=write_problems(EQUAL_LENGTHS, bench.folder / "equal.jsonl"),
        max_tokens=EQUAL_LENGTHS[1] + 1 + SPARE_TOKENS,
    )
    check = replay(bench)
    runs = [run_both(bench, "mixed", seed=seed, steps=size.steps) for seed in range(options.seeds)]
    equal_runs = [run_both(equal, "equal", seed=0, steps=min(EQUAL_LENGTH_STEPS, size.steps))]
    weights = load_file(bench.model / "model.safetensors").values()
    return {
        "parameters": sum(weight.numel() for weight in weights),
        "hidden_size": size.hidden_size,
        "num_layers": size.num_layers,
        "steps": size.steps,
        "lr": size.lr,
        "micro_batch": size.micro_batch,
        "replay": check,
        "mixed": {side: [per_step(run[side]) for run in runs] for side in SIDES},
        "equal": {side: [per_step(run[side]) for run in equal_runs] for side in SIDES},
    }


def per_step(result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: numbers by step, seconds as differences."""
    steps = {name: [later - at for at, later in pairwise(result[name])] for name in ("cpu_s", "wall_s")}
    steps |= {name: result[name] for name in ("generate_cpu_s", "reward", "response_tokens")}
    return {"seed": result["seed"]} | {name: [round(v, 5) for v in row] for name, row in steps.items()}


def sweep(name: str, options: argparse.Namespace, work: Path) -> None:
    """Time what both sides can choose freely: micro-batch sizes, and TRL's continuous batching."""
    bench = prepare(SIZES[name], MIXED_LENGTHS, options, work / name)
    ways = [(side, {"micro_batch": number}) for side in SIDES for number in SWEEP[side]]
    if options.continuous:
        ways.append(("trl", {"micro_batch": SWEEP["trl"][0], "continuous_batching": True}))
    for number, (side, changes) in enumerate(ways):
        result = run_side(bench, side, f"sweep{number}", steps=SWEEP_STEPS, **changes)
        rate = bench.prompts_per_step * bench.group_size / mean_step(result)
        text = ", ".join(f"{field} {value}" for field, value in changes.items())
        print(f"{name} {side:8} {text:45} {rate:7.0f} samples per CPU second", flush=True)


# Environments


def trl_python(path: Path | None) -> str:
    """TRL's Python: the one given, or that of an environment made here."""
    python = path or TRL_ENVIRONMENT / "bin" / "python"
    if path is None and not (TRL_ENVIRONMENT / ".installed").exists():
        make_environment(TRL_ENVIRONMENT)
    version = versions(str(python))["trl"]
    if version != TRL_VERSION:
        raise SystemExit(f"{python} has TRL {version}, this comparison is with {TRL_VERSION}")
    return str(python)


def make_environment(folder: Path) -> None:
    print(f"making TRL's environment in {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    (folder / ".gitignore").write_text("*\n")
    pins = dict(line.split("==") for line in CONSTRAINTS.read_text().split() if "==" in line)
    # torch first and by its pin: resolved later, pip would choose the CUDA build (several GB).
    for wanted in ([f"torch=={pins['torch']}"], [f"trl=={TRL_VERSION}", "--constraint", str(CONSTRAINTS)]):
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *wanted], check=True)
    (folder / ".installed").touch()


def versions(python: str) -> dict[str, str]:
    """Python and the packages that matter; "-" is not installed."""
    code = (
        "import importlib.metadata as m, json, platform\n"
        "def of(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return '-'\n"
        "names = ('forebay', 'trl', 'torch', 'transformers', 'accelerate')\n"
        "print(json.dumps({'python': platform.python_version()} | {n: of(n) for n in names}))"
    )
    found: dict[str, str] = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    return found


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return {"cpu": ", ".join(sorted(models)) or "unknown", "cores": os.cpu_count()}


# The command


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default=",".join(SIZES), help=f"of {', '.join(SIZES)}; several with a comma")
    parser.add_argument("--seeds", type=int, default=3, help="runs per size and side")
    parser.add_argument("--steps", type=int, help="per run; default: the size's own")
    parser.add_argument("--prompts", type=int, default=16, help="per step")
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--trl-python", type=Path, help=f"a Python with TRL {TRL_VERSION}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file; the page stands beside it")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--work", type=Path, help="keep models, jobs and logs in this new folder")
    parser.add_argument("--sweep", action="store_true", help="only time the choices both sides have")
    parser.add_argument("--continuous", action="store_true", help="--sweep: also TRL's continuous batching")
    parser.add_argument("--render", action="store_true", help="only write page and picture again")
    options = parser.parse_args(arguments)
    options.sizes = options.size.split(",")
    if unknown := set(options.sizes) - set(SIZES):
        parser.error(f"--size {options.size}: unknown {sorted(unknown)}; known: {', '.join(SIZES)}")
    if options.steps is not None and options.steps <= UNTIMED_STEPS:
        parser.error(f"--steps {options.steps}: the first {UNTIMED_STEPS} are not timed; give more")
    return options


def measure_all(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    started = {"load_average": os.getloadavg()[0]}
    sizes = {name: measure(name, options, work) for name in options.sizes}
    return {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine() | started | {"load_average_after": os.getloadavg()[0]},
        "versions": {"forebay": versions(sys.executable), "trl": versions(options.trl_python)},
        "prompts_per_step": options.prompts,
        "group_size": options.group,
        "untimed_steps": UNTIMED_STEPS,
        "letters": {"mixed": MIXED_LENGTHS, "equal": EQUAL_LENGTHS},
        "sizes": sizes,
    }


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if not options.render:
        options.trl_python = trl_python(options.trl_python)
        work = options.work or Path(tempfile.mkdtemp(prefix="train_vs_trl-"))
        try:
            if options.sweep:
                for name in options.sizes:
                    sweep(name, options, work)
                return
            found = measure_all(options, work)
        finally:
            if options.work is None:
                shutil.rmtree(work, ignore_errors=True)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(found) + "\n", encoding="utf-8")
    report.write(options.results, options.picture)


if __name__ == "__main__":
    main()
