"""A client of an OpenAI-compatible chat API, for judges: cached, paced, budgeted.

It asks once; a `TransientJudgeError` says that a failure may pass, and then the judge asks again.

::

    ask(messages) -> cache? --> reply
          |
          v budget left? -> its turn in the minute -> one of max_concurrent slots -> POST /chat/completions
                                    429, 5xx, no connection, no reply in time, no text --> TransientJudgeError
                                    any other refusal, no budget                        --> JudgeError
    keep(request, reply) -> cache         (by the caller, once the reply has proved readable)
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from forebay.aio.time_limits import timeout
from forebay.config import StrictModel
from forebay.extras import require_library
from forebay.judges.base import DEFAULT_MAX_RETRIES, JudgeError, TransientJudgeError

if TYPE_CHECKING:
    import httpx

Messages = Sequence[Mapping[str, Any]]

# A server that asks for more is down for the run's purposes; its rollouts fail meanwhile.
_LONGEST_RETRY_AFTER_S = 120.0
_NUM_CACHED_REPLIES = 1 << 16


class LLMArguments(StrictModel, strict=True):
    """The arguments of the judge ``llm``: the question, the model that is asked, and how often it may be."""

    base_url: str
    """Address of the API, with its version, such as ``https://host/v1``."""
    model: str
    """The judging model, as the server calls it."""
    template: str | None = None
    """Jinja text of the question. It is given ``prompt`` (the last user message), ``messages``, ``response``,
    ``ground_truth`` (or none), ``reward_model``, ``data_source``, ``task_name`` and ``extra_fields``; for a
    group, ``responses``, and the rest of its first rollout. None: a grade from 0 to 1 is asked for."""
    system: str | None = None
    """A system message before the question."""
    group: bool = False
    """Ask once for all rollouts of a group."""
    parse: Any = "json"
    """How the reply is read: ``json`` (an object with ``score``; its other numbers are logged; for a group,
    ``scores``), ``number``, a regular expression with one group around a number, or
    ``package.module:function`` of the reply that returns a verdict (for a group: a list of them)."""
    scale: Sequence[float] | None = None
    """The lowest and highest raw score, which become 0 and 1; None: scores are taken as they are."""
    max_retries: int = Field(default=DEFAULT_MAX_RETRIES, ge=0)
    """Further tries for one rollout or group."""
    api_key_env: str | None = None
    """The environment variable that holds the API key; None sends none."""
    parameters: Mapping[str, Any] | None = None
    """Further fields of each request (``temperature`` is 0 by default)."""
    max_concurrent: int = Field(default=16, ge=1)
    """Requests in flight."""
    per_minute: float | None = Field(default=None, gt=0)
    """Requests that begin in a minute, evenly spread; None: as many as come."""
    max_calls: int | None = Field(default=None, ge=1)
    """Requests in all; None: unlimited."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of prompts and replies in all; None: unlimited."""
    cache: bool | str = True
    """Keep replies in memory (true), also in this file (a path), or not at all (false)."""


