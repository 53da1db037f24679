"""Talking to an inference server: control calls, health, the event stream of a request.

::

    do(calls)     --> the last answer     | unreachable: EngineLost
    events(body)  --> event, event, ...   | refused: Refused (the request's fault), ServerFailed (its own),
                                          |          Busy (to be asked again)

It knows the dialect's names for things, not what the engine wants of them. Only calls that say so are tried
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

from forebay.engines.base import EngineLost
from forebay.engines.servers.client import Client, HTTPError
from forebay.engines.servers.dialects import BadAnswer, Call, Dialect

_HEALTH_LIMIT_S = 30.0
"""For an answer about health: a busy server answers late."""
CONTROL_LIMIT_S = 50.0
"""For what is done between two steps of the model; those who ask the engine give it a minute."""
_TRY_AGAIN_S = 0.2
"""Between two tries of a call that could not be done just now."""
_LONGEST_RETRY_AFTER_S = 120.0
"""A server that wants to be left alone for longer is away."""
_SHOWN = 300
"""Characters of an answer in an error."""
_OK, _NOT_FOUND = 200, 404
_NO_KEY = frozenset({401, 403})
_BUSY = frozenset({429, 503})
_MAY_PASS = frozenset({408, 425}) | _NO_KEY
"""Client errors that are not the request's fault."""


class ServerFailed(EngineLost):
    """The server lives, but did not do what it was asked; it may be ill, and well when started anew."""


class Busy(EngineLost):
    """The server has too much to do for one more request."""

    def __init__(self, message: str, after_s: float) -> None:
        super().__init__(message)
        self.after_s = after_s
        """When it wants to be asked again; 0: it does not say."""


class Refused(ValueError):
    """The server finds fault with what it is asked; another server would, too."""


class ServerLink:
    """The HTTP connection to one server, whose address may change when it is restarted.

    Raises only `EngineLost`, `ServerFailed`, `Refused` and `BadAnswer`, never the client's own errors.

    >>> link = ServerLink(VLLM(), lambda: "http://127.0.0.1:8000")                  # doctest: +SKIP
    >>> await link.do(link.dialect.pause)                                          # doctest: +SKIP
    """

    def __init__(
        self, dialect: Dialect, url: Callable[[], str], headers: Mapping[str, str] | None = None
    ) -> None:
        self.dialect = dialect
        self._url = url
        self._client = Client(headers)

    def __str__(self) -> str:
        return self._url()

    async def is_healthy(self) -> bool:
        """Whether the server says that it can serve; one that wants another key is well, and will say so."""
        status = await self._status(self.dialect.health, _HEALTH_LIMIT_S)
        return status == _OK or status in _NO_KEY

    async def is_ready(self) -> bool:
        """Whether a server that was started has come to the end of that."""
        return await self._status(self.dialect.ready, _HEALTH_LIMIT_S) == _OK

    async def is_alive(self) -> bool:
        """Whether the model's own process answers; a server that does not know the question passes."""
        status = await self._status(self.dialect.alive, CONTROL_LIMIT_S)
        return status is not None and status < 500

    async def _status(self, call: Call, limit_s: float) -> int | None:
        try:
            async with asyncio.timeout(limit_s):
                return (await self._ask(call))[0]
        except (HTTPError, TimeoutError):
            return None

    async def do(self, calls: Iterable[Call], *, takes_long: bool = False) -> Any:
        """Let the server do these things in turn; its last answer.

        Each is due within `CONTROL_LIMIT_S`, except what `takes_long`: its limit is the caller's.

        Raises:
            EngineLost: it cannot be reached, died of it, or does not answer in time.
            ServerFailed: it lives, but does not do it.
            Refused: it does not do what it `may_refuse`, and is well.
        """
        answer: Any = None
        for call in calls:
            for num_left in reversed(range(call.tries)):
                status, text = await self._ask_within(call, None if takes_long else CONTROL_LIMIT_S)
                answer = _parsed(text)
                if status != _OK or answer.get("success") is not False or not num_left:
                    break
                await asyncio.sleep(_TRY_AGAIN_S)
            if status == _NOT_FOUND and not call.may_refuse:
                raise ServerFailed(f"{self} knows no {call.path}; {self.dialect.help}")
            if status != _OK or answer.get("success") is False:
                problem = f"{self}: {call.path} was answered {status}{_hint(status)}: {_shown(text)}"
                if not await self.is_healthy():
                    raise EngineLost(problem)
                raise (Refused if call.may_refuse and status not in _NO_KEY else ServerFailed)(problem)
        return answer

    async def _ask_within(self, call: Call, limit_s: float | None) -> tuple[int, bytes]:
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await self._ask(call)
        except HTTPError as error:
            raise EngineLost(f"{self}: {error}") from error
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineLost(f"{self}: {call.path} was not answered within {limit_s:g} s") from None

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of a generation.

        Raises:
            EngineLost: the server cannot be reached, or went away in the middle.
            Refused: the server finds fault with the request.
            Busy: the server has too much to do now.
            ServerFailed: the server cannot serve it.
            BadAnswer: it sends something else.
        """
        url = self._url() + self.dialect.generate_path
        try:
            async with self._client.request("POST", url, json.dumps(body).encode()) as response:
                if (status := response.status) != _OK:
                    problem = f"{self} answered {status}{_hint(status)}: {_shown(await response.read())}"
                    if status in _BUSY:
                        raise Busy(problem, _retry_after_s(response.headers))
                    blame = 400 <= status < 500 and status not in _MAY_PASS
                    raise (Refused if blame else ServerFailed)(problem)
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


def _hint(status: int) -> str:
    return " (the API key is wrong or missing: see api_key_env)" if status in _NO_KEY else ""


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return min(max(0.0, float(headers["retry-after"])), _LONGEST_RETRY_AFTER_S)
    # None given, or a date.
    except (KeyError, ValueError):
        return 0.0


def _shown(text: bytes) -> str:
    return text.decode(errors="replace")[:_SHOWN]
