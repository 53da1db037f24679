"""Servers and clients that are stopped (SIGSTOP): nobody waits for ever, and no group is lost or doubled."""

import asyncio
import errno
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from replay_factory import make_group, names
from test_replay_server_faults import HELLO, call, of_math

from forebay.replay import ConnectionLost, FIFOReplayPolicy, IndexedStorage, RemoteReplayBuffer, ReplayBuffer, serve
from forebay.replay.remote import link as client_link
from forebay.types import Status
from forebay.watching.stalls import StallError, answered

COMPLETED = Status.COMPLETED
CHILD = Path(__file__).with_name("frozen_child.py")
SHORT_S = 0.1
LONG_S = 600.0
"""No test waits for so long: what ends has another reason."""


@asynccontextmanager
async def running(*arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable, CHILD, *map(str, arguments), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def serving(path):
    async with running("serve", path) as process:
        yield process, (await process.stdout.readline()).decode().strip()


@contextmanager
def frozen(process):
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


@pytest.fixture
def buffer():
    return ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())


CALLS = {
    "put": lambda client: client.put(make_group("more"), "math"),
    "put_groups": lambda client: client.put_groups([make_group("large", num_tokens=2_000_000)] * 3, "math"),
    "get": lambda client: client.get(2, "math", COMPLETED),
    "take_batch": lambda client: client.take_batch({"math": 2}, train_step=1),
    "count": lambda client: client.count("math", COMPLETED),
    "is_ready": lambda client: client.is_ready({"math": 1}),
    "commit": lambda client: client.commit(0),
    "restore": lambda client: client.restore(0),
    "refresh_staleness": lambda client: client.refresh_staleness({"math": 9}, 1),
    "update_priorities": lambda client: client.update_priorities({1: 2.0}),
    "save": lambda client: client.save("/nowhere"),
    "resume": lambda client: client.resume("/nowhere"),
    "wait_for_change": lambda client: client.wait_for_change(client.version),
    "rows": lambda client: client.count("math", Status.COMPLETED),
}


@pytest.mark.parametrize("address", ["socket", "tcp"])
async def test_every_call_to_a_frozen_server_obeys_cancellation_and_loses_nothing(tmp_path, address):
    place = tmp_path / "socket" if address == "socket" else "tcp://127.0.0.1:0"
    async with serving(place) as (process, found):
        client = await RemoteReplayBuffer.connect(found, limit_s=LONG_S)
        for name in "abc":
            await client.put(make_group(name), "math")
        with frozen(process):
            waits = [asyncio.create_task(in_time(make(client))) for make in CALLS.values()]
            await asyncio.gather(*waits)
            with pytest.raises(StallError, match="no answer within"):
                await answered(client.count("math", COMPLETED), "the server", limit_s=SHORT_S)
            counting = asyncio.create_task(client.count("math", COMPLETED))
            await asyncio.sleep(0)
            counting.cancel()
            counting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await counting
        # All were undone but, perhaps, the put for which there was room.
        seen = client.version
        while not {"a", "b", "c"} <= set(await held(client)):
            seen = await client.wait_for_change(seen)
        assert sorted(await held(client)) in (["a", "b", "c"], ["a", "b", "c", "more"])
        await client.close()


async def in_time(work):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SHORT_S):
            await work


async def held(client):
    num_held = await client.count("math", Status.COMPLETED)
    taken, _ = await client.take_batch({"math": num_held}, train_step=9)
    await client.restore(8)
    return names(taken["math"])


async def test_a_frozen_server_is_given_up_and_named(tmp_path):
    async with serving(tmp_path / "socket") as (process, address):
        client = await RemoteReplayBuffer.connect(address, limit_s=2.0)
        with frozen(process):
            calls = {name: CALLS[name](client) for name in ("resume", "put", "count", "wait_for_change")}
            errors = await asyncio.gather(*calls.values(), return_exceptions=True)
            found = dict(zip(calls, errors, strict=True))
            assert {type(error) for error in errors} == {ConnectionLost}
            for name in ("resume", "put"):
                assert f"{address} has been silent for 2 s" in str(found[name])
                assert "is not known" in str(found[name])
            for name in ("count", "wait_for_change"):
                assert f"{address} did not answer within 2 s" in str(found[name])
            with pytest.raises(ConnectionLost, match=r"did not answer within 0\.1 s"):
                await RemoteReplayBuffer.connect(address, limit_s=SHORT_S)
        # The same client goes on when the server does.
        assert await client.count("math", COMPLETED) in (0, 1)
        await client.close()


