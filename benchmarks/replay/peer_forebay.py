"""This project's side of ``peers.py``.

Usage: python benchmarks/replay/peer_forebay.py JOB

    in this process     ReplayBuffer over IndexedStorage
    in another process  the same behind its server, through a Unix socket

Puts give labels, train step and threshold. A take is `take_batch` for good, most stale first. The rollouts
are new ones for every put, made before.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import peer_job
from rollouts import copies
from serving import connected

from forebay.replay import IndexedStorage, ReplayBuffer, StalenessReplayPolicy
from forebay.types import RolloutState, Status

TASK = "math"
PER_ROLLOUT = ("response_ids", "logprobs", "response_mask")

Group = list[RolloutState]


def make_group(job: peer_job.Job) -> Group:
    """The same arrays as the other sides', the labels left to `put`."""
    arrays = peer_job.draw(job, np.random.default_rng(0))
    prompt_ids = arrays["prompt_ids"][0].copy()
    return [
        RolloutState(
            [{"role": "user", "content": "?"}],
            rollout_id=str(member),
            prompt_ids=prompt_ids,
            tokens=np.concatenate([prompt_ids, arrays["response_ids"][member]]),
            reward={"score": float(arrays["reward"][member, 0])},
            finish_reason="stop",
            status=Status.COMPLETED,
            **{name: arrays[name][member].copy() for name in PER_ROLLOUT},
        )
        for member in range(job.group_size)
    ]


class Side:
    """One buffer, the groups made for the next call, and the calls."""

    def __init__(self, job: peer_job.Job, buffer: Any) -> None:
        self.job = job
        self.buffer = buffer
        self.template = make_group(job)
        self.ready: list[Group] = []

    def prepare(self, number: int) -> None:
        """Make the groups that the next calls put."""
        self.ready = list(copies(self.template, number))

    async def put_one(self) -> None:
        await self.buffer.put(self.ready.pop(), TASK, model_step=3, current_train_step=5, stale_threshold=4)

    async def put_in_flight(self) -> None:
        async with asyncio.TaskGroup() as puts:
            for _ in range(peer_job.BATCH):
                puts.create_task(self.put_one())

    async def put_batch(self) -> None:
        await self.buffer.put_groups(self.ready, TASK, model_step=3, current_train_step=5, stale_threshold=4)

    async def take(self) -> None:
        await self.take_groups(peer_job.BATCH)

    async def take_one(self) -> None:
        await self.take_groups(1)

    async def take_groups(self, number: int) -> None:
        groups, _ = await self.buffer.take_batch({TASK: number})
        assert len(groups[TASK]) == number
        assert len(groups[TASK][-1][-1].response_ids) == self.job.response_tokens

    async def run(self, name: str, place: str) -> peer_job.Way:
        operations: dict[str, Callable[[], Awaitable[None]]] = {
            peer_job.ONE: self.put_one,
            peer_job.TAKE_ONE: self.take_one,
            peer_job.IN_FLIGHT: self.put_in_flight,
            peer_job.BATCHED: self.put_batch,
            peer_job.TAKE: self.take,
        }
        for _ in range(self.job.held // peer_job.BATCH):
            self.prepare(peer_job.BATCH)
            await self.put_in_flight()
        way = peer_job.Way(name, place)
        for operation, calls in peer_job.schedule(self.job, way, operations):
            self.prepare(max(calls, peer_job.BATCH))
            with way.timing(operation, calls):
                for _ in range(calls):
                    await operations[operation]()
        return way


async def run(job: peer_job.Job, folder: Path) -> list[peer_job.Way]:
    local = ReplayBuffer(StalenessReplayPolicy(), IndexedStorage())
    ways = [await Side(job, local).run("Forebay, IndexedStorage", "same process")]
    async with connected(folder) as remote:
        ways.append(await Side(job, remote).run("Forebay, IndexedStorage", "buffer server, Unix socket"))
    return ways


def main() -> None:
    job = peer_job.Job.load(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        ways = asyncio.run(run(job, Path(folder)))
    names = ("forebay", "numpy")
    peer_job.write_result(job, ways, {name: importlib.metadata.version(name) for name in names})


if __name__ == "__main__":
    main()
