"""Clocks and records of the replay benchmarks: calls timed in turns, findings written for ``report.py``.

::

    Way(prepare, call, undo) --compare--> Times (wall and CPU seconds of every call), the ways in turns
    Finding, Table --Record.save--> benchmarks/results/replay/<name>.json --report.py--> replay.md

CPU seconds are those of this process with all its threads; they tell how much of a wall time was waiting for
a busy machine. Ratios are of medians of one run. With --quick nothing is written: sizes are those of a test.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results" / "replay"

MAX_CALLS = 400
"""Of one way: a median needs no more."""
MIN_CALLS = 7
TURN_S = 0.2
"""Seconds that one way is called before it is the next one's turn."""

Step = Callable[..., Awaitable[Any]]


@dataclass
class Times:
    """Seconds of every call."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """Median wall seconds."""
        return statistics.median(self.wall_s)

    @property
    def cpu(self) -> float:
        """Median CPU seconds."""
        return statistics.median(self.cpu_s)

    def add(self, wall_s: float, cpu_s: float) -> None:
        self.wall_s.append(wall_s)
        self.cpu_s.append(cpu_s)


@dataclass(frozen=True)
class Way:
    """One way to do what is compared. Only `call` is timed; it gets what `prepare` returned, if there is one.

    `undo` gets what `call` returned and leaves things as they were before.
    """

    call: Step
    prepare: Callable[[], Awaitable[Any]] | None = None
    undo: Step | None = None

    async def measure(self, times: Times) -> None:
        given = () if self.prepare is None else (await self.prepare(),)
        cpu, wall = time.process_time(), time.perf_counter()
        result = await self.call(*given)
        times.add(time.perf_counter() - wall, time.process_time() - cpu)
        if self.undo is not None:
            await self.undo(result)


async def compare(ways: Mapping[str, Way], *, seconds: float) -> dict[str, Times]:
    """Call the ways in turns, each for about `seconds`, at least `MIN_CALLS` times after a first one."""
    times = {name: Times() for name in ways}
    spent = dict.fromkeys(ways, 0.0)
    for way in ways.values():
        await way.measure(Times())

    def is_done(name: str) -> bool:
        calls = len(times[name].wall_s)
        return calls >= MAX_CALLS or (calls >= MIN_CALLS and spent[name] >= seconds)

    while left := [name for name in ways if not is_done(name)]:
        for name in left:
            start = time.perf_counter()
            while (now := time.perf_counter()) - start < TURN_S and not is_done(name):
                await ways[name].measure(times[name])
                spent[name] += time.perf_counter() - now
    return times


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One number that a target, or a reader, asks for."""

    what: str
    measured: float
    unit: str
    """Printed behind the number: ``x``, `` rollouts/s``, `` ms``."""
    target: float | None = None
    at_most: bool = False
    """The target is an upper bound; else a lower one."""
    detail: str = ""
    """What the number is made of."""

    @property
    def is_met(self) -> bool | None:
        if self.target is None:
            return None
        return self.measured <= self.target if self.at_most else self.measured >= self.target

    def to_text(self) -> str:
        verdict = {None: "", True: "met", False: "MISSED"}[self.is_met]
        sense = "" if self.target is None else f"{'<=' if self.at_most else '>='} {self.target:,.10g}{self.unit}"
        return f"  {self.what}: {show(self.measured)}{self.unit}  {sense}  {verdict}  {self.detail}"


@dataclass(frozen=True)
class Table:
    """Measurements in full, as they go on the page."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def to_text(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([f"\n  {self.title}", *(f"    {line.rstrip()}" for line in padded)])


@dataclass
class Record:
    """What one benchmark found, with all that is needed to judge it."""

    name: str
    title: str
    setting: list[str]
    """What was measured, one sentence each."""
    quick: bool
    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: versions("forebay", "numpy", "pyarrow"))
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    started: float = field(default_factory=time.time)

    def find(self, what: str, measured: float, unit: str, **more: Any) -> None:
        self.findings.append(Finding(what=what, measured=measured, unit=unit, **more))

    def save(self) -> None:
        """Print everything; write it too, unless it was only a quick run."""
        print(f"\n{self.title}{' (quick: sizes of a test)' if self.quick else ''}")
        print("\n".join(f"  {sentence}" for sentence in self.setting))
        print("\n".join(table.to_text() for table in self.tables) + "\n")
        print("\n".join(finding.to_text() for finding in self.findings), flush=True)
        if self.quick:
            return
        content = asdict(self) | {
            "command": command(),
            "hardware": hardware(),
            "load_after": os.getloadavg()[0],
            "date": time.strftime("%Y-%m-%d", time.gmtime(self.started)),
            "minutes": (time.time() - self.started) / 60,
        }
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def arguments(description: str | None, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """The command line: ``--quick`` and what else the benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is written")
    for flag, settings in more:
        parser.add_argument(flag, **settings)
    return parser.parse_args()


def command() -> str:
    """As it was called, from the repository's root."""
    script = Path(sys.argv[0]).resolve().relative_to(RESULTS.parent.parent.parent)
    return shlex.join(["python", str(script), *sys.argv[1:]])


def versions(*packages: str) -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **found}


def hardware() -> dict[str, Any]:
    return {
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def _first_value(path: str, name: str) -> str:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "?")


def show(value: float) -> str:
    """`value` with three or four digits, thousands apart."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def show_s(seconds: float) -> str:
    """A duration with its unit."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def spread(values: Iterable[float]) -> str:
    """Lowest to highest."""
    values = list(values)
    return f"{show(min(values))} to {show(max(values))}"
