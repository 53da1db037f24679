"""Servers and clients as processes of their own, stopped and killed."""

import asyncio
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from replay_factory import make_group, names

from forebay.io.address import Address
from forebay.replay import (
    ConnectionLost,
    FIFOReplayPolicy,
    IndexedStorage,
    RemoteReplayBuffer,
    ReplayBuffer,
    ServerClosed,
    SQLStorage,
    serve,
)
from forebay.replay.remote.link import BufferLink
from forebay.replay.remote.messages import TakeArguments
from forebay.types import Status

COMPLETED, ARCHIVED = Status.COMPLETED, Status.ARCHIVED
CHILD = Path(__file__).with_name("server_child.py")


@asynccontextmanager
async def running(*arguments):
    """A process of this Python; killed at the end, if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        # Both, so that the pipe is closed too.
        await process.communicate()


@asynccontextmanager
async def serving(address, *options):
    """`forebay buffer serve`, once it listens; its address."""
    main = "from forebay.cli import main; main()"
    async with running("-c", main, "buffer", "serve", address, *options) as process:
        line = (await process.stdout.readline()).decode()
        assert line.startswith("listening on "), line
        yield process, line.split()[-1]


@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_a_killed_client_loses_nothing(store, tmp_path):
    storage = IndexedStorage() if store == "memory" else SQLStorage(tmp_path / "b.db")
    buffer = ReplayBuffer(FIFOReplayPolicy(), storage)
    for name in "abcd":
        await buffer.put(make_group(name), "math")
    async with serve(buffer, tmp_path / "socket"):
        async with (
            running(CHILD, tmp_path / "socket", "take", 2) as taker,
            running(CHILD, tmp_path / "socket", "archive", 1) as archiver,
        ):
            taken = (await taker.stdout.readline()).decode().split()
            archived = (await archiver.stdout.readline()).decode().split()
            assert sorted([*taken, *archived]) in (["a", "b", "c"],)
            assert await buffer.count("math", COMPLETED) == 1
            seen = buffer.version
            taker.kill()
            archiver.kill()
            while await buffer.count("math", COMPLETED) != 3:
                seen = await buffer.wait_for_change(seen)
        await buffer.restore(4)
        assert names(await buffer.get(9, "math", COMPLETED)) == ["a", "b", "c", "d"]
    await buffer.close()


async def test_a_killed_server_on_a_database_loses_nothing_and_doubles_nothing(tmp_path):
    address, database = tmp_path / "socket", tmp_path / "b.db"
    answered = []

    async def put(client, name):
        await client.put(make_group(name), "math", tags={"name": name})
        answered.append(name)

    async with serving(address, "--store", database, "--policy", "fifo") as (server, _):
        client = await RemoteReplayBuffer.connect(address)
        for number in range(5):
            await put(client, str(number))
        # Taken, and not confirmed when the server dies.
        link = await BufferLink.open(Address.parse(address), None)
        arguments = TakeArguments(b"key", {"math": 2}, COMPLETED, None)
        _, groups = await link.ask("take_batch", arguments)
        assert names(groups) == ["0", "1"]
        await client.take_batch({"math": 1}, train_step=7)
        puts = [asyncio.create_task(put(client, str(number))) for number in range(5, 60)]
        await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
        server.kill()
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {type(None), ConnectionLost}
        await link.close()
    async with serving(address, "--store", database, "--policy", "fifo"):
        # The same client, with the new server.
        assert await client.count("math", ARCHIVED) == 1
        await client.restore(6)
        groups = names(await client.get(99, "math", COMPLETED))
        assert groups[:5] == ["0", "1", "2", "3", "4"]
        assert len(groups) == len(set(groups))
        assert set(answered) <= set(groups)
        await client.close()


async def test_a_server_that_is_ended_leaves_what_its_store_keeps(tmp_path):
    options = ["--store", tmp_path / "buffer.db", "--max-live", 3]
    async with serving("tcp://127.0.0.1:0", *options) as (server, address):
        client = await RemoteReplayBuffer.connect(address)
        for name in "abc":
            await client.put(make_group(name), "math")
        full = asyncio.create_task(client.put(make_group("d"), "math"))
        waiting = asyncio.create_task(client.wait_for_change(client.version))
        await client.count("math", COMPLETED)
        server.send_signal(signal.SIGTERM)
        for ended in (full, waiting):
            with pytest.raises(ServerClosed, match="has not happened"):
                await ended
        await server.communicate()
        assert server.returncode == 0
        await client.close()
    async with serving(tmp_path / "socket", *options) as (server, address):
        assert address == f"unix:{tmp_path / 'socket'}"
        async with await RemoteReplayBuffer.connect(address) as client:
            assert names(await client.get(9, "math", COMPLETED)) == ["a", "b", "c"]
        server.send_signal(signal.SIGINT)
        await server.communicate()
        assert server.returncode == 0
