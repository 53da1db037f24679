"""`close` ends who waits, whatever else happens in the same turn of the event loop."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_factory import make_group

from forebay.aio.virtual_time import run
from forebay.replay import BufferClosed, FIFOReplayPolicy, IndexedStorage, RemoteReplayBuffer, ReplayBuffer, serve
from forebay.types import Status

STEPS = ("wait", "put", "take", "close", "cancel", "turn")


@given(st.lists(st.sampled_from(STEPS), max_size=12))
def test_every_wait_ends_with_a_change_or_with_the_closing(steps):
    # A wait that nothing ends is a `DeadlockError` of the loop.
    run(play(steps))


async def play(steps):
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    waits, is_closed = [], False
    for number, step in enumerate(steps):
        if step == "wait":
            waits.append((buffer.version, asyncio.create_task(buffer.wait_for_change(buffer.version))))
        elif step == "put":
            await buffer.put(make_group(number), "math")
        elif step == "take":
            await buffer.get(1, "math", Status.COMPLETED)
        elif step == "close":
            await buffer.close()
            is_closed = True
        elif step == "cancel" and waits:
            waits[0][1].cancel()
        elif step == "turn":
            await asyncio.sleep(0)
    if not is_closed:
        await buffer.close()
    for version, wait in waits:
        [result] = await asyncio.gather(wait, return_exceptions=True)
        assert isinstance(result, BufferClosed | asyncio.CancelledError) or result > version


async def test_a_buffer_that_is_closed_under_its_server_ends_the_waits_of_clients(tmp_path):
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    async with (
        serve(buffer, tmp_path / "socket", max_live=1),
        await RemoteReplayBuffer.connect(tmp_path / "socket") as client,
    ):
        await client.put(make_group("a"), "math")
        waits = [
            asyncio.create_task(client.put(make_group("b"), "math")),
            asyncio.create_task(client.wait_for_change(client.version)),
        ]
        await client.count("math", Status.COMPLETED)
        await buffer.close()
        for wait in waits:
            with pytest.raises(BufferClosed):
                await wait
