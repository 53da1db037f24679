"""Requests of judges to servers: bounded in number, within a budget, and failures told apart.

::

    post: budget left? -> one of max_concurrent slots -> POST -> read
            408, 429, 5xx, no connection, no reply in time, an unreadable reply --> TransientJudgeError
            any other refusal, no budget                                        --> JudgeError
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from pydantic import Field

from forebay.aio.time_limits import timeout
from forebay.config import StrictModel
from forebay.extras import require_library
from forebay.judges.base import JudgeError, TransientJudgeError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

ReadT = TypeVar("ReadT")


class ServerArguments(StrictModel, strict=True):
    """How often a judging server may be asked."""

    max_concurrent: int = Field(default=16, ge=1)
    """Requests in flight."""
    max_calls: int | None = Field(default=None, ge=1)
    """Requests in all; None: unlimited."""
    api_key_env: str | None = None
    """The environment variable that holds the API key; None sends none."""


class JudgeServer:
    """Posts JSON to one server.

    Invariants: at most `max_concurrent` requests are in flight; requests, failed ones included, count against
    `max_calls`, anew with each process.

    Args:
        arguments: the limits.
        judge: for messages.
        timeout_s: for one request; None waits for ever.

    Raises:
        ConfigError: aiohttp is not installed.
        ValueError: the environment variable is not set.
    """

    def __init__(self, arguments: ServerArguments, *, judge: str, timeout_s: float | None) -> None:
        require_library("aiohttp", judge)
        self._headers: dict[str, str] = {}
        if arguments.api_key_env is not None:
            key = os.environ.get(arguments.api_key_env)
            if not key:
                raise ValueError(f"api_key_env: the environment variable {arguments.api_key_env} is not set")
            self._headers = {"Authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(arguments.max_concurrent)
        self._limit = arguments.max_calls
        self._num_calls = 0
        self._http: ClientSession | None = None

    async def post(self, url: str, request: Mapping[str, Any], read: Callable[[Any], ReadT]) -> ReadT:
        """Post `request` and return the result of `read` on the JSON of the answer.

        Raises:
            TransientJudgeError: there was no reply, or `read` failed on it; another one may be right.
            JudgeError: no attempt will succeed: the request was refused, or the budget is used up.
        """
        from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

        async with self._slots:
            if self._limit is not None and self._num_calls >= self._limit:
                used = f"{self._num_calls} of max_calls = {self._limit}"
                raise JudgeError(f"the budget is used up: {used}; raise it")
            if self._http is None:
                self._http = ClientSession(
                    connector=TCPConnector(limit=0),
                    timeout=ClientTimeout(total=None),
                    headers=self._headers,
                )
            # Hosted models may be behind a proxy that the environment names. Not `trust_env`, which also puts
            # what a netrc file has in the place of the key.
            parts = urlsplit(url)
            proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
            # Failed requests count, too: the server may charge for them.
            self._num_calls += 1
            late = TransientJudgeError(f"{url}: no reply within {self._timeout_s} s")
            try:
                async with (
                    timeout(self._timeout_s, lambda: late),
                    self._http.post(url, json=request, allow_redirects=False, proxy=proxy) as response,
                ):
                    text = await response.text(errors="replace")
            except ClientError as error:
                raise TransientJudgeError(f"{url}: {type(error).__name__}: {error}") from error
        _check_status(response, text)
        try:
            return read(json.loads(text))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise TransientJudgeError(f"{url}: another form of reply: {text[:200]!r}") from None

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None


# A server that asks for more is down for the run's purposes; its rollouts fail meanwhile.
_LONGEST_RETRY_AFTER_S = 120.0


def _check_status(response: "ClientResponse", text: str) -> None:
    status = response.status
    if status < 400:
        return
    message = f"{response.url}: HTTP {status}: {text[:200]!r}"
    # 408: the server's own time-out. 409 and 425 are "again, later" too.
    if status not in (408, 409, 425, 429) and status < 500:
        raise JudgeError(message)
    try:
        after_s = min(max(float(response.headers["retry-after"]), 0.0), _LONGEST_RETRY_AFTER_S)
    # There is no such header, or it has a date in place of seconds.
    except (KeyError, ValueError):
        after_s = None
    raise TransientJudgeError(message, after_s=after_s)
