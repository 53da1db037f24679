"""An engine behind HTTP: vLLM or SGLang, tokens in and tokens out.

::

    generate() --POST--> server --events--> pieces --> Completion
        | cut: abort, time limit, pause, server lost        the tokens of all pieces read so far

    load_weights(step): files.write -> interrupt what runs -> load the folder -> release -> go on
    bring_up():  start or wait for the server -> load the current weights -> release -> check what it answers

    _watch    consumes: nothing               waits for: the clock, the end of the server's process
              woken by: the first request     produces: the loss of all that runs, when the server is gone or
                                                        stands still

It starts no process by itself (`forebay.engines.servers` does) and knows no server's names for things
(`forebay.engines.http_dialects` does). One controller per server: pausing it pauses everybody's requests.

While weights change requests wait here, also those that were running: they go on from their tokens when the
new weights are there. Every token carries the step of the weights that made it: see
`forebay.engines.http_stream`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from forebay.engines.base import Completion, EngineHealth, EngineLost, GenerateRequest
from forebay.engines.http_check import check_context, check_probe, probe_request
from forebay.engines.http_dialects import VLLM, BadAnswer, Dialect, ErrorEvent
from forebay.engines.http_link import Busy, Refused, ServerFailed, ServerLink
from forebay.engines.http_stream import Stream
from forebay.engines.servers import START_LIMIT_S, LocalServer
from forebay.engines.stopping import StopTexts
from forebay.engines.weight_files import WeightFiles, WrittenWeights

if TYPE_CHECKING:
    import torch

TOKENS_PER_PIECE = 16
"""Asked of servers that take it. One event per token costs both sides more than it tells."""

_HEALTH_EVERY_S = 10.0
"""Seconds between two questions while something runs: a machine that vanished closes no connection."""
_SILENCE_S = 60.0
"""Without a token, after which the model's own process is asked: it may hang in a healthy server."""
_ASK_EVERY_S = 1.0
"""Seconds between two questions whether a server is back that others start."""
_TRY_AGAIN_S = 10.0
"""Between two tries to use such a server: it cannot be started anew."""
_BUSY_FIRST_S, _BUSY_MOST_S, _BUSY_LIMIT_S = 0.5, 30.0, 600.0
"""Until a busy server is asked again: doubled each time, up to the second; after the third it has failed."""
_END_LIMIT_S = 5.0
"""For requests to end after the server was paused; then their connections are closed."""
_START_TRIES = 3
"""Failures in a row to bring a server back, after which it is given up."""


