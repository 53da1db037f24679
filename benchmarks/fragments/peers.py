"""Inserting and sampling beside dm-reverb and TorchRL: the same items, one machine, one run.

Usage: python benchmarks/fragments/peers.py [--quick] [--ray] [--sizes N ...] [--environments PATH]

    peers.py --commands--> peer_reverb.py   its own environment    (made in PATH when it is missing: 1.8 GB)
             --commands--> peer_torchrl.py  its own environment    (1.6 GB)
             --commands--> peer_forebay.py  this Python
             <-- items, seconds, CPU seconds, memory

All sides of one size are up at the same time and idle but for the one whose turn it is: a round gives each
its turn, so a busy machine is busy for all. Ratios are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import side

sys.path.insert(0, str(Path(__file__).parent.parent / "replay"))
import measuring
from measuring import Record, Table, arguments, show

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".envs"
PACKAGES = {
    "reverb": ["dm-reverb==0.14.0", "tensorflow==2.14.1", "numpy<2"],
    "torchrl": ["torchrl==0.14.1", "ray==2.60.0"],
}
ROUNDS, QUICK_ROUNDS = 7, 1
TURN_S, QUICK_TURN_S = 0.6, 0.2
TRIALS, QUICK_TRIALS = 3, 1
WRITERS = ("StructuredWriter", "TrajectoryWriter chunks of 1", "Writer chunks of 1", "Writer chunks of 10")
SAMPLERS = (
    "TimestepDataset 2 batches, 1 worker",
    "TimestepDataset 3 batches, 2 workers",
    "TimestepDataset 2 batches, workers auto",
    "TrajectoryDataset 2 batches, 1 worker",
    "TrajectoryDataset 3 batches, 2 workers",
)
ACROSS, LOCAL = "across processes", "in one process"
OURS, REVERB = "Forebay, memory", "dm-reverb"


@dataclass
class Contender:
    """One side in one way, and what it did."""

    name: str
    place: str
    transport: str
    script: str
    way: str
    environment: str = ""
    is_on_disk: bool = False
    ways: dict[str, str] = field(default_factory=dict)
    """By operation, for a side that has several."""
    found: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {"insert": [], "sample": [], "both": []})
    memory: dict[str, Any] = field(default_factory=dict)
    worker: Any = None
    capacity: int = 0
    operations: tuple[str, ...] = ()

    def command(self, operation: str, seconds: float) -> dict[str, Any]:
        return {"op": operation, "seconds": seconds, "way": self.ways.get(operation)} | self.ways

    def rate(self, operation: str, index: int) -> float:
        result = self.found[operation][index]
        return result["items"] / result["wall_s"]

    def rates(self, operation: str) -> list[float]:
        return [self.rate(operation, i) for i in range(len(self.found[operation]))]

    def cpu_us(self, operation: str) -> float:
        return 1e6 * statistics.median(one["cpu_s"] / one["items"] for one in self.found[operation])


def contenders() -> list[Contender]:
    unix = "Unix socket; payloads by a shared map"
    return [
        Contender(REVERB, ACROSS, "gRPC over TCP, localhost", "peer_reverb.py", "served", "reverb"),
        Contender(OURS, ACROSS, f"{unix} of /dev/shm", "peer_forebay.py", "served"),
        Contender("Forebay, disk", ACROSS, f"{unix} of a disk file", "peer_forebay.py", "served", is_on_disk=True),
        Contender("Forebay, memory, Ray actor", ACROSS, "Ray; payloads by a shared map", "peer_forebay.py", "ray"),
        Contender(
            "TorchRL, LazyMemmapStorage",
            ACROSS,
            "`shared=True`, inherited map",
            "peer_torchrl.py",
            "shared",
            "torchrl",
        ),
        Contender(
            "TorchRL, LazyTensorStorage", ACROSS, "Ray actor, object store", "peer_torchrl.py", "ray", "torchrl"
        ),
        Contender("Forebay, memory", LOCAL, "none", "peer_forebay.py", "local"),
        Contender("TorchRL, LazyTensorStorage", LOCAL, "none", "peer_torchrl.py", "tensors", "torchrl"),
        Contender("TorchRL, LazyMemmapStorage", LOCAL, "none", "peer_torchrl.py", "memmap", "torchrl"),
    ]


def python_of(environments: Path, name: str) -> str:
    if not name:
        return sys.executable
    python = environments / name / "bin" / "python"
    if not python.exists():
        print(f"making an environment in {python.parent.parent}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES[name]], check=True)
    return str(python)


def started(stack: ExitStack, size: int, options: Any) -> Iterator[Contender]:
    for contender in contenders():
        if contender.way == "ray" and not options.ray:
            continue
        folder = tempfile.mkdtemp(prefix="fragments-", dir=options.disk if contender.is_on_disk else "/dev/shm")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        python = python_of(options.environments, contender.environment)
        script = str(HERE / contender.script)
        contender.capacity = side.CAPACITY[size]
        contender.worker = side.Worker(python, script, str(size), folder, contender.way, is_alone=True)
        stack.callback(contender.worker.end)
        contender.operations = tuple(contender.worker.receive()["ready"])
        yield contender


def choose(reverb: Contender, seconds: float, trials: int) -> list[list[str]]:
    """Try its ways to write and to sample, keep the fastest of each; what was tried."""
    tried = []
    for operation, ways in (("insert", WRITERS), ("sample", SAMPLERS)):
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(trials):
            for way in ways:
                result = reverb.worker.ask({"op": operation, "seconds": seconds, "way": way})
                rates[way].append(result["items"] / result["wall_s"])
        medians = {way: statistics.median(found) for way, found in rates.items()}
        reverb.ways[operation] = max(medians, key=lambda way: medians[way])
        tried += [[operation, way, show(rate)] for way, rate in medians.items()]
        if operation == "insert":
            refill(reverb, max(ways[:2], key=lambda way: medians[way]))
    return tried


def refill(reverb: Contender, way: str) -> None:
    """Replace all that its samplers draw from."""
    items = 0
    while items < reverb.capacity:
        items += reverb.worker.ask({"op": "insert", "seconds": 0.2, "way": way})["items"]


def fill(contender: Contender, seconds: float) -> None:
    """Bring it to its steady state: full, every page of it written once, code warm."""
    for _ in range(2):
        contender.worker.ask(contender.command("insert", seconds))
    contender.worker.ask(contender.command("sample", seconds))


def measure(size: int, options: Any, record: Record) -> list[Contender]:
    rounds, seconds = (QUICK_ROUNDS, QUICK_TURN_S) if options.quick else (ROUNDS, TURN_S)
    with ExitStack() as stack:
        sides = list(started(stack, size, options))
        tried = choose(sides[0], seconds, QUICK_TRIALS if options.quick else TRIALS)
        record.tables.append(Table(f"dm-reverb's ways at {size:,} B, items/s", ["operation", "way", "median"], tried))
        for contender in sides:
            fill(contender, 2 * seconds)
        for number in range(rounds):
            print(f"{size:,} B: round {number + 1} of {rounds}", flush=True)
            for operation in ("insert", "sample", "both"):
                for contender in sides:
                    take_turn(contender, operation, seconds)
        for contender in sides:
            contender.memory = contender.worker.ask({"op": "memory"})
    return sides


def take_turn(contender: Contender, operation: str, seconds: float) -> None:
    if operation not in contender.operations:
        return
    result = contender.worker.ask(contender.command(operation, seconds))
    if operation == "both":
        insert, sample = result
        rates = {"insert": insert["items"] / insert["wall_s"], "sample": sample["items"] / sample["wall_s"]}
        contender.found["both"].append(rates)
    else:
        contender.found[operation].append(result)


def report(record: Record, size: int, sides: list[Contender]) -> None:
    rows = []
    for contender in sides:
        cells = [contender.name, contender.place, contender.transport]
        for operation in ("insert", "sample"):
            rates = contender.rates(operation)
            cells += [show(statistics.median(rates)), f"{show(min(rates))} to {show(max(rates))}"]
            cells.append(f"{contender.cpu_us(operation):.3g} us")
        both = contender.found["both"]
        cells.append(
            " and ".join(show(statistics.median(one[kind] for one in both)) for kind in ("insert", "sample"))
            if both
            else ""
        )
        rows.append(cells)
    columns = ["", "where", "by what"]
    for operation in ("inserts/s", "samples/s"):
        columns += [operation, "of rounds", "CPU an item"]
    record.tables.append(Table(f"{size:,} B items", [*columns, "both at once, inserts/s and samples/s"], rows))
    record.tables.append(memory_table(size, sides))
    reverb, ours = sides[0], sides[1]
    for operation in ("insert", "sample"):
        pairs = zip(ours.rates(operation), reverb.rates(operation), strict=True)
        ratios = [mine / theirs for mine, theirs in pairs]
        record.find(
            f"{operation}s of {size:,} B across processes, against dm-reverb",
            statistics.median(ratios),
            "x",
            target=2.0,
            detail=(
                f"{show(statistics.median(ours.rates(operation)))}/s against "
                f"{show(statistics.median(reverb.rates(operation)))}/s ({reverb.ways[operation]}); rounds "
                f"{min(ratios):.2f} to {max(ratios):.2f}x; CPU an item {ours.cpu_us(operation):.3g} us "
                f"against {reverb.cpu_us(operation):.3g} us"
            ),
        )


def memory_table(size: int, sides: list[Contender]) -> Table:
    rows = []
    for contender in sides:
        groups = {name: totals for name, totals in contender.memory.items() if name != "files"}
        total = {kind: sum(group[kind] for group in groups.values()) for kind in ("pss", "rss")}
        server = groups.get("server")
        rows.append(
            [
                contender.name,
                contender.place,
                "" if server is None else show(server["pss"]),
                show(total["pss"]),
                show(total["rss"]),
                show(contender.memory["files"]),
            ]
        )
    held = side.CAPACITY[size] * size / 1e6
    columns = ["", "where", "server, PSS", "all its processes, PSS", "RSS", "files (in PSS where mapped)"]
    return Table(f"Memory with {held:.0f} MB of payloads held, in MB", columns, rows)


def main() -> None:
    options = arguments(
        __doc__,
        ("--environments", {"type": Path, "default": ENVIRONMENTS, "help": "where theirs are, or are made"}),
        ("--sizes", {"type": int, "nargs": "+", "default": side.SIZES, "help": "bytes of an item"}),
        ("--ray", {"action": "store_true", "help": "the ways through Ray actors too"}),
        ("--disk", {"type": Path, "default": Path(tempfile.gettempdir()), "help": "a folder on a disk"}),
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measuring.RESULTS = HERE.parent / "results" / "fragments"
    record = Record(
        "peers",
        "Beside dm-reverb and TorchRL",
        [
            "One item is one array of random bytes; "
            + ", ".join(f"{side.CAPACITY[size]:,} of {size:,} B" for size in side.SIZES)
            + " fill the buffer, and the oldest leave. Uniform sampling. One writer and one sampler process.",
            f"Batches of {', '.join(str(side.BATCH[size]) for size in side.SIZES)} on every side; a sampled "
            "batch is one array in the sampler's own memory.",
            "dm-reverb holds items in its server's memory and loses them with it. Forebay holds them in "
            "files: in /dev/shm they outlive every process but not a reboot, on a disk a reboot too, but not "
            "a power cut without `save`. TorchRL's shared map has no account of uses, ages or leases.",
            "Each side is a session of its own: Linux shares a busy machine among these, not among threads.",
            f"Medians of {QUICK_ROUNDS if options.quick else ROUNDS} rounds of {TURN_S} s, the sides in "
            "turns; CPU of all processes of a side.",
        ],
        options.quick,
    )
    for packages in PACKAGES.values():
        record.versions |= dict(package.split("==") for package in packages if "==" in package)
    for size in options.sizes:
        report(record, size, measure(size, options, record))
        record.save()


if __name__ == "__main__":
    main()
