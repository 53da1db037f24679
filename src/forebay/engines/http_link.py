"""Talking to an inference server: control calls, health, the event stream of a request.

::

    do(calls)     --> the last answer     | unreachable: EngineLost
    events(body)  --> event, event, ...   | refused: Refused (the request's fault), ServerFailed (its own)

It knows the dialect's names for things, not what the engine wants of them, and it never tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any
from urllib.parse import urlencode

from forebay.engines.base import EngineLost
from forebay.engines.http_client import Client, HTTPError
from forebay.engines.http_dialects import BadAnswer, Call, Dialect

_HEALTH_LIMIT_S = 30.0
"""For an answer about health: a busy server answers late."""
_SHOWN = 300
"""Characters of an answer in an error."""
_OK, _NOT_FOUND = 200, 404
_MAY_PASS = frozenset({408, 425, 429})
"""Client errors that are the server's condition, not the request's fault."""


class ServerFailed(RuntimeError):
    """The server did not do what it was asked; it may be ill."""


class Refused(ValueError):
    """The server finds fault with a request; another server would, too."""


class ServerLink:
    """The HTTP connection to one server, whose address may change when it is restarted.

    Raises only `EngineLost`, `ServerFailed`, `Refused` and `BadAnswer`, never the client's own errors.

    >>> link = ServerLink(VLLM(), lambda: "http://127.0.0.1:8000")                  # doctest: +SKIP
    >>> await link.do(link.dialect.pause)                                          # doctest: +SKIP
    """

    def __init__(self, dialect: Dialect, url: Callable[[], str]) -> None:
        self.dialect = dialect
        self._url = url
        self._client = Client()

    def __str__(self) -> str:
        return self._url()

    async def is_healthy(self) -> bool:
        """Whether the server says that it can serve."""
        try:
            async with asyncio.timeout(_HEALTH_LIMIT_S):
                status, _ = await self._ask(self.dialect.health)
        except (HTTPError, TimeoutError):
            return False
        return status == _OK

    async def do(self, calls: Iterable[Call]) -> Any:
        """Let the server do these things in turn; its last answer.

        Raises:
            EngineLost: it cannot be reached, or died of it.
            ServerFailed: it lives, but does not do it.
        """
        answer: Any = None
        for call in calls:
            try:
                status, text = await self._ask(call)
            except HTTPError as error:
                raise EngineLost(f"{self}: {error}") from error
            if status == _NOT_FOUND:
                raise ServerFailed(f"{self} knows no {call.path}; {self.dialect.help}")
            answer = _parsed(text)
            if status != _OK or answer.get("success") is False:
                problem = f"{self}: {call.path} was answered {status}: {_shown(text)}"
                if not await self.is_healthy():
                    raise EngineLost(problem)
                raise ServerFailed(problem)
        return answer

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of a generation.

        Raises:
            EngineLost: the server cannot be reached, or went away in the middle.
            Refused: the server finds fault with the request.
            ServerFailed: the server cannot serve it now.
            BadAnswer: it sends something else.
        """
        url = self._url() + self.dialect.generate_path
        try:
            async with self._client.request("POST", url, json.dumps(body).encode()) as response:
                if response.status != _OK:
                    blame = 400 <= response.status < 500 and response.status not in _MAY_PASS
                    raise (Refused if blame else ServerFailed)(
                        f"{self} answered {response.status}: {_shown(await response.read())}"
                    )
                rest = b""
                async with contextlib.aclosing(response.chunks()) as chunks:
                    async for chunk in chunks:
                        *events, rest = (rest + chunk).split(b"\n\n")
                        for event in events:
                            if (data := event.removeprefix(b"data:").strip()) not in (b"", b"[DONE]"):
                                yield _decoded(data)
        except HTTPError as error:
            raise EngineLost(f"{self}: {error}") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def _ask(self, call: Call) -> tuple[int, bytes]:
        query = f"?{urlencode(call.params)}" if call.params else ""
        body = None if call.body is None else json.dumps(call.body).encode()
        async with self._client.request(call.method, self._url() + call.path + query, body) as response:
            return response.status, await response.read()


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except json.JSONDecodeError as error:
        raise BadAnswer(f"not an event: {data[:_SHOWN]!r}") from error
    if not isinstance(event, dict):
        raise BadAnswer(f"not an event: {data[:_SHOWN]!r}")
    return event


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _shown(text: bytes) -> str:
    return text.decode(errors="replace")[:_SHOWN]
