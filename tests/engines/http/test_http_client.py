"""Framing, and connections that break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from forebay.engines.servers.client import HTTPError, request

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Scripted:
    """Answers each request on a connection with the next of `answers`; empty: it closes the connection."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers, self.requests = answers, []
        self.num_open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            while self.answers:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = (
                    int(head.split("content-length: ")[1].split("\r\n")[0]) if "content-length" in head else 0
                )
                self.requests.append(
                    head.split("\r\n")[0] + "|" + (await reader.readexactly(length)).decode()
                )
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

    async def start(*answers: bytes) -> tuple[str, Scripted]:
        script = Scripted(list(answers))
        servers.append(await asyncio.start_server(script, "127.0.0.1"))
        return f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}", script

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


async def ask(url: str, body: bytes | None = None) -> tuple[int, bytes]:
    async with request("GET" if body is None else "POST", url, body) as response:
        return response.status, await response.read()


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length:0\r\n\r\n", 503, b""),
        (CHUNKED + b"3\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n", 200, b"abc0123456789abcdef"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nno", 404, b"no"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200000, 200, b"x" * 200000),
    ],
)
async def test_bodies_of_all_kinds_are_read(serve, answer, status, body):
    url, script = await serve(answer, answer, answer)
    for path in ("/a", "/b?c=d"):
        assert await ask(url + path) == (status, body)
    assert await ask(url, b'{"x": 1}') == (status, body)
    assert script.requests == ["GET /a HTTP/1.1|", "GET /b?c=d HTTP/1.1|", 'POST / HTTP/1.1|{"x": 1}']


async def test_a_body_without_a_length_ends_with_the_connection(serve):
    url, _ = await serve(b"HTTP/1.1 200 OK\r\n\r\nall of it")
    assert await ask(url) == (200, b"all of it")


async def test_the_certificates_are_read_once(monkeypatch):
    made = []

    async def connect(host, port, *, ssl, **_):
        made.append(ssl)
        raise OSError("nobody")

    monkeypatch.setattr(asyncio, "open_connection", connect)
    for _ in range(2):
        with pytest.raises(HTTPError, match="nobody"):
            await ask("https://127.0.0.1:1")
    assert made[0] is made[1] is not None


async def test_leaving_an_answer_early_closes_its_connection(serve):
    url, script = await serve(CHUNKED + b"3\r\nabc\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
    async with request("GET", url) as response:
        assert await anext(response.chunks()) == b"abc"
    assert await ask(url) == (200, b"x")
    async with asyncio.timeout(10):
        while script.num_open:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed in the middle"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "closed in the middle"),
        (CHUNKED + b"3\r\nab", "closed in the middle"),
        (CHUNKED + b"3\r\nabc\r\n", "closed in the middle"),
        (CHUNKED + b"three\r\nabc\r\n", "is not HTTP"),
        (b"hello there\r\n\r\n", "is not HTTP"),
    ],
)
async def test_what_is_broken_is_said(serve, answer, message):
    url, _ = await serve(answer)
    with pytest.raises(HTTPError, match=message):
        await ask(url)


async def test_nobody_there():
    with pytest.raises(HTTPError, match="no connection"):
        await ask("http://127.0.0.1:1")
