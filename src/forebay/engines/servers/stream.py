"""A request while a server works on it: its tokens so far, and how it ends.

::

    leg(step): send `rest()` --> add(piece), add(piece), ...      the next leg, if it was interrupted
    cut(reason) from outside: the reading ends, what was read stays          --> completion()

A leg is one request to the server. An update of the weights interrupts what runs, and a new leg goes on from
the tokens: so all tokens of a leg are of the same weights, whenever their pieces arrive. A server may also
hold its requests while weights change. Then the end of the leg says which version made which token; until it
is there, and where it never comes (a server that dies, a cut), every token counts as of the oldest weights
that the leg may have met.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.aio.time_limits import timeout
from forebay.engines.base import Completion, GenerateRequest, joined_experts
from forebay.engines.local.stopping import StopTexts


class Stream:
    """One request at a server.

    Invariants: tokens, log probabilities and labels are equally many; the end that the server reports wins
    over a cut, so that nothing is continued that has ended.

    ::

        stream = Stream(request, None, {})
        while not stream.has_ended:
            async with stream.leg(step=engine.model_step):
                async for event in link.events(body_of(stream.rest())):
                    stream.add(dialect.read(event, stream.num_in_leg))
        stream.completion().model_steps  # array([3, 3], dtype=int32)
    """

    def __init__(self, request: GenerateRequest, stop_texts: StopTexts | None, steps: Mapping[str, int]) -> None:
        """`steps` are those of the versions of weights that the server may name."""
        self.request = request
        self._steps_of = steps
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._steps: list[int] = []
        self._experts: NDArray[Any] | None = None
        self._stop_texts = stop_texts
        self._leg_start = 0
        self._step = 0
        self._reading: asyncio.Timeout | None = None
        self._stopping = False
        self._goes_on = False
        self.leg_has_ended = False
        """The server has said how."""
        self._timer: asyncio.TimerHandle | None = None
        self._end: Completion | None = None
        """How it ended; the tokens are added when it is asked for."""

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing more to make."""
        return self._end is not None

    @property
    def num_in_leg(self) -> int:
        """Tokens of the current leg so far."""
        return len(self.ids) - self._leg_start

    def rest(self) -> GenerateRequest:
        """The request that makes the tokens which are still missing."""
        return self.request.after(self.ids)

    @contextlib.asynccontextmanager
    async def leg(self, *, step: int) -> AsyncIterator[None]:
        """Read one answer in here, made by the weights of `step`; a cut ends the reading."""
        self._leg_start, self._step = len(self.ids), step
        self._stopping = self._goes_on = self.leg_has_ended = False
        async with self._until_cut():
            yield

    async def until(self, event: asyncio.Event) -> None:
        """Wait for `event` or for a cut, whichever comes first."""
        async with self._until_cut():
            await event.wait()

    @contextlib.asynccontextmanager
    async def _until_cut(self) -> AsyncIterator[None]:
        self._reading = timeout(None)
        try:
            # The limit is brought forward to now by a cut, which is how the reading ends without an error.
            with contextlib.suppress(TimeoutError):
                async with self._reading:
                    yield
        finally:
            self._reading = None

    def add(self, piece: "Piece") -> None:
        """Take in what the server sent."""
        if piece.ids and not self.ids and (limit_s := self.request.time_limit_s) is not None:
            # From the first token on: before that it may have waited for its turn.
            why = f"aborted after its time limit of {limit_s} s"
            self._timer = asyncio.get_running_loop().call_later(limit_s, self.cut, "abort", why)
        self.ids += piece.ids
        self._logprobs += piece.logprobs
        self._steps += [self._step] * len(piece.ids)
        self._experts = joined_experts(self._experts, piece.routed_experts)
        for version, begin, end in piece.versions:
            begin, end = self._leg_start + begin, min(self._leg_start + end, len(self.ids))
            self._steps[begin:end] = [self._steps_of.get(version, self._step)] * max(0, end - begin)
        if piece.finish_reason is not None:
            self.leg_has_ended = True
            if not (self._goes_on and piece.finish_reason == "abort"):
                # The server's word counts more than a cut from here that it did not know of.
                self._end = Completion(finish_reason=piece.finish_reason)
        if self._completes_stop_text(len(piece.ids)):
            self._end = Completion(finish_reason="stop")

    def end(self, reason: str, why: str | None = None, *, lost: bool = False) -> None:
        """Say how it ended, unless that is known already."""
        self._end = self._end or Completion(finish_reason=reason, error_msg=why, lost=lost)

    def cut(self, reason: str, why: str | None = None, *, lost: bool = False) -> None:
        """End it from outside."""
        self.end(reason, why, lost=lost)
        self._stop_reading()

    def stop_leg(self, *, goes_on: bool) -> None:
        """The server will abort this leg, which is the end, or another leg goes on."""
        self._stopping, self._goes_on = True, goes_on

    def end_leg(self) -> bool:
        """The answer has ended; whether it should have: it said how, or it was to be aborted.

        A server may say nothing of a request that it aborts before the first token.
        """
        if self._stopping and not self.leg_has_ended:
            self.add(Piece(finish_reason="abort"))
        return self.leg_has_ended

    def cut_leg(self) -> None:
        """End the leg from outside, after `stop_leg`."""
        if not self._goes_on:
            self.end("abort")
        self._stop_reading()

    def close(self) -> None:
        """Forget about the time limit."""
        if self._timer is not None:
            self._timer.cancel()

    def completion(self) -> Completion:
        """Its tokens, and how it ended."""
        assert self._end is not None, "a stream was left without an end"
        return replace(
            self._end,
            response_ids=np.array(self.ids, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            model_steps=np.array(self._steps, np.int32),
            routed_experts=self._experts,
        )

    def _stop_reading(self) -> None:
        # A second cut may come before the first has taken effect.
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(asyncio.get_running_loop().time())

    def _completes_stop_text(self, num_new: int) -> bool:
        """Whether the response ends in a stop text that began before this leg, which no server can know.

        Tokens beyond it are dropped.
        """
        stop, texts, request = self.request.params.stop, self._stop_texts, self.request
        if not (stop and texts and request.num_earlier + self._leg_start):
            return False
        count = texts.num_tail_tokens(stop)
        before = request.input_ids[-request.num_earlier :].tolist() if request.num_earlier else []
        for end in range(len(self.ids) - num_new + 1, min(len(self.ids), self._leg_start + count) + 1):
            if texts.completed(stop, (before + self.ids[:end])[-count:]):
                del self.ids[end:], self._logprobs[end:], self._steps[end:]
                return True
        return False


@dataclass(frozen=True, kw_only=True)
class Piece:
    """New tokens of one event of a stream."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_ids: list[int] | None = None
    """With the begin of an answer to a prompt with images: what the server made of it."""
    routed_experts: NDArray[Any] | None = None
    """With the end of an answer: those of all its tokens, from the first of the prompt on."""
    versions: tuple[tuple[str, int, int], ...] = ()
    """With the end of an answer that was held while weights changed: the version that made its tokens from
    the first number up to the second, for each."""


class BadAnswer(ValueError):
    """A server sent something else than its interface says."""


class ErrorEvent(BadAnswer):
    """A server sent an error in the middle of a stream."""
