"""What the sides of ``peers.py`` share: sizes, random payloads, processes on command, clocks, memory.

Imported in every environment, so it uses the standard library and numpy only.

    peers.py --command--> side (peer_<name>.py) --command--> server | writer | sampler, a process each
             <--findings--'        <-- items, seconds --------------'

Commands and answers are lines of JSON. A command runs for some seconds in whole batches, and its last batch
is confirmed by the other side before the clock stops.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (400, 40_000, 400_000)
"""Bytes of an item."""
CAPACITY = {400: 20_000, 40_000: 2_000, 400_000: 500}
"""Items in a full buffer."""
BATCH = {400: 256, 40_000: 64, 400_000: 16}
"""Items that are sampled, or sent, together."""
NUM_PAYLOADS = 64


def payloads(size: int) -> list[np.ndarray]:
    """Different random bytes, which no compression makes smaller."""
    generator = np.random.default_rng(size)
    return [generator.integers(0, 256, size, np.uint8) for _ in range(NUM_PAYLOADS)]


def check_batch(stacked: np.ndarray, size: int) -> None:
    """A batch is one array in the reader's own memory, of random bytes."""
    assert stacked.shape == (BATCH[size], size), stacked.shape
    assert stacked[0, :64].any()
    assert stacked[-1, -64:].any()


def repeat(batch: Callable[[], int], seconds: float, finish: Callable[[], None]) -> dict[str, float]:
    """Call `batch`, which returns its items, for so long, and `finish`."""
    items, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        items += batch()
    finish()
    return {"items": items, "wall_s": time.perf_counter() - start}


def commands() -> Iterator[dict[str, Any]]:
    """Those that come to this process, until there are no more."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(value: Any) -> None:
    # What a library prints must not be taken for an answer.
    print("@" + json.dumps(value), flush=True)


class Worker:
    """A process that answers commands."""

    def __init__(self, python: str, script: str, *arguments: str, is_alone: bool = False) -> None:
        """`is_alone`: the system shares a busy machine among such processes with all they start, not among
        threads, of which the sides have different numbers."""
        self._process = subprocess.Popen(
            [python, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("SHOW_ERRORS") else subprocess.DEVNULL,
            text=True,
            start_new_session=is_alone,
        )
        self.pid = self._process.pid

    def send(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit(f"{self._process.args} ended with {self._process.wait()}; SHOW_ERRORS=1 shows why")

    def ask(self, command: Mapping[str, Any]) -> Any:
        self.send(command)
        return self.receive()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def tree() -> dict[int, int]:
    """Every living process below this one, and this one, with its parent."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            parents[int(name)] = int(stat[1])
    return {pid: parent for pid, parent in parents.items() if _descends(pid, parents)}


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command in brackets may hold anything, so what counts begins after the last bracket.
    return text.rpartition(")")[2].split()


def _descends(pid: int, parents: Mapping[int, int]) -> bool:
    while pid in parents:
        if pid == os.getpid():
            return True
        pid = parents[pid]
    return False


def cpu_s() -> float:
    """User and system seconds of this process and all below it."""
    stats = [stat for pid in tree() if (stat := _stat(pid)) is not None]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def memory(pids: Mapping[str, list[int]]) -> dict[str, dict[str, float]]:
    """MB resident of each group of processes: all (rss), and shared pages divided among sharers (pss)."""
    found: dict[str, dict[str, float]] = {}
    for name, group in pids.items():
        totals = {"rss": 0.0, "pss": 0.0}
        for pid in group:
            lines = Path("/proc", str(pid), "smaps_rollup").read_text(encoding="utf-8").splitlines()
            values = {line.split(":")[0].lower(): line.split()[1] for line in lines[1:]}
            for kind in totals:
                totals[kind] += int(values[kind]) * 1024 / 1e6
        found[name] = totals
    return found


def run(operations: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
    """Answer the commands of ``peers.py``, and say what each took of the processors."""
    answer({"ready": sorted(operations)})
    for command in commands():
        before = cpu_s()
        result = operations[command["op"]](command)
        if isinstance(result, dict) and "items" in result:
            result["cpu_s"] = cpu_s() - before
        answer(result)
