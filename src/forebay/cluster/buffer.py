"""The replay buffer as a named Ray actor: one buffer for the producers and the trainer of a cluster.

::

    start_buffer(store="run/buffer.db") --> actor: ReplayBuffer, served at a port of its node
                                              ^  |            ^
           (Ray: where is it, what token?)    |  | killed:    |  groups: a socket (`replay.server`)
    connect_buffer() --> RemoteReplayBuffer --'  | Ray makes  |
                              '------------------+-it anew ---'

Ray places the actor, finds it by name and makes it anew when its process dies. The groups do not pass through
Ray: they travel out of band from process to process, so that a put needs no task, no pickle and no reference.
Of a killed actor's groups its store keeps all on a database, none in memory. It comes back on
the node it was on before if the store is an SQLite file, which is on that node's disk.
"""

import asyncio
import gc
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from forebay.aio.time_limits import timeout
from forebay.cluster.library import MAX_CALLS, NAMESPACE, import_ray, on_node, why
from forebay.io.address import Address
from forebay.replay import ConnectionLost, RemoteReplayBuffer, serve
from forebay.replay.remote.server import IN_MEMORY, ServeOptions, keep_freed_memory, open_buffer

DEFAULT_NAME = "forebay_buffer"

LOCATE_LIMIT_S = 300.0
"""The time for the buffer's address: a restart, and a store on disk that recovers, may take minutes."""

CLOSE_LIMIT_S = 60.0
"""The time that running calls get; then the actor is killed. A database loses nothing by that."""

Place = tuple[str, str]
"""An address and the token for it."""


class BufferActor:
    """The actor: a buffer and its server, opened when the first client asks for them.

    ::

        actor = ray.remote(BufferActor).remote(ServeOptions(address="", store="run/buffer.db"), token)
        address, token = await actor.place.remote()
    """

    def __init__(self, options: ServeOptions, token: str, host: str | None = None) -> None:
        self._options, self._token, self._host = options, token, host
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._place: Place | None = None

    async def place(self) -> Place:
        """Where the buffer is served, and the token.

        Raises:
            OSError, ValueError: the store cannot be opened.
        """
        async with self._opening:
            if self._place is None:
                self._place = await self._open(), self._token
        return self._place

    async def _open(self) -> str:
        host = self._host
        if host is None:
            ray = import_ray()
            # Loopback while this node is the whole cluster; else the address by which the others know it.
            here = ray.get_runtime_context().get_node_id()
            alive = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
            host = alive[here] if len(alive) > 1 else "127.0.0.1"
        # Ray's loaded objects stay: the garbage collector need not visit them after every so many groups.
        gc.collect()
        gc.freeze()
        keep_freed_memory()
        async with AsyncExitStack() as stack:
            buffer = open_buffer(self._options)
            stack.push_async_callback(buffer.close)
            # Any free port: a client that lost the connection asks again.
            address = str(Address(host=host, port=0))
            serving = serve(buffer, address, token=self._token, max_live=self._options.max_live)
            server = await stack.enter_async_context(serving)
            self._stack = stack.pop_all()
        return server.address

    async def close(self) -> None:
        """Let what runs come to its end, and close the store."""
        async with self._opening:
            await self._stack.aclose()
            self._place = None


def start_buffer(
    *,
    name: str = DEFAULT_NAME,
    host: str | None = None,
    actor_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Start a buffer as the actor `name` and return Ray's handle; ``ray.init`` was called before.

    The actor lives as long as the program that started it has a handle or a client of it;
    ``actor_options={"lifetime": "detached"}`` keeps it until `stop_buffer`.

    Args:
        name: by which `connect_buffer` finds it, from other programs on the same cluster too.
        host: where to listen on the actor's node. None: loopback if that node is the whole cluster when the
            first client asks, else the node's address; name one where nodes will join later.
        actor_options: of Ray, beyond the name: where it is placed, and what it may use.
        settings: `store` ("memory"; or the path of an SQLite file or the URL of a PostgreSQL database, which
            survive the actor's process), `policy` ("fifo", "staleness" or "prioritized"), `limit` (live
            groups at most, beyond which the oldest are evicted), `max_live` (live groups beyond which puts
            wait).

    Raises:
        ValueError: there is an actor of that name, or the options contradict each other.
    """
    options = ServeOptions(address="", **settings)
    placed: dict[str, Any] = {"num_cpus": 0} | dict(actor_options or {})
    if options.store != IN_MEMORY and "://" not in options.store:
        placed.setdefault("scheduling_strategy", on_node(import_ray().get_runtime_context().get_node_id()))
    placed |= {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": MAX_CALLS, "namespace": NAMESPACE}
    # The same one after a restart. It also keeps out programs that reach the node and are not of the cluster.
    token = secrets.token_urlsafe(32)
    return import_ray().remote(BufferActor).options(name=name, **placed).remote(options, token, host)


async def connect_buffer(name: str = DEFAULT_NAME) -> RemoteReplayBuffer:
    """A client of the buffer `name`, for one event loop; it finds the actor again after a restart.

    Raises:
        ValueError: there is no actor of that name.
        ConnectionLost: it cannot be reached.
    """
    return await RemoteReplayBuffer.connect_through(partial(locate, import_ray().get_actor(name, NAMESPACE)))


async def locate(actor: Any) -> tuple[Address, str]:
    """Where the buffer of `actor` is served now, and the token for it.

    Raises:
        ConnectionLost: the actor has ended for good, cannot be reached, or does not answer.
        OSError, ValueError: its store cannot be opened.
    """
    try:
        # Ray answers when the actor runs: a call during a restart waits for its end.
        async with timeout(LOCATE_LIMIT_S):
            address, token = await actor.place.remote()
    except TimeoutError:
        raise ConnectionLost(f"the buffer's actor did not answer within {LOCATE_LIMIT_S:g} s") from None
    except import_ray().exceptions.RayTaskError:
        # There is an actor, and that is what it says.
        raise
    except import_ray().exceptions.RayError as error:
        raise ConnectionLost(why(error)) from error
    return Address.parse(address), token


async def stop_buffer(name: str = DEFAULT_NAME) -> None:
    """End the buffer `name` for good; clients are told goodbye. Groups in a database stay there.

    Raises:
        ValueError: there is no actor of that name.
        TimeoutError: it did not end what it does in time, and was killed.
    """
    actor = import_ray().get_actor(name, NAMESPACE)
    try:
        async with timeout(CLOSE_LIMIT_S):
            await actor.close.remote()
    finally:
        # Also one that hangs.
        import_ray().kill(actor)
