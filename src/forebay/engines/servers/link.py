"""Talking to an inference server: control calls, health, the event stream of a request.

::

    do(calls)     --> the last answer     | unreachable: EngineLost
    events(body)  --> event, event, ...   | refused: Refused (the request's fault), ServerFailed (its own),
                          |               |          Busy (to be asked again)
                          v
              Watch   consumes: nothing     waits for: the clock, the end of the server's process
                      woken by: the first answer that is read
                      produces: one call of `lose`, when the server is gone or stands still

It knows the dialect's names for things, not what the engine wants of them. Only calls that say so are tried
again. Every request has a connection of its own: making one costs 0.1 ms of a request that takes a second,
and a kept one may be closed by the server just when it is used again.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.aio.tasks import beside
from forebay.aio.time_limits import timeout
from forebay.engines.base import EngineLost, GenerateRequest
from forebay.engines.servers.dialects import Call, Dialect
from forebay.engines.servers.launch import LocalServer, log_tail
from forebay.engines.servers.stream import BadAnswer, ErrorEvent
from forebay.extras import needed_by

if TYPE_CHECKING:
    from aiohttp import ClientResponse

_CONNECT_LIMIT_S = 10.0

_HEALTH_LIMIT_S = 30.0
"""The time for an answer about health: a busy server answers late."""

CONTROL_LIMIT_S = 50.0
"""For calls that are answered between two steps of the model; the engine's own callers give it a minute."""

_OK, _NOT_FOUND = 200, 404
_NO_KEY = frozenset({401, 403})

_BUSY = frozenset({429, 503})

_MAY_PASS = frozenset({408, 425}) | _NO_KEY
"""Client errors that are not the request's fault."""


