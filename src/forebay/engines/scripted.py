"""An engine that answers from a script, for tests and simulations: no model, no threads.

::

    request -> waiting -> running: script(request) -> timer on the event loop's clock -> Completion
                  |          |
               abort(), pause(): the tokens whose time has come

Time is the loop's, so it runs under a virtual clock; a request costs one timer however many tokens it makes.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import numpy as np

from forebay.engines.base import Completion, EngineHealth, GenerateRequest
from forebay.models.starting_weights import Weights
from forebay.types import IntArray

Answer = Sequence[int] | Completion | Exception
"""Token ids; or a whole completion; or an error, which makes an error completion."""

Script = Callable[[GenerateRequest], Answer] | Mapping[tuple[int, ...], Answer]
"""A function of the request; or answers by prompt ids, of which an input that goes on gets the rest."""

SCRIPTED_LOGPROB = -1.0
"""The log probability of every token for which the script gives none."""

CLOCK_ROUNDING = 1e-6
"""The rounding, in tokens: sums of latencies, or of seconds times rates, may be this much short of one."""


@dataclass(eq=False)
class ScriptedRequest:
    """A request that waits or runs."""

    request: GenerateRequest
    ended: asyncio.Future[Completion]
    answer: Completion = field(default_factory=lambda: Completion(finish_reason="abort"))
    first_token: float = math.inf
    """When the first token starts to be made, on the engine's clock."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class ScriptedEngine:
    """Answers requests from a script, with latencies, limited places, pauses, weight steps and faults.

    A script returns token ids (cut at the request's budget: ``length``, or after a stop id: ``stop``), a
    `Completion`, or an exception; what it raises becomes an error completion too. A latency of infinity
    hangs until aborted. Everything it does is deterministic on a deterministic clock.

    >>> from forebay.types import SampleParams
    >>> engine = ScriptedEngine({(1, 2): [7, 8, 9]}, token_latency_s=0.01)
    >>> request = GenerateRequest(request_id="a", input_ids=np.array([1, 2], np.int32),
    ...                           params=SampleParams(max_tokens=2), max_tokens=2, seed=0)
    >>> asyncio.run(engine.generate(request)).response_ids.tolist()
    [7, 8]
    """

    script: Script
    _: KW_ONLY
    request_latency_s: float | Callable[[GenerateRequest], float] = 0.0
    """Seconds before a request's first token."""
    token_latency_s: float = 0.0
    """Seconds for each token."""
    max_running: int | None = None
    """The requests that run at once; None: all."""
    max_context_tokens: int = 1_000_000
    """The most tokens, prompt and response together, one request may reach."""
    eos_token_ids: Collection[int] = ()
    model_step: int = 0
    """The step of the latest weights."""

    def __post_init__(self) -> None:
        self._loads = [(-math.inf, self.model_step)]
        """The moments, on the engine's clock, from which each model step was loaded."""
        # Dicts are the ordered sets of Python: first in, first out.
        self._waiting: dict[ScriptedRequest, None] = {}
        self._running: dict[ScriptedRequest, None] = {}
        self._paused = False
        self._closed = False
        self.requests: list[GenerateRequest] = []
        """Every request that began to run, in order."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Answer from the script.

        Raises:
            ValueError: the request is empty, or at or over the context.
        """
        request.check(self.max_context_tokens)
        if self._closed:
            return Completion(finish_reason="error", error_msg="the engine is closed")
        if self._paused:
            return Completion(finish_reason="abort")
        entry = ScriptedRequest(request, asyncio.get_running_loop().create_future())
        self._waiting[entry] = None
        self._fill_places()
        try:
            return await entry.ended
        finally:
            # Only a cancelled caller finds it still here.
            self._leave(entry)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``"abort"``; unknown ids are ignored."""
        wanted = set(request_ids)
        for entry in (*self._waiting, *self._running):
            if entry.request.request_id in wanted:
                self._end(entry, aborted=True)

    async def pause(self) -> None:
        """End every request with ``"abort"`` and take no new one until `resume`."""
        self._paused = True
        for entry in (*self._waiting, *self._running):
            self._end(entry, aborted=True)

    async def resume(self) -> None:
        """Take requests again."""
        self._paused = False

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request has by now; else 0."""
        return sum(self._num_made(entry) for entry in self._running if entry.request.request_id == request_id)

    async def load_weights(self, weights: Weights, model_step: int) -> None:
        """Label the tokens from now on with `model_step`; the weights are read and forgotten."""
        for _ in weights:
            pass
        self.model_step = model_step
        self._loads.append((self._clock(), model_step))

    async def health(self) -> EngineHealth:
        """Whether it can serve, and how busy it is."""
        return EngineHealth(
            ok=not self._closed,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            model_step=self.model_step,
        )

    async def close(self) -> None:
        """End everything; `generate` afterwards returns an error completion."""
        self._closed = True
        await self.pause()

    def _fill_places(self) -> None:
        while self._waiting and len(self._running) < (self.max_running or math.inf):
            entry = next(iter(self._waiting))
            del self._waiting[entry]
            self._running[entry] = None
            self._start(entry)

    # Tokens and their times: `forebay.simulation.engine` overrides when they begin, and the clock.

    def _clock(self) -> float:
        """The time that the latencies of tokens are in."""
        return asyncio.get_running_loop().time()

    def _start(self, entry: ScriptedRequest) -> None:
        self.requests.append(entry.request)
        loop = asyncio.get_running_loop()
        latency = self.request_latency_s
        entry.answer = self._answer(entry.request)
        entry.first_token = loop.time() + (latency(entry.request) if callable(latency) else latency)
        end_s = entry.first_token + len(entry.answer.response_ids) * self.token_latency_s
        if end_s < math.inf:
            entry.timers.append(loop.call_at(end_s, self._end, entry))
        self._start_time_limit(entry)

    def _start_time_limit(self, entry: ScriptedRequest) -> None:
        if (limit_s := entry.request.time_limit_s) is not None:
            why = f"aborted after its time limit of {limit_s} s"
            timer = asyncio.get_running_loop().call_later(limit_s, self._end, entry, True, why)
            entry.timers.append(timer)

    def _answer(self, request: GenerateRequest) -> Completion:
        try:
            answer = self.script(request) if callable(self.script) else _rest(self.script, request)
        # A script may raise whatever an engine might: it fails this request only.
        except Exception as error:
            answer = error
        if isinstance(answer, Exception):
            return Completion(finish_reason="error", error_msg=f"{type(answer).__name__}: {answer}")
        if isinstance(answer, Completion):
            return answer
        ids = np.asarray(answer, np.int32).reshape(-1)
        stops = np.isin(ids, [*self.eos_token_ids, *request.params.stop_token_ids])
        end = int(stops.argmax()) + 1 if stops.any() else len(ids)
        limit = min(request.max_tokens, self.max_context_tokens - len(request.input_ids))
        return Completion(response_ids=ids[: min(end, limit)], finish_reason="stop" if end <= limit else "length")

    def _end(self, entry: ScriptedRequest, aborted: bool = False, why: str | None = None) -> None:
        """Resolve the request with what it has by now."""
        count = self._num_made(entry) if aborted else len(entry.answer.response_ids)
        completion = self._completion(entry, count, aborted)
        if why is not None:
            completion = replace(completion, error_msg=why)
        self._leave(entry)
        # A caller that was cancelled this very turn has cancelled the future with it.
        if not entry.ended.done():
            entry.ended.set_result(completion)

    def _leave(self, entry: ScriptedRequest) -> None:
        for timer in entry.timers:
            timer.cancel()
        self._waiting.pop(entry, None)
        if entry in self._running:
            del self._running[entry]
            self._fill_places()

    def _num_made(self, entry: ScriptedRequest) -> int:
        elapsed = self._clock() - entry.first_token
        # Tokens that take no time all come with the request's end: one that is aborted has none.
        if elapsed < 0 or not self.token_latency_s:
            return 0
        made = int(elapsed / self.token_latency_s + CLOCK_ROUNDING)
        return min(made, len(entry.answer.response_ids))

    def _completion(self, entry: ScriptedRequest, count: int, aborted: bool) -> Completion:
        answer = entry.answer
        logprobs, steps = answer.logprobs, answer.model_steps
        return replace(
            answer,
            response_ids=answer.response_ids[:count].copy(),
            logprobs=logprobs[:count] if len(logprobs) else np.full(count, SCRIPTED_LOGPROB, np.float32),
            model_steps=steps[:count] if len(steps) else self._labels(entry, count),
            finish_reason="abort" if aborted else answer.finish_reason,
        )

    def _labels(self, entry: ScriptedRequest, count: int) -> IntArray:
        """The step whose weights were loaded when each token was made."""
        # No weights came since it began: all tokens have one label.
        if count == 0 or self._loads[-1][0] <= entry.first_token:
            return np.full(count, self._loads[-1][1], np.int32)
        made = entry.first_token + np.arange(1, count + 1) * self.token_latency_s
        times, steps = zip(*self._loads, strict=True)
        labels: IntArray = np.asarray(steps, np.int32)[np.searchsorted(times, made, side="right") - 1]
        return labels


def _rest(script: Mapping[tuple[int, ...], Answer], request: GenerateRequest) -> Answer:
    """The answer of the longest prompt that begins the input, less what the input has of it already."""
    ids = tuple(request.input_ids.tolist())
    for length in range(len(ids), 0, -1):
        if ids[:length] in script:
            answer = script[ids[:length]]
            return answer[len(ids) - length :] if isinstance(answer, Sequence) else answer
    raise KeyError(f"the script has no answer for {ids}")
