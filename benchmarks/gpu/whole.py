"""Steps about the whole: tests that need a GPU, the demo, plans against measures, one rank."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from accelerator import Bench, Row, make_groups
from generation import by_engine
from torch import distributed
from training import make_trainer

from forebay.config import parse_config
from forebay.engines import RolloutController, TransformersEngine
from forebay.plan import make_plan, parse_devices, this_machine
from forebay.plan.turns import CONTEXT_BYTES
from forebay.runs.config import RunConfig
from forebay.train import TrainConfig
from forebay.train.learner import Learner
from forebay.train.parallel.learner import source_of
from forebay.train.parallel.loading import load_sharded, make_mesh

ROOT = Path(__file__).parents[2]


# The suite


def suite(bench: Bench) -> None:
    """The tests with the marker ``gpu``."""
    bench.attempt("tests that need a GPU", 0, partial(_suite, bench))


def _suite(bench: Bench) -> Row:
    files = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    ]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rfE", "-p", "no:cacheprovider"]
    # A warning that only this machine gives is no failure.
    report = bench.folder / "report.xml"
    command += ["-vv", "-W", "default", f"--junit-xml={report}"]
    if find_spec("pytest_timeout"):
        command += [f"--timeout={bench.left_s():.0f}"]
    # Most of them wait for processes to start.
    if find_spec("xdist"):
        command += ["-n", str(min(6, os.cpu_count() or 1))]
    ended = _call([*command, *map(str, files)], bench.left_s() - 5)
    if not report.exists():
        raise RuntimeError("the tests did not end in time; see the log")
    cases = ElementTree.parse(report).getroot().findall(".//testcase")
    counts, bad = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in cases:
        end = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        end = "failed" if end in ("failure", "error") else end
        counts[end] += 1
        bad += [case.attrib["name"]] if end == "failed" else []
    return {**counts, "which": ", ".join(bad) or "-", "ended": ended}


def _call(command: list[str], limit_s: float) -> bool:
    """Run a program, whose output goes to the log, and end it at its limit; whether it ended before."""
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    program = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        program.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        # pytest then tells what failed so far.
        program.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            program.wait(8)
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        return False


# The demo


def demo(bench: Bench) -> None:
    """`recipes/demo_tiny.toml` on the device."""
    row = bench.attempt("recipes/demo_tiny.toml, seed 0", 0, partial(_demo, bench))
    if row is not None and row["steps"] == row["of"]:
        bench.goal("the demo's held-out accuracy", row["accuracy after"])


SHORT_DEMO = {
    "steps": 2,
    "batch_size": 2,
    "rollouts_per_prompt": 4,
    "tasks.0.eval_data.size": 4,
    "warmup.steps": 1,
    "evaluate.every": 2,
}


def _demo(bench: Bench) -> Row:
    overrides = {"output": bench.folder, "device": bench.device.type}
    overrides |= SHORT_DEMO if bench.tiny else {}
    program = "from forebay.cli import main; main()"
    command = [sys.executable, "-c", program, "train", str(ROOT / "recipes/demo_tiny.toml"), "--overwrite"]
    _call([*command, *(f"{key}={value}" for key, value in overrides.items())], bench.left_s() - 5)
    metrics = bench.folder / "demo_tiny" / "metrics.jsonl"
    if not metrics.exists():
        raise RuntimeError("the demo did not begin; see the log")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    steps = max(row["train_step"] for row in rows)
    times = [row["step_s"] for row in rows if "step_s" in row]
    return {
        "steps": steps,
        "of": 2 if bench.tiny else 450,
        "accuracy before": accuracies[0],
        "accuracy after": accuracies[-1],
        "seconds of a step": sum(times) / max(1, len(times)),
    }


# Plans


def plans(bench: Bench) -> None:
    """What `forebay plan` says of a run, and what engine and trainer then take."""
    cases: Mapping[str, Mapping[str, Any]] = {
        "0.5b, packed": {"layout": "packed"},
        "0.5b, padded, checkpointing": {"gradient_checkpointing": True},
    }
    for number, (case, keys) in enumerate(cases.items()):
        row = bench.attempt(case, 25, partial(_plan, bench, keys))
        if row is not None and number == 0:
            bench.goal("plan of memory, off by", abs(row["planned GiB"] / row["measured GiB"] - 1))
            bench.goal("plan of a step's time, off by", abs(row["planned s"] / row["measured s"] - 1))


def _plan(bench: Bench, keys: Mapping[str, Any]) -> Row:
    prompt, response, groups, members = (8, 8, 2, 4) if bench.tiny else (256, 512, 8, 8)
    folder = bench.folder / "planned"
    bench.config("0.5b").save_pretrained(folder)
    train = {"dtype": "bfloat16", "token_budget": 8192, **keys}
    run = {
        "name": "planned",
        "steps": 1,
        "batch_size": groups,
        "rollouts_per_prompt": members,
        "model": {"source": str(folder)},
        "engine": {"name": "transformers", "dtype": "bfloat16"},
        "tasks": [
            {
                "name": "task",
                "data": {"source": "addition"},
                "judge": "exact_match",
                "sample": {"max_tokens": response},
            }
        ],
        "train": train,
    }
    device = parse_devices("H100-80GB") if bench.tiny else this_machine("cuda")
    plan = make_plan(parse_config(RunConfig, run), device, prompt_tokens=prompt)
    config = TrainConfig(**train)
    trainer = make_trainer(bench, "0.5b", config, engine_dtype="bfloat16")
    engine = TransformersEngine(bench.model("0.5b", torch.bfloat16), device=str(bench.device))
    controller = RolloutController(engine)
    vocabulary = bench.config("0.5b").vocab_size
    batch = make_groups(groups, members, prompt=prompt, response=response, vocabulary=vocabulary, equal=True)
    requests = [(list(map(int, state.prompt_ids)), response) for group in batch for state in group]
    with asyncio.Runner() as runner:

        def step() -> None:
            runner.run(trainer.sync_weights(controller))
            runner.run(controller.continue_generation())
            runner.run(by_engine(engine, requests))
            # As in a run: cache and graphs are given back before the trainer trains.
            runner.run(controller.pause_generation())
            times.append(bench.seconds_of(lambda: trainer.fit(batch)))

        times: list[float] = []
        seconds = bench.seconds(step)
        peak = bench.peak_gib()
        runner.run(controller.close())
    return {
        "planned GiB": (plan.total - CONTEXT_BYTES) / 2**30,
        "measured GiB": peak,
        "planned s": plan.times.step_s if plan.times else float("nan"),
        "measured s": seconds,
        "training, planned s": plan.times.training_s if plan.times else float("nan"),
        "training, measured s": min(times),
        "generation, planned s": plan.times.generation_s if plan.times else float("nan"),
        "generation, measured s": seconds - min(times),
    }


# One rank


def one_rank(bench: Bench) -> None:
    """A trainer in slices, of which the only rank has all, over NCCL: two steps; and one, save, resume, the other."""
    bench.attempt("FSDP, one rank: step, save, resume, step", 20, partial(_one_rank, bench))


def _one_rank(bench: Bench) -> Row:
    device, over = bench.device, "gloo"
    if device.type == "cuda":
        device, over = torch.device("cuda", 0), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    distributed.init_process_group(
        over,
        init_method=f"file://{bench.folder}/meet",
        rank=0,
        world_size=1,
        device_id=None if bench.tiny else device,
    )
    try:
        return {"collectives": distributed.get_backend(), **_resumed(bench, device)}
    finally:
        distributed.destroy_process_group()


def _resumed(bench: Bench, device: torch.device) -> Row:
    config = TrainConfig(lr=1e-4, layout="packed", token_budget=4096, dtype="bfloat16")
    vocabulary = bench.config("0.5b").vocab_size
    length = 8 if bench.tiny else 256
    groups = make_groups(4, 4, prompt=length, response=length, vocabulary=vocabulary)
    whole = make_trainer(bench, "0.5b", config)
    batch = whole.compute_advantages(whole.pack(groups))
    batch.token_weights = (batch.response_mask / batch.response_mask.sum()).astype(np.float32)
    source = source_of(whole.model, bench.folder / "model")
    # Its memory is the slices'.
    del whole
    mesh = make_mesh(device.type, 1, config.parallel)
    folder, found, times = bench.folder / "rank", [], {}
    folder.mkdir()
    for part in ("saved", "resumed"):
        model = load_sharded(source, mesh, config.parallel, precision="bfloat16", device=str(device))
        learner = Learner(model, config, pad_token_id=0, device=device, mesh=mesh)
        if part == "saved":
            learner.update(batch, 0)
            times["save s"] = bench.seconds_of(partial(_save, learner, folder))
        else:
            times["resume s"] = bench.seconds_of(partial(learner.resume, folder))
        times["step s"] = bench.seconds_of(partial(learner.update, batch, 1))
        found.append({name: weight.detach().cpu().clone() for name, weight in learner.weights()})
    here, there = found
    largest = max(float((weight - there[name]).abs().max()) for name, weight in here.items())
    return {**times, "largest difference of a weight": largest}


def _save(learner: Learner, folder: Path) -> None:
    learner.begin_save(folder, 1)
    learner.finish_save()
