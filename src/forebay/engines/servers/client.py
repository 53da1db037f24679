"""A lean HTTP/1.1 client for many concurrent requests to few servers.

::

    request() --> an idle connection, or a new one --> status, headers --> body in pieces
                                     ^-- kept for a second, if the body was read to its end; else closed

General clients cost milliseconds a request once hundreds run at once (benchmarks/http_engine.py): time taken
from the trainer. This one does what inference servers need: JSON in, a body in chunks out. It follows no
redirects and knows no proxies, cookies or compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

CONNECT_LIMIT_S = 10.0
KEPT_FOR_S = 1.0
"""An idle connection: servers close theirs after 5 s, and a request must not meet that."""

_LINE_LIMIT_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16


class HTTPError(OSError):
    """There is no connection, it broke, or what came over it is not HTTP."""


class _Origin(NamedTuple):
    host: str
    port: int
    secure: bool


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Response:
    """The answer to a request; its body can be read once.

    >>> async with client.request("GET", "http://127.0.0.1:8000/health") as response:   # doctest: +SKIP
    ...     response.status, await response.read()
    (200, b'')
    """

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        """Names in lower case."""
        self._reader = reader
        self.is_complete = False
        """Whether the whole body has been read."""

    @property
    def can_reuse(self) -> bool:
        """Whether the connection is good for another request."""
        return self.is_complete and self.headers.get("connection", "").lower() != "close"

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives.

        Raises:
            HTTPError: it ended early, or is not HTTP.
        """
        with _as_http_errors():
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                # What may follow a semicolon says nothing that is needed.
                while size := int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
                await self._reader.readuntil(b"\r\n")
            elif "content-length" in self.headers:
                left = int(self.headers["content-length"])
                while left:
                    piece = await self._reader.readexactly(min(left, _PIECE_BYTES))
                    left -= len(piece)
                    yield piece
            else:
                self.headers["connection"] = "close"
                while piece := await self._reader.read(_PIECE_BYTES):
                    yield piece
        self.is_complete = True

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            HTTPError: as `chunks`.
        """
        return b"".join([piece async for piece in self.chunks()])


class Client:
    """Sends requests, as many at once as it is asked to; for one event loop.

    >>> client = Client({"authorization": "Bearer secret"})
    >>> asyncio.run(client.close())
    """

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        """`headers` are sent with every request."""
        self._headers = [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._idle: dict[_Origin, deque[tuple[_Connection, float]]] = defaultdict(deque)
        """With the time since when; the latest last."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._ssl: ssl.SSLContext | None = None

    @contextlib.asynccontextmanager
    async def request(self, method: str, url: str, body: bytes | None = None) -> AsyncIterator[Response]:
        """The answer to a request with a JSON `body`; leaving the block before its end closes the connection.

        Raises:
            HTTPError: see there.
        """
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        origin = _Origin(parts.hostname or "", parts.port or (443 if secure else 80), secure)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"{method} {target} HTTP/1.1", f"host: {parts.netloc}", *self._headers]
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        connection, kept = await self._connect(origin), False
        try:
            with _as_http_errors():
                connection.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b""))
                await connection.writer.drain()
                response = await _read_head(connection.reader)
            yield response
            kept = response.can_reuse
        finally:
            if kept:
                self._keep(origin, connection)
            else:
                # Not `close`, which would wait for what is still to be sent: nobody wants the answer.
                connection.writer.transport.abort()

    async def close(self) -> None:
        """Close the idle connections."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for connections in self._idle.values():
            for connection, _ in connections:
                connection.writer.close()
                with contextlib.suppress(OSError):
                    await connection.writer.wait_closed()
        self._idle.clear()

    async def _connect(self, origin: _Origin) -> _Connection:
        now_s, idle = asyncio.get_running_loop().time(), self._idle[origin]
        while idle:
            # The one used last: those before it have been idle for longer.
            connection, since_s = idle.pop()
            if now_s - since_s < KEPT_FOR_S and not connection.reader.at_eof():
                return connection
            connection.writer.transport.abort()
        if origin.secure and self._ssl is None:
            # Once: it reads all certificates of the machine.
            self._ssl = ssl.create_default_context()
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                return _Connection(
                    *await asyncio.open_connection(
                        origin.host,
                        origin.port,
                        ssl=self._ssl if origin.secure else None,
                        limit=_LINE_LIMIT_BYTES,
                    )
                )
        except TimeoutError:
            raise HTTPError(f"no connection within {CONNECT_LIMIT_S:g} s") from None
        except OSError as error:
            raise HTTPError(f"no connection: {error}") from error

    def _keep(self, origin: _Origin, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        self._idle[origin].append((connection, loop.time()))
        if self._sweeping is None:
            self._sweeping = loop.call_later(KEPT_FOR_S, self._sweep)

    def _sweep(self) -> None:
        """Close what has been idle for too long; again later, if there is more."""
        loop = asyncio.get_running_loop()
        self._sweeping = None
        for idle in self._idle.values():
            while idle and loop.time() - idle[0][1] >= KEPT_FOR_S:
                connection, _ = idle.popleft()
                connection.writer.transport.abort()
        if any(self._idle.values()):
            self._sweeping = loop.call_later(KEPT_FOR_S, self._sweep)


async def _read_head(reader: asyncio.StreamReader) -> Response:
    status = 100
    while 100 <= status < 200:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        status = int(first.split(" ", 2)[1])
    pairs = (line.partition(":") for line in lines)
    return Response(status, {name.strip().lower(): value.strip() for name, _, value in pairs}, reader)


@contextlib.contextmanager
def _as_http_errors() -> Iterator[None]:
    try:
        yield
    except asyncio.IncompleteReadError:
        raise HTTPError("the connection was closed in the middle of the answer") from None
    except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
        raise HTTPError(f"the answer is not HTTP: {error}") from error
    except HTTPError:
        raise
    except OSError as error:
        raise HTTPError(f"the connection broke: {error}") from error
