"""The board on a run with a million rollouts: time to the first paint, of a search, memory; cost to a run.

    python benchmarks/board.py make FOLDER      write the run: 5,000 steps, 1 M rollouts of 1.5 kB (0.8 GB)
    python benchmarks/board.py look FOLDER      first paint in Chromium, each question, memory of the server
    python benchmarks/board.py viewers          CPU seconds of the server with 0, 1 and 10 viewers
    python benchmarks/board.py beside           a run with 0, 1, 10 viewers, with board = true and with a
                                                server of its own: CPU of the board's process over that of the
                                                run's in the same blocks, and CPU of the run's process a step
    python benchmarks/board.py cost             CPU seconds of the demo with and without its history

CPU seconds stand beside wall times, because other work on the machine moves only the latter.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import numpy as np

from forebay.runs.record.columns import Left
from forebay.runs.record.history import _Files
from forebay.types import RolloutState, Status

STEPS, GROUPS_A_STEP, MEMBERS, SENTENCES_A_TEXT = 5_000, 25, 8, 15
START = "from forebay.cli import main; main()"


def make(folder: Path) -> None:
    rng = np.random.default_rng(0)
    letters = list("etaoinshrdlucmfwypvbgkjqxz")
    words = ["".join(rng.choice(letters, size=rng.integers(2, 9))) for _ in range(6_000)]
    sentences = [" ".join(rng.choice(words, size=16)) + ". " for _ in range(20_000)]
    files = _Files(folder / "history", 20 << 30)
    files.begin(None)
    (folder / "run.toml").write_text(f'name = "million"\nsteps = {STEPS}\n')
    begun, number = time.time() - 2 * STEPS, 0
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, STEPS + 1):
            groups = []
            for _ in range(GROUPS_A_STEP):
                prompt = f"Question {rng.integers(0, 15_000)}: {sentences[rng.integers(0, 20_000)]}"
                groups.append([_rollout(rng, sentences, prompt, number, m, step) for m in range(MEMBERS)])
                number += 1
            num_dropped, now = GROUPS_A_STEP // 10, begun + 2 * step
            left = [
                Left(groups[num_dropped:], "trained", None, step, now, None, None),
                Left(groups[:num_dropped], "dropped", "expired", step, now, None, None),
            ]
            files.add(left, [(now, now + 1, "train", f"step {step}", "", "", "")])
            row = {"train_step": step, "unix_time_s": now, "step_s": 2.0}
            row |= {f"train/{name}": float(rng.normal()) for name in ("entropy", "grad_norm", "ess_token")}
            row |= {"reward": float(rng.random()), **{f"other/{k}": float(rng.random()) for k in range(80)}}
            metrics.write(json.dumps(row) + "\n")
    files.finish()


def _rollout(rng, sentences, prompt, number, member, step) -> RolloutState:
    size = int(rng.integers(1, 2 * SENTENCES_A_TEXT))
    text = "".join(sentences[place] for place in rng.integers(0, 20_000, size))
    if rng.random() < 1e-5:
        text += "needle in the haystack"
    return RolloutState(
        [{"role": "user", "content": prompt}],
        rollout_id=f"{number}/{member}",
        group_id=str(number),
        task_name="math" if number % 3 else "code",
        prompt_ids=[1],
        response=text,
        response_ids=rng.integers(0, 30_000, 16),
        logprobs=-rng.exponential(size=16).astype("f4"),
        response_mask=np.ones(16, "u1"),
        response_model_steps=np.full(16, step - 1),
        reward={"score": float(rng.random() < 0.3 + 0.4 * step / STEPS)},
        status=Status.COMPLETED,
        finish_reason="stop",
    )


def cpu_s(pid: int) -> float:
    """CPU seconds of a process until now, without those of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def num_calls(pid: int) -> int:
    """Calls of read and write by a process until now."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("syscr", "syscw")))


class Served:
    """``forebay board`` of a folder in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", START, "board", str(folder), "--port", "0", "--beside"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().split()[-1]

    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)

    def memory_mb(self, name: str = "VmHWM") -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split(f"{name}:")[1].split()[0]) / 1024

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def look(folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    served = Served(folder)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for visit in ("cold", "again"):
            page = browser.new_page()
            client = page.context.new_cdp_session(page)
            client.send("Performance.enable", {"timeDomain": "threadTicks"})
            begun, cpu = time.perf_counter(), served.cpu_s()
            page.goto(served.address)
            page.wait_for_selector("figure.chart canvas")
            wall = time.perf_counter() - begun
            found = client.send("Performance.getMetrics")["metrics"]
            worked = next(one["value"] for one in found if one["name"] == "TaskDuration")
            print(
                f"first paint, {visit}: {wall:.2f} s wall, {served.cpu_s() - cpu:.2f} CPU s of the server, "
                f"{worked:.2f} of the page"
            )
            page.goto("about:blank")
        print(f"a written step is on the screen after {_until_seen(browser)} s")
        browser.close()
    run = json.load(urllib.request.urlopen(f"{served.address}api/runs"))[0]["id"]
    for what, given in (
        ("rollouts", {}),
        ("count", {}),
        ("rollouts", {"text": "needle in"}),
        ("rollouts", {"text": "question 12"}),
        ("count", {"text": "needle in"}),
        ("rollouts", {"order": "worst", "task": "math"}),
        ("prompts", {}),
        ("bias", {}),
        ("timeline", {}),
    ):
        begun, cpu = time.perf_counter(), served.cpu_s()
        urllib.request.urlopen(f"{served.address}api/{what}?{urlencode({'run': run, **given})}").read()
        wall, cpu = time.perf_counter() - begun, served.cpu_s() - cpu
        print(f"{what} {given}: {wall:.2f} s wall, {cpu:.2f} CPU s")
    print(f"memory of the server: at most {served.memory_mb():.0f} MB, now {served.memory_mb('VmRSS'):.0f} MB")
    served.close()


def _until_seen(browser) -> str:
    """Seconds from a row in the metrics until the page shows its step, for ten of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(f'name = "live"\nsteps = {2 * STEPS}\n')
        seen, rows = [], (folder / "metrics.jsonl").open("w")
        for step in range(1, STEPS + 1):
            rows.write(json.dumps({"train_step": step, "unix_time_s": time.time(), "reward": 0.5}) + "\n")
        rows.flush()
        served, page = Served(folder), browser.new_page()
        page.goto(served.address)
        page.wait_for_selector("figure.chart canvas")
        for step in range(STEPS + 1, STEPS + 11):
            time.sleep(1.3)
            begun = time.perf_counter()
            rows.write(json.dumps({"train_step": step, "unix_time_s": time.time(), "reward": 0.5}) + "\n")
            rows.flush()
            page.wait_for_function(
                "text => document.querySelector('main').innerText.includes(text)", arg=f"{step:,} of"
            )
            seen.append(time.perf_counter() - begun)
        page.goto("about:blank")
        served.process.kill()
    return f"{sorted(seen)[5]:.2f} (at most {max(seen):.2f})"


def viewers(seconds: float = 20.0) -> None:
    """A run that writes its state once a second, and 5,000 steps behind it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(f'name = "live"\nsteps = {2 * STEPS}\n')
        row = {f"other/{number}": number / 7 for number in range(90)}
        with (folder / "metrics.jsonl").open("w") as metrics:
            for step in range(STEPS):
                metrics.write(json.dumps({"train_step": step, **row}) + "\n")
        for count in (0, 1, 10):
            served, step = Served(folder), STEPS
            streams = [
                urllib.request.urlopen(f"{served.address}api/events?run={folder.name}&since={STEPS}")
                for _ in range(count)
            ]
            for stream in streams:
                threading.Thread(target=lambda s=stream: list(s), daemon=True).start()
            time.sleep(2)
            before = served.cpu_s()
            for _ in range(int(seconds)):
                step += 1
                with (folder / "metrics.jsonl").open("a") as metrics:
                    metrics.write(json.dumps({"train_step": step, **row}) + "\n")
                (folder / "live.json").write_text(
                    json.dumps({"unix_time_s": time.time(), "state": "running", "books": {}})
                )
                time.sleep(1)
            print(f"{count} viewers: {served.cpu_s() - before:.2f} CPU s of the server in {seconds:.0f} s")
            served.process.kill()


RUN = """
name = "seen"
steps = 100000
output = {output!r}
batch_size = 4
rollouts_per_prompt = 4
checkpoint_every = 0
board = {board}
model = {{ source = "tiny", tiny = {{ hidden_size = 64, num_layers = 2, num_heads = 2 }} }}
[[tasks]]
name = "sorting"
data = {{ source = "sorting", size = 400 }}
judge = {{ name = "exact_match" }}
sample = {{ max_tokens = 12 }}
"""


def beside(rounds: int = 10, seconds: float = 6.0) -> None:
    """One run, looked at in turns: those of a round are held against each other, so drifts do not count."""
    for how in ("board = true", "a server of its own"):
        with tempfile.TemporaryDirectory() as name:
            run_file, folder = Path(name) / "seen.toml", Path(name) / "seen"
            is_beside = how == "board = true"
            run_file.write_text(RUN.format(output=name, board=str(is_beside).lower()))
            command = [sys.executable, "-c", START, "train", str(run_file)]
            run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            address = ""
            while is_beside and not address:
                line = run.stdout.readline()
                address = next((word for word in line.split() if word.startswith("http://127")), "")
            threading.Thread(target=run.stdout.read, daemon=True).start()
            while not (folder / "metrics.jsonl").exists() or _num_lines(folder) < 20:
                time.sleep(0.2)
            served = None if is_beside else Served(Path(name))
            address = served.address if served else address
            board = served.process.pid if served else _child(run.pid)
            a_step: dict[int, list[float]] = {0: [], 1: [], 10: []}
            shares: dict[int, list[float]] = {count: [] for count in a_step}
            calls = {count: np.zeros(2) for count in a_step}
            for turn in range(rounds):
                # In another order each time: none of them always follows the same one.
                for count in np.random.default_rng(turn).permutation(list(a_step)).tolist():
                    streams = [urllib.request.urlopen(f"{address}api/events?run=seen&since=0") for _ in range(count)]
                    told: list[float] = []
                    for stream in streams:
                        threading.Thread(target=lambda s=stream, t=told: _drain(s, t), daemon=True).start()
                    # Each has all steps until now: a page opens once, and then looks on.
                    while len(told) < 4 * count:
                        time.sleep(0.2)
                    time.sleep(1)
                    before, first, done = cpu_s(run.pid), _num_lines(folder), num_calls(run.pid)
                    looked = cpu_s(board)
                    time.sleep(seconds)
                    num_steps = _num_lines(folder) - first
                    worked = cpu_s(run.pid) - before
                    a_step[count].append(worked / num_steps)
                    shares[count].append((cpu_s(board) - looked) / worked)
                    calls[count] += num_calls(run.pid) - done, num_steps
                    for stream in streams:
                        stream.fp.raw._sock.shutdown(2)
            for count, found in shares.items():
                error = np.std(found, ddof=1) / rounds**0.5
                print(
                    f"{how}, {count} viewers: CPU of the board's process over that of the run's: "
                    f"{np.mean(found):.2%}, standard error {error:.2%}, highest {max(found):.2%}"
                )
            words = ", ".join(f"{number / steps:.2f} with {count}" for count, (number, steps) in calls.items())
            print(f"{how}: reads and writes of the run's process a step: {words} viewers")
            for count in (1, 10):
                ratios = np.array(a_step[count]) / np.array(a_step[0]) - 1
                error = ratios.std(ddof=1) / rounds**0.5
                print(
                    f"{how}, {count} viewers: {np.mean(a_step[count]) * 1000:.2f} ms of CPU a step against "
                    f"{np.mean(a_step[0]) * 1000:.2f}: {ratios.mean():+.1%}, standard error {error:.1%}",
                    flush=True,
                )
            run.kill()
            if served:
                served.close()


def _child(pid: int) -> int:
    """The board that a run has started."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _num_lines(folder: Path) -> int:
    return (folder / "metrics.jsonl").read_bytes().count(b"\n")


def _drain(stream, told: list[float]) -> None:
    try:
        told.extend(time.monotonic() for line in stream if line.startswith(b"data"))
    except (OSError, ValueError):
        return


def cost() -> None:
    recipe = Path(__file__).parents[1] / "recipes/demo_tiny.toml"
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(3):
            for limit in (2.0, 0.0):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                settings = ["steps=60", f"history_gb={limit}", f"output={folder}/{turn}_{limit}"]
                command = [sys.executable, "-c", START, "train", str(recipe), *settings]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                print(f"history_gb={limit}: {cpu:.2f} CPU s", flush=True)


if __name__ == "__main__":
    action, *folder = sys.argv[1:]
    if action in ("make", "look"):
        {"make": make, "look": look}[action](Path(folder[0]))
    else:
        {"viewers": viewers, "beside": beside, "cost": cost}[action]()
