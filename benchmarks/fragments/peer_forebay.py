"""This project's side of ``peers.py``.

Usage: python benchmarks/fragments/peer_forebay.py SIZE FOLDER WAY

    served    as below
    ray       the buffer is a Ray actor instead of the server
    local     all is one process

    writer:  write 256 / 64 / 16 fragments to the store and announce them, a call each; eight under way
    server:  `ReplayBufferActor` behind a Unix socket
    sampler: fetch a batch, stack its payloads to one array, release its lease; more are under way

An item is one fragment and one chunk, its payload `obs`. The store is in FOLDER; chunks may be used any
number of times, and the oldest leave the full buffer.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections import deque
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import side

from forebay.cluster.fragments import connect_replay_buffer, start_replay_buffer
from forebay.fragments import (
    FragmentMetadata,
    FragmentStore,
    RemoteFragmentBuffer,
    ReplayBufferActor,
    SampleFragment,
    serve,
)

UNLIMITED = 2**31
CALLS_UNDER_WAY = 8


def settings(size: int, folder: str) -> dict[str, Any]:
    num_bytes = side.CAPACITY[size] * (size + 1_000)
    return {
        "max_chunks": side.CAPACITY[size],
        "max_staleness": UNLIMITED,
        "max_reuse": UNLIMITED,
        "fragments_per_chunk": 1,
        "database_config": {"path": folder, "max_bytes": 2 * num_bytes + (64 << 20)},
    }


class Client:
    """What a writer or a sampler does with a buffer, wherever that is."""

    def __init__(self, size: int, buffer: Any, store: FragmentStore) -> None:
        self._size, self._buffer, self._store = size, buffer, store
        # Long enough for a batch from every place in it.
        payloads = side.payloads(size)
        self._payloads = np.stack([payloads[i % len(payloads)] for i in range(len(payloads) + side.BATCH[size])])
        self._num_sent = 0
        self._under_way: deque[asyncio.Future[Any]] = deque()
        self._releases: deque[asyncio.Future[Any]] = deque()

    def _next(self) -> SampleFragment:
        """The next fragments, as one: the steps of as many environments."""
        size, first = side.BATCH[self._size], self._num_sent
        self._num_sent += size
        start = first % side.NUM_PAYLOADS
        return SampleFragment(
            obs=self._payloads[start : start + size],
            action=None,
            next_done=None,
            reward=None,
            first=None,
            in_state=None,
            worker_uuid="writer",
            fid_in_worker=list(range(first, first + size)),
        )

    def _start(self, work: Awaitable[Any]) -> None:
        self._under_way.append(asyncio.ensure_future(work))

    async def insert(self) -> int:
        batch = self._next()
        announced = [
            (fragment_id, FragmentMetadata("writer", fid, 0, "run"))
            for fragment_id, fid in zip(self._store.add_stacked(batch), batch.fid_in_worker, strict=True)
        ]
        self._start(self._buffer.add_fragments(announced))
        # Sent before the next ones are packed.
        await asyncio.sleep(0)
        while len(self._under_way) >= CALLS_UNDER_WAY:
            await self._under_way.popleft()
        return len(announced)

    async def sample(self) -> int:
        while len(self._under_way) < CALLS_UNDER_WAY:
            self._start(self._buffer.fetch_fragments(side.BATCH[self._size]))
        batch = await self._under_way.popleft()
        self._start(self._buffer.fetch_fragments(side.BATCH[self._size]))
        await asyncio.sleep(0)
        side.check_batch(self._store.stack(batch.fragment_ids).obs, self._size)
        self._releases.append(asyncio.ensure_future(self._buffer.release(batch.lease)))
        while len(self._releases) >= CALLS_UNDER_WAY:
            await self._releases.popleft()
        return len(batch)

    async def finish(self) -> None:
        while self._under_way:
            result = await self._under_way.popleft()
            if result is not None:
                await self._buffer.release(result.lease)
        while self._releases:
            await self._releases.popleft()

    async def repeat(self, operation: str, seconds: float) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        items, start = 0, loop.time()
        while loop.time() - start < seconds:
            items += await getattr(self, operation)()
        await self.finish()
        return {"items": items, "wall_s": loop.time() - start}


async def serve_until_input_ends(size: int, folder: str) -> None:
    # Nothing here makes cycles at speed, and looking for them takes a seventh of the time.
    gc.set_threshold(100_000)
    buffer = ReplayBufferActor(**settings(size, folder))
    await buffer.update_model_version("run", 0)
    async with serve(buffer, socket_of(folder)):
        side.answer("ready")
        await asyncio.to_thread(sys.stdin.read)
    await buffer.close()


def socket_of(folder: str) -> Path:
    return Path(folder) / "socket"


def start_ray(**where: Any) -> Any:
    import ray

    ray.init(include_dashboard=False, log_to_driver=False, namespace="fragments", **where)
    return ray


async def work(size: int, folder: str, way: str, operation: str) -> None:
    if way == "ray":
        start_ray()
        buffer: Any = connect_replay_buffer()
    else:
        buffer = await RemoteFragmentBuffer.connect(socket_of(folder))
    client = Client(size, buffer, FragmentStore(**await buffer.get_database_config()))
    side.answer("ready")
    commands = side.commands()
    while (command := await asyncio.to_thread(next, commands, None)) is not None:
        side.answer(await client.repeat(operation, command["seconds"]))


def coordinate(size: int, folder: str, way: str) -> None:
    start = partial(side.Worker, sys.executable, __file__, str(size), folder, way)
    workers = {}
    if way == "ray":
        ray = start_ray(num_cpus=4, _node_ip_address="127.0.0.1")
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        buffer = start_replay_buffer(**settings(size, folder))
        asyncio.run(buffer.update_model_version("run", 0))
    else:
        workers["server"] = start("server")
        workers["server"].receive()
    for operation in ("insert", "sample"):
        workers[operation] = start(operation)
        workers[operation].receive()

    def both(command: dict[str, Any]) -> list[Any]:
        for operation in ("insert", "sample"):
            workers[operation].send(command)
        return [workers[operation].receive() for operation in ("insert", "sample")]

    def memory(_: dict[str, Any]) -> dict[str, Any]:
        groups = {role: [worker.pid] for role, worker in workers.items()}
        return side.memory(groups if way == "served" else {"all": list(side.tree())}) | used(folder)

    side.run({"insert": workers["insert"].ask, "sample": workers["sample"].ask, "both": both, "memory": memory})
    for worker in reversed(workers.values()):
        worker.end()
    if way == "ray":
        ray.shutdown()


def used(folder: str) -> dict[str, float]:
    return {"files": sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*")) / 1e6}


def coordinate_local(size: int, folder: str) -> None:
    loop = asyncio.new_event_loop()
    buffer = ReplayBufferActor(**settings(size, folder))
    loop.run_until_complete(buffer.update_model_version("run", 0))
    config = loop.run_until_complete(buffer.get_database_config())
    client = Client(size, buffer, FragmentStore(**config))

    def run(command: dict[str, Any]) -> Any:
        return loop.run_until_complete(client.repeat(command["op"], command["seconds"]))

    memory = {"memory": lambda _: side.memory({"all": list(side.tree())}) | used(folder)}
    side.run({"insert": run, "sample": run} | memory)
    loop.run_until_complete(buffer.close())


def main() -> None:
    size, folder, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    match sys.argv[4:]:
        case [] if way == "local":
            coordinate_local(size, folder)
        case []:
            coordinate(size, folder, way)
        case ["server"]:
            asyncio.run(serve_until_input_ends(size, folder))
        case [operation]:
            asyncio.run(work(size, folder, way, operation))


if __name__ == "__main__":
    main()
