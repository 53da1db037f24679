"""An engine that takes the time a real one would: its requests share a rate that depends on how many run.

::

    request -> waiting -> prefill (a slot, no tokens) -> decoding -> Completion
                  |            |                            |
               abort(), pause(): the tokens whose time has come
               it fails: the same, as of a lost engine; `bring_up` starts it again

All decoding requests get tokens at one speed, so their progress is one number that grows: a request ends when
that number has grown by its length. That is one timer for an engine, however many requests and tokens it has.
Requests wait, run and are aborted as those of `forebay.engines.scripted`, where each token takes a fixed
time: here it takes 1 on a clock that shows this progress.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from forebay.engines.base import Completion, GenerateRequest
from forebay.engines.scripted import CLOCK_ROUNDING, ScriptedEngine, ScriptedRequest

_LONGEST = 1 << 20
"""Tokens: the context of an engine whose limits are those of the run file."""
_LOST = Completion(finish_reason="error", error_msg="the engine failed", lost=True)


class ModeledEngine(ScriptedEngine):
    """Serves requests of known lengths at a known rate, without making their tokens.

    Invariants: at most `slots` requests run; tokens made in any stretch of time are the integral of
    ``rate(number decoding)``, but for the started token of each request that was aborted; a request costs a
    logarithm of those that run, however long it is.

    >>> from forebay.aio import virtual_time
    >>> from forebay.types import SampleParams
    >>> async def example():
    ...     engine = ModeledEngine(rate=lambda running: 10.0 * running, slots=4, length=lambda request: 20)
    ...     ids, params = np.zeros(3, np.int32), SampleParams(max_tokens=99)
    ...     request = GenerateRequest(request_id="a", input_ids=ids, params=params, max_tokens=99, seed=0)
    ...     print(len((await engine.generate(request)).response_ids), asyncio.get_running_loop().time())
    >>> virtual_time.run(example())
    20 2.0

    Args:
        rate: tokens per second with so many requests decoding.
        slots: requests that run together.
        length: tokens that are still to come of a request, before its budget cuts them.
        prefill_s: seconds before the first token, by input tokens.
        lives_s: seconds from each time it comes up until it fails; after the last it fails no more.
        restart_s: seconds that it takes to come up again; at first it comes up at once.
        keeps_tokens: whether the tokens of requests that it loses are known, so that others go on from them.
        sleeps: whether a trainer has its device now and then; see `forebay.runs.turns`.
    """

    def __init__(
        self,
        *,
        rate: Callable[[int], float],
        slots: int,
        length: Callable[[GenerateRequest], int],
        prefill_s: Callable[[int], float] = lambda num_tokens: 0.0,
        lives_s: Iterable[float] = (),
        restart_s: float = 0.0,
        keeps_tokens: bool = True,
        sleeps: bool = False,
    ) -> None:
        super().__init__({}, token_latency_s=1.0, max_running=slots, max_context_tokens=_LONGEST)
        self._slot_rates = [0.0, *(rate(running) / running for running in range(1, slots + 1))]
        self.sleeps = sleeps
        self.num_tokens = 0
        """Tokens of all requests that ended, also of those that were lost."""
        self._lives_s, self._keeps_tokens = iter(lives_s), keeps_tokens
        self._restart_s, self._is_away = restart_s, False
        self._length, self._prefill_s = length, prefill_s
        self._left_slot_s = 0.0
        """Sum of the ends less that of the beginnings of all times in a slot, as far as they are known."""
        self._num_decoding = 0
        self._ends: list[tuple[float, int, ScriptedRequest]] = []
        """A heap: decoding requests by the progress at which they end; those that left stay until popped."""
        self._num_started = 0
        self._progress = 0.0
        """Tokens that a request would have that had been decoding from the start."""
        self._progress_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_setting_timer = False

    def slot_s(self) -> float:
        """Seconds that slots were taken until now, all slots together."""
        return self._left_slot_s + len(self._running) * asyncio.get_running_loop().time()

    async def sleep(self, *, keep_weights: bool) -> None:
        """Let the trainer have the device until `resume`; the requests go elsewhere, or wait."""
        await self.pause()

    # -- Failures

    async def bring_up(self) -> None:
        """Come up, at first or after a failure."""
        await asyncio.sleep(self._restart_s * self._is_away)
        self._is_away = False
        if (life_s := next(self._lives_s, None)) is not None:
            asyncio.get_running_loop().call_later(life_s, self._fail)

    def _fail(self) -> None:
        self._is_away = True
        for entry in (*self._waiting, *self._running):
            self._end(entry, aborted=True)

    async def generate(self, request: GenerateRequest) -> Completion:
        """As the base; a request that comes after a failure is lost, too."""
        return _LOST if self._is_away else await super().generate(request)

    # -- Slots

    def _start(self, entry: ScriptedRequest) -> None:
        loop, request = asyncio.get_running_loop(), entry.request
        self._start_time_limit(entry)
        length, budget = max(1, self._length(request)), request.max_tokens
        # One zero that counts as so many: no tokens take memory before the end.
        ids = np.broadcast_to(np.int32(0), min(length, budget))
        entry.answer = Completion(response_ids=ids, finish_reason="stop" if length <= budget else "length")
        self._left_slot_s -= loop.time()
        if seconds := self._prefill_s(len(request.input_ids)):
            entry.timers.append(loop.call_later(seconds, self._decode, entry))
        else:
            self._decode(entry)

    def _decode(self, entry: ScriptedRequest) -> None:
        entry.first_token = self._clock()
        self._num_decoding += 1
        self._num_started += 1
        end = entry.first_token + len(entry.answer.response_ids)
        heapq.heappush(self._ends, (end, self._num_started, entry))
        self._set_timer()

    def _completion(self, entry: ScriptedRequest, count: int, aborted: bool) -> Completion:
        self.num_tokens += count
        if not self._is_away:
            return super()._completion(entry, count, aborted)
        known = super()._completion(entry, count if self._keeps_tokens else 0, aborted)
        return replace(known, finish_reason="error", error_msg=_LOST.error_msg, lost=True)

    def _leave(self, entry: ScriptedRequest) -> None:
        if entry in self._running:
            self._advance()
            self._num_decoding -= entry.first_token < math.inf
            self._left_slot_s += self._progress_at_s
            self._set_timer()
        super()._leave(entry)

    # -- Progress

    def _clock(self) -> float:
        self._advance()
        return self._progress

    def _advance(self) -> None:
        """Bring the progress up to now."""
        now_s = asyncio.get_running_loop().time()
        self._progress += (now_s - self._progress_at_s) * self._slot_rates[self._num_decoding]
        self._progress_at_s = now_s

    def _set_timer(self) -> None:
        """Set the timer of the next end, after all else of this instant: many may start or end in one."""
        if not self._is_setting_timer:
            self._is_setting_timer = True
            asyncio.get_running_loop().call_soon(self._set_timer_now)

    def _set_timer_now(self) -> None:
        self._is_setting_timer = False
        self._advance()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        if self._ends:
            seconds = (self._ends[0][0] - self._progress) / self._slot_rates[self._num_decoding]
            self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._end_due)

    def _end_due(self) -> None:
        self._timer = None
        self._advance()
        # The timer was set for the first: rounding must not make it come again for nothing.
        due = max(self._progress, self._ends[0][0]) + CLOCK_ROUNDING
        while self._ends and self._ends[0][0] <= due:
            _, _, entry = heapq.heappop(self._ends)
            if entry in self._running:
                self._end(entry)
        self._set_timer()
