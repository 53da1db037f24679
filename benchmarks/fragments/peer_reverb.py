"""The dm-reverb side of ``peers.py``; runs in an environment with dm-reverb and TensorFlow.

Usage: python benchmarks/fragments/peer_reverb.py SIZE FOLDER WAY      (FOLDER and WAY go unused)

    writer:  one of `WRITERS`, flushed batch by batch, so that as many items stay under way
    server:  `reverb.Server` with one table: uniform sampling, the oldest leave, no limit of rate or use
    sampler: one of `SAMPLERS`, batched by tf.data

An item is one step with one array. gRPC over TCP on localhost is its transport between processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import reverb
import side
import tensorflow as tf

TABLE, LEGACY = "items", "items of Writer"
"""A `Writer` makes items of another shape, [1, SIZE]: they have a table of their own, of two batches."""


def serve(size: int) -> None:
    def make(name: str, max_size: int) -> reverb.Table:
        return reverb.Table(
            name,
            sampler=reverb.selectors.Uniform(),
            remover=reverb.selectors.Fifo(),
            max_size=max_size,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature={"x": tf.TensorSpec([size], tf.uint8)},
        )

    server = reverb.Server([make(TABLE, side.CAPACITY[size]), make(LEGACY, 2 * side.BATCH[size])])
    side.answer(server.port)
    sys.stdin.read()
    server.stop()


class Writer:
    """Puts batches into the table in one of several documented ways."""

    def __init__(self, address: str, size: int, way: str) -> None:
        self._batch = side.BATCH[size]
        self._payloads = side.payloads(size)
        self._num_sent = 0
        kind, _, chunk = way.partition(" ")
        client = reverb.Client(address)
        make = {"TrajectoryWriter": self._trajectory, "StructuredWriter": self._structured, "Writer": self._legacy}
        self.insert, self.finish = make[kind](client, int(chunk.split()[-1]) if chunk else 1)

    def _next(self) -> list[Any]:
        first = self._num_sent
        self._num_sent += self._batch
        return [self._payloads[i % side.NUM_PAYLOADS] for i in range(first, self._num_sent)]

    def _trajectory(self, client: reverb.Client, chunk: int) -> tuple[Callable[[], int], Callable[[], None]]:
        writer = client.trajectory_writer(num_keep_alive_refs=chunk, validate_items=False)
        writer.configure(("x",), num_keep_alive_refs=chunk, max_chunk_length=chunk)

        def insert() -> int:
            for payload in self._next():
                writer.append({"x": payload})
                writer.create_item(TABLE, priority=1.0, trajectory={"x": writer.history["x"][-1]})
            writer.flush(block_until_num_items=self._batch)
            return self._batch

        return insert, writer.flush

    def _structured(self, client: reverb.Client, _: int) -> tuple[Callable[[], int], Callable[[], None]]:
        library = reverb.structured_writer
        pattern = library.pattern_from_transform({"x": None}, lambda step: {"x": step["x"][-1]})
        writer = client.structured_writer([library.create_config(pattern, TABLE)])

        def insert() -> int:
            for payload in self._next():
                writer.append({"x": payload})
            writer.flush(block_until_num_items=self._batch)
            return self._batch

        return insert, writer.flush

    def _legacy(self, client: reverb.Client, chunk: int) -> tuple[Callable[[], int], Callable[[], None]]:
        writer = client.writer(chunk, chunk_length=chunk, max_in_flight_items=4 * self._batch)

        def insert() -> int:
            for payload in self._next():
                writer.append({"x": payload})
                writer.create_item(LEGACY, num_timesteps=1, priority=1.0)
            return self._batch

        return insert, writer.flush


WRITERS = ("StructuredWriter", "TrajectoryWriter chunks of 1", "Writer chunks of 1", "Writer chunks of 10")
SAMPLERS = {
    # In flight, in batches; and workers.
    "TimestepDataset 2 batches, 1 worker": (reverb.TimestepDataset, 2, 1),
    "TimestepDataset 3 batches, 2 workers": (reverb.TimestepDataset, 3, 2),
    "TimestepDataset 2 batches, workers auto": (reverb.TimestepDataset, 2, -1),
    "TrajectoryDataset 2 batches, 1 worker": (reverb.TrajectoryDataset, 2, 1),
    "TrajectoryDataset 3 batches, 2 workers": (reverb.TrajectoryDataset, 3, 2),
}


def batches(address: str, size: int, way: str) -> Iterator[Any]:
    kind, num_batches, num_workers = SAMPLERS[way]
    dataset = kind(
        server_address=address,
        table=TABLE,
        dtypes={"x": tf.uint8},
        shapes={"x": tf.TensorShape([size])},
        max_in_flight_samples_per_worker=num_batches * side.BATCH[size],
        num_workers_per_iterator=num_workers,
    )
    return iter(dataset.batch(side.BATCH[size], drop_remainder=True).as_numpy_iterator())


def work(address: str, size: int, role: str) -> None:
    side.answer("ready")
    ways: dict[str, Any] = {}
    for command in side.commands():
        way = command["way"]
        if role == "insert":
            writer = ways.setdefault(way, None) or Writer(address, size, way)
            ways[way] = writer
            side.answer(side.repeat(writer.insert, command["seconds"], writer.finish))
        else:
            # A new one each time: what it had read ahead while others had their turn would come for nothing.
            source = batches(address, size, way)
            next(source)
            side.answer(side.repeat(partial(sample, source, size), command["seconds"], lambda: None))


def sample(source: Iterator[Any], size: int) -> int:
    data = next(source).data["x"]
    side.check_batch(data, size)
    return len(data)


def coordinate(size: int, unused: list[str]) -> None:
    start = partial(side.Worker, sys.executable, __file__, str(size), *unused)
    workers = {"server": start("server")}
    address = f"localhost:{workers['server'].receive()}"
    for role in ("insert", "sample"):
        workers[role] = start(role, address)
        workers[role].receive()

    def both(command: dict[str, Any]) -> list[Any]:
        for role in ("insert", "sample"):
            workers[role].send(command | {"way": command[role]})
        return [workers[role].receive() for role in ("insert", "sample")]

    def memory(_: dict[str, Any]) -> dict[str, Any]:
        return side.memory({role: [worker.pid] for role, worker in workers.items()}) | {"files": 0.0}

    side.run({"insert": workers["insert"].ask, "sample": workers["sample"].ask, "both": both, "memory": memory})
    for role in ("insert", "sample", "server"):
        workers[role].end()


def main() -> None:
    size = int(sys.argv[1])
    match sys.argv[4:]:
        case []:
            coordinate(size, sys.argv[2:4])
        case ["server"]:
            serve(size)
        case [role, address]:
            work(address, size, role)


if __name__ == "__main__":
    main()
