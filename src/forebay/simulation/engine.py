"""An engine that takes the time a real one would: its requests share a rate that depends on how many run.

::

    request -> waiting -> prefill (a slot, no tokens) -> decoding -> Completion
                  |            |                            |
               abort(), pause(): the tokens whose time has come

All decoding requests get tokens at one speed, so their progress is one number that grows: a request ends when
that number has grown by its length. That is one timer for an engine, however many requests and tokens it has.
It makes no tokens one could read; `forebay.engines.scripted` does, at a fixed time for each.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forebay.engines.base import Completion, EngineHealth, GenerateRequest
from forebay.types import FloatArray, IntArray

if TYPE_CHECKING:
    import torch

_ROUNDING = 1e-6
"""In tokens: sums of seconds times rates may come out this much short of a token."""

_LONGEST = 1 << 20
"""Tokens: the context of an engine whose limits are those of the run file."""


class Segment(NamedTuple):
    """One request's time in a slot."""

    engine: int
    slot: int
    start_s: float
    end_s: float
    num_tokens: int
    model_step: int
    """Of the weights when it began."""
    is_aborted: bool


@dataclass(eq=False)
class _Entry:
    request: GenerateRequest
    ended: asyncio.Future[Completion]
    length: int = 0
    slot: int = -1
    start_s: float = math.nan
    first_step: int = 0
    first_progress: float = math.inf
    """Where the engine's progress was when it began to decode."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class ModeledEngine:
    """Serves requests of known lengths at a known rate, without making their tokens.

    Invariants: at most `slots` requests run; tokens made in any stretch of time are the integral of
    ``rate(number decoding)``, but for the started token of each request that was aborted; a request costs a
    logarithm of those that run, however long it is.

    >>> engine = ModeledEngine(rate=lambda running: 10.0 * running, slots=4, length=lambda request: 20)
    >>> completion = await engine.generate(request)                                 # two seconds later
    >>> len(completion.response_ids), completion.finish_reason
    (20, 'stop')

    Args:
        rate: tokens per second with so many requests decoding.
        slots: requests that run together.
        length: tokens that are still to come of a request, before its budget cuts them.
        prefill_s: seconds before the first token, by input tokens.
        number: of the engine, for the record.
    """

    def __init__(
        self,
        *,
        rate: Callable[[int], float],
        slots: int,
        length: Callable[[GenerateRequest], int],
        prefill_s: Callable[[int], float] = lambda num_tokens: 0.0,
        number: int = 0,
    ) -> None:
        self._slot_rates = [0.0, *(rate(running) / running for running in range(1, slots + 1))]
        self._length = length
        self._prefill_s = prefill_s
        self._number = number
        self._waiting: dict[_Entry, None] = {}
        self._running: dict[_Entry, None] = {}
        self._free_slots = list(range(slots))
        self._num_decoding = 0
        self._ends: list[tuple[float, int, _Entry]] = []
        """A heap: decoding requests by the progress at which they end; those that left stay until popped."""
        self._num_started = 0
        self._progress = 0.0
        """Tokens that a request would have that had been decoding from the start."""
        self._progress_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_setting_timer = False
        self._loads: list[tuple[float, int]] = [(-math.inf, 0)]
        """From which progress on, which model step."""
        self._is_paused = False
        self._is_closed = False
        self.segments: list[Segment] = []
        """Every request's time in its slot, in the order of their ends."""

    @property
    def model_step(self) -> int:
        """The step of the latest weights."""
        return self._loads[-1][1]

    @property
    def max_context_tokens(self) -> int:
        """The run file's limits are what counts."""
        return _LONGEST

    async def generate(self, request: GenerateRequest) -> Completion:
        """Take the time that the request takes."""
        if self._is_closed:
            return Completion(finish_reason="error", error_msg="the engine is closed")
        if self._is_paused:
            return Completion(finish_reason="abort")
        entry = _Entry(request, asyncio.get_running_loop().create_future())
        self._waiting[entry] = None
        self._fill_slots()
        try:
            return await entry.ended
        finally:
            # Only a cancelled caller finds it still here.
            self._leave(entry, 0, is_aborted=True)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``"abort"``; unknown ids are ignored."""
        wanted = set(request_ids)
        self._abort([e for e in (*self._waiting, *self._running) if e.request.request_id in wanted])

    async def pause(self) -> None:
        """End every request with ``"abort"`` and take no new one until `resume`."""
        self._is_paused = True
        self._abort([*self._waiting, *self._running])

    async def resume(self) -> None:
        """Take requests again."""
        self._is_paused = False

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request has by now; else 0."""
        self._advance()
        return sum(self._num_made(entry) for entry in self._running if entry.request.request_id == request_id)

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None:
        """Label the tokens from now on with `model_step`; there are no weights."""
        self._advance()
        self._loads.append((self._progress, model_step))

    async def health(self) -> EngineHealth:
        """Whether it can serve, and how busy it is."""
        return EngineHealth(
            ok=not self._is_closed,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            model_step=self.model_step,
        )

    async def close(self) -> None:
        """End everything; `generate` afterwards returns an error completion."""
        self._is_closed = True
        await self.pause()

    # -- Slots

    def _fill_slots(self) -> None:
        while self._waiting and self._free_slots:
            entry = next(iter(self._waiting))
            del self._waiting[entry]
            self._start(entry)

    def _start(self, entry: _Entry) -> None:
        loop, request = asyncio.get_running_loop(), entry.request
        self._running[entry] = None
        entry.slot = heapq.heappop(self._free_slots)
        entry.start_s, entry.first_step = loop.time(), self.model_step
        entry.length = max(1, self._length(request))
        if request.time_limit_s is not None:
            entry.timers.append(loop.call_later(request.time_limit_s, self._abort, [entry]))
        if seconds := self._prefill_s(len(request.input_ids)):
            entry.timers.append(loop.call_later(seconds, self._decode, entry))
        else:
            self._decode(entry)

    def _decode(self, entry: _Entry) -> None:
        self._advance()
        self._num_decoding += 1
        self._num_started += 1
        entry.first_progress = self._progress
        end = self._progress + min(entry.length, entry.request.max_tokens)
        heapq.heappush(self._ends, (end, self._num_started, entry))
        self._set_timer()

    def _abort(self, entries: Sequence[_Entry]) -> None:
        self._advance()
        for entry in entries:
            self._end(entry, self._num_made(entry) if entry in self._running else 0, "abort")
        self._set_timer()

    def _end(self, entry: _Entry, num_tokens: int, reason: str) -> None:
        self._leave(entry, num_tokens, is_aborted=reason == "abort")
        # A caller that was cancelled this very turn has cancelled the future with it.
        if not entry.ended.done():
            entry.ended.set_result(self._completion(entry, num_tokens, reason))

    def _leave(self, entry: _Entry, num_tokens: int, *, is_aborted: bool) -> None:
        self._waiting.pop(entry, None)
        if entry not in self._running:
            return
        self._advance()
        del self._running[entry]
        for timer in entry.timers:
            timer.cancel()
        self._num_decoding -= entry.first_progress < math.inf
        heapq.heappush(self._free_slots, entry.slot)
        self.segments.append(
            Segment(
                self._number,
                entry.slot,
                entry.start_s,
                self._progress_at_s,
                num_tokens,
                entry.first_step,
                is_aborted,
            )
        )
        if not self._is_paused:
            self._fill_slots()
        self._set_timer()

    # -- Progress

    def _advance(self) -> None:
        """Bring the progress up to now."""
        now_s = asyncio.get_running_loop().time()
        self._progress += (now_s - self._progress_at_s) * self._slot_rates[self._num_decoding]
        self._progress_at_s = now_s

    def _set_timer(self) -> None:
        """For the next end, once everything else of this instant is done: many may start or end in one."""
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
        due = max(self._progress, self._ends[0][0]) + _ROUNDING
        while self._ends and self._ends[0][0] <= due:
            _, _, entry = heapq.heappop(self._ends)
            if entry in self._running:
                budget = entry.request.max_tokens
                reason = "stop" if entry.length <= budget else "length"
                self._end(entry, min(entry.length, budget), reason)
        self._set_timer()

    def _num_made(self, entry: _Entry) -> int:
        made = max(0.0, self._progress - entry.first_progress)
        return min(int(made + _ROUNDING), entry.length, entry.request.max_tokens)

    def _completion(self, entry: _Entry, count: int, reason: str) -> Completion:
        return Completion(
            response_ids=_constant(0, count),
            logprobs=_LOGPROBS[:count] if count <= len(_LOGPROBS) else np.full(count, -1.0, np.float32),
            model_steps=self._labels(entry, count),
            finish_reason=reason,
        )

    def _labels(self, entry: _Entry, count: int) -> IntArray:
        """The step whose weights were loaded when each token was made."""
        if count == 0 or self._loads[-1][0] <= entry.first_progress:
            return _constant(self._loads[-1][1], count)
        made = entry.first_progress + np.arange(1, count + 1)
        starts, steps = zip(*self._loads, strict=True)
        labels: IntArray = np.asarray(steps, np.int32)[np.searchsorted(starts, made, side="right") - 1]
        return labels


_LOGPROBS: FloatArray = np.full(1 << 16, -1.0, np.float32)


def _constant(value: int, count: int) -> IntArray:
    return np.full(count, value, np.int32)
