"""A lean HTTP/1.1 client for many concurrent requests to few servers.

::

    request() --> a connection of its own --> status, headers --> body in pieces --> connection closed

General clients cost milliseconds a request once hundreds run at once (benchmarks/http_engine.py): time taken
from the trainer. This one does what inference servers need: JSON in, a body in chunks out. It follows no
redirects and knows no proxies, cookies or compression, and keeps no connection: making one costs 0.1 ms of a
request that takes a second, and a kept one may be closed by the server just when it is used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from forebay.aio.time_limits import timeout
from forebay.engines.base import EngineLost

CONNECT_LIMIT_S = 10.0

_HEAD_LIMIT_BYTES = 1 << 20

_PIECE_BYTES = 1 << 16


class HTTPError(EngineLost):
    """There is no connection, it broke, or the bytes on it are not HTTP."""


@dataclass
class Response:
    """The answer to a request; its body can be read once."""

    status: int
    headers: dict[str, str]
    """Header values by name in lower case."""
    reader: asyncio.StreamReader
    origin: str
    """Scheme, host and port of the server, for errors."""

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives.

        Raises:
            HTTPError: it ended early, or is not HTTP.
        """
        with _as_http_errors(self.origin):
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                # A chunk's size may have an extension after a semicolon, which says nothing that is needed.
                while size := int((await self.reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                    yield (await self.reader.readexactly(size + 2))[:-2]
            elif "content-length" in self.headers:
                left = int(self.headers["content-length"])
                while left:
                    piece = await self.reader.readexactly(min(left, _PIECE_BYTES))
                    left -= len(piece)
                    yield piece
            else:
                while piece := await self.reader.read(_PIECE_BYTES):
                    yield piece

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            HTTPError: as `chunks`.
        """
        return b"".join([piece async for piece in self.chunks()])


@contextlib.asynccontextmanager
async def request(
    method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Response]:
    """Send a request with a JSON `body`; the answer. Leaving the block closes the connection.

    ::

        async with request("GET", "http://127.0.0.1:8000/health") as response:
            response.status, await response.read()  # (200, b'')

    Raises:
        HTTPError: there is no connection, or it broke.
    """
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    given = {"host": parts.netloc, "connection": "close", **(headers or {})}
    if body is not None:
        given |= {"content-type": "application/json", "content-length": str(len(body))}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    secure, origin = parts.scheme == "https", f"{parts.scheme}://{parts.netloc}"
    try:
        async with timeout(CONNECT_LIMIT_S):
            reader, writer = await asyncio.open_connection(
                parts.hostname,
                parts.port or (443 if secure else 80),
                ssl=_certificates() if secure else None,
                limit=_HEAD_LIMIT_BYTES,
            )
    except TimeoutError:
        raise HTTPError(f"{origin}: no connection within {CONNECT_LIMIT_S:g} s") from None
    except OSError as error:
        raise HTTPError(f"{origin}: no connection: {error}") from error
    try:
        with _as_http_errors(origin):
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b""))
            await writer.drain()
            status = 100
            # Provisional answers, such as "100 Continue", come before the one that counts.
            while 100 <= status < 200:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *fields = head.rstrip("\r\n").split("\r\n")
                status = int(first.split(" ", 2)[1])
        pairs = (field.partition(":") for field in fields)
        found = {name.strip().lower(): value.strip() for name, _, value in pairs}
        yield Response(status, found, reader, origin)
    finally:
        # Not `close`, which would wait for the rest of the request to be sent.
        writer.transport.abort()


# Made once, because it reads all certificates of the machine.
_certificates = cache(ssl.create_default_context)


@contextlib.contextmanager
def _as_http_errors(origin: str) -> Iterator[None]:
    try:
        yield
    except asyncio.IncompleteReadError:
        raise HTTPError(f"{origin}: the connection was closed in the middle of the answer") from None
    except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
        raise HTTPError(f"{origin}: the answer is not HTTP: {error}") from error
    except OSError as error:
        raise HTTPError(f"{origin}: the connection broke: {error}") from error
