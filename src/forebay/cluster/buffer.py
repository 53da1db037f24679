"""The replay buffer as a named Ray actor: one buffer for the producers and the trainer of a cluster.

::

    start_buffer(store="run/buffer.db") --> actor: ReplayBuffer, served at a port of its node
                                              ^  |            ^
           (Ray: where is it, what token?)    |  | killed:    |  groups: a socket (`replay.server`)
    connect_buffer() --> RemoteReplayBuffer --'  | Ray makes  |
                              '------------------+-it anew ---'

Ray places the actor, finds it by name and makes it anew when its process dies. The groups do not pass through
Ray: they travel out of band from process to process, so that a put needs no task, no pickle and no reference.
What a killed actor held is what its store kept: all of it on a database, nothing in memory. It comes back on
the node it was on before if the store is an SQLite file, which is on that node's disk.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from forebay.cluster.library import NAMESPACE, import_ray, on_this_node, why
from forebay.replay import ConnectionLost, RemoteReplayBuffer, ReplayBuffer, ShardedReplayBuffer, serve
from forebay.replay.server_address import Address
from forebay.replay.server_command import IN_MEMORY, POLICIES, ServeOptions, open_buffer
from forebay.replay.server_memory import keep_freed_memory

DEFAULT_NAME = "forebay_buffer"
MAX_CALLS = 10_000
"""Clients that ask at the same time where the buffer is; an answer takes a millisecond."""

LOOPBACK = "127.0.0.1"

Place = tuple[str, str]
"""An address and the token for it."""


class BufferActor:
    """What runs in the actor: a buffer and its server, opened when the first client asks for them.

    >>> actor = ray.remote(BufferActor).remote(ServeOptions(address="", store="run/buffer.db"), token)
    >>> address, token = await actor.place.remote()
    """

    def __init__(
        self, options: ServeOptions, token: str, host: str | None = None, num_shards: int = 1
    ) -> None:
        self._options = options
        self._token = token
        self._host = host
        self._num_shards = num_shards
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._buffer: ReplayBuffer | None = None
        self._place: Place | None = None

    async def layout(self) -> tuple[int, str]:
        """How many shards there are, and the name of their policy."""
        return self._num_shards, self._options.policy

    async def place(self) -> Place:
        """Where the buffer is served, and the token.

        Raises:
            OSError, ValueError: the store cannot be opened.
        """
        async with self._opening:
            if self._place is None:
                self._place = await self._open()
        return self._place

    async def _open(self) -> Place:
        host = self._host or _node_address(import_ray())
        # What Ray has loaded stays: the garbage collector need not visit it with every many groups that come.
        gc.collect()
        gc.freeze()
        keep_freed_memory()
        self._buffer = await open_buffer(self._options)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._buffer.close)
            # Whatever port is free: who lost the connection asks again.
            address = str(Address(host=host, port=0))
            serving = serve(self._buffer, address, token=self._token, max_live=self._options.max_live)
            server = await stack.enter_async_context(serving)
            self._stack = stack.pop_all()
        return server.address, self._token

    async def close(self) -> None:
        """Let what runs come to its end, and close the store."""
        async with self._opening:
            await self._stack.aclose()
            self._place = None


def start_buffer(
    *,
    name: str = DEFAULT_NAME,
    num_shards: int = 1,
    store: str = IN_MEMORY,
    policy: str = "staleness",
    limit: int | None = None,
    max_live: int | None = None,
    keep_consumed: bool = False,
    host: str | None = None,
    actor_options: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Start a buffer as the actor `name` and return Ray's handles; ``ray.init`` was called before.

    Of several shards each is an actor of its own, with a handle in the list. An actor lives as long as
    somebody has a handle or a client of it in the program that started it;
    ``actor_options={"lifetime": "detached"}`` keeps it until `stop_buffer`.

    Args:
        name: by which `connect_buffer` finds it, from other programs on the same cluster too.
        num_shards: processes that share the work; see `ShardedReplayBuffer`.
        store: "memory"; or the path of an SQLite file or the URL of a PostgreSQL database, which survive the
            actor's process. Shards have a file each: ``buffer-0.db``, ``buffer-1.db``, ...
        policy: "fifo", "staleness" or "prioritized".
        limit: live groups of a shard at most, beyond which the oldest are evicted.
        max_live: live groups of a shard beyond which puts wait.
        keep_consumed: see `ReplayBuffer`.
        host: where to listen on the actor's node. None: loopback if that node is the whole cluster when the
            first client asks, else the node's address; name one where nodes will join later.
        actor_options: of Ray, beyond the name: where it is placed, and what it may use.

    Raises:
        ValueError: there is an actor of that name, or the options contradict each other.
    """
    ray = import_ray()
    if num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {num_shards}")
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
    if max_live is not None and limit is not None:
        raise ValueError(f"give max_live or limit, not both; got {max_live} and {limit}")
    placed: dict[str, Any] = {"num_cpus": 0} | dict(actor_options or {})
    if _is_file(store):
        placed.setdefault("scheduling_strategy", on_this_node(ray))
    placed |= {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": MAX_CALLS}
    # The same one after a restart. It also keeps out those who reach the node and are not of the cluster.
    token = secrets.token_urlsafe(32)
    handles = []
    for shard in range(num_shards):
        options = ServeOptions(
            address="",
            store=store if num_shards == 1 else _shard_store(store, shard),
            policy=policy,
            limit=limit,
            max_live=max_live,
            keep_consumed=keep_consumed,
        )
        actor = ray.remote(BufferActor).options(name=_shard_name(name, shard), namespace=NAMESPACE, **placed)
        handles.append(actor.remote(options, token, host, num_shards))
    return handles


def _shard_name(name: str, shard: int) -> str:
    """The first one has the name itself: from there the others are found."""
    return f"{name}/{shard}" if shard else name


def _is_file(store: str) -> bool:
    return store != IN_MEMORY and "://" not in store


def _shard_store(store: str, shard: int) -> str:
    if store == IN_MEMORY:
        return store
    if not _is_file(store):
        raise ValueError("shards need an SQLite file each: give a path, or use one shard for a database")
    path = Path(store)
    return str(path.with_name(f"{path.stem}-{shard}{path.suffix}"))


def _node_address(ray: Any) -> str:
    """Loopback while this node is the whole cluster; else the address by which the others know it."""
    here = ray.get_runtime_context().get_node_id()
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    return addresses[here] if len(addresses) > 1 else LOOPBACK


async def connect_buffer(name: str = DEFAULT_NAME) -> RemoteReplayBuffer | ShardedReplayBuffer:
    """A client of the buffer `name`, for one event loop; it finds the actors again after a restart.

    Raises:
        ValueError: there is no actor of that name.
        ConnectionLost: it cannot be reached.
    """
    ray = import_ray()
    num_shards, policy = await ray.get_actor(name, NAMESPACE).layout.remote()
    async with AsyncExitStack() as stack:
        shards = []
        for shard in range(num_shards):
            connecting = _connect(ray.get_actor(_shard_name(name, shard), NAMESPACE))
            shards.append(await stack.enter_async_context(await connecting))
        # From here on they are whoever's asked.
        stack.pop_all()
    return shards[0] if num_shards == 1 else ShardedReplayBuffer(shards, POLICIES[policy]())


async def _connect(actor: Any) -> RemoteReplayBuffer:
    return await RemoteReplayBuffer.connect_through(partial(locate, actor))


async def locate(actor: Any) -> tuple[Address, str]:
    """Where the buffer of `actor` is served now, and the token for it.

    Raises:
        ConnectionLost: the actor has ended for good, or cannot be reached.
        OSError, ValueError: its store cannot be opened.
    """
    exceptions = import_ray().exceptions
    try:
        # Ray answers when the actor runs: a call during a restart waits for its end.
        address, token = await actor.place.remote()
    except exceptions.RayTaskError:
        # There is an actor, and that is what it says.
        raise
    except exceptions.RayError as error:
        raise ConnectionLost(why(error)) from error
    return Address.parse(address), token


async def stop_buffer(name: str = DEFAULT_NAME) -> None:
    """End the buffer `name` for good; clients are told goodbye. What a database holds stays there.

    Raises:
        ValueError: there is no actor of that name.
    """
    ray = import_ray()
    num_shards, _ = await ray.get_actor(name, NAMESPACE).layout.remote()
    for shard in range(num_shards):
        actor = ray.get_actor(_shard_name(name, shard), NAMESPACE)
        await actor.close.remote()
        ray.kill(actor)
