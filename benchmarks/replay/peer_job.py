"""What the sides of ``peers.py`` share: the job they are given, the clock, the random tokens.

Imported in every environment, so it uses the standard library and numpy only.

    a round: put one group at a time | take one at a time | 64 groups, a call each, all in flight
             | 64 groups in one call, then take 64 groups as often as leaves `held` groups in the buffer
    or       put the Small batch in one call | get it
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ONE, IN_FLIGHT, BATCHED, TAKE = "put 1 group", "put 64 in flight", "put 64 in one call", "take 64"
TAKE_ONE = "take 1 group"
SMALL_PUT, SMALL_GET = "Small: put", "Small: get"
SMALL_ROWS, SMALL_FIELDS, SMALL_TOKENS = 128, 3, 1024
"""The Small setting of TransferQueue's own performance test: 128 samples with 3 fields of 1,024 floats."""
BATCH = 64
"""Groups of a batch."""
VOCABULARY = 150_000


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every side does."""

    group_size: int
    prompt_tokens: int
    response_tokens: int
    held: int
    """Groups in the buffer between rounds."""
    singles: int
    """Groups put one at a time in a round; a multiple of `BATCH`."""
    rounds: int
    small: bool = False
    """The Small batch in place of everything else."""
    result: str
    """The file that the side writes."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: str) -> Job:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def draw(job: Job, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """The arrays of one group, by field: ``[group_size, tokens]``."""
    shape = (job.group_size, job.response_tokens)
    prompt = generator.integers(0, VOCABULARY, (1, job.prompt_tokens), np.int32)
    return {
        "prompt_ids": np.repeat(prompt, job.group_size, axis=0),
        "response_ids": generator.integers(0, VOCABULARY, shape, np.int32),
        "logprobs": -generator.exponential(size=shape).astype(np.float32),
        "response_mask": np.ones(shape, np.uint8),
        "response_model_steps": np.full(shape, 3, np.int32),
        "reward": generator.integers(0, 2, (job.group_size, 1)).astype(np.float32),
    }


@dataclass
class Way:
    """One way of one side: wall seconds of every call by operation, CPU seconds of all calls together."""

    name: str
    transport: str
    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timing(self, operation: str, calls: int) -> Iterator[None]:
        cpu, wall = tree_cpu_s(), time.perf_counter()
        yield
        self.wall_s.setdefault(operation, []).append((time.perf_counter() - wall) / calls)
        self.cpu_s[operation] = self.cpu_s.get(operation, 0.0) + tree_cpu_s() - cpu

    def forget(self) -> None:
        """The rounds so far were to warm up."""
        self.wall_s.clear()
        self.cpu_s.clear()


def schedule(job: Job, way: Way, operations: Collection[str]) -> Iterator[tuple[str, int]]:
    """What to call next, and how often: one round to warm up, then `rounds` that count."""
    for number in range(job.rounds + 1):
        if number == 1:
            way.forget()
        if job.small:
            yield SMALL_PUT, 1
            yield SMALL_GET, 1
            continue
        num_put = 0
        for name, calls, groups in ((ONE, job.singles, 1), (IN_FLIGHT, 1, BATCH), (BATCHED, 1, BATCH)):
            if name in operations:
                yield name, calls
                num_put += calls * groups
            if name == ONE and TAKE_ONE in operations:
                yield TAKE_ONE, calls
                num_put -= calls
        for _ in range(num_put // BATCH):
            yield TAKE, 1


def run_rounds(job: Job, way: Way, operations: Mapping[str, Callable[[], Any]]) -> None:
    """All that `schedule` says."""
    for name, calls in schedule(job, way, operations):
        with way.timing(name, calls):
            for _ in range(calls):
                operations[name]()


def tree_cpu_s() -> float:
    """User and system seconds of this process and all its descendants that live."""
    parents, used = {}, {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path("/proc", name, "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The command in brackets may hold anything, so what counts begins after the last bracket.
        values = stat.rpartition(")")[2].split()
        parents[int(name)] = int(values[1])
        used[int(name)] = (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
    return sum(seconds for pid, seconds in used.items() if _descends(pid, os.getpid(), parents))


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid == ancestor:
            return True
        pid = parents[pid]
    return False


def write_result(job: Job, ways: list[Way], versions: dict[str, str]) -> None:
    result = {"ways": [asdict(way) for way in ways], "versions": versions}
    Path(job.result).write_text(json.dumps(result), encoding="utf-8")
