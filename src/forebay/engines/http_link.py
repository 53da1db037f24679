"""Talking to an inference server: control calls, health, the event stream of a request.

::

    do(calls)     --> the last answer     | unreachable: EngineLost
    events(body)  --> event, event, ...   | refused: Refused (the request's fault), ServerFailed (its own)

It knows the dialect's names for things, not what the engine wants of them, and it never tries again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import httpx

from forebay.engines.base import EngineLost
from forebay.engines.http_dialects import BadAnswer, Call, Dialect

_CONNECT_LIMIT_S = 10.0
_HEALTH_LIMIT_S = 30.0
"""For an answer about health: a busy server answers late."""
_KEPT_FOR_S = 1.0
"""An idle connection: servers close theirs after 5 s, and a request must not meet that."""
_SHOWN = 300
"""Characters of an answer in an error."""
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
        self._client: httpx.AsyncClient | None = None

    def __str__(self) -> str:
        return self._url()

    async def is_healthy(self) -> bool:
        """Whether the server says that it can serve."""
        call = self.dialect.health
        try:
            answer = await self._connected().request(
                call.method, self._at(call.path), timeout=_HEALTH_LIMIT_S
            )
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    async def do(self, calls: Iterable[Call]) -> Any:
        """Let the server do these things in turn; its last answer.

        Raises:
            EngineLost: it cannot be reached, or died of it.
            ServerFailed: it lives, but does not do it.
        """
        answer: Any = None
        for call in calls:
            try:
                response = await self._connected().request(
                    call.method, self._at(call.path), json=call.body, params=dict(call.params)
                )
            except httpx.HTTPError as error:
                raise EngineLost(f"{self}: {_words(error)}") from error
            answer = response.json() if response.content[:1] == b"{" else {}
            if response.status_code == httpx.codes.NOT_FOUND:
                raise ServerFailed(f"{self} knows no {call.path}; {self.dialect.help}")
            if not response.is_success or answer.get("success") is False:
                problem = f"{self}: {call.path} was answered {response.status_code}: {response.text[:_SHOWN]}"
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
        client, url = self._connected(), self._at(self.dialect.generate_path)
        try:
            async with client.stream("POST", url, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")[:_SHOWN]
                    blame = response.is_client_error and response.status_code not in _MAY_PASS
                    raise (Refused if blame else ServerFailed)(
                        f"{self} answered {response.status_code}: {text}"
                    )
                rest = b""
                async for chunk in response.aiter_bytes():
                    *events, rest = (rest + chunk).split(b"\n\n")
                    for event in events:
                        if (data := event.removeprefix(b"data:").strip()) not in (b"", b"[DONE]"):
                            yield _decoded(data)
        except httpx.HTTPError as error:
            raise EngineLost(f"{self}: {_words(error)}") from error

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()

    def _at(self, path: str) -> str:
        return self._url() + path

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                # Requests queue at the server, for as long as it likes.
                timeout=httpx.Timeout(None, connect=_CONNECT_LIMIT_S),
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEPT_FOR_S
                ),
                # Reading the system's certificates takes longer than everything else here.
                verify=self._url().startswith("https"),
                trust_env=False,
            )
        return self._client


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except json.JSONDecodeError as error:
        raise BadAnswer(f"not an event: {data[:_SHOWN]!r}") from error
    if not isinstance(event, dict):
        raise BadAnswer(f"not an event: {data[:_SHOWN]!r}")
    return event


def _words(error: Exception) -> str:
    # Some of the client's errors have no text.
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
