"""Reading batches of 400 kB items in one process, against copying memory.

Usage: python benchmarks/fragments/reading.py [--quick]

    store.stack(ids)   16 payloads --one copy--> a new batch       store.get_fragments: copies, then read
    memcpy             16 arrays   --one copy--> memory that is there, or a new batch (np.stack)

Both copy 6.4 MB from memory that 200 MB of other items have pushed out of the cache. The ways take turns.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import side

sys.path.insert(0, str(Path(__file__).parent.parent / "replay"))
import measuring
from measuring import Record, Table, Way, arguments, compare, show, show_s

from forebay.fragments import FragmentStore, SampleFragment

SIZE = 400_000
COUNT, QUICK_COUNT = 500, 40
SECONDS, QUICK_SECONDS = 6.0, 0.2
FRESH, REUSED, ARRAYS = "memcpy to a new batch (np.stack)", "memcpy to memory in use", "reading arrays (sum)"
STACK, FRAGMENTS = "store.stack: one batch", "store.get_fragments, reading them (sum)"


class Source:
    """Batches of the same items in the store and in arrays, drawn at random."""

    def __init__(self, folder: str, count: int) -> None:
        payloads = side.payloads(SIZE)
        self.store = FragmentStore(folder, max_bytes=2 * count * SIZE)
        self.arrays = [payloads[i % len(payloads)].copy() for i in range(count)]
        self.ids = [self.store.add_fragment(_fragment(fid, array)) for fid, array in enumerate(self.arrays)]
        self.generator = np.random.default_rng(0)
        self.target = np.zeros((side.BATCH[SIZE], SIZE), np.uint8)

    def draw(self) -> list[int]:
        return self.generator.choice(len(self.ids), side.BATCH[SIZE], replace=False).tolist()

    def copy_to_used(self, chosen: list[int]) -> None:
        for row, i in enumerate(chosen):
            self.target[row] = self.arrays[i]

    def copy_to_new(self, chosen: list[int]) -> Any:
        return np.stack([self.arrays[i] for i in chosen])

    def stack(self, chosen: list[int]) -> Any:
        return self.store.stack([self.ids[i] for i in chosen]).obs

    def read_fragments(self, chosen: list[int]) -> int:
        fragments = self.store.get_fragments([self.ids[i] for i in chosen])
        return sum(int(fragment.obs.view(np.uint64).sum()) for fragment in fragments)

    def read_arrays(self, chosen: list[int]) -> int:
        return sum(int(self.arrays[i].view(np.uint64).sum()) for i in chosen)


def _fragment(fid: int, payload: np.ndarray) -> SampleFragment:
    return SampleFragment(payload, None, None, None, None, None, "writer", fid)


def way(source: Source, call: Callable[[list[int]], Any]) -> Way:
    async def prepare() -> list[int]:
        return source.draw()

    async def run(chosen: list[int]) -> Any:
        return call(chosen)

    return Way(run, prepare)


def main() -> None:
    options = arguments(__doc__)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measuring.RESULTS = Path(__file__).parent.parent / "results" / "fragments"
    count = QUICK_COUNT if options.quick else COUNT
    record = Record(
        "reading",
        "Reading items of 400 kB in one process",
        [
            f"{count} items of {SIZE:,} random bytes in a store in /dev/shm, batches of {side.BATCH[SIZE]}; "
            "medians, the ways in turns, one thread."
        ],
        options.quick,
    )
    with tempfile.TemporaryDirectory(prefix="fragments-", dir="/dev/shm") as folder:
        source = Source(folder, count)
        assert source.read_fragments([0, 1]) == source.read_arrays([0, 1])
        calls = {
            STACK: source.stack,
            FRESH: source.copy_to_new,
            REUSED: source.copy_to_used,
            FRAGMENTS: source.read_fragments,
            ARRAYS: source.read_arrays,
        }
        ways = {name: way(source, call) for name, call in calls.items()}
        times = asyncio.run(compare(ways, seconds=QUICK_SECONDS if options.quick else SECONDS))
    num_bytes = side.BATCH[SIZE] * SIZE
    rows = [
        [name, show_s(found.wall), show_s(found.cpu), f"{show(num_bytes / found.wall / 1e9)} GB/s"]
        for name, found in times.items()
    ]
    record.tables.append(Table("A batch of 16 items", ["", "wall", "CPU", "bandwidth"], rows))
    for ours, theirs, target in ((STACK, REUSED, 50.0), (STACK, FRESH, None), (FRAGMENTS, ARRAYS, None)):
        record.find(
            f"{ours}, share of {theirs}",
            100 * times[theirs].wall / times[ours].wall,
            "%",
            target=target,
            detail=f"{show_s(times[ours].wall)} against {show_s(times[theirs].wall)} a batch; CPU "
            f"{100 * times[theirs].cpu / times[ours].cpu:.3g}%",
        )
    record.save()


if __name__ == "__main__":
    main()
