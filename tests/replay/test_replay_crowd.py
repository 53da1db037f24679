"""Many clients at once, and what they may cost the server: connections, and memory."""

import asyncio
import socket
import struct
from contextlib import AsyncExitStack

import pytest
from replay_factory import make_group, names
from test_replay_frozen import serving
from test_replay_server_faults import HELLO, PUT, call, frame

from forebay.io import address as server_address
from forebay.io.channel import MAX_HEADER_BYTES
from forebay.io.messages import Cancel
from forebay.replay import ConnectionLost, FIFOReplayPolicy, IndexedStorage, RemoteReplayBuffer, ReplayBuffer, serve
from forebay.replay.format.encode import pack_group
from forebay.replay.remote import client
from forebay.replay.remote.connection import ClientConnection
from forebay.types import Status

COMPLETED = Status.COMPLETED
MANY = 500
LONG_S = 600.0


@pytest.fixture
def buffer():
    return ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())


async def connect_all(address, number, **options):
    """What became of each."""
    connecting = (RemoteReplayBuffer.connect(address, limit_s=LONG_S, **options) for _ in range(number))
    return await asyncio.gather(*connecting, return_exceptions=True)


@pytest.mark.parametrize("kind", ["socket", "tcp"])
async def test_five_hundred_clients_get_in_together(tmp_path, kind):
    place = tmp_path / "socket" if kind == "socket" else "tcp://127.0.0.1:0"
    async with serving(place) as (_, address), AsyncExitStack() as stack:
        found = await connect_all(address, MANY)
        for one in found:
            assert isinstance(one, RemoteReplayBuffer), one
            stack.push_async_callback(one.close)
        assert await found[-1].count("math", COMPLETED) == 0


async def test_all_get_in_where_the_system_lets_only_few_wait(tmp_path, buffer, monkeypatch):
    monkeypatch.setattr(server_address, "BACKLOG", 1)
    async with serve(buffer, tmp_path / "socket") as server, AsyncExitStack() as stack:
        for one in await connect_all(tmp_path / "socket", 40):
            assert isinstance(one, RemoteReplayBuffer), one
            stack.push_async_callback(one.close)
        assert server.num_clients == 40


@pytest.mark.parametrize("kind", ["socket", "tcp"])
async def test_who_is_too_many_is_told_so_and_gets_in_later(tmp_path, buffer, kind):
    place = tmp_path / "socket" if kind == "socket" else "tcp://127.0.0.1:0"
    async with serve(buffer, place, max_clients=3) as server:
        found = await connect_all(server.address, 8)
        refused = [one for one in found if isinstance(one, ConnectionLost)]
        inside = [one for one in found if isinstance(one, RemoteReplayBuffer)]
        assert (len(refused), len(inside)) == (5, 3)
        assert all("the server takes 3 connections" in str(one) for one in refused)
        await inside.pop().close()
        while server.num_clients == 3:
            await asyncio.sleep(0)
        inside.append(await RemoteReplayBuffer.connect(server.address))
        for one in inside:
            await one.close()


@pytest.mark.parametrize(
    "options", [{"max_clients": 0}, {"max_put_bytes": 0}, {"client_limit_s": 0.0}, {"client_limit_s": float("nan")}]
)
async def test_limits_are_positive(tmp_path, buffer, options):
    [name] = options
    with pytest.raises(ValueError, match=name):
        async with serve(buffer, tmp_path / "socket", **options):
            pass
    async with serve(buffer, tmp_path / "socket"):
        with pytest.raises(ValueError, match="limit_s must be a positive"):
            await RemoteReplayBuffer.connect(tmp_path / "socket", limit_s=0)


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("sizes", [(200 << 20, 0), (0, 200 << 20)], ids=["heads", "arrays"])
async def test_memory_follows_what_has_come_not_what_was_announced(tmp_path, sizes):
    async with serving(tmp_path / "socket") as (process, address), AsyncExitStack() as stack:
        observer = await stack.enter_async_context(await RemoteReplayBuffer.connect(address))
        before = resident_bytes(process.pid)
        for number in range(20):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(str(tmp_path / "socket"))
            sock.sendall(HELLO + call(1, "put_groups", PUT, [sizes]) + bytes(1000) * (number + 1))
            # And one that announces a long message.
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(str(tmp_path / "socket"))
            sock.sendall(HELLO + struct.pack("<4sI", b"FBC1", MAX_HEADER_BYTES) + b"x")
        for _ in range(3):
            await observer.put(make_group("a"), "math")
        assert resident_bytes(process.pid) - before < 100 << 20


async def test_puts_of_all_clients_wait_for_room_in_memory(tmp_path, buffer, monkeypatch):
    """More than the server may hold at a time: all of it is stored, and it never held more."""
    monkeypatch.setattr(client, "FULL_PAUSE_S", 0.0)
    path, num_clients, most, num_refused = tmp_path / "socket", 8, 0, 0
    size = sum(pack_group(make_group("0/0", num_tokens=2_000)).size)
    limit = 10 * size
    reserve = ClientConnection._reserve

    def note_refusal(*arguments):
        nonlocal num_refused
        has_room = reserve(*arguments)
        num_refused += not has_room
        return has_room

    monkeypatch.setattr(ClientConnection, "_reserve", note_refusal)
    async with serve(buffer, path, max_put_bytes=limit) as server, AsyncExitStack() as stack:
        store = buffer._store

        async def store_slowly(*arguments):
            nonlocal most
            most = max(most, server._served.put_bytes)
            for _ in range(20):
                await asyncio.sleep(0)
            return await store(*arguments)

        buffer._store = store_slowly

        async def put(one, number):
            groups = [make_group(f"{number}/{place}", num_tokens=2_000) for place in range(4)]
            await one.put_groups(groups, "math")

        clients = [await stack.enter_async_context(await RemoteReplayBuffer.connect(path)) for _ in range(num_clients)]
        async with asyncio.TaskGroup() as tasks:
            for number, one in enumerate(clients * 2):
                tasks.create_task(put(one, number))
        found = await buffer.get(999, "math", COMPLETED)
        assert sorted(names(found)) == sorted(f"{n}/{place}" for n in range(16) for place in range(4))
        assert 0 < most <= limit + size
        assert num_refused > 0
        assert server._served.put_bytes == 0


async def test_what_a_broken_put_held_is_given_back(tmp_path, buffer):
    async with serve(buffer, tmp_path / "socket") as server:
        for last in (b"", frame(Cancel(1))):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(tmp_path / "socket"))
                sock.sendall(HELLO + call(1, "put_groups", PUT, [(5 << 20, 5 << 20)]) + bytes(2000) + last)
                while not server._served.put_bytes:
                    await asyncio.sleep(0)
            while server.num_clients:
                await asyncio.sleep(0)
            assert server._served.put_bytes == 0