class ChatClient:
    """Asks a model for replies.

    Invariants: at most `max_concurrent` requests are in flight and at most `per_minute` begin in any minute,
    evenly spread; requests, failed ones included, count against `max_calls`, and the tokens that the server
    reports against `max_tokens`, which may be overrun by what is in flight. Budgets and the cache in memory
    begin anew with the process.

    Args:
        arguments: the model and the limits.
        timeout_s: for one request; None waits for ever.

    Raises:
        ConfigError: httpx is not installed.
        ValueError: the environment variable is not set.
    """

    def __init__(self, arguments: LLMArguments, *, timeout_s: float | None = 60.0) -> None:
        require_library("httpx", "judge 'llm'")
        self._url = f"{arguments.base_url.rstrip('/')}/chat/completions"
        self._headers = _authorization(arguments.api_key_env)
        self._fixed = {"model": arguments.model, "temperature": 0.0, **(arguments.parameters or {})}
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(arguments.max_concurrent)
        self._pace = Pace(arguments.per_minute)
        self._limits = {"max_calls": arguments.max_calls, "max_tokens": arguments.max_tokens}
        self._spent = dict.fromkeys(self._limits, 0)
        path = None if isinstance(arguments.cache, bool) else Path(arguments.cache)
        self._cache = ReplyCache(path) if arguments.cache else None
        self._http: httpx.AsyncClient | None = None

    async def ask(self, messages: Messages) -> str:
        """The model's reply to `messages`.

        Raises:
            TransientJudgeError: there was none, but there may be one if it is asked again.
            JudgeError: there will be none: the request was refused, or the budget is used up.
        """
        request = self._request(messages)
        if self._cache is not None and (reply := self._cache.get(request)) is not None:
            return reply
        # Before the turn is taken: a refused request must not cost the others time.
        self._check_budget()
        await self._pace.turn()
        async with self._slots:
            # Again: requests that were in flight meanwhile were paid from it too.
            self._check_budget()
            return await self._post(request)

    def keep(self, messages: Messages, reply: str) -> None:
        """Return `reply` whenever the same is asked again."""
        if self._cache is not None:
            self._cache.put(self._request(messages), reply)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    def _request(self, messages: Messages) -> dict[str, Any]:
        return {"messages": list(messages), **self._fixed}

    def _check_budget(self) -> None:
        for name, limit in self._limits.items():
            if limit is not None and self._spent[name] >= limit:
                raise JudgeError(f"the budget is used up: {self._spent[name]} of {name} = {limit}; raise it")

    async def _post(self, request: dict[str, Any]) -> str:
        import httpx

        if self._http is None:
            self._http = httpx.AsyncClient(timeout=None, headers=self._headers)
        # Failed requests count, too: the server may charge for them.
        self._spent["max_calls"] += 1
        try:
            async with timeout(self._timeout_s):
                response = await self._http.post(self._url, json=request)
        except TimeoutError:
            raise TransientJudgeError(f"{self._url}: no reply within {self._timeout_s} s") from None
        except httpx.TransportError as error:
            raise TransientJudgeError(f"{self._url}: {type(error).__name__}: {error}") from error
        _check_status(response)
        try:
            body = response.json()
            self._spent["max_tokens"] += int((body.get("usage") or {}).get("total_tokens") or 0)
            reply = body["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise TransientJudgeError(
                f"{self._url}: not a chat completion: {response.text[:200]!r}"
            ) from None
        if not isinstance(reply, str):
            raise TransientJudgeError(f"{self._url}: a reply without text")
        return reply


def _authorization(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise ValueError(f"api_key_env: the environment variable {api_key_env} is not set")
    return {"Authorization": f"Bearer {key}"}


def _check_status(response: httpx.Response) -> None:
    status = response.status_code
    if status < 400:
        return
    message = f"{response.url}: HTTP {status}: {response.text[:200]!r}"
    # 408: the server's own time-out. 409 and 425 are "again, later" too.
    if status not in (408, 409, 425, 429) and status < 500:
        raise JudgeError(message)
    try:
        after_s = min(max(float(response.headers["retry-after"]), 0.0), _LONGEST_RETRY_AFTER_S)
    # None given, or a date.
    except (KeyError, ValueError):
        after_s = None
    raise TransientJudgeError(message, after_s=after_s)


class Pace:
    """Lets work begin at most `per_minute` times a minute, evenly spread, in the order of asking.

    With ``Pace(60)``, the first turn comes at once and the next one a second later.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._interval_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next_s = float("-inf")

    async def turn(self) -> None:
        """Wait for the next turn."""
        if not self._interval_s:
            return
        now_s = asyncio.get_running_loop().time()
        turn_s = max(now_s, self._next_s)
        self._next_s = turn_s + self._interval_s
        await asyncio.sleep(turn_s - now_s)


class ReplyCache:
    """Replies by request; the least recently used ones are forgotten, in memory.

    Invariants: the file has one JSON line ``{"request": digest, "reply": text}`` for each reply; half a line,
    left by a killed process, is skipped. Several processes may append to one file.

    >>> cache = ReplyCache(path=None)
    >>> cache.put({"model": "m", "messages": []}, "7")
    >>> cache.get({"messages": [], "model": "m"})
    '7'
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._replies: dict[str, str] = {}
        """In the order of their use: the first is the one to forget."""
        # Now and not at the first question: a long file would hold up the event loop.
        if path is not None and path.exists():
            self._read(path)

    def get(self, request: Mapping[str, Any]) -> str | None:
        """The reply to `request`, if it is known."""
        key = _digest(request)
        if (reply := self._replies.get(key)) is not None:
            self._remember(key, reply)
        return reply

    def put(self, request: Mapping[str, Any], reply: str) -> None:
        """Remember `reply`."""
        key = _digest(request)
        if self._replies.get(key) == reply:
            return
        self._remember(key, reply)
        if self._path is not None:
            line = json.dumps({"request": key, "reply": reply}) + "\n"
            with self._path.open("ab") as file:
                # Ends the half line of a killed process.
                file.write((b"" if _ends_a_line(self._path) else b"\n") + line.encode())

    def _remember(self, key: str, reply: str) -> None:
        self._replies.pop(key, None)
        self._replies[key] = reply
        if len(self._replies) > _NUM_CACHED_REPLIES:
            del self._replies[next(iter(self._replies))]

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                self._remember(entry["request"], entry["reply"])


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _digest(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
