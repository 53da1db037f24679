"""An OpenAI-compatible chat endpoint, a private address for every session.

::

    http://127.0.0.1:PORT/SECRET/v1/chat/completions --> ChatSession of that SECRET --> answer, or SSE chunks

The secret in the address is the session: it separates programs that run at the same time, and without it no
request reaches a rollout. The API key that a client sends is not looked at. Anything but text in and text (or
tool calls) out is refused with an error that the official clients raise.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from forebay.agents.chat.conversation import RequestError, with_text_arguments
from forebay.agents.chat.session import MODEL, BudgetExhaustedError, ChatSession, SessionEndedError, Turn
from forebay.config import ConfigError, errors_about
from forebay.io.address import is_loopback

MAX_BODY_BYTES = 32 << 20
"""Far longer than any context."""
BACKLOG = 2048
"""Every program of a large batch may connect at once."""
KEEP_ALIVE_S = 600
"""A program may think for long between two requests; a connection that is closed under one fails it."""


class ChatEndpoint:
    """Serves chat sessions on a local port, from the first one until `close`.

    Invariants: a request reaches only the session whose address it was sent to; an ended session answers 410,
    an unknown address 404; nothing listens on other interfaces than that of `host`.

    Args: host: the interface to listen on, ``HOST`` or ``HOST:PORT``; with ``remote:`` before it, it need
    not be loopback: whatever reaches it can load the engines.

    Raises:
        ConfigError: the host cannot be read, or is not loopback and that was not allowed.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        place = host.removeprefix("remote:")
        with errors_about(f"host = {host!r} is neither HOST nor HOST:PORT", ValueError):
            # An IPv6 address by itself has brackets in a URL only.
            parts = urlsplit(f"//[{place}]" if place.count(":") > 1 and "[" not in place else f"//{place}")
            self._host, self._port = parts.hostname or "", parts.port or 0
        if not self._host or not (is_loopback(self._host) or place != host):
            raise ConfigError(
                f"the chat endpoint would listen on {host!r}, which others can reach; use '127.0.0.1', or "
                f"host = 'remote:{place}' where the network is trusted"
            )
        self._bound_port = self._port
        self._sessions: dict[str, ChatSession] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def serving(self, session: ChatSession) -> AsyncIterator[str]:
        """The base URL of `session`, for as long as the block lasts."""
        async with self._starting:
            if self._runner is None:
                await self._start()
        secret = secrets.token_urlsafe(18)
        self._sessions[secret] = session
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            yield f"http://{host}:{self._bound_port}/{secret}/v1"
        finally:
            del self._sessions[secret]

    async def close(self) -> None:
        """Stop listening. A session that is opened later starts it again."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _start(self) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.create_server((self._host, self._port), family=family)
        self._bound_port = listening.getsockname()[1]
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/{secret}/v1/chat/completions", self._chat)
        app.router.add_get("/{secret}/v1/models", self._models)
        app.router.add_route("*", "/{rest:.*}", _unknown)
        # A program that still waits for an answer does not hold up the end of the run.
        runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEP_ALIVE_S, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listening, backlog=BACKLOG).start()
        self._runner = runner

    async def _chat(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.match_info["secret"])
        if session is None:
            return await _unknown(request)
        try:
            body = await _body(request)
            stop = body.get("stop") or ()
            turn = await session.complete(
                body["messages"],
                tools=body.get("tools") or None,
                may_call=body.get("tool_choice") != "none",
                max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
                stop=(stop,) if isinstance(stop, str) else tuple(str(text) for text in stop if text),
            )
        except BudgetExhaustedError as error:
            return _error(400, str(error), "context_length_exceeded")
        except RequestError as error:
            return _error(400, str(error), "invalid_request_error")
        except SessionEndedError as error:
            return _error(410, str(error), "session_ended")
        completion = _completion(turn, str(body.get("model") or MODEL), bool(body.get("logprobs")))
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return web.Response(body=_events(completion, usage), content_type="text/event-stream")
        return _json(completion)

    async def _models(self, request: web.Request) -> web.Response:
        if request.match_info["secret"] not in self._sessions:
            return await _unknown(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "forebay"}
        return _json({"object": "list", "data": [model]})


async def _unknown(request: web.Request) -> web.Response:
    return _error(
        404,
        f"no session answers {request.method} {request.path}; what is served is "
        f"BASE_URL/chat/completions and BASE_URL/models, with the base URL that the program was given",
        "not_found",
    )


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise RequestError(f"the request has more than {MAX_BODY_BYTES} bytes") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON that can be read: {error}") from None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise RequestError("the request needs a list of messages")
    if (body.get("n") or 1) != 1:
        raise RequestError(f"n = {body['n']} is not supported; send {body['n']} requests instead")
    for key in ("max_tokens", "max_completion_tokens"):
        if body.get(key) is not None and (not isinstance(body[key], int) or body[key] < 1):
            raise RequestError(f"{key} must be a positive whole number, got {body[key]!r}")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise RequestError(
            f"tool_choice {body['tool_choice']!r} cannot be enforced on what the policy writes; send 'auto' "
            f"with the tools that it may call, or 'none'"
        )
    for key, kind, what in (("tools", list, "a list"), ("stream_options", dict, "an object")):
        if body.get(key) is not None and not isinstance(body[key], kind):
            raise RequestError(f"{key} must be {what}, got {body[key]!r}"[:200])
    return body


def _error(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": code, "param": None, "code": code}
    return _json({"error": error}, status)


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    # Clients retry errors that they take for passing faults; none of these passes.
    return web.json_response(content, status=status, headers={"x-should-retry": "false"})


def _completion(turn: Turn, model: str, with_logprobs: bool) -> dict[str, Any]:
    message = with_text_arguments(turn.message)
    if message.get("tool_calls"):
        # As OpenAI answers where there is a call and no text.
        message["content"] = message["content"] or None
    logprobs: dict[str, Any] | None = None
    if with_logprobs:
        content = [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in turn.logprobs()
        ]
        logprobs = {"content": content, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": turn.finish_reason, "logprobs": logprobs}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": turn.num_prompt_tokens,
            "completion_tokens": turn.num_tokens,
            "total_tokens": turn.num_prompt_tokens + turn.num_tokens,
        },
    }


def _events(completion: dict[str, Any], with_usage: bool) -> bytes:
    """The whole turn as a stream: it is only sent when it is complete."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if with_usage:
        parts.append({"choices": [], "usage": completion["usage"]})
    events = b""
    for part in parts:
        chunk = {**completion, "object": "chat.completion.chunk", **part}
        if "usage" not in part:
            # Null beside the last chunk's numbers, and nothing where none were asked for.
            chunk.pop("usage", None)
            chunk |= {"usage": None} if with_usage else {}
        events += b"data: " + json.dumps(chunk).encode() + b"\n\n"
    return events + b"data: [DONE]\n\n"
