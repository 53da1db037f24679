"""Requests to servers: bodies of all kinds, and connections that break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from forebay.engines.base import EngineLost
from forebay.engines.servers.dialects import Call, Dialect
from forebay.engines.servers.link import ServerLink

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'19\r\ndata: {"answer": "yes"}\n\n\r\n'


class Scripted:
    """Answers each request on a connection with the next of `answers`; empty: it closes the connection."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers, self.requests = answers, []
        self.num_open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            while self.answers:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length: ")[1].split("\r\n")[0]) if "content-length" in head else 0
                self.requests.append(head.split("\r\n")[0] + "|" + (await reader.readexactly(length)).decode())
                if not (answer := self.answers.pop(0)):
                    break
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., object]]:
    servers: list[asyncio.Server] = []

    async def start(*answers: bytes) -> tuple[ServerLink, Scripted]:
        script = Scripted(list(answers))
        servers.append(await asyncio.start_server(script, "127.0.0.1"))
        url = f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"
        return ServerLink(Dialect(), url), script

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"hi": "x"}',
        CHUNKED + b'3\r\n{"h\r\n8\r\ni": "x"}\r\n0\r\n\r\n',
        b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length:11\r\n\r\n{"hi": "x"}',
        b'HTTP/1.1 200 OK\r\nContent-Length: 200011\r\n\r\n{"hi": "x"}' + b" " * 200_000,
    ],
)
async def test_bodies_of_all_kinds_are_read(serve, answer):
    link, script = await serve(answer, answer, answer)
    calls = [Call("GET", "/a"), Call("GET", "/b", params={"c": "d"}), Call("POST", "/", {"x": 1})]
    for call in calls:
        assert await link.do([call]) == {"hi": "x"}
    assert script.requests == ["get /a http/1.1|", "get /b?c=d http/1.1|", 'post / http/1.1|{"x": 1}']


async def test_leaving_an_answer_early_closes_its_connection(serve):
    link, script = await serve(CHUNKED + EVENT)
    events = link.events({})
    assert await anext(events) == {"answer": "yes"}
    await events.aclose()
    async with asyncio.timeout(300):
        while script.num_open:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "Server disconnected"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "is not completed"),
        (CHUNKED + b"3\r\nab", "is not completed"),
        (CHUNKED + b"3\r\nabc\r\n", "is not completed"),
        (CHUNKED + EVENT, "is not completed"),
        (CHUNKED + b"three\r\nabc\r\n", "three"),
        (b"hello there\r\n\r\n", "Bad status line"),
    ],
)
async def test_what_is_broken_is_said(serve, answer, message):
    link, _ = await serve(answer)
    with pytest.raises(EngineLost, match=message):
        assert [event async for event in link.events({})] == [{"answer": "yes"}]


async def test_nobody_there():
    link = ServerLink(Dialect(), "http://127.0.0.1:1")
    with pytest.raises(EngineLost, match="Cannot connect"):
        await link.do([Call("GET", "/")])