class HTTPEngine:
    """One inference server; see `forebay.engines.base` for the contract, and `bring_up` first.

    The same request draws the same random numbers, but what runs beside it changes a server's rounding, so
    tokens may differ from run to run. A stop text that began before an interruption is found where a
    tokenizer is given.

    >>> engine = HTTPEngine("http://gpu7:8000", model="policy", max_context_tokens=4096,
    ...                     files=WeightFiles(Path("/shared/weights")))                # doctest: +SKIP
    >>> await engine.bring_up()                                                        # doctest: +SKIP
    >>> completion = await engine.generate(request)                                    # doctest: +SKIP
    """

    def __init__(
        self,
        server: str | LocalServer,
        *,
        model: str,
        max_context_tokens: int,
        files: WeightFiles,
        dialect: Dialect | None = None,
        tokenizer: Any = None,
        model_step: int = 0,
        start_limit_s: float = START_LIMIT_S,
        api_key: str | None = None,
    ) -> None:
        """`server` is an address or a server to start; `model` is what it calls the model.

        `files` is shared by all engines of a run. `start_limit_s` is how long a server that others start
        may be away, and how long one may take to be ready for use. `api_key` goes with every request.
        """
        self._server = server if isinstance(server, LocalServer) else None
        self._link = ServerLink(
            dialect or VLLM(),
            lambda: server if isinstance(server, str) else server.url,
            {} if api_key is None else {"authorization": f"Bearer {api_key}"},
        )
        self._dialect = self._link.dialect
        self._model = model
        self._max_context_tokens = max_context_tokens
        self._files = files
        files.num_users += 1
        self._stop_texts = None if tokenizer is None else StopTexts(tokenizer)
        self._model_step = model_step
        self._start_limit_s = start_limit_s
        self._streams: dict[Stream, None] = {}
        self._watching: asyncio.Task[None] | None = None
        self._heard_s = 0.0
        """When a token came, or reading began."""
        self._num_reading = 0
        self._quiet = asyncio.Event()
        """Set while no answer is being read."""
        self._quiet.set()
        self._control = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._away = "it has not been brought up"
        """Why there is no server; empty while there is one."""
        self._was_up = False
        self._half_loaded = False
        """Whether the server may have part of new weights under the name of the old ones."""
        self._paused = False
        self._closed = False

    def __str__(self) -> str:
        return str(self._link)

    @property
    def model_step(self) -> int:
        """The step of the weights that make the next token."""
        return self._model_step

    @property
    def max_context_tokens(self) -> int:
        """The most tokens, prompt and response together, one request may reach."""
        return self._max_context_tokens

    # Requests

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue ``request.input_ids``.

        Raises:
            ValueError: the request can never run: empty, at or over the context, no budget, or its log
                probabilities would not be those of what it draws from.
        """
        self._check(request)
        stream = Stream(request, self._stop_texts)
        self._streams[stream] = None
        try:
            while not stream.has_ended:
                # It is closed while weights change.
                if self._open.is_set():
                    await self._go_on(stream)
                else:
                    await stream.until(self._open)
        finally:
            stream.close()
            del self._streams[stream]
        return stream.completion()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``"abort"``; unknown ids are ignored.

        Their connections are closed, which makes the server drop them.
        """
        wanted = set(request_ids)
        for stream in self._streams:
            if stream.request.request_id in wanted:
                stream.cut("abort")

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request has by now, but for those of the piece to come; else 0."""
        return sum(len(stream.ids) for stream in self._streams if stream.request.request_id == request_id)

    # Control

    async def pause(self) -> None:
        """End every request with ``"abort"`` and take no new one until `resume`.

        Raises:
            EngineLost: the server does not answer.
        """
        self._paused = True
        async with self._controlling():
            await self._stop_all(goes_on=False)

    async def resume(self) -> None:
        """Take requests again.

        Raises:
            EngineLost: the server does not answer.
        """
        async with self._controlling():
            await self._link.do(self._dialect.release)
            self._paused = False

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None:
        """Write these parameters to a folder (once for all engines that share it) and let the server load it.

        Running requests wait meanwhile and go on over the new weights.

        Raises:
            EngineLost: the server is away, went away or refuses them; it loads the folder when it is brought
                up.
            ConfigError: they cannot be written; the server keeps what it has.
            RuntimeError: the engine is closed.
        """
        if self._closed:
            raise RuntimeError(f"the engine is closed and takes no weights (those of step {model_step})")
        written = await self._files.write(weights, model_step)
        async with self._controlling():
            try:
                if self._away:
                    raise EngineLost(f"{self}: {self._away}")
                await self._load(written)
            except BaseException:
                # Half loaded or not at all: the next tokens will be made by these weights, or newer ones.
                self._model_step = model_step
                raise

    async def health(self) -> EngineHealth:
        """Whether it can serve, and how busy it is."""
        ok = not (self._away or self._closed) and await self._link.is_healthy()
        num_running = sum(1 for stream in self._streams if stream.ids)
        return EngineHealth(
            ok=ok,
            num_running=num_running,
            num_waiting=len(self._streams) - num_running,
            model_step=self._model_step,
            detail="" if ok else self._away or f"{self} does not answer",
        )

    async def close(self) -> None:
        """End everything; stop the server if it was started here, else leave it unpaused."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.cut("abort")
        await self._quiet.wait()
        if self._server is not None:
            await self._server.stop()
        elif self._was_up:
            with contextlib.suppress(EngineLost, TimeoutError):
                async with asyncio.timeout(_END_LIMIT_S):
                    await self._link.do(self._dialect.release)
        await self._link.close()
        self._files.num_users -= 1
        if not self._files.num_users:
            self._files.close()

    async def bring_up(self) -> None:
        """Return once the server answers as it should and has the current weights.

        A server of this machine that is down, or does not answer, or cannot be used, is started anew; for
        another one this waits until it is there. One that never was up gets one try: it is set up wrongly;
        so is one that refuses what it is asked right after its start.

        Raises:
            EngineLost: it could not be started, did not come back, or is not set up as it must be.
        """
        failures: list[str] = []
        num_tries = _START_TRIES if self._was_up else 1
        while len(failures) < num_tries:
            if failures and self._server is None:
                await asyncio.sleep(_TRY_AGAIN_S)
            is_new = False
            try:
                is_new = await self._reach()
                await self._prepare_in_time()
                return
            except (EngineLost, Refused, BadAnswer) as error:
                self._lose(str(error))
                failures.append(str(error))
                if self._server is not None:
                    await self._server.stop()
                    if is_new and isinstance(error, ServerFailed):
                        break
        what = "; ".join(dict.fromkeys(failures))
        where = "" if self._server is None else f" (its log: {self._server.log})"
        raise EngineLost(f"given up after {len(failures)} tries: {what}{where}")

    # What runs

    def _check(self, request: GenerateRequest) -> None:
        length = len(request.input_ids)
        if not 0 < length < self._max_context_tokens:
            raise ValueError(
                f"request {request.request_id!r} has {length} input tokens; it needs at least one and fewer "
                f"than the context of {self._max_context_tokens}"
            )
        if request.max_tokens < 1:
            raise ValueError(
                f"request {request.request_id!r} may add {request.max_tokens} tokens; at least 1"
            )
        self._dialect.check(request)

    async def _go_on(self, stream: Stream) -> None:
        """Let the server work on it, unless it has ended or cannot."""
        if stream.has_ended:
            return
        if self._closed:
            return stream.end("error", "the engine is closed")
        if self._paused:
            return stream.end("abort")
        if self._away:
            return stream.end("error", f"{self}: {self._away}", lost=True)
        self._begin_reading()
        try:
            async with stream.leg(step=self._model_step):
                await self._read(stream)
        except Refused as error:
            stream.end("error", str(error))
        except (EngineLost, BadAnswer) as error:
            stream.end("error", str(error), lost=True)
        finally:
            self._end_reading()

    async def _read(self, stream: Stream) -> None:
        """One leg of it. A server that is busy is asked again; it has done nothing yet."""
        loop = asyncio.get_running_loop()
        until_s, delay_s = loop.time() + _BUSY_LIMIT_S, _BUSY_FIRST_S
        while True:
            try:
                return await self._read_answer(stream)
            except Busy as busy:
                if loop.time() > until_s:
                    raise
                await asyncio.sleep(max(delay_s, busy.after_s))
                delay_s = min(2 * delay_s, _BUSY_MOST_S)

    async def _read_answer(self, stream: Stream) -> None:
        request, loop = stream.rest(), asyncio.get_running_loop()
        max_tokens = min(request.max_tokens, self._max_context_tokens - len(request.input_ids))
        body = self._dialect.body(request, self._model, max_tokens, TOKENS_PER_PIECE)
        async with contextlib.aclosing(self._link.events(body)) as events:
            async for event in events:
                self._heard_s = loop.time()
                stream.add(self._dialect.read(event, stream.num_in_leg))
                if stream.found_stop_text:
                    return
        if not stream.end_leg():
            raise ServerFailed(f"{self}: the answer ended early")

    def _begin_reading(self) -> None:
        self._num_reading += 1
        self._quiet.clear()
        if self._watching is None:
            self._heard_s = asyncio.get_running_loop().time()
            self._watching = asyncio.create_task(self._watch())

    def _end_reading(self) -> None:
        self._num_reading -= 1
        if not self._num_reading:
            self._quiet.set()
            if self._watching is not None:
                self._watching.cancel()
                self._watching = None

    @contextlib.asynccontextmanager
    async def _controlling(self) -> AsyncIterator[None]:
        """One control at a time; the server is lost if it fails or is cancelled: nobody knows what it did."""
        async with self._control:
            try:
                yield
            except BaseException as error:
                self._lose(str(error) or "what it was asked for was cancelled")
                raise

    async def _stop_all(self, *, goes_on: bool) -> None:
        """Let the server abort all that runs, and return when all that was made has been read."""
        streams = list(self._streams)
        for stream in streams:
            stream.stop_leg(goes_on=goes_on)
        await self._link.do(self._dialect.pause)
        for stream in streams:
            # The server has ended all it knew of; a request that it did not know yet has made nothing.
            if not stream.num_in_leg:
                stream.cut_leg()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_LIMIT_S):
                await self._quiet.wait()
        for stream in streams:
            stream.cut_leg()
        await self._quiet.wait()

    def _lose(self, why: str) -> None:
        self._away = why.removeprefix(f"{self}: ")
        for stream in self._streams:
            stream.cut("error", f"{self}: {self._away}", lost=True)

    async def _watch(self) -> None:
        """While something runs; see the module docstring."""
        ended = asyncio.create_task(self._process_ended())
        try:
            why = ""
            while not why:
                await asyncio.wait([ended], timeout=_HEALTH_EVERY_S)
                why = ended.result() if ended.done() else await self._what_is_wrong()
            self._lose(why)
        finally:
            ended.cancel()

    async def _what_is_wrong(self) -> str:
        """Nothing (empty), or why the server must be taken for lost."""
        if not await self._link.is_healthy():
            return "it does not answer any more"
        silent_s = asyncio.get_running_loop().time() - self._heard_s
        if silent_s > _SILENCE_S and not await self._link.is_alive():
            return f"it stands still: no token for {silent_s:.0f} s, and its model does not answer"
        return ""

    async def _process_ended(self) -> str:
        """How the server's process ended, once it has; of another's server nothing is known."""
        if self._server is None:
            await asyncio.Event().wait()
            raise AssertionError("nobody sets that event")
        code = await self._server.wait()
        return f"it ended with exit code {code}; the end of its log:\n{self._server.log_tail()}"

    # The server

    async def _reach(self) -> bool:
        """Return once the server answers; whether it was started for that.

        Raises:
            EngineLost: it does not.
        """
        if self._server is not None:
            if self._server.is_running and await self._answers():
                return False
            self._lose(self._away or "it does not answer")
            await self._server.start(self._link.is_ready)
            return True
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._start_limit_s
        while not await self._answers():
            if loop.time() > until_s:
                raise EngineLost(f"{self}: no server there that answers, for {self._start_limit_s:.0f} s")
            # Another's server has no event for being back.
            await asyncio.sleep(_ASK_EVERY_S)
        return False

    async def _answers(self) -> bool:
        return await self._link.is_healthy() and await self._link.is_alive()

    async def _prepare_in_time(self) -> None:
        limit = asyncio.timeout(self._start_limit_s)
        try:
            async with limit, self._controlling():
                await self._prepare()
                # Others may have started theirs anew, in another way.
                if self._server is None or not self._was_up:
                    await check_context(self._link, self._model, self._max_context_tokens)
                    await self._probe()
                self._away, self._was_up = "", True
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineLost(
                f"{self}: it answers, but was not ready within {self._start_limit_s:.0f} s"
            ) from None

    async def _prepare(self) -> None:
        """Load the current weights if the server lacks them; then let it make tokens."""
        # Whoever brings it up pauses it again if need be; a stale pause would outlast the loading below.
        self._paused = False
        if (written := await self._files.latest()) is not None:
            version = self._dialect.version_of(await self._link.do([self._dialect.version]))
            if self._half_loaded or version != written.version:
                return await self._load(written)
            self._model_step = written.model_step
        await self._link.do(self._dialect.release)

    async def _probe(self) -> None:
        stream = Stream(probe_request(self._dialect))
        try:
            await self._read(stream)
        except ErrorEvent:
            raise
        except (Refused, BadAnswer) as error:
            raise ServerFailed(f"{error}; {self._dialect.help}") from error
        check_probe(self._link, stream.completion())

    async def _load(self, written: WrittenWeights) -> None:
        """Let the server take over weights; what runs is interrupted and goes on afterwards."""
        self._open.clear()
        try:
            await self._stop_all(goes_on=True)
            self._half_loaded = True
            # As long as whoever asked for it waits: minutes, where a model is large.
            await self._link.do(self._dialect.load(str(written.folder), written.version), takes_long=True)
            self._half_loaded = False
            self._model_step = written.model_step
            if not self._paused:
                await self._link.do(self._dialect.release)
        finally:
            self._open.set()
