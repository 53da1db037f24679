"""The buffer as a Ray actor: found by name, and back after its process was killed."""

import os
import signal

import pytest
from fragment_factory import SETTINGS, fids, send

from forebay.fragments import BufferClosed


@pytest.fixture
def client(ray, database_config):
    from forebay.cluster.fragments import start_replay_buffer

    started = start_replay_buffer(name="restarted", database_config=database_config, **SETTINGS)
    yield started
    ray.kill(started.actor)


async def find_process(client):
    return await client.actor.__ray_call__.remote(lambda _: os.getpid())


async def test_an_actor_whose_process_is_killed_goes_on_with_what_it_held(ray, client, store):
    from forebay.cluster.fragments import connect_replay_buffer

    buffer = connect_replay_buffer("restarted")
    await buffer.update_model_version("s", 7)
    await send(buffer, store, "w", range(4), version=7, session="s")
    batch = await buffer.fetch_fragments(2)
    process = await find_process(client)
    os.kill(process, signal.SIGKILL)
    # Calls made before Ray has made it anew fail.
    while True:
        try:
            assert await find_process(buffer) != process
            break
        except ray.exceptions.RayError:
            continue
    assert await buffer.renew(batch.lease)
    assert store.stack(batch.fragment_ids).fid_in_worker == fids(batch)
    rest = await buffer.fetch_fragments(2)
    assert sorted(fids(batch) + fids(rest)) == [0, 1, 2, 3]


async def test_calls_to_a_frozen_actor_end(client):
    from forebay.cluster.fragments import ReplayBufferClient

    buffer = ReplayBufferClient(client.actor, limit_s=2.0)
    process = await find_process(client)
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(BufferClosed, match=r"called to metrics.*: no answer within 2 s"):
        await buffer.metrics()
    os.kill(process, signal.SIGCONT)
    assert (await client.metrics())["chunks"] == 0
