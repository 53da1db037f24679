"""The TransferQueue side of ``peers.py``; runs in an environment with TransferQueue.

Usage: python benchmarks/replay/peer_transferqueue.py JOB

    this process (client) --ZeroMQ, TCP on loopback--> controller actor (metadata)
                          '-----------------------> two storage actors (data)          actors by Ray

Puts are `kv_batch_put`, the batched call of its key-value interface, with a key per rollout and regular
tensors, its fastest layout. A take is what its trainers do: `get_meta` with the sampler for groups
(`GRPOGroupNSampler`), `get_data`, `clear_samples`. Backend SimpleStorage with its default of two units.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import os
import sys

os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
# Its default is 8 torch threads a process, which on fewer cores was 1.5 to 3 times slower.
os.environ.setdefault("TQ_NUM_THREADS", str(os.cpu_count()))

import numpy as np
import peer_job
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

PARTITION = "train"
LOGICAL_CPUS = 16
"""Each actor asks for one; the machine may have fewer."""


class Side:
    """The client and the data it puts."""

    def __init__(self, job: peer_job.Job) -> None:
        self.job = job
        group = peer_job.draw(job, np.random.default_rng(0))
        tensors = {name: torch.from_numpy(array) for name, array in group.items()}
        self.group = TensorDict(tensors, batch_size=[job.group_size])
        self.batch = torch.cat([self.group] * peer_job.BATCH)
        self.numbers = itertools.count()
        self.client = tq.get_client()

    def keys(self, groups: int) -> list[str]:
        return [
            f"{number}-{member}"
            for number in itertools.islice(self.numbers, groups)
            for member in range(self.job.group_size)
        ]

    def put_one(self) -> None:
        tq.kv_batch_put(keys=self.keys(1), partition_id=PARTITION, fields=self.group)

    def put_in_flight(self) -> None:
        async def put_all() -> None:
            puts = (
                tq.async_kv_batch_put(keys=self.keys(1), partition_id=PARTITION, fields=self.group)
                for _ in range(peer_job.BATCH)
            )
            await asyncio.gather(*puts)

        # In the client's own event loop, where its synchronous calls run too.
        self.client._run_coroutine(put_all())

    def put_batch(self) -> None:
        tq.kv_batch_put(keys=self.keys(peer_job.BATCH), partition_id=PARTITION, fields=self.batch)

    def take(self) -> None:
        self.take_groups(peer_job.BATCH)

    def take_one(self) -> None:
        self.take_groups(1)

    def take_groups(self, groups: int) -> None:
        number = groups * self.job.group_size
        meta = self.client.get_meta(
            data_fields=list(self.group.keys()), batch_size=number, partition_id=PARTITION, task_name="train"
        )
        data = self.client.get_data(meta)
        self.client.clear_samples(meta)
        assert data.batch_size == (number,), data
        assert data["response_ids"].numel() == number * self.job.response_tokens, data


def run_groups(job: peer_job.Job, way: peer_job.Way) -> None:
    side = Side(job)
    for _ in range(job.held // peer_job.BATCH):
        side.put_batch()
    operations = {
        peer_job.ONE: side.put_one,
        peer_job.TAKE_ONE: side.take_one,
        peer_job.IN_FLIGHT: side.put_in_flight,
        peer_job.BATCHED: side.put_batch,
        peer_job.TAKE: side.take,
    }
    peer_job.run_rounds(job, way, operations)


class SmallSide:
    """Its own performance test, Small: random floats by key; clearing is not timed there either."""

    def __init__(self) -> None:
        shape = (peer_job.SMALL_ROWS, peer_job.SMALL_TOKENS)
        fields = {f"field_{i}": torch.randn(shape) for i in range(peer_job.SMALL_FIELDS)}
        self.data = TensorDict(fields, batch_size=[peer_job.SMALL_ROWS])
        self.keys = [f"test_key_{i}" for i in range(peer_job.SMALL_ROWS)]

    def put(self) -> None:
        tq.kv_batch_put(keys=self.keys, partition_id="train_0", fields=self.data)

    def get(self) -> None:
        data = tq.kv_batch_get(keys=self.keys, partition_id="train_0")
        assert data.batch_size == (peer_job.SMALL_ROWS,)
        # It comes back as a nested tensor, whose lines may differ in length.
        assert data["field_0"].numel() == self.data["field_0"].numel()

    def clear(self) -> None:
        tq.kv_clear(keys=self.keys, partition_id="train_0")


def run_small(job: peer_job.Job, way: peer_job.Way) -> None:
    side = SmallSide()
    operations = {peer_job.SMALL_PUT: side.put, peer_job.SMALL_GET: side.get}
    for name, calls in peer_job.schedule(job, way, operations):
        with way.timing(name, calls):
            operations[name]()
        if name == peer_job.SMALL_GET:
            side.clear()


def main() -> None:
    job = peer_job.Job.load(sys.argv[1])
    ray.init(
        num_cpus=LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2**30,
        _node_ip_address="127.0.0.1",
    )
    way = peer_job.Way("TransferQueue, SimpleStorage", "Ray actors, ZeroMQ over TCP")
    if job.small:
        # As its script says: one storage unit, and the sequential sampler.
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        run_small(job, way)
    else:
        sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=job.group_size)
        tq.init(OmegaConf.create({"controller": {"sampler": sampler}}, flags={"allow_objects": True}))
        run_groups(job, way)
    names = ("TransferQueue", "ray", "torch", "tensordict", "pyzmq")
    peer_job.write_result(job, [way], {name: importlib.metadata.version(name) for name in names})
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
