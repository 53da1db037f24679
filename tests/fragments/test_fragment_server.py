"""A buffer served on a Unix socket: what only connections can do wrong."""

import asyncio
import os
import stat

import pytest
from fragment_factory import fids, send

from forebay.fragments import BufferClosed, FragmentMetadata, RateLimit, RemoteFragmentBuffer, serve


@pytest.fixture
def path(tmp_path):
    return tmp_path / "socket"


@pytest.fixture
async def served(make_plain, path):
    async with serve(make_plain(max_reuse=3), path):
        yield path


async def test_clients_share_one_buffer_and_calls_run_side_by_side(served, store):
    writer = await RemoteFragmentBuffer.connect(served)
    reader = await RemoteFragmentBuffer.connect(served)
    fetching = [asyncio.create_task(reader.fetch_fragments(2)) for _ in range(2)]
    await asyncio.sleep(0)
    # The same connection answers while a fetch waits.
    assert (await reader.metrics())["waiting_fetches"] == 2
    ids = await send(writer, store, "w", range(2))
    for batch in [await task for task in fetching]:
        assert sorted(batch.fragment_ids) == sorted(ids)
        assert store.stack(batch.fragment_ids).fid_in_worker == fids(batch)
        assert await reader.renew(batch.lease)
        assert await writer.release(batch.lease.lease_id)
    await writer.disconnect()
    await reader.disconnect()


async def test_a_cancelled_fetch_takes_nothing_and_a_served_one_is_released(served, store):
    client = await RemoteFragmentBuffer.connect(served)
    waiting = asyncio.create_task(client.fetch_fragments(1))
    await asyncio.sleep(0)
    await client.metrics()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await send(client, store, "w", [0])
    metrics = await client.metrics()
    assert (metrics["waiting_fetches"], metrics["fetches"]) == (0, 0)
    # Cancelled before the answer is read, whether it was served by then or not.
    racing = asyncio.create_task(client.fetch_fragments(1))
    await asyncio.sleep(0)
    racing.cancel()
    await asyncio.wait([racing])
    assert racing.cancelled()
    assert (await client.metrics())["leases"] == 0
    await client.disconnect()


async def test_what_a_client_waited_for_goes_with_it(served, store):
    leaving = await RemoteFragmentBuffer.connect(served)
    staying = await RemoteFragmentBuffer.connect(served)
    fetching = asyncio.create_task(leaving.fetch_fragments(1))
    await asyncio.sleep(0)
    await leaving.metrics()
    next_in_line = asyncio.create_task(staying.fetch_fragments(1))
    await asyncio.sleep(0)
    await staying.metrics()
    await leaving.disconnect()
    with pytest.raises(BufferClosed, match="closed on this side"):
        await fetching
    with pytest.raises(BufferClosed, match="closed on this side"):
        await leaving.metrics()
    await send(staying, store, "w", [0])
    assert fids(await next_in_line) == [0]
    assert (await staying.metrics())["fetches"] == 1
    await staying.disconnect()


async def test_when_the_server_ends_calls_end(make_plain, path):
    async with serve(make_plain(), path):
        client = await RemoteFragmentBuffer.connect(path)
        fetching = asyncio.create_task(client.fetch_fragments(1))
        await asyncio.sleep(0)
        await client.metrics()
    with pytest.raises(BufferClosed):
        await fetching
    assert not path.exists()
    await client.disconnect()


async def test_errors_are_those_of_the_buffer(served, store):
    client = await RemoteFragmentBuffer.connect(served)
    with pytest.raises(ValueError, match="num_fragments must be a multiple"):
        await client.fetch_fragments(9)
    with pytest.raises(ValueError, match="a lease is what a batch has"):
        await client.release("no lease")
    with pytest.raises(TimeoutError):
        await client.fetch_fragments(1, timeout_s=0.01)
    with pytest.raises(ValueError, match="str"):
        await client.add_fragment(7, FragmentMetadata("w", 0, -1, ""))
    with pytest.raises(ValueError, match="no method 'drop_everything'"):
        await client._call("drop_everything")
    await client.close()
    again = await RemoteFragmentBuffer.connect(served)
    with pytest.raises(BufferClosed, match="the buffer was closed"):
        await again.add_fragment("id", FragmentMetadata("w", 0, -1, ""))
    await again.disconnect()


async def test_whoever_speaks_something_else_is_not_listened_to(served):
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"FBC1" + (5).to_bytes(4, "little") + b"\xffabcd", b"\x01"):
        reader, writer = await asyncio.open_unix_connection(str(served))
        writer.write(words)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    client = await RemoteFragmentBuffer.connect(served)
    assert (await client.metrics())["added_fragments"] == 0
    await client.disconnect()


async def test_a_socket_is_its_owners_and_one_servers(make_plain, path):
    path.touch()
    os.unlink(path)
    async with serve(make_plain(), path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(OSError, match="in use"):
            async with serve(make_plain(), path):
                pass
        client = await RemoteFragmentBuffer.connect(path)
        await client.disconnect()


async def test_the_socket_of_a_killed_server_is_taken_over(make_plain, path):
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with serve(make_plain(), path):
        client = await RemoteFragmentBuffer.connect(path)
        assert await client.get_database_config()
        await client.disconnect()


async def test_a_fetch_is_read_however_many_additions_of_its_client_wait(make_plain, path, store):
    limit = RateLimit(samples_per_insert=1.0, min_chunks=1, error_buffer=1.0)
    async with serve(make_plain(rate_limit=limit), path):
        client = await RemoteFragmentBuffer.connect(path)
        adding = [asyncio.create_task(send(client, store, f"w{i}", [0])) for i in range(1500)]
        while (await client.metrics())["added_fragments"] < 1:
            await asyncio.sleep(0)
        assert len(await client.fetch_fragments(1)) == 1
        for task in adding:
            task.cancel()
        await asyncio.gather(*adding, return_exceptions=True)
        await client.disconnect()
