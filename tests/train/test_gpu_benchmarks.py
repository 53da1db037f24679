"""The GPU benchmarks: every case runs, on a CPU with toy models; what fails or hangs costs only itself."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
MODULES = ("accelerator", "generation", "handover", "run_all", "training", "whole")
ONLY_ON_A_GPU = {
    "0.5b, packed, moments of 8 bits",
    "1.5b, packed, compiled",
    "1.5b, packed, compiled, 16k tokens",
    "1.5b, packed, sdpa",
    "1.5b, packed, flex_attention",
}
"""Cases whose libraries or kernels may be missing here."""


@pytest.fixture
def run_all(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module("run_all")
    # Their names are short; others may want them.
    for name in {*MODULES} - before:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("warm")
def test_every_case_runs_and_is_on_the_page(run_all, tmp_path, capfd):
    page = tmp_path / "gpu.md"
    status = run_all.main(["--cpu", "--page", str(page)])
    lines = [json.loads(line) for line in page.with_suffix(".jsonl").read_text().splitlines()]
    failed = [line for line in lines if "failed" in line]
    assert not failed
    assert status == 0, capfd.readouterr().err
    assert {line["step"]: line["end"] for line in lines if "end" in line} == {
        step.name: "ended" for step in run_all.STEPS
    }
    assert {line["goal"] for line in lines if "goal" in line} == run_all.GOALS.keys()
    # Those with a target have the time for it, however long each takes.
    aimed = {line["step"] for line in lines if "goal" in line}
    last = max(number for number, step in enumerate(run_all.STEPS) if step.name in aimed)
    limit_s = sum(step.limit_s + run_all.GRACE_S for step in run_all.STEPS[: last + 1])
    assert limit_s <= 9 * 60 - run_all.RESERVE_S
    text = page.read_text()
    assert "No number here means anything" in text
    for line in lines:
        if "skipped" in line:
            assert line["case"] in ONLY_ON_A_GPU
        elif "case" in line:
            assert f"| {line['case']} |" in text
    (suite,) = (line["row"] for line in lines if line.get("case") == "tests that need a GPU")
    assert suite["passed"] + suite["skipped"] > 0
    (rank,) = (line["row"] for line in lines if line.get("step") == "one_rank" and "row" in line)
    assert rank["largest difference of a weight"] == 0
    assert "gloo" in rank["collectives"]


def lasting(text: str) -> list[str]:
    return [sys.executable, "-c", f"import subprocess, sys, time\n{text}"]


@pytest.mark.parametrize(
    ("text", "end", "reason"),
    [
        ("pass", "ended", None),
        ("sys.exit(3)", "failed", "exit status 3"),
        ("time.sleep(600)", "cut off", "killed after 1 s"),
    ],
)
def test_how_a_child_ended_is_told(run_all, text, end, reason):
    told = run_all.watch(subprocess.Popen(lasting(text)), 1.0)
    assert told["end"] == end
    assert reason is None or told["reason"].startswith(reason)


def test_a_child_dies_with_what_it_started(run_all, tmp_path):
    # In a session of its own, as servers and demos are.
    file = tmp_path / "pid"
    grandchild = f"[{sys.executable!r}, '-c', 'import time; time.sleep(600)']"
    text = f"""
other = subprocess.Popen({grandchild}, start_new_session=True)
open({str(file)!r}, 'w').write(str(other.pid))
time.sleep(600)"""
    child = subprocess.Popen(lasting(text))
    until_s = time.monotonic() + 300
    while not (file.exists() and file.read_text()) and time.monotonic() < until_s:
        time.sleep(0.05)
    other = psutil.Process(int(file.read_text()))
    run_all.watch(child, 0.2)
    assert not other.is_running() or other.status() == psutil.STATUS_ZOMBIE


def test_a_child_that_takes_the_memory_is_ended(run_all, monkeypatch):
    monkeypatch.setattr(run_all, "MEMORY_SHARE", 1e-6)
    told = run_all.watch(subprocess.Popen(lasting("time.sleep(600)")), 60.0)
    assert (told["end"], "of memory" in told["reason"]) == ("cut off", True)


def test_a_step_that_fails_leaves_the_others_and_what_it_measured(run_all, tmp_path, monkeypatch):
    steps = [step for step in run_all.STEPS if step.name in ("suite", "demo", "generation", "train_1.5b")]

    def child(step, results, *, limit_s):
        if step.name == "demo":
            time.sleep(0.3)
            return {"end": "cut off", "reason": "killed after 0 s"}
        results.add({"step": step.name, "case": "half", "row": {"seconds": 1.5}})
        if step.name == "suite":
            return {"end": "failed", "reason": "exit status 1; see the log"}
        results.add({"goal": "generation over plain generate", "value": 3.5})
        results.add({"step": step.name, "case": "other", "skipped": "needs about 60 s, 3 s are left"})
        return {"end": "ended"}

    monkeypatch.setattr(run_all, "run_child", child)
    steps = [run_all.replace(step, least_s=0.1 if step.name != "generation" else 99.0) for step in steps]
    results = run_all.Results(tmp_path / "gpu.md")
    assert not run_all.run_all(steps, results, minutes=1, cpu=False)
    # A kill in the middle of a line.
    with results.lines_file.open("a") as file:
        file.write('{"step": "sui')
    results.write_page(steps)
    text = results.page.read_text()
    assert "`suite`: failed after 0 s: exit status 1; see the log." in text
    assert "`demo`: cut off after 0 s: killed after 0 s." in text
    assert "`generation`: skipped after 0 s: it needs 99 s," in text
    assert text.count("| half | 1.5 |") == 2
    assert "* other: skipped: needs about 60 s, 3 s are left" in text
    assert "| generation over plain generate | 3.5 | >= 3 | yes |" in text
    assert "| hand-over, share of copy speed | - | >= 0.8 | not measured |" in text


def test_without_a_gpu_it_says_so_and_measures_nothing(run_all, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="sees no GPU"):
        run_all.main(["--step", "plans", "--page", str(tmp_path / "gpu.md")])
    with pytest.raises(SystemExit, match="2"):
        run_all.main(["--cpu"])
