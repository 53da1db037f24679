"""An engine behind HTTP: vLLM or SGLang, tokens in and tokens out.

::

    generate() --POST--> server --events--> pieces --> Completion
        | cut: abort, time limit, pause, server lost        the tokens of all pieces read so far

    load_weights(step): files.write -> interrupt what runs -> load the folder -> release -> go on
    bring_up():  start or wait for the server -> check what it answers -> load the current weights

    _watch    consumes: nothing               waits for: the clock, the end of the server's process
              woken by: the first request     produces: the loss of all that runs, when the server is gone

It starts no process by itself (`forebay.engines.servers` does) and knows no server's names for things
(`forebay.engines.http_dialects` does). One controller per server: pausing it pauses everybody's requests.

While weights change requests wait here, also those that were running: they go on from their tokens when the
new weights are there. Every token carries the step of the weights that made it: see
`forebay.engines.http_stream`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.engines.base import Completion, EngineHealth, EngineLost, GenerateRequest
from forebay.engines.http_dialects import VLLM, BadAnswer, Dialect, ErrorEvent
from forebay.engines.http_link import Refused, ServerFailed, ServerLink
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
_ASK_EVERY_S = 1.0
"""Seconds between two questions whether a server is back that others start."""
_END_LIMIT_S = 5.0
"""For requests to end after the server was paused; then their connections are closed."""
_START_TRIES = 3
"""Failures in a row to bring a server back, after which it is given up."""
_CERTAIN = -1e-3
"""Log probability of what is certain, but for rounding."""


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
    ) -> None:
        """`server` is an address or a server to start; `model` is what it calls the model.

        `files` is shared by all engines of a run. `start_limit_s` is how long a server that others start
        may be away.
        """
        self._server = server if isinstance(server, LocalServer) else None
        self._link = ServerLink(dialect or VLLM(), lambda: server if isinstance(server, str) else server.url)
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
                await self._open.wait()
                await self._go_on(stream)
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
        async with self._control:
            await self._stop_all(goes_on=False)

    async def resume(self) -> None:
        """Take requests again.

        Raises:
            EngineLost: the server does not answer.
        """
        async with self._control:
            await self._link.do(self._dialect.release)
            self._paused = False

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None:
        """Write these parameters to a folder (once for all engines that share it) and let the server load it.

        Running requests wait meanwhile and go on over the new weights.

        Raises:
            EngineLost: the server is away, or went away; it loads the folder when it is brought up.
            RuntimeError: the server refuses the weights, or the engine is closed.
        """
        if self._closed:
            raise RuntimeError(f"the engine is closed and takes no weights (those of step {model_step})")
        written = await self._files.write(weights, model_step)
        async with self._control:
            try:
                if self._away:
                    raise EngineLost(f"{self}: {self._away}")
                await self._load(written)
            except (EngineLost, ServerFailed) as error:
                # Half loaded or not at all, it must not make tokens; the next ones will be made by these
                # weights, or newer ones.
                self._lose(str(error))
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
        """End everything; stop the server if it was started here."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.cut("abort")
        await self._quiet.wait()
        await self._link.close()
        if self._server is not None:
            await self._server.stop()
        self._files.num_users -= 1
        if not self._files.num_users:
            self._files.close()

    async def bring_up(self) -> None:
        """Return once the server answers as it should and has the current weights.

        A server of this machine that is down, or does not answer, is started anew; for another one this
        waits until it is there. One that never was up gets one try: it is set up wrongly.

        Raises:
            EngineLost: it could not be started, did not come back, or is not set up as it must be.
        """
        failures: list[str] = []
        while len(failures) < (_START_TRIES if self._was_up else 1):
            try:
                await self._reach()
                async with self._control:
                    await self._prepare()
                    self._away, self._was_up = "", True
                return
            except (EngineLost, ServerFailed, Refused, BadAnswer) as error:
                self._lose(str(error))
                failures.append(str(error))
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
        except (EngineLost, ServerFailed, BadAnswer) as error:
            stream.end("error", str(error), lost=True)
        finally:
            self._end_reading()

    async def _read(self, stream: Stream) -> None:
        request = stream.rest()
        max_tokens = min(request.max_tokens, self._max_context_tokens - len(request.input_ids))
        body = self._dialect.body(request, self._model, max_tokens, TOKENS_PER_PIECE)
        async with contextlib.aclosing(self._link.events(body)) as events:
            async for event in events:
                stream.add(self._dialect.read(event, stream.num_in_leg))
                if stream.found_stop_text:
                    return
        if not stream.end_leg():
            raise ServerFailed(f"{self}: the answer ended early")

    def _begin_reading(self) -> None:
        self._num_reading += 1
        self._quiet.clear()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    def _end_reading(self) -> None:
        self._num_reading -= 1
        if not self._num_reading:
            self._quiet.set()
            if self._watching is not None:
                self._watching.cancel()
                self._watching = None

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
        self._away = why
        for stream in self._streams:
            stream.cut("error", f"{self}: {why}", lost=True)

    async def _watch(self) -> None:
        """While something runs; see the module docstring."""
        ended = asyncio.create_task(self._process_ended())
        try:
            await asyncio.wait([ended], timeout=_HEALTH_EVERY_S)
            while not ended.done() and await self._link.is_healthy():
                await asyncio.wait([ended], timeout=_HEALTH_EVERY_S)
            self._lose(ended.result() if ended.done() else "it does not answer any more")
        finally:
            ended.cancel()

    async def _process_ended(self) -> str:
        """How the server's process ended, once it has; of another's server nothing is known."""
        if self._server is None:
            await asyncio.Event().wait()
            raise AssertionError("nobody sets that event")
        code = await self._server.wait()
        return f"it ended with exit code {code}; the end of its log:\n{self._server.log_tail()}"

    # The server

    async def _reach(self) -> None:
        """Return once the server answers.

        Raises:
            EngineLost: it does not.
        """
        if self._server is not None:
            if not (self._server.is_running and await self._link.is_healthy()):
                self._lose(self._away or "it does not answer")
                await self._server.start(self._link.is_healthy)
            return
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._start_limit_s
        while not await self._link.is_healthy():
            if loop.time() > until_s:
                raise EngineLost(f"{self}: no server there for {self._start_limit_s:.0f} s")
            # Another's server has no event for being back.
            await asyncio.sleep(_ASK_EVERY_S)

    async def _prepare(self) -> None:
        """Check what the server answers, if that is not known; load the current weights if it lacks them."""
        await self._link.do(self._dialect.release)
        # Whoever brings it up pauses it again if need be; a stale pause would outlast the loading below.
        self._paused = False
        if not self._was_up:
            await self._probe()
        if (written := self._files.current) is not None:
            answer = await self._link.do([self._dialect.version])
            if self._dialect.version_of(answer) != written.version:
                await self._load(written)
            self._model_step = written.model_step

    async def _probe(self) -> None:
        dialect = self._dialect
        request = GenerateRequest(
            request_id="probe", input_ids=np.zeros(1, np.int32), params=dialect.probe, max_tokens=1, seed=0
        )
        stream = Stream(request)
        try:
            await self._read(stream)
        except ErrorEvent:
            raise
        except (Refused, BadAnswer) as error:
            raise ServerFailed(f"{error}; {dialect.help}") from error
        logprobs = stream.completion().logprobs
        if len(logprobs) != 1:
            raise ServerFailed(f"{self} made {len(logprobs)} tokens where 1 was asked for; {dialect.help}")
        if dialect.probe_is_certain and not logprobs[0] > _CERTAIN:
            raise ServerFailed(
                f"{self} does not report the log probabilities of what it draws from (a certain token has "
                f"{logprobs[0]:.3f}, not 0); {dialect.help}"
            )

    async def _load(self, written: WrittenWeights) -> None:
        """Let the server take over weights; what runs is interrupted and goes on afterwards."""
        self._open.clear()
        try:
            await self._stop_all(goes_on=True)
            await self._link.do(self._dialect.load(str(written.folder), written.version))
            self._model_step = written.model_step
            if not self._paused:
                await self._link.do(self._dialect.release)
        finally:
            self._open.set()
