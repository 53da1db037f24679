"""An engine behind HTTP: vLLM or SGLang, tokens in and tokens out.

::

    generate() --POST--> server --events--> pieces --> Completion
        | cut: abort, time limit, pause, server lost        the tokens of all pieces read so far

    load_weights(step), load_adapters(step):
                 files.write -> interrupt or hold what runs -> load, or take buckets -> release -> go on
    sleep():     pause -> memory given back, or the server ended        load_weights, resume: taken again
    bring_up():  start or wait for the server -> load the current weights -> release -> check what it answers

The engine's state says what becomes of a request that comes now, and of those that are at the server:

::

          bring_up           load
    NEW -----------> UP <-----------> LOADING     UP: to the server; LOADING: waits here, and goes on after it
                     | ^                 |
           no answer | | bring_up        | the load fails
                     v |                 |
                    LOST <---------------+        NEW and LOST: ends, "error" and lost
       any of these -----close-----> CLOSED       CLOSED: ends, "error"

Beside it the engine is paused or not, as its controller wants it: while paused, requests end with "abort",
and a load leaves the server paused. One that sleeps is paused, so no request reaches it. One controller per
server: pausing it pauses the requests of all its users.

Requests that were running when weights change go on from their tokens with the new weights: in new requests,
or held in between (`Dialect.keeps`). Every token carries its weights' step: `forebay.engines.servers.stream`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from enum import Enum, auto
from typing import Any

from forebay.aio.tasks import unless
from forebay.aio.time_limits import time_limit, timeout
from forebay.engines.base import Completion, EngineHealth, EngineLost, GenerateRequest, WeightsGone
from forebay.engines.local.stopping import StopTexts
from forebay.engines.servers.dialects import CACHE, WEIGHTS, Dialect
from forebay.engines.servers.images import SentImages, check_prompt
from forebay.engines.servers.launch import START_LIMIT_S, LocalServer
from forebay.engines.servers.link import NO_LIMITS, Refused, ServerFailed, ServerLink, Watch, when_not_busy
from forebay.engines.servers.stream import BadAnswer, Stream
from forebay.engines.servers.weights import ServerWeights
from forebay.engines.weights.files import WeightFiles, WrittenWeights
from forebay.models.starting_weights import AdapterConfig, AdaptersRefusedError, Weights


class HTTPEngine:
    """One inference server; see `forebay.engines.base` for the contract, and `bring_up` first.

    The same request draws the same random numbers, but what runs beside it changes a server's rounding, so tokens may
    differ from run to run. A stop text that began before an interruption is found where a tokenizer is given::

        files = WeightFiles(folder, model_folder)
        engine = HTTPEngine("http://gpu7:8000", model="policy", max_context_tokens=4096, files=files)
        await engine.bring_up()
        completion = await engine.generate(request)
    """

    takes_live_weights = True
    """Live weights go to the server in buckets, or into the folder that it loads."""

    def __init__(
        self,
        server: str | LocalServer,
        *,
        model: str,
        max_context_tokens: int,
        files: WeightFiles,
        dialect: Dialect | None = None,
        tokenizer: Any = None,
        start_limit_s: float = START_LIMIT_S,
        api_key: str | None = None,
        lora_rank: int = 0,
        sleeps: bool = False,
        sender_device: str | None = None,
    ) -> None:
        """`server` is an address or a server to start; `model` is what it calls the model.

        `files` is shared by all engines of a run. A server that others start may be away for `start_limit_s`, and any
        may take as long to be ready for use. `api_key` goes with every request. `lora_rank` is the highest rank of
        adapters that the server was started for; 0: none. One that `sleeps` has a GPU of the trainer, which its
        controller gives to one of them at a time. `sender_device` is that of its `Sender`.
        """
        self.max_context_tokens = max_context_tokens
        """The most tokens, prompt and response together, one request may reach."""
        self.max_running, self.cache_tokens, self.cache_block = NO_LIMITS
        self.sleeps = sleeps
        self._server = server if isinstance(server, LocalServer) else None
        self._dialect = dialect or Dialect()
        self._link = ServerLink(self._dialect, server, {"authorization": f"Bearer {api_key}"} if api_key else None)
        self._model = model
        self._files = files
        files.num_users += 1
        self.takes_buckets = files.bucket_device == "cpu"
        self._stop_texts = None if tokenizer is None else StopTexts(tokenizer)
        self._weights = ServerWeights(self._link, lora_rank=lora_rank, sender_device=sender_device)
        self._start_limit_s = start_limit_s
        self._images = SentImages()
        self._streams: dict[Stream, None] = {}
        self._by_id: dict[str, list[Stream]] = {}
        """The same by the ids of their requests, which need not differ: a pool asks for all ids in turn."""
        self._control = asyncio.Lock()
        self._state, self._lost_because = State.NEW, "it has not been brought up"
        self._not_loading = asyncio.Event()
        self._not_loading.set()
        self._watch = Watch(self._link, self._server, self._not_loading, self._lose)
        self._paused = False

    def __str__(self) -> str:
        return str(self._link)

    @property
    def model_step(self) -> int:
        """The step of the weights that make the next token."""
        return self._weights.model_step

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, and uses no GPU any more."""
        return self._state is State.CLOSED

    # Requests

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue ``request.input_ids``.

        Raises:
            ValueError: the request can never run: empty, at or over the context, no budget, or its log
                probabilities would not be those of the distribution that it draws from.
        """
        request.check(self.max_context_tokens)
        self._dialect.check(request)
        stream = Stream(request, self._stop_texts, self._weights.steps)
        self._streams[stream] = None
        self._by_id.setdefault(request.request_id, []).append(stream)
        try:
            while not stream.has_ended:
                if self._state is State.LOADING:
                    await stream.until(self._not_loading)
                else:
                    await self._go_on(stream)
        finally:
            stream.close()
            del self._streams[stream]
            self._by_id[request.request_id].remove(stream)
            if not self._by_id[request.request_id]:
                del self._by_id[request.request_id]
        return stream.completion()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``"abort"``; unknown ids are ignored.

        Their connections are closed, which makes the server drop them.
        """
        for stream in [stream for name in set(request_ids) for stream in self._by_id.get(name, ())]:
            stream.cut("abort")

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request has by now, but for those of the piece to come; else 0."""
        return sum(len(stream.ids) for stream in self._by_id.get(request_id, ()))

    async def health(self) -> EngineHealth:
        """Whether it can serve, and how busy it is."""
        has_server = self._state in (State.UP, State.LOADING)
        ok = has_server and await self._link.is_healthy()
        num_running = sum(1 for stream in self._streams if stream.ids)
        return EngineHealth(
            ok=ok,
            num_running=num_running,
            num_waiting=len(self._streams) - num_running,
            model_step=self.model_step,
            detail="" if ok else f"{self} does not answer" if has_server else self._lost_because,
        )

    # Control

    async def pause(self) -> None:
        """End every request with ``"abort"`` and take no new one until `resume`.

        Raises:
            EngineLost: the server does not answer.
        """
        # Before the wait for a load that is under way: that leaves the server paused then.
        self._paused = True
        async with self._controlling():
            await self._stop_all(goes_on=False)

    async def resume(self) -> None:
        """Take requests again, and the memory that they need.

        Raises:
            EngineLost: the server does not answer, or was given no weights since it sleeps without.
        """
        async with self._controlling():
            await self._weights.wake(WEIGHTS, CACHE)
            if self._weights.is_half_loaded:
                raise EngineLost(f"{self} slept without its weights, and was given none")
            await self._link.do(self._dialect.release)
            self._paused = False

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Pause, and give the device's memory back until `load_weights` (that of weights) or `resume` (all).

        A server of this machine that does not, or is lost, is ended: afterwards its memory is free in any case.

        Raises:
            EngineLost: the server did not do it.
        """
        self._paused = True
        async with self._controlling():
            is_up = self._state is State.UP
            if is_up and self._weights.asleep == (WEIGHTS, CACHE):
                return
            try:
                if not is_up:
                    raise EngineLost(f"{self}: {self._lost_because}")
                late = EngineLost(f"{self} did not sleep within {_SLEEP_LIMIT_S:.0f} s")
                async with timeout(_SLEEP_LIMIT_S, lambda: late):
                    await self._stop_all(goes_on=False)
                    await self._weights.sleep(keep_weights=keep_weights)
            except BaseException:
                if self._server is not None:
                    await self._server.stop()
                raise

    async def load_weights(self, weights: Weights, model_step: int, *, config: AdapterConfig | None = None) -> None:
        """Let the server load these parameters: from a folder, for all engines that share it, or live ones in buckets.

        Running requests wait meanwhile and go on over the new weights. With a `config` they are adapters on the
        starting weights (`forebay.engines.base`): the server computes with them beside its weights, so log
        probabilities are those of merged weights but for rounding.

        Raises:
            BaseDiffersError: not known to be for the weights that the server has below adapters.
            AdaptersRefusedError: the server cannot use such adapters; the server goes on as it was.
            EngineLost: the server is away, went away or refuses them; it loads the folder when it is back.
            ConfigError: they cannot be written; the server keeps what it has.
            RuntimeError: the engine is closed.
        """
        if config is not None:
            # It refuses kinds of adapters that servers do not compute; it needs torch, as nothing else here.
            from forebay.engines.weights.takeover import scale_of

            scale_of(config)
        if self.is_closed:
            raise RuntimeError(f"the engine is closed and takes no weights (those of step {model_step})")
        written = await self._files.write(weights, model_step, adapters=config)
        async with self._controlling(loading=model_step):
            if self._state in (State.NEW, State.LOST, State.CLOSED):
                raise EngineLost(f"{self}: {self._lost_because}")
            self._enter(State.LOADING)
            try:
                # The folder of a load that waited long may be gone.
                await self._load(self._files.current or written)
            finally:
                if self._state is State.LOADING:
                    self._enter(State.UP)

    load_adapters = load_weights

    @property
    def takes_adapters(self) -> bool:
        """Whether the server was started for adapters, and has refused none yet."""
        return self._weights.takes_adapters

    async def close(self) -> None:
        """End everything; stop the server if it was started here, else leave it unpaused."""
        if self.is_closed:
            return
        was_up = self._state is not State.NEW
        self._enter(State.CLOSED, "the engine is closed")
        for stream in self._streams:
            stream.cut("abort")
        await self._watch.quiet.wait()
        await self._weights.sender.close()
        if self._server is not None:
            await self._server.stop()
        elif was_up:
            with contextlib.suppress(EngineLost, TimeoutError):
                async with timeout(_END_LIMIT_S):
                    await self._link.do(self._dialect.release)
        self._files.num_users -= 1
        if not self._files.num_users:
            self._files.close()

    async def bring_up(self) -> None:
        """Return once the server answers as it should and has the current weights.

        A server of this machine that is down, or does not answer, or cannot be used, is started anew; for
        another one this waits until it is there.

        Raises:
            EngineLost: it could not be started, did not come back, or cannot be used.
        """
        while True:
            seen = self._files.changes.version
            try:
                await self._link.reach(self._start_limit_s, self._restarts)
                return await self._prepare()
            except WeightsGone:
                # The server is well, and nothing else can be done for it.
                await self._files.changes.wait(seen)
            except (EngineLost, Refused, BadAnswer, AdaptersRefusedError) as error:
                self._lose(str(error))
                if self._server is None:
                    raise EngineLost(str(error)) from None
                await self._server.stop()
                raise EngineLost(f"{error} (its log: {self._server.log})") from None

    # States

    def _enter(self, state: State, why: str = "") -> None:
        if self.is_closed:
            return
        self._state, self._lost_because = state, why
        if state is State.LOADING:
            self._not_loading.clear()
        else:
            self._not_loading.set()

    def _lose(self, why: str) -> None:
        why, self._images = why.removeprefix(f"{self}: "), SentImages()
        self._weights.sender.kill()
        # A server that never was up is still a new one: it is set up wrongly, not lost.
        self._enter(State.NEW if self._state is State.NEW else State.LOST, why)
        for stream in self._streams:
            stream.cut("error", f"{self}: {why}", lost=True)

    def _restarts(self) -> None:
        self._lose(self._lost_because or "it does not answer")
        self._weights.forget()

    @contextlib.asynccontextmanager
    async def _controlling(self, loading: int | None = None) -> AsyncIterator[None]:
        """One control at a time; after one that failed or was cancelled the server is lost.

        `loading` is the step of the weights that the server is being given.
        """
        async with self._control:
            try:
                yield
            except AdaptersRefusedError:
                # The server does what it did before.
                raise
            except BaseException as error:
                if loading is not None:
                    # Half loaded or not at all: the next tokens will be made by these weights, or newer ones.
                    self._weights.model_step = loading
                self._lose(str(error) or "what it was asked for was cancelled")
                raise

    # Requests at the server

    async def _go_on(self, stream: Stream) -> None:
        """Let the server work on it, or end it as the state says."""
        if self.is_closed:
            return stream.end("error", self._lost_because)
        if self._paused:
            return stream.end("abort")
        if self._state is not State.UP:
            return stream.end("error", f"{self}: {self._lost_because}", lost=True)
        with self._watch.reading():
            try:
                async with stream.leg(step=self.model_step):
                    await when_not_busy(lambda: self._read(stream))
            except Refused as error:
                stream.end("error", str(error))
            except (EngineLost, BadAnswer) as error:
                stream.end("error", str(error), lost=True)

    async def _read(self, stream: Stream) -> None:
        """Read one leg."""
        request = stream.rest()
        max_tokens = min(request.max_tokens, self.max_context_tokens - len(request.input_ids))

        def make() -> dict[str, Any]:
            weights = self._weights
            return self._dialect.body(
                request, self._model, max_tokens, adapters=weights.adapters, version=weights.label
            )

        sending = self._images.sending(request.images, make)
        async with sending as (body, taken), contextlib.aclosing(self._link.events(body, taken)) as events:
            async for event in events:
                self._watch.heard()
                piece = self._dialect.read(event, stream.num_in_leg)
                if request.images and not stream.num_in_leg:
                    check_prompt(request, piece.prompt_ids)
                stream.add(piece)
                # The response is complete, by a stop text perhaps, and the server would go on.
                if stream.has_ended and not stream.leg_has_ended:
                    return
        if not stream.end_leg():
            raise ServerFailed(f"{self}: the answer ended early")

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
            async with timeout(_END_LIMIT_S):
                await self._watch.quiet.wait()
        for stream in streams:
            stream.cut_leg()
        await self._watch.quiet.wait()

    # Weights

    async def _load(self, written: WrittenWeights) -> None:
        """Let the server take over weights; requests are interrupted, or held, and go on afterwards."""
        if self._dialect.keeps and not self._paused:
            await self._link.do(self._dialect.hold)
        else:
            await self._stop_all(goes_on=True)
        refused: AdaptersRefusedError | None = None
        try:
            await self._weights.wake(WEIGHTS)
            await self._take(written)
        except AdaptersRefusedError as error:
            # It goes on with what it had.
            refused = error
        if not self._paused:
            await self._link.do(self._dialect.release)
        if refused is not None:
            raise refused

    async def _take(self, written: WrittenWeights) -> None:
        if self._state is not State.LOADING:
            # It is being brought up, which has a limit of its own.
            return await self._weights.take(written)
        # A machine that vanishes closes no connection, and it may have no request that is watched.
        with self._watch.reading():
            await unless(self._not_loading, self._weights.take(written))
        if self._state is not State.LOADING:
            raise EngineLost(f"{self}: {self._lost_because}")

    # The server

    async def _prepare(self) -> None:
        """Load the current weights if the server lacks them, let it make tokens, and check how it does."""
        late = EngineLost(f"{self}: it answers, but was not ready within {self._start_limit_s:.0f} s")
        # A train step may be longer: the wait for it does not count.
        async with time_limit(self._start_limit_s, lambda: late), self._controlling():
            # The pool pauses it again if need be; a stale pause would outlast the load.
            self._paused = False
            await self._weights.wake(WEIGHTS, CACHE)
            written = await self._files.latest()
            if written is not None and not await self._weights.has(written):
                await self._load(written)
            else:
                await self._link.do(self._dialect.release)
            # Others may have started theirs anew, in another way.
            if self._server is None or self._state is State.NEW:
                await self._link.check_context(self._model, self.max_context_tokens)
                await self._link.probe(self._model, self._weights.label)
            self.max_running, self.cache_tokens, self.cache_block = await self._link.capacity()
            self._enter(State.UP)


class State(Enum):
    """The state of an `HTTPEngine`; the docstring of the module draws it."""

    NEW = auto()
    UP = auto()
    LOADING = auto()
    LOST = auto()
    CLOSED = auto()


_SLEEP_LIMIT_S = 120.0
"""The time that a server gets to copy its weights to the CPU and free the rest."""

_END_LIMIT_S = 5.0
"""The time that requests get to end after the server was paused; then their connections are closed."""
