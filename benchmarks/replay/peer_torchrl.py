"""The TorchRL side of ``peers.py``; runs in an environment with TorchRL and Ray.

Usage: python benchmarks/replay/peer_torchrl.py JOB

    in this process    LazyTensorStorage (one tensor per field, written in place)
                       LazyStackStorage  (a list of groups; what it recommends for rollouts of any length)
    in a Ray actor     LazyTensorStorage, data by Ray's object store
                       LazyTensorStorage, data by its own transport (torch.distributed, gloo over TCP)

An item is a group. Puts are `add` (one group) and `extend` (64 at once), a take is `sample(64)` from a buffer
with `consume_after_n_samples=1`: what was sampled is not sampled again and its place is free. It draws at
random; TorchRL has no order of arrival among samplers that consume.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import numpy as np
import peer_job
import ray
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer

LOGICAL_CPUS = 16
ACTORS: dict[str, dict[str, Any]] = {
    "Ray actor, object store": {"transport": "ray"},
    "Ray actor, gloo over TCP": {"transport": "distributed", "transport_options": {"backend": "gloo"}},
}


def operations(job: peer_job.Job, buffer: Any, *, is_stack: bool) -> dict[str, Callable[[], Any]]:
    group = _make_group(job)
    groups = [group.clone() for _ in range(peer_job.BATCH)]
    # A list of groups keeps them as they are, one tensor per field is what the other storage copies fastest.
    batch = lazy_stack(groups) if is_stack else torch.stack(groups)

    def put_one() -> None:
        # A list storage keeps the object that it is given.
        buffer.add(group.clone() if is_stack else group)

    def take() -> None:
        data = buffer.sample(peer_job.BATCH)
        assert data.batch_size[0] == peer_job.BATCH, data
        assert data["response_ids"].shape[-1] == job.response_tokens, data

    return {peer_job.ONE: put_one, peer_job.BATCHED: lambda: buffer.extend(batch), peer_job.TAKE: take}


def _make_group(job: peer_job.Job) -> TensorDict:
    arrays = peer_job.draw(job, np.random.default_rng(0))
    return TensorDict({name: torch.from_numpy(array) for name, array in arrays.items()}, batch_size=[])


def run(job: peer_job.Job, place: str, storage: Callable[..., Any], **where: Any) -> peer_job.Way:
    """The rounds on one buffer; `where` are the arguments that put it into an actor."""
    capacity = job.held + job.singles + 2 * peer_job.BATCH
    buffer = ReplayBuffer(
        storage=partial(storage, capacity), consume_after_n_samples=1, batch_size=peer_job.BATCH, **where
    )
    calls = operations(job, buffer, is_stack=storage is LazyStackStorage)
    for _ in range(job.held // peer_job.BATCH):
        calls[peer_job.BATCHED]()
    way = peer_job.Way(f"TorchRL, {storage.__name__}", place)
    peer_job.run_rounds(job, way, calls)
    if where:
        buffer.shutdown()
    return way


def main() -> None:
    job = peer_job.Job.load(sys.argv[1])
    torch.set_num_threads(os.cpu_count() or 1)
    ways = [run(job, "same process", LazyTensorStorage), run(job, "same process", LazyStackStorage)]
    ray.init(
        num_cpus=LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2**30,
        _node_ip_address="127.0.0.1",
    )
    for place, where in ACTORS.items():
        ways.append(run(job, place, LazyTensorStorage, service_backend="ray", **where))
    ray.shutdown()
    names = ("torchrl", "ray", "torch", "tensordict")
    peer_job.write_result(job, ways, {name: importlib.metadata.version(name) for name in names})


if __name__ == "__main__":
    main()