class ServerLink:
    """The HTTP side of one server, whose address may change when it is restarted.

    Raises only `EngineLost`, `ServerFailed`, `Refused` and `BadAnswer`, never the client's own errors.

    ::

        link = ServerLink(Dialect(), "http://127.0.0.1:8000")
        await link.do(link.dialect.pause)
    """

    def __init__(self, dialect: Dialect, server: str | LocalServer, headers: Mapping[str, str] | None = None) -> None:
        """`server` is an address, or a process whose address is asked for each time."""
        with needed_by("an inference server"):
            import aiohttp
        self.dialect = dialect
        self._server = server
        self.name = server if isinstance(server, str) else str(server.log)
        """Stays when the server is started anew, at another address."""
        # Limits on the whole are the callers'. It reads no proxy from the environment.
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_LIMIT_S)
        self._request = partial(aiohttp.request, headers=headers, timeout=limits, allow_redirects=False)

    def __str__(self) -> str:
        return self._server if isinstance(self._server, str) else self._server.url

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

    async def reach(self, limit_s: float, on_start: Callable[[], None]) -> None:
        """Return once the server answers; `on_start` is called before one of this machine is started for that.

        Raises:
            EngineLost: it does not answer; one that others start has `limit_s` for that.
        """
        if not isinstance(self._server, str):
            if not (self._server.is_running and await self._answers()):
                on_start()
                await self._server.start(self.is_ready)
            return
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        while not await self._answers():
            if loop.time() > until_s:
                raise EngineLost(f"{self}: no server there that answers, for {limit_s:.0f} s")
            # A server that others run has no event for being back.
            await asyncio.sleep(_ASK_EVERY_S)

    async def _answers(self) -> bool:
        return await self.is_healthy() and await self.is_alive()

    async def _status(self, call: Call, limit_s: float) -> int | None:
        try:
            return (await self._ask(call, limit_s))[0]
        except EngineLost:
            return None

    async def do(self, calls: Iterable[Call], *, takes_long: bool = False) -> Any:
        """Let the server do these things in turn; its last answer.

        Each is due within `CONTROL_LIMIT_S`, except if it `takes_long`: then the caller limits it.

        Raises:
            EngineLost: it cannot be reached, died of it, or does not answer in time.
            ServerFailed: it lives, but does not do it.
            Refused: it does not do what it `may_refuse`, and is well.
        """
        answer: Any = None
        for call in calls:
            for num_left in reversed(range(call.tries)):
                status, text = await self._ask(call, None if takes_long else CONTROL_LIMIT_S)
                answer = _parsed(text)
                # SGLang answers 200 also to what it did not do.
                done = status == _OK and answer.get("success") is not False
                if done or status != _OK or not num_left:
                    break
                await asyncio.sleep(_TRY_AGAIN_S)
            # A server that was started without its development endpoints answers so.
            if status == _NOT_FOUND and not call.may_refuse:
                raise ServerFailed(f"{self} knows no {call.path}; {self.dialect.help}")
            if not done:
                problem = f"{self}: {call.path} was {_answered(status, text)}"
                # Asked only after a failure: one that died of the call is lost, one that lives has said no.
                if not await self.is_healthy():
                    raise EngineLost(problem)
                raise (Refused if call.may_refuse and status not in _NO_KEY else ServerFailed)(problem)
        return answer

    async def check_context(self, model: str, max_context_tokens: int) -> None:
        """Check that the server serves `model`, and takes `max_context_tokens` of it.

        Raises:
            ServerFailed: it does not.
            EngineLost: it does not answer.
        """
        served = (await self.do([self.dialect.models])).get("data")
        contexts = {entry.get("id"): entry.get("max_model_len") for entry in served or ()}
        if model not in contexts:
            raise ServerFailed(f"{self} does not serve the model {model!r}, but {list(contexts)}")
        if (context := contexts[model]) is not None and context < max_context_tokens:
            raise ServerFailed(
                f"{self} takes {context} tokens, but the run needs {max_context_tokens}: start it with as many"
            )

    async def capacity(self) -> tuple[int | None, int | None, int]:
        """The requests that it runs at once, the tokens that its cache holds and those of a block, or `NO_LIMITS`."""
        # That it cannot be asked is no fault: a server without an answer is sent all requests.
        with contextlib.suppress(EngineLost, Refused, LookupError, TypeError):
            return self.dialect.capacity(await self.do([self.dialect.info]))
        return NO_LIMITS

    async def device(self) -> str:
        """The kind of device that it computes on, ``cuda`` or ``cpu``, if it says so."""
        config = (await self.do([self.dialect.info])).get("vllm_config") or {}
        return str((config.get("device_config") or {}).get("device"))

    async def probe(self, model: str, version: str) -> None:
        """Have one token made, which every server can do, and check its log probability.

        Raises:
            ServerFailed: it is not that of the distribution it was drawn from, or there is no token.
            EngineLost, BadAnswer: as `events`.
        """
        dialect, logprobs = self.dialect, list[float]()
        # Every vocabulary has a token 0.
        request = GenerateRequest(
            request_id="probe", input_ids=np.zeros(1, np.int32), params=dialect.probe, max_tokens=1, seed=0
        )
        body = dialect.body(request, model, 1, adapters=None, version=version)
        try:
            async with contextlib.aclosing(self.events(body)) as events:
                async for event in events:
                    logprobs += dialect.read(event, len(logprobs)).logprobs
        except ErrorEvent:
            raise
        except (Refused, BadAnswer) as error:
            raise ServerFailed(f"{error}; {dialect.help}") from error
        if len(logprobs) != 1:
            raise ServerFailed(f"{self} made {len(logprobs)} tokens where 1 was asked for; {dialect.help}")
        if dialect.probe_is_certain and not logprobs[0] > _CERTAIN:
            raise ServerFailed(
                f"{self} does not report the log probabilities of what it draws from (a certain token has "
                f"{logprobs[0]:.3f}, not 0); {dialect.help}"
            )

    async def events(
        self, body: dict[str, Any], taken: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of a generation; `taken` is called once the server has taken it.

        Raises:
            EngineLost: the server cannot be reached, or went away in the middle.
            Refused: the server finds fault with the request.
            Busy: the server has too much to do now.
            ServerFailed: the server cannot serve it.
            BadAnswer: it sends something else.
        """
        async with self._sent(Call("POST", self.dialect.path(body), body)) as response:
            if (status := response.status) != _OK:
                problem = f"{self} {_answered(status, await response.read())}"
                if status in _BUSY:
                    raise Busy(problem, _retry_after_s(response.headers))
                blame = 400 <= status < 500 and status not in _MAY_PASS
                raise (Refused if blame else ServerFailed)(problem)
            taken()
            rest = b""
            async for chunk in response.content.iter_any():
                # After the last blank line an event has begun whose rest is to come.
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    if (data := event.removeprefix(b"data:").strip()) in (b"", b"[DONE]"):
                        continue
                    if not (found := _parsed(data)):
                        raise BadAnswer(f"not an event: {data[:_SHOWN]!r}")
                    yield found

    async def _ask(self, call: Call, limit_s: float | None) -> tuple[int, bytes]:
        try:
            async with timeout(limit_s), self._sent(call) as response:
                return response.status, await response.read()
        except TimeoutError:
            raise EngineLost(f"{self}: {call.path} was not answered within {limit_s:g} s") from None

    @contextlib.asynccontextmanager
    async def _sent(self, call: Call) -> "AsyncIterator[ClientResponse]":
        from aiohttp import ClientError

        url = str(self) + call.path
        try:
            async with self._request(call.method, url, params=call.params, json=call.body) as response:
                yield response
        except ClientError as error:
            raise EngineLost(f"{self}: {type(error).__name__}: {error}") from error


_TRY_AGAIN_S = 0.2
"""The pause between two tries of a call that could not be done just now."""

_LONGEST_RETRY_AFTER_S = 120.0
"""A server that wants to be left alone for longer is away."""

_SHOWN = 300
"""Characters of an answer in an error."""

_ASK_EVERY_S = 1.0
"""Seconds between two questions whether a server is back that others start."""

NO_LIMITS: tuple[int | None, int | None, int] = (None, None, 1)
"""The capacity of a server that does not say it."""

_CERTAIN = -1e-3
"""Log probability of a certain token, but for rounding."""

_HEALTH_EVERY_S = 10.0
"""Seconds between two questions while something runs: a machine that vanished closes no connection."""

_SILENCE_S = 60.0
"""Without a token, after which the model's own process is asked: it may hang in a healthy server."""


class Watch:
    """Notices that a server is gone, or stands still, while answers of it are read.

    Invariants: it watches while answers are read, and only then; what it finds it tells `lose`, once. It ends
    nothing itself.

    ::

        watch = Watch(link, None, not_loading, lose=print)
        with watch.reading():
            watch.heard()
    """

    def __init__(
        self, link: ServerLink, server: LocalServer | None, not_loading: asyncio.Event, lose: Callable[[str], None]
    ) -> None:
        """`server` is its process, where it is known; `lose` is told why the server is lost.

        While `not_loading` is not set the server loads weights: it may be silent, if it is healthy.
        """
        self._link, self._server, self._lose = link, server, lose
        self._not_loading = not_loading
        self._heard_s = 0.0
        """When a token came, or reading began."""
        self._num_reading = 0
        self._watching: asyncio.Task[None] | None = None
        self.quiet = asyncio.Event()
        """Set while no answer is read."""
        self.quiet.set()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While open, an answer is read."""
        self._num_reading += 1
        self.quiet.clear()
        if self._watching is None:
            self.heard()
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._num_reading -= 1
            if not self._num_reading:
                self.quiet.set()
                self._watching.cancel()
                self._watching = None

    def heard(self) -> None:
        """Note that something came."""
        self._heard_s = asyncio.get_running_loop().time()

    async def _watch(self) -> None:
        why = ""
        async with beside(self._server.wait() if self._server else asyncio.Event().wait()) as ended:
            while not why:
                await asyncio.wait([ended], timeout=_HEALTH_EVERY_S)
                if ended.done():
                    assert self._server is not None
                    tail = log_tail(self._server.log)
                    why = f"it ended with exit code {ended.result()}; the end of its log:\n{tail}"
                else:
                    why = await self._fault()
            self._lose(why)

    async def _fault(self) -> str:
        """Why the server must be taken for lost; empty if it need not."""
        is_well = await self._link.is_healthy()
        # Over a load it may be late once.
        if not (is_well or (not self._not_loading.is_set() and await self._link.is_healthy())):
            return "it does not answer any more"
        if not self._not_loading.is_set():
            # Held requests get no tokens then, and the model's process answers nothing; a load has its limit.
            self.heard()
        silent_s = asyncio.get_running_loop().time() - self._heard_s
        is_silent = silent_s > _SILENCE_S and not await self._link.is_alive()
        # A load may have begun while it was asked.
        if is_silent and self._not_loading.is_set():
            return f"it stands still: no token for {silent_s:.0f} s, and its model does not answer"
        return ""


class ServerFailed(EngineLost):
    """The server lives, but did not do what it was asked; it may be ill, and well when started anew."""


class Busy(EngineLost):
    """The server has too much to do for one more request; ask again after `after_s` (0: it does not say)."""

    def __init__(self, message: str, after_s: float) -> None:
        super().__init__(message)
        self.after_s = after_s


async def when_not_busy(ask: Callable[[], Awaitable[None]]) -> None:
    """Ask a server, and again while it is busy: it has done nothing yet."""
    loop = asyncio.get_running_loop()
    until_s, delay_s = loop.time() + _BUSY_LIMIT_S, _BUSY_FIRST_S
    while True:
        try:
            return await ask()
        except Busy as busy:
            if loop.time() > until_s:
                raise
            await asyncio.sleep(max(delay_s, busy.after_s))
            delay_s = min(2 * delay_s, _BUSY_MOST_S)


_BUSY_FIRST_S, _BUSY_MOST_S, _BUSY_LIMIT_S = 0.5, 30.0, 600.0
"""Until a busy server is asked again: doubled each time, up to the second; after the third it has failed."""


class Refused(ValueError):
    """The server finds fault with the request; another server would, too."""


def _parsed(text: bytes) -> dict[str, Any]:
    """The JSON object in `text`; {} if there is none."""
    try:
        answer = json.loads(text)
    # Not JSON, or not even UTF-8: the error page of a proxy.
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _answered(status: int, text: bytes) -> str:
    hint = " (the API key is wrong or missing: see api_key_env)" if status in _NO_KEY else ""
    return f"answered {status}{hint}: {text.decode(errors='replace')[:_SHOWN]}"


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return min(max(0.0, float(headers["retry-after"])), _LONGEST_RETRY_AFTER_S)
    # None given, or a date.
    except (KeyError, ValueError):
        return 0.0
