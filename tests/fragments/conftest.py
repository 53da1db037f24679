"""The buffer as it is used: embedded, and as a Ray actor."""

import pytest
from fragment_factory import SETTINGS
from ray_cluster import local_cluster

from forebay.fragments import FragmentStore, ReplayBufferActor


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


@pytest.fixture(params=["plain", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))])
def make(request, make_plain, database_config):
    """Makes the buffer of either kind."""
    if request.param == "plain":
        yield make_plain
        return
    ray = request.getfixturevalue("ray")
    from forebay.cluster.fragments import start_replay_buffer

    started = []

    def start(**settings):
        settings = SETTINGS | settings
        started.append(start_replay_buffer(name="buffer", database_config=database_config, **settings))
        return started[-1]

    yield start
    for client in started:
        ray.kill(client.actor)
