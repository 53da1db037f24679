"""Writers that ask for room before they act."""

import asyncio

from fragment_factory import send

from forebay.fragments import RateLimit


async def test_all_who_asked_go_on_when_a_reader_waits(make, store):
    buffer = make(rate_limit=RateLimit(samples_per_insert=1.0, min_chunks=1, error_buffer=1.0))
    await send(buffer, store, "w", range(2))
    asking = [asyncio.ensure_future(buffer.wait_for_room()) for _ in range(3)]
    _, pending = await asyncio.wait(asking, timeout=0.05)
    assert len(pending) == 3
    fetching = asyncio.ensure_future(buffer.fetch_fragments(3))
    await asyncio.gather(*asking)
    await send(buffer, store, "w", [2])
    assert len(await fetching) == 3


async def test_room_is_what_the_rate_limit_says(make, store):
    buffer = make(rate_limit=RateLimit(samples_per_insert=1.0, min_chunks=1, error_buffer=1.0))
    await buffer.wait_for_room()
    await send(buffer, store, "w", range(2))
    asking = asyncio.ensure_future(buffer.wait_for_room())
    await buffer.fetch_fragments(1)
    await asking


async def test_without_a_rate_limit_there_is_always_room(make):
    await make().wait_for_room()
