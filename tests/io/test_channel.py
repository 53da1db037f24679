"""The channel between two processes: whole messages, bounds, ends; and the calls over it."""

import asyncio
import socket

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.io import channel as channel_module
from forebay.io.channel import BlockingChannel, Channel
from forebay.io.link import Link, Session
from forebay.io.messages import Alive, Call, Cancel, FrameError, Note, encode_value, sizes_of

MIB = 1 << 20


def note(value, buffers=()):
    return Note(encode_value(value), sizes_of(buffers)), buffers


def value_of(received):
    message, buffers = received
    return msgspec.msgpack.decode(message.value), [bytes(buffer) for buffer in buffers]


@pytest.fixture
async def ends():
    here, there = map(Channel, socket.socketpair())
    yield here, there
    here.close()
    there.close()


@pytest.fixture
def blocking_ends():
    here, there = map(BlockingChannel, socket.socketpair())
    yield here, there
    here.close()
    there.close()


@given(
    messages=st.lists(
        st.lists(st.sampled_from([0, 1, 7, 4096, 100_000, 3 * MIB]), max_size=70), min_size=1, max_size=5
    ),
    seed=st.integers(0, 9),
)
@settings(max_examples=15, deadline=None)
def test_messages_arrive_whole_and_in_order(messages, seed):
    generator = np.random.default_rng(seed)
    sent = [[generator.bytes(min(size, 8 * MIB // (len(sizes) or 1))) for size in sizes] for sizes in messages]

    async def run(send, receive):
        expected = list(enumerate(sent))
        received = await asyncio.gather(receive(), send())
        assert [(number, buffers) for number, buffers in received[0]] == expected

    async def of_asyncio():
        here, there = map(Channel, socket.socketpair())

        async def send():
            for number, buffers in enumerate(sent):
                await here.send(*note(number, buffers))

        async def receive():
            return [value_of(await there.receive()) for _ in sent]

        await run(send, receive)
        here.close()
        assert await there.receive() is None
        there.close()

    async def of_threads():
        here, there = map(BlockingChannel, socket.socketpair())

        def send():
            for number, buffers in enumerate(sent):
                here.send(*note(number, buffers))

        await run(
            lambda: asyncio.to_thread(send),
            lambda: asyncio.to_thread(lambda: [value_of(there.receive()) for _ in sent]),
        )
        here.close()
        with pytest.raises(EOFError, match="closed by the other side"):
            there.receive()
        there.close()

    asyncio.run(of_asyncio())
    asyncio.run(of_threads())


async def test_a_message_can_be_taken_back_until_some_of_it_is_sent(ends):
    here, there = ends
    data = bytes(4 * MIB)
    large, small = here.post(*note("large", [data])), here.post(*note("small"))
    await asyncio.sleep(0)
    assert here.is_sending
    assert not here.recall(large)
    assert here.recall(small)
    last = here.post(*note("last"))
    assert value_of(await there.receive()) == ("large", [data])
    assert value_of(await there.receive()) == ("last", [])
    assert not here.recall(last)


async def test_a_cancelled_send_sends_the_whole_message(ends):
    here, there = ends
    data = bytes(4 * MIB)
    sending = asyncio.create_task(here.send(*note("large", [data])))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending])
    here.post(*note("next"))
    assert value_of(await there.receive()) == ("large", [data])
    assert value_of(await there.receive()) == ("next", [])


async def test_a_peer_that_takes_nothing_ends_the_connection(ends, monkeypatch):
    monkeypatch.setattr(channel_module, "STALL_S", 0.02)
    here, _ = ends
    with pytest.raises(OSError, match=r"taken nothing for 0\.02 s"):
        await here.send(*note("large", [bytes(4 * MIB)]))
    assert not here.is_sending
    assert await here.receive() is None
    with pytest.raises(OSError, match="taken nothing"):
        await here.send(*note("more"))


async def test_buffers_without_room_are_read_and_forgotten(ends):
    here, there = ends
    asked = []

    def reserve(message, num_bytes):
        asked.append(num_bytes)
        return sum(asked) <= 2 * MIB

    sending = asyncio.create_task(here.send(*note("large", [bytes(5 * MIB), b"x"])))
    message, buffers = await there.receive(reserve)
    assert (message.sizes, buffers) == ([5 * MIB, 1], None)
    assert asked == [MIB] * 3
    await sending
    await here.send(*note("next", [b"y"]))
    assert value_of(await there.receive()) == ("next", [b"y"])


def test_a_blocking_peer_that_says_nothing_is_given_up(blocking_ends):
    here, there = blocking_ends
    here.sock.settimeout(0.02)
    with pytest.raises(TimeoutError):
        here.receive()
    with pytest.raises(TimeoutError):
        here.send(*note("large", [bytes(8 * MIB)]))
    there.sock.sendall(b"HTTP/1.1 400 Bad Request")
    with pytest.raises(FrameError, match="starts with"):
        here.receive()


def test_signs_of_life_come_again_and_again(blocking_ends):
    here, there = blocking_ends
    here.beat(Alive(), 0.005)
    there.sock.settimeout(60)
    assert [there.receive()[0] for _ in range(3)] == [Alive()] * 3


class Answering(Session):
    """Echoes, fails, or waits until it is cancelled."""

    ended_calls = 0

    async def handle(self, call, buffers):
        match call.method:
            case "echo":
                return msgspec.msgpack.decode(call.arguments), buffers
            case "fail":
                raise FileNotFoundError("no such thing")
        await asyncio.Event().wait()

    def ended(self, number):
        self.ended_calls += 1


@pytest.fixture
async def calling():
    """A link, the session that it talks to, and the session's task."""
    here, there = map(Channel, socket.socketpair())
    session = Answering(there, limit_s=30.0)
    running = asyncio.create_task(session.run())
    link = Link(here, "the test")
    yield link, session
    await link.close()
    await asyncio.wait([running])


async def test_calls_are_answered_by_number(calling):
    link, _ = calling
    waiting = asyncio.create_task(link.call("wait"))
    value, buffers = await link.call("echo", {"a": [1]}, [b"xyz"])
    assert (msgspec.msgpack.decode(value), [bytes(buffer) for buffer in buffers]) == ({"a": [1]}, [b"xyz"])
    with pytest.raises(FileNotFoundError, match="no such thing"):
        await link.call("fail")
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_a_call_that_is_cancelled_before_it_begins_there_is_answered_too(calling):
    link, session = calling
    # Both are read in one turn, so the task never takes its first step.
    link.channel.post(Call(77, "wait", encode_value(None)))
    link.channel.post(Cancel(77))
    await link.call("echo")
    assert session.calls == {}
    assert session.ended_calls == 2


@pytest.mark.parametrize("turns", range(8))
async def test_an_answer_that_came_too_late_is_not_lost(calling, turns):
    """At whatever moment a caller is cancelled: it has the answer, `late` has it, or the call was undone."""
    link, _ = calling
    late = []
    echo = asyncio.create_task(link.call("echo", "x", late=late.append))
    for _ in range(turns):
        await asyncio.sleep(0)
    echo.cancel()
    await asyncio.wait([echo])
    await link.call("echo")
    assert len(late) <= int(echo.cancelled())
    assert link.is_answering


async def test_a_silent_or_lost_peer_ends_every_call():
    here, there = socket.socketpair()
    with there:
        link = Link(Channel(here), "the test", limit_s=0.04, loss=LookupError)
        with pytest.raises(LookupError, match=r"the test has been silent for 0\.04 s"):
            await link.call("echo")
        with pytest.raises(LookupError, match="silent"):
            await link.call("echo")
        await link.close()
