"""An engine that takes the time a real one would: its requests share a rate that depends on how many run.

::

    request -> waiting -> prefill (a slot, no tokens) -> decoding -> Completion
                  |            |                            |
               abort(), pause(): the tokens whose time has come

All decoding requests get tokens at one speed, so their progress is one number that grows: a request ends when
that number has grown by its length. That is one timer for an engine, however many requests and tokens it has.
Requests wait, run and are aborted as those of `forebay.engines.scripted`, where each token takes a fixed
time; tokens and their times are its own.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forebay.engines.base import Completion, GenerateRequest
from forebay.engines.scripted import SCRIPTED_LOGPROB, ScriptedEngine, ScriptedRequest
from forebay.types import IntArray

if TYPE_CHECKING:
    import torch

_ROUNDING = 1e-6
"""In tokens: sums of seconds times rates may come out this much short of a token."""

_LONGEST = 1 << 20
"""Tokens: the context of an engine whose limits are those of the run file."""


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
    """

    def __init__(
        self,
        *,
        rate: Callable[[int], float],
        slots: int,
        length: Callable[[GenerateRequest], int],
        prefill_s: Callable[[int], float] = lambda num_tokens: 0.0,
    ) -> None:
        super().__init__({}, max_running=slots, max_context_tokens=_LONGEST)
        self._slot_rates = [0.0, *(rate(running) / running for running in range(1, slots + 1))]
        self.num_tokens = 0
        """Tokens of all requests that ended."""
        self._length, self._prefill_s = length, prefill_s
        self._work: dict[ScriptedRequest, _Work] = {}
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
        self._loads: list[tuple[float, int]] = [(-math.inf, 0)]
        """From which progress on, which model step."""

    def slot_s(self) -> float:
        """Seconds that slots were taken until now, all slots together."""
        return self._left_slot_s + len(self._work) * asyncio.get_running_loop().time()

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None:
        """Label the tokens from now on with `model_step`; there are no weights."""
        self._advance()
        self.model_step = model_step
        self._loads.append((self._progress, model_step))

    # -- Slots

    def _start(self, entry: ScriptedRequest) -> None:
        loop, request = asyncio.get_running_loop(), entry.request
        self._start_time_limit(entry)
        self._work[entry] = _Work(max(1, self._length(request)))
        self._left_slot_s -= loop.time()
        if seconds := self._prefill_s(len(request.input_ids)):
            entry.timers.append(loop.call_later(seconds, self._decode, entry))
        else:
            self._decode(entry)

    def _decode(self, entry: ScriptedRequest) -> None:
        self._advance()
        self._num_decoding += 1
        self._num_started += 1
        work = self._work[entry]
        work.first_progress = self._progress
        end = self._progress + min(work.length, entry.request.max_tokens)
        heapq.heappush(self._ends, (end, self._num_started, entry))
        self._set_timer()

    def _completion(self, entry: ScriptedRequest, count: int, aborted: bool) -> Completion:
        work, budget = self._work.get(entry), entry.request.max_tokens
        if work is None:
            return Completion(finish_reason="abort")
        self.num_tokens += count
        return Completion(
            response_ids=np.zeros(count, np.int32),
            logprobs=np.full(count, SCRIPTED_LOGPROB, np.float32),
            model_steps=self._labels(entry, count),
            finish_reason="abort" if aborted else "stop" if work.length <= budget else "length",
        )

    def _leave(self, entry: ScriptedRequest) -> None:
        work = self._work.pop(entry, None)
        if work is not None:
            self._advance()
            self._num_decoding -= work.first_progress < math.inf
            self._left_slot_s += self._progress_at_s
            self._set_timer()
        super()._leave(entry)

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
        while self._ends and self._ends[0][2] not in self._work:
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
            if entry in self._work:
                self._end(entry)
        self._set_timer()

    def _num_whole(self, entry: ScriptedRequest) -> int:
        return min(self._work[entry].length, entry.request.max_tokens)

    def _num_made(self, entry: ScriptedRequest) -> int:
        self._advance()
        made = max(0.0, self._progress - self._work[entry].first_progress)
        return min(int(made + _ROUNDING), self._num_whole(entry))

    def _labels(self, entry: ScriptedRequest, count: int) -> IntArray:
        """The step whose weights were loaded when each token was made."""
        first_progress = self._work[entry].first_progress
        if count == 0 or self._loads[-1][0] <= first_progress:
            return np.full(count, self._loads[-1][1], np.int32)
        made = first_progress + np.arange(1, count + 1)
        starts, steps = zip(*self._loads, strict=True)
        labels: IntArray = np.asarray(steps, np.int32)[np.searchsorted(starts, made, side="right") - 1]
        return labels


@dataclass
class _Work:
    """A request in a slot."""

    length: int
    first_progress: float = math.inf
    """Where the engine's progress was when it began to decode."""