async def test_a_time_out_of_the_network_is_not_told_as_the_limit_of_the_client(monkeypatch):
    async def dial(address):
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(client_link, "dial", dial)
    with pytest.raises(ConnectionLost, match=r"no buffer server answers at .*: .*Connection timed out"):
        await RemoteReplayBuffer.connect("tcp://127.0.0.1:9", limit_s=LONG_S)


async def test_closing_does_not_wait_for_a_frozen_server(tmp_path):
    async with serving(tmp_path / "socket") as (process, address):
        client = await RemoteReplayBuffer.connect(address, limit_s=LONG_S)
        with frozen(process):
            putting = asyncio.create_task(CALLS["put_groups"](client))
            counting = asyncio.create_task(client.count("math", COMPLETED))
            await asyncio.sleep(SHORT_S)
            await client.close()
            for task in (putting, counting):
                with pytest.raises(ConnectionLost):
                    await task


async def test_a_frozen_client_is_given_up_and_doubles_nothing_when_it_comes_back(tmp_path, buffer):
    for name in "abc":
        await buffer.put(make_group(name), "math")
    path = tmp_path / "socket"
    async with serve(buffer, path, client_limit_s=2.0), running("take", path, 2) as child:
        assert (await child.stdout.readline()).decode().split() == ["a", "b"]
        seen = buffer.version
        assert len(buffer) == 1
        with frozen(child):
            while len(buffer) != 3:
                seen = await buffer.wait_for_change(seen)
            # In their old places, for another one.
            assert names(await buffer.get(2, "math", COMPLETED)) == ["a", "b"]
        child.stdin.write(b"\n")
        assert b"in the buffer again" in await child.stdout.readline()
        assert names(await buffer.get(9, "math", COMPLETED)) == ["c"]


async def test_a_frozen_client_that_is_being_sent_groups_is_given_up(tmp_path, buffer):
    for number in range(10):
        await buffer.put(make_group(number, num_tokens=20_000), "math")
    async with serve(buffer, tmp_path / "socket", client_limit_s=SHORT_S):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(tmp_path / "socket"))
            sock.sendall(HELLO + call(1, "take_batch", of_math(b"k", 10)))
            seen = await buffer.wait_for_change(buffer.version)
            while len(buffer) != 10:
                seen = await buffer.wait_for_change(seen)


async def test_both_ends_stay_connected_while_nothing_is_said(tmp_path, buffer):
    limit_s = 0.5
    async with (
        serve(buffer, tmp_path / "socket", client_limit_s=limit_s),
        await RemoteReplayBuffer.connect(tmp_path / "socket", limit_s=limit_s) as client,
    ):
        link = client._link
        version = client.version
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3 * limit_s):
                await client.wait_for_change(version)
        assert await client.count("math", COMPLETED) == 0
        assert client._link is link
        assert link.lost is None


class Unheard(BaseException):
    """Of no kind that anybody expects."""


@pytest.mark.parametrize("error", [MemoryError("too large"), KeyError("a bug"), Unheard("of")], ids=repr)
async def test_whatever_ends_the_reading_ends_the_link_and_says_why(tmp_path, buffer, monkeypatch, error):
    def fail(*_):
        raise error

    async def wait_for_ever(path):
        await asyncio.Event().wait()

    for name in "ab":
        await buffer.put(make_group(name), "math")
    async with serve(buffer, tmp_path / "socket"), await RemoteReplayBuffer.connect(tmp_path / "socket") as client:
        monkeypatch.setattr(client_link, "unpack_group", fail)
        monkeypatch.setattr(buffer, "save", wait_for_ever)
        saving = asyncio.create_task(client.save(tmp_path / "snapshot"))
        taking = asyncio.create_task(client.take_batch({"math": 2}, train_step=1))
        for task in (taking, saving):
            with pytest.raises(ConnectionLost, match=type(error).__name__) as caught:
                await task
            assert caught.value.__cause__ is error
        monkeypatch.undo()
        # Nothing is lost, and the next call connects again.
        groups, _ = await client.take_batch({"math": 2}, train_step=1)
        assert names(groups["math"]) == ["a", "b"]
