"""Clients that die, stall, lie or are not let in harm nobody but themselves; servers that go lose nothing."""

import asyncio
import contextlib
import json
import os
import socket
import struct

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from replay_factory import make_group, names, same

from forebay.io import channel
from forebay.io.address import Address, is_proof, prove
from forebay.io.channel import framed
from forebay.io.messages import Call, Goodbye, Note, Part, decode, encode_value
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
from forebay.replay.arrival import Arrival
from forebay.replay.format.encode import ARRAYS, pack_group
from forebay.replay.format.packed import unpack_group
from forebay.replay.remote import connection as server_connection
from forebay.replay.remote import link as client_link
from forebay.replay.remote import messages
from forebay.replay.remote.link import BufferLink
from forebay.types import Status

COMPLETED, ARCHIVED = Status.COMPLETED, Status.ARCHIVED
TOKEN = "a token of enough length"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "socket"


@pytest.fixture
def buffer():
    return ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())


def connect(path, token=None):
    return RemoteReplayBuffer.connect(path, token)


async def put_named(buffer, text):
    for name in text:
        await buffer.put(make_group(name), "math")


async def open_raw(path):
    """A socket to the server, and its greeting read."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    await read_message(reader)
    return reader, writer


async def read_message(reader):
    magic, length = struct.unpack("<4sI", await reader.readexactly(8))
    assert magic == b"FBC1"
    return decode(await reader.readexactly(length))


def frame(message):
    return b"".join(framed(message))


def hello(protocol=messages.PROTOCOL):
    return frame(Note(encode_value(messages.Hello(protocol, b""))))


HELLO = hello()


async def last_words(reader):
    """What the server says before it ends the connection."""
    words = []
    try:
        while True:
            words.append(await read_message(reader))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return words[-1].message if words and isinstance(words[-1], Goodbye) else None


def call(number, method, arguments, sizes=()):
    return frame(Call(number, method, encode_value(arguments), [size for pair in sizes for size in pair]))


def of_math(key, number, tags=None):
    return messages.TakeArguments(key, {"math": number}, COMPLETED, None, tags)


COUNT = {"task_name": "math", "group_status": COMPLETED, "tags": None}
PUT = messages.PutArguments(b"", "t", Arrival())
PACKED = pack_group(make_group("raw", steps=[1]))
SIZE, GROUP = PACKED.size, PACKED.head + b"".join(PACKED.buffers)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "starts with"),
        (HELLO + b"FBC2" + bytes(8), "starts with"),
        (HELLO + struct.pack("<4sI", b"FBC1", 2**31), "at most"),
        (HELLO + struct.pack("<4sI", b"FBC1", 3) + b"abc", "not a message"),
        (HELLO + HELLO, "one hello"),
        (struct.pack("<4sI", b"FBC1", 5000), "at most 4096"),
        (call(1, "count", COUNT), "hello"),
        (hello(99), "protocol"),
        (HELLO + call(1, "count", COUNT, [(2**40, 2**40)]), "at most"),
        (HELLO + call(1, "count", COUNT, [(-1, 5)]), ">= 0"),
        (HELLO + call(1, "put_groups", PUT), "does not bring 0 groups"),
        (HELLO + frame(Part(1, [])), "not expected"),
        (HELLO + frame(Part(1, list(SIZE))) + GROUP, "brings no groups"),
        (HELLO + call(1, "count", COUNT, [SIZE]) + GROUP, "brings no groups"),
        (HELLO + call(1, "put_groups", PUT, [(2, 3)]) + b"\x92\x90abc", "damaged"),
    ],
)
async def test_what_is_no_message_ends_its_connection_with_a_reason(buffer, path, data, reason):
    async with serve(buffer, path), await connect(path) as other:
        reader, writer = await open_raw(path)
        writer.write(data)
        assert reason in await last_words(reader)
        writer.close()
        await put_named(other, "a")
        assert len(buffer) == 1


async def test_a_message_that_breaks_off_ends_its_connection(buffer, path):
    async with serve(buffer, path) as server, await connect(path) as other:
        packed = pack_group(make_group("a"))
        arguments = messages.PutArguments(b"k", "math", Arrival())
        data = HELLO + call(1, "put_groups", arguments, [packed.size]) + packed.head + b"".join(packed.buffers)
        for length in (3, 20, len(HELLO), len(HELLO) + 9, len(data) - 1):
            reader, writer = await open_raw(path)
            writer.write(data[:length])
            writer.write_eof()
            await last_words(reader)
            writer.close()
        assert await other.count("math", COMPLETED) == len(buffer) == 0
        assert server.num_clients == 1


@given(data=st.lists(st.binary(max_size=60), min_size=1, max_size=4), hello=st.booleans())
@example(data=[b""], hello=False)
def test_any_bytes_harm_nobody(data, hello, tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / "socket"

    async def run():
        buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
        async with serve(buffer, path):
            for rest in data:
                reader, writer = await open_raw(path)
                for bytes_ in (rest, struct.pack("<4sI", b"FBC1", len(rest)) + rest):
                    writer.write(HELLO * hello + bytes_)
                writer.write_eof()
                await last_words(reader)
                writer.close()
            async with await connect(path) as other:
                await put_named(other, "a")
                assert names(await other.get(1, "math", COMPLETED)) == ["a"]

    asyncio.run(run())


@given(data=st.data())
def test_a_damaged_group_is_a_clear_error(data):
    extra = {"array": __import__("numpy").arange(3.0), "tuple": (1,), "scalar": __import__("numpy").float32(1)}
    group = make_group("g", steps=[1, 2], extra_fields=extra)
    packed = pack_group(group)
    head, arrays = bytearray(packed.head), bytearray(b"".join(packed.buffers))
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from([head, arrays]))
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del arrays[data.draw(st.integers(0, len(arrays) - 1)) :]
    with contextlib.suppress(ValueError):
        for state in unpack_group(head, arrays):
            assert isinstance(state.status, Status)
            assert {getattr(state, name).dtype for name in ARRAYS} <= set(ARRAYS.values())


@pytest.mark.parametrize("dtype", ["'|O'", "[('a', '|O')]", "'" + " " * 9000 + "<i4'"])
@pytest.mark.parametrize("tree", [{"$array": ["", [1], 0]}, {"$tuple": [{"$scalar": ["", "AAAAAAAAAAA="]}]}])
def test_bytes_are_never_taken_for_python_objects(dtype, tree):
    group = make_group("g", extra_fields={"x": (b"12345678",)})
    packed = pack_group(group)
    inner = tree.get("$array") or tree["$tuple"][0]["$scalar"]
    inner[0] = dtype
    head = msgspec.msgpack.decode(packed.head)
    head["trees"] = json.dumps({"extra_fields": [tree]})
    with pytest.raises(ValueError, match="dtype"):
        unpack_group(msgspec.msgpack.encode(head), b"".join(packed.buffers))


async def test_a_client_that_does_not_read_holds_up_nobody(buffer, path):
    for number in range(30):
        await buffer.put(make_group(number, num_tokens=20_000), "math")
    async with serve(buffer, path), await connect(path) as other:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(path))
        takes = b"".join(call(n, "take_batch", of_math(bytes([n]), 10)) for n in (1, 2, 3))
        sock.sendall(HELLO + takes)
        while await other.count("math", COMPLETED) == 30:
            await other.wait_for_change(other.version)
        # Its first batch is on its way, and it gets no second one before it has read that.
        assert names(await other.get(30, "math", COMPLETED)) == list(range(10, 30))
        await other.put(make_group("more"), "math")
        seen = other.version
        sock.close()
        while await other.count("math", COMPLETED) != 11:
            seen = await other.wait_for_change(seen)
        assert names(await other.get(11, "math", COMPLETED)) == [*range(10), "more"]


async def test_a_client_that_never_confirms_is_given_up(buffer, path, monkeypatch):
    monkeypatch.setattr(server_connection, "STALL_S", 0.01)
    await put_named(buffer, "ab")
    async with serve(buffer, path):
        link = await BufferLink.open(Address.parse(path), None)
        seen = buffer.version
        _, groups = await link.ask("take_batch", of_math(b"key", 2))
        assert len(groups) == 2
        while len(buffer) != 2:
            seen = await buffer.wait_for_change(seen)
        await link.close()


async def test_a_client_that_takes_nothing_is_given_up(buffer, path, monkeypatch):
    monkeypatch.setattr(channel, "STALL_S", 0.01)
    for number in range(10):
        await buffer.put(make_group(number, num_tokens=20_000), "math")
    async with serve(buffer, path):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(HELLO + call(1, "take_batch", of_math(b"k", 10)))
            seen = await buffer.wait_for_change(buffer.version)
            while len(buffer) != 10:
                seen = await buffer.wait_for_change(seen)


@pytest.mark.parametrize("make_storage", [IndexedStorage, None], ids=["memory", "sqlite"])
async def test_what_a_dead_client_did_not_confirm_is_back_in_its_place(path, tmp_path, make_storage):
    storage = make_storage() if make_storage else SQLStorage(tmp_path / "b.db")
    buffer = ReplayBuffer(FIFOReplayPolicy(), storage)
    await buffer.put(make_group("a", steps=[1]), "math", tags={"x": 1}, priority=2.0)
    await put_named(buffer, "b")
    before = await buffer.storage.get({})
    async with serve(buffer, path), await connect(path) as other:
        link = await BufferLink.open(Address.parse(path), None)
        await link.ask("take_batch", of_math(b"key", 2, {"x": 1}))
        assert await other.count("math", COMPLETED) == 1
        await put_named(other, "c")
        seen = other.version
        await link.close()
        while await other.count("math", COMPLETED) != 3:
            seen = await other.wait_for_change(seen)
        rows = await buffer.storage.get({})
        assert [row.uid for row in rows[:2]] == [row.uid for row in before]
        assert (rows[0].tags, rows[0].priority, rows[0].status) == ({"x": 1}, 2.0, COMPLETED)
        # A checkpoint's commit and restore pass over groups that are between two owners.
        link = await BufferLink.open(Address.parse(path), None)
        await link.ask("take_batch", messages.TakeArguments(b"key", {"math": 1}, COMPLETED, None))
        await other.commit(99)
        await other.restore(0)
        assert await other.count("math", COMPLETED) == 2
        seen = other.version
        await link.close()
        while await other.count("math", COMPLETED) != 3:
            seen = await other.wait_for_change(seen)
        assert names(await other.get(9, "math", COMPLETED)) == ["a", "b", "c"]
    await buffer.close()


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_a_cancelled_take_loses_nothing_at_any_moment(buffer, path, turns):
    await put_named(buffer, "abc")
    async with serve(buffer, path), await connect(path) as client:
        seen = buffer.version
        taking = asyncio.create_task(client.get(2, "math", COMPLETED))
        for _ in range(turns):
            await asyncio.sleep(0)
        taking.cancel()
        try:
            taken = names(await taking)
        except asyncio.CancelledError:
            taken = []
        while len(buffer) != 3 - len(taken):
            seen = await buffer.wait_for_change(seen)
        assert sorted([*taken, *names(await client.get(9, "math", COMPLETED))]) == ["a", "b", "c"]


class SlowStorage(IndexedStorage):
    """Puts that wait for a word."""

    def __init__(self):
        super().__init__()
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def put(self, item):
        self.begun.set()
        await self.go.wait()
        return await super().put(item)


async def end_connections(server):
    for connection in list(server._connections):
        connection.channel.end()


async def test_a_put_whose_answer_was_lost_is_stored_once(path):
    storage = SlowStorage()
    async with serve(ReplayBuffer(FIFOReplayPolicy(), storage), path) as server, await connect(path) as client:
        putting = asyncio.create_task(client.put(make_group("a"), "math"))
        await storage.begun.wait()
        await end_connections(server)
        while server.num_clients:
            await asyncio.sleep(0)
        storage.go.set()
        await putting
        assert await client.count("math", COMPLETED) == 1
        # The same key once more: the server remembers.
        link = client._link
        arguments = messages.PutArguments(b"key", "math", Arrival())
        for _ in range(2):
            await link.put(arguments, [make_group("b")])
        assert await client.count("math", COMPLETED) == 2


async def test_a_put_that_failed_may_be_tried_again(buffer, path):
    async with serve(buffer, path):
        link = await BufferLink.open(Address.parse(path), None)
        for task, outcome in (("ma\0th", ValueError), ("math", None)):
            arguments = messages.PutArguments(b"key", task, Arrival())
            if outcome:
                with pytest.raises(outcome, match="NUL"):
                    await link.put(arguments, [make_group("b")])
            else:
                await link.put(arguments, [make_group("b")])
        assert len(buffer) == 1
        arguments = messages.PutArguments(b"other", "math", Arrival(stale_threshold=0))
        with pytest.raises(ValueError, match="threshold"):
            await link.put(arguments, [make_group("b")])
        await link.close()


async def test_a_server_that_was_started_anew(path):
    storage = SlowStorage()
    async with serve(ReplayBuffer(FIFOReplayPolicy(), storage), path) as server:
        client = await connect(path)
        putting = asyncio.create_task(client.put(make_group("a"), "math"))
        await storage.begun.wait()
        await end_connections(server)
        server._path.unlink()
        second = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
        async with serve(second, path):
            with pytest.raises(ConnectionLost, match="not known"):
                await putting
            # The next call finds the new server by itself.
            assert await client.count("math", COMPLETED) == 0
            assert await client.wait_for_change(-5) == second.version
            await client.put(make_group("b"), "math")
            assert len(second) == 1
            waiting = asyncio.create_task(client.wait_for_change(client.version))
            await client.count("math", COMPLETED)
        with pytest.raises((ServerClosed, ConnectionLost)):
            await waiting
        storage.go.set()
    with pytest.raises(ConnectionLost, match="no buffer server answers"):
        await client.count("math", COMPLETED)
    await client.close()
    with pytest.raises(ConnectionError, match="closed"):
        await client.count("math", COMPLETED)


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_a_cancelled_take_for_a_train_step_has_not_happened(buffer, path, turns):
    await put_named(buffer, "abc")
    async with serve(buffer, path), await connect(path) as client:
        taking = asyncio.create_task(client.take_batch({"math": 2}, train_step=3))
        for _ in range(turns):
            await asyncio.sleep(0)
        taking.cancel()
        try:
            await taking
        except asyncio.CancelledError:
            assert await client.count("math", ARCHIVED) == 0
            assert names(await client.get(9, "math", COMPLETED)) == ["a", "b", "c"]
        else:
            assert await client.count("math", ARCHIVED) == 2


async def test_closing_lets_what_runs_finish_and_ends_what_waits(path):
    storage = SlowStorage()
    buffer = ReplayBuffer(FIFOReplayPolicy(), storage)
    stack = serve(buffer, path, max_live=1)
    server = await stack.__aenter__()
    client = await connect(path)
    running = asyncio.create_task(client.put(make_group("a"), "math"))
    await storage.begun.wait()
    full = asyncio.create_task(client.put(make_group("b"), "math"))
    waiting = asyncio.create_task(client.wait_for_change(client.version))
    (connection,) = server._connections
    while len(connection._waiting) < 2:
        await asyncio.sleep(0)
    closing = asyncio.create_task(stack.__aexit__(None, None, None))
    for ended in (full, waiting):
        with pytest.raises(ServerClosed, match="has not happened"):
            await ended
    storage.go.set()
    await running
    await closing
    assert len(buffer) == 1
    assert not path.exists()
    await client.close()


async def test_the_token_lets_in_and_nothing_else_does(buffer):
    async with serve(buffer, "tcp://127.0.0.1:0", token=TOKEN) as server:
        assert server.address.startswith("tcp://127.0.0.1:")
        async with await connect(server.address, TOKEN) as client:
            await put_named(client, "a")
        with pytest.raises(ConnectionLost, match="asks for a token"):
            await connect(server.address)
        with pytest.raises(ConnectionLost, match="token is missing or wrong"):
            await connect(server.address, TOKEN + "x")
    assert not is_proof(b"", TOKEN, b"nonce")
    assert not is_proof(prove(TOKEN, b"another nonce"), TOKEN, b"nonce")


async def test_only_loopback_is_open_to_everybody(buffer):
    with pytest.raises(ValueError, match="token"):
        async with serve(buffer, "tcp://0.0.0.0:0"):
            pass
    with pytest.raises(ValueError, match="at least 16"):
        async with serve(buffer, "tcp://127.0.0.1:0", token="short"):
            pass
    async with serve(buffer, "localhost:0") as server, await connect(server.address) as client:
        assert await client.count("math", COMPLETED) == 0
    async with serve(buffer, "tcp://0.0.0.0:0", token=TOKEN) as server:
        port = server.address.rpartition(":")[2]
        async with await connect(f"127.0.0.1:{port}", TOKEN) as client:
            assert len(client) == 0


@pytest.mark.parametrize("address", ["", "unix:", "tcp://host", "tcp://host:99999", "http://host:1", "tcp:///x"])
async def test_an_address_is_a_path_or_a_port(address):
    with pytest.raises(ValueError, match="address"):
        Address.parse(address)


def test_addresses_are_written_as_they_are_read():
    for text in ("unix:run/a.sock", "tcp://[::1]:80", "tcp://host:80"):
        assert str(Address.parse(text)) == text
    assert Address.parse("run/a.sock") == Address.parse("unix:run/a.sock")
    assert Address.parse("a:b/c").path is not None
    assert Address.parse("host:80") == Address.parse("tcp://host:80")


async def test_one_server_at_one_place(buffer, path, tmp_path):
    async with serve(buffer, path):
        assert os.stat(path).st_mode & 0o077 == 0
        with pytest.raises(OSError, match="another server"):
            async with serve(buffer, path):
                pass
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="no socket"):
        async with serve(buffer, tmp_path / "file"):
            pass
    assert (tmp_path / "file").read_text() == "mine"
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(str(path))
    left_over.close()
    async with serve(buffer, path), await connect(path) as client:
        assert len(client) == 0


async def test_not_every_server_is_a_buffer_server(path, monkeypatch):
    async def talk(reader, writer):
        writer.write(b"220 mail.example.org ESMTP\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(talk, str(path)):
        with pytest.raises(ConnectionLost, match="starts with"):
            await connect(path)
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    async with serve(buffer, path):
        monkeypatch.setattr(client_link, "ROLLOUT_FIELDS", ("message",))
        with pytest.raises(ConnectionLost, match="another version"):
            await connect(path)


async def test_the_arrays_of_a_group_are_views_of_what_came(buffer):
    (group,) = [make_group("a", num_tokens=100)]
    packed = pack_group(group)
    data = bytearray(b"".join(packed.buffers))
    (first, _) = unpack_group(packed.head, data)
    assert same(first.response_ids, group[0].response_ids)
    data[:4] = b"\x07\x00\x00\x00"
    assert first.response_ids[0] == 7


async def test_a_group_that_cannot_be_read_here_is_an_error_and_stays_with_the_server(buffer, path, monkeypatch):
    await put_named(buffer, "a")
    num_read = 0

    def fail(*_):
        nonlocal num_read
        num_read += 1
        # A second attempt would meet the same group, and a third.
        if num_read > 2:
            pytest.fail("the client takes what it cannot read again and again")
        raise ValueError("a tensor needs torch")

    async with serve(buffer, path), await connect(path) as client:
        with monkeypatch.context() as patch:
            patch.setattr(client_link, "unpack_group", fail)
            for take in (client.get(1, "math", COMPLETED), client.take_batch({"math": 1}, train_step=3)):
                with pytest.raises(ConnectionLost, match="a tensor needs torch"):
                    await take
                seen = buffer.version
                while not len(buffer):
                    seen = await buffer.wait_for_change(seen)
        assert names(await client.get(1, "math", COMPLETED)) == ["a"]
