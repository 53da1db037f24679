"""The buffer as it is used: embedded, served to other processes, and as a Ray actor."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from fragment_factory import SETTINGS

from forebay.fragments import FragmentStore, RemoteFragmentBuffer, ReplayBufferActor, serve
from ray_cluster import local_cluster


@pytest.fixture
def database_config(tmp_path):
    return {"path": str(tmp_path / "store"), "max_bytes": 64 << 20}


@pytest.fixture
def store(database_config):
    return FragmentStore(**database_config)


@pytest.fixture
def make_plain(database_config):
    """Makes embedded buffers, on one folder if not told another: the next one takes over from the last."""

    def make(**settings):
        return ReplayBufferActor(**{"database_config": database_config} | SETTINGS | settings)

    return make


@pytest.fixture(scope="session")
def ray():
    with local_cluster() as ray:
        yield ray


class Served:
    """A buffer behind a socket, and a client of it; both begin with the first call."""

    def __init__(self, buffer, path):
        self._buffer, self._path = buffer, path
        self._stack = AsyncExitStack()
        self._connecting = asyncio.Lock()
        self._client = None

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            async with self._connecting:
                if self._client is None:
                    await self._stack.enter_async_context(serve(self._buffer, self._path))
                    self._client = await RemoteFragmentBuffer.connect(self._path)
                    self._stack.push_async_callback(self._client.disconnect)
            return await getattr(self._client, name)(*args, **kwargs)

        return call

    async def end(self):
        await self._stack.aclose()


@pytest.fixture(params=["plain", "served", "ray"])
async def make(request, make_plain, database_config, tmp_path_factory):
    """Makes the buffer of either kind."""
    if request.param == "plain":
        yield make_plain
    elif request.param == "served":
        async for start in making_served(make_plain, tmp_path_factory.mktemp("sockets")):
            yield start
    else:
        for start in making_actors(request.getfixturevalue("ray"), database_config):
            yield start


async def making_served(make_plain, folder):
    started = []

    def start(**settings):
        started.append(Served(make_plain(**settings), folder / str(len(started))))
        return started[-1]

    yield start
    for served in started:
        await served.end()


def making_actors(ray, database_config):
    from forebay.cluster.fragments import start_replay_buffer

    started = []

    def start(**settings):
        settings = SETTINGS | settings
        started.append(start_replay_buffer(name="buffer", database_config=database_config, **settings))
        return started[-1]

    yield start
    for client in started:
        ray.kill(client.actor)
