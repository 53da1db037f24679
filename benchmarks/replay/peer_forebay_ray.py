"""This project's side of ``ray_hosted.py``: the buffer as a Ray actor.

Usage: python benchmarks/replay/peer_forebay_ray.py JOB

    this process (client) --a socket, TCP on loopback, with a token--> actor: ReplayBuffer over IndexedStorage

Ray starts the actor and says where it is; the groups do not pass through Ray. The Small batch is 16 groups of
8 rollouts with three random arrays of 4 bytes a token (ids, logprobs, model steps), so that nothing is left
out because it follows from the rest; getting it is `take_batch`, which removes it too.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys

import numpy as np
import peer_job
import ray
from peer_forebay import TASK, Group, Side

from forebay.cluster.buffer import connect_buffer, start_buffer
from forebay.types import RolloutState, Status

LOGICAL_CPUS = 16
"""As the other side's."""


class SmallSide:
    """The Small batch, in groups of 8."""

    def __init__(self, job: peer_job.Job, buffer: object) -> None:
        self.job = job
        self.buffer = buffer
        self.random = np.random.default_rng(0)
        self.num_groups = peer_job.SMALL_ROWS // job.group_size
        self.groups: list[Group] = []

    def prepare(self) -> None:
        self.groups = [
            [self.make_rollout(f"{number}/{member}") for member in range(self.job.group_size)]
            for number in range(self.num_groups)
        ]

    def make_rollout(self, name: str) -> RolloutState:
        ids, steps = self.random.integers(0, peer_job.VOCABULARY, (2, peer_job.SMALL_TOKENS), np.int32)
        logprobs = self.random.standard_normal(peer_job.SMALL_TOKENS).astype(np.float32)
        arrays = {"response_ids": ids, "logprobs": logprobs, "response_model_steps": steps}
        return RolloutState([], rollout_id=name, status=Status.COMPLETED, **arrays)

    async def put(self) -> None:
        await self.buffer.put_groups(self.groups, TASK)

    async def get(self) -> None:
        groups, _ = await self.buffer.take_batch({TASK: self.num_groups})
        assert len(groups[TASK][-1][-1].logprobs) == peer_job.SMALL_TOKENS

    async def run(self, way: peer_job.Way) -> peer_job.Way:
        operations = {peer_job.SMALL_PUT: self.put, peer_job.SMALL_GET: self.get}
        for operation, calls in peer_job.schedule(self.job, way, operations):
            self.prepare()
            with way.timing(operation, calls):
                await operations[operation]()
        return way


async def run(job: peer_job.Job) -> peer_job.Way:
    name, place = "Forebay, IndexedStorage", "Ray actor, sockets over TCP"
    # Kept, because with its handle the actor would go.
    actor = start_buffer(name="benchmark")
    async with await connect_buffer("benchmark") as buffer:
        if job.small:
            way = await SmallSide(job, buffer).run(peer_job.Way(name, place))
        else:
            way = await Side(job, buffer).run(name, place)
    del actor
    return way


def main() -> None:
    job = peer_job.Job.load(sys.argv[1])
    ray.init(
        num_cpus=LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2**30,
        _node_ip_address="127.0.0.1",
    )
    way = asyncio.run(run(job))
    names = ("forebay", "numpy", "ray")
    peer_job.write_result(job, [way], {name: importlib.metadata.version(name) for name in names})
    ray.shutdown()


if __name__ == "__main__":
    main()
