"""The TorchRL side of ``peers.py``; runs in an environment with TorchRL and Ray.

Usage: python benchmarks/fragments/peer_torchrl.py SIZE FOLDER WAY

    tensors   LazyTensorStorage, in this process
    memmap    LazyMemmapStorage in FOLDER, in this process
    shared    LazyMemmapStorage in FOLDER, `shared=True`: writer and sampler are processes that inherit it
    ray       LazyTensorStorage in a Ray actor: writer and sampler are processes that call it

An item is a row. Puts are `extend` of a batch, a sample is a uniform `sample(batch)`; the oldest rows are
overwritten.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import side
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

LOGICAL_CPUS = 4


def make_buffer(size: int, folder: str, way: str) -> Any:
    capacity, batch = side.CAPACITY[size], side.BATCH[size]
    if way == "ray":
        return ReplayBuffer(
            storage=partial(LazyTensorStorage, capacity),
            batch_size=batch,
            service_backend="ray",
            service_backend_options={"remote_config": {"num_cpus": 0}},
            transport="ray",
        )
    storage = (
        LazyTensorStorage(capacity)
        if way == "tensors"
        else LazyMemmapStorage(capacity, scratch_dir=str(Path(folder) / "memmap"))
    )
    return ReplayBuffer(storage=storage, batch_size=batch, shared=way == "shared")


def operations(size: int, buffer: Any) -> dict[str, Callable[[], int]]:
    count = side.BATCH[size]
    payloads = side.payloads(size)
    rows = np.stack([payloads[i % len(payloads)] for i in range(count)])
    batch = TensorDict({"x": torch.from_numpy(rows)}, batch_size=[count])

    def insert() -> int:
        buffer.extend(batch)
        return count

    def sample() -> int:
        side.check_batch(buffer.sample()["x"].numpy(), size)
        return count

    return {"insert": insert, "sample": sample}


def work(size: int, buffer: Any, operation: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    call = operations(size, buffer)[operation]
    while (seconds := pipe.recv()) is not None:
        pipe.send(side.repeat(call, seconds, lambda: None))


class Child:
    """A process that does one operation, as `side.Worker` does."""

    def __init__(self, size: int, buffer: Any, operation: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=work, args=(size, buffer, operation, other))
        self._process.start()
        self.pid = self._process.pid

    def send(self, command: dict[str, Any]) -> None:
        self._pipe.send(command["seconds"])

    def receive(self) -> Any:
        return self._pipe.recv()

    def ask(self, command: dict[str, Any]) -> Any:
        self.send(command)
        return self.receive()

    def end(self) -> None:
        self._pipe.send(None)
        self._process.join()


def main() -> None:
    size, folder, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    if way == "ray":
        import ray

        ray.init(num_cpus=LOGICAL_CPUS, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    buffer = make_buffer(size, folder, way)
    local = operations(size, buffer)
    for _ in range(side.CAPACITY[size] // side.BATCH[size] + 1):
        local["insert"]()

    def memory(_: dict[str, Any]) -> dict[str, Any]:
        groups = {"all processes": list(side.tree())}
        files = sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*")) / 1e6
        return side.memory(groups) | {"files": files}

    def alone(command: dict[str, Any]) -> Any:
        return side.repeat(local[command["op"]], command["seconds"], lambda: None)

    if way in ("tensors", "memmap", "ray"):
        side.run({"insert": alone, "sample": alone, "memory": memory})
        return
    children = {operation: Child(size, buffer, operation) for operation in local}

    def both(command: dict[str, Any]) -> list[Any]:
        for child in children.values():
            child.send(command)
        return [child.receive() for child in children.values()]

    side.run({"insert": children["insert"].ask, "sample": children["sample"].ask, "both": both, "memory": memory})
    for child in children.values():
        child.end()


if __name__ == "__main__":
    main()
