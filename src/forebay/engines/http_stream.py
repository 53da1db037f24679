"""A request while a server works on it: its tokens so far, and how it ends.

::

    add(piece), add(piece), ... --> completion()
    cut(reason) from outside: the reading ends, what was read stays

Labels. A piece carries the step that was current when the piece *before* it was read (or the request was
sent). Of a rollout that runs across an update of the weights, tokens that may still be the old weights' so
carry the old step: a label is never newer than its token, and at most one piece older.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from forebay.engines.base import Completion, GenerateRequest
from forebay.engines.http_dialects import Piece
from forebay.engines.stopping import StopTexts


class Stream:
    """One request at a server.

    Invariants: tokens, log probabilities and labels are equally many; the end that the server reports wins
    over a cut, so that nothing is continued that has ended.

    >>> stream = Stream(request, step=3)                                            # doctest: +SKIP
    >>> async with stream.reading():                                                # doctest: +SKIP
    ...     async for event in link.events(body):
    ...         stream.add(dialect.read(event, len(stream.ids)), step=engine.model_step)
    >>> stream.completion().model_steps                                             # doctest: +SKIP
    array([3, 3], dtype=int32)
    """

    def __init__(self, request: GenerateRequest, *, step: int, stop_texts: StopTexts | None = None) -> None:
        self.request = request
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._steps: list[int] = []
        self._step = step
        self._stop_texts = stop_texts
        self._cut = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._end: tuple[str, str | None, bool] | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to read."""
        return self._is_over

    def add(self, piece: Piece, *, step: int) -> None:
        """Take in what the server sent; `step` is the model step current now."""
        if piece.ids and not self.ids:
            self._start_time_limit()
        self.ids += piece.ids
        self._logprobs += piece.logprobs
        self._steps += [self._step] * len(piece.ids)
        self._step = step
        if piece.finish_reason is not None:
            self._end = (piece.finish_reason, None, False)
        if self._completes_stop_text(len(piece.ids)):
            self._end, self._is_over = ("stop", None, False), True

    def end(self, reason: str, why: str | None = None, *, lost: bool = False) -> None:
        """Say how it ended, unless that is known already."""
        self._end = self._end or (reason, why, lost)

    def cut(self, reason: str, why: str | None = None, *, lost: bool = False) -> None:
        """End the reading from outside."""
        self.end(reason, why, lost=lost)
        self._cut.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """What is done in here ends when the stream is cut."""
        try:
            async with self._cut:
                yield
        except TimeoutError:
            if not self._cut.expired():
                raise
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def completion(self) -> Completion:
        """What has come of it."""
        assert self._end is not None, "a stream was left without an end"
        reason, why, lost = self._end
        return Completion(
            response_ids=np.array(self.ids, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            model_steps=np.array(self._steps, np.int32),
            finish_reason=reason,
            error_msg=why,
            lost=lost,
        )

    def _start_time_limit(self) -> None:
        """From the first token on: before that it may have waited for its turn."""
        if (limit_s := self.request.time_limit_s) is not None:
            why = f"aborted after its time limit of {limit_s} s"
            self._timer = asyncio.get_running_loop().call_later(limit_s, self.cut, "abort", why)

    def _completes_stop_text(self, num_new: int) -> bool:
        """Whether the response ends in a stop text that began before this call, which no server can know.

        What was made beyond it is dropped.
        """
        stop, earlier, texts = self.request.params.stop, self.request.num_earlier, self._stop_texts
        if not (stop and earlier and texts):
            return False
        count = texts.num_tail_tokens(stop)
        before = self.request.input_ids[-min(count, earlier) :].tolist()
        for end in range(len(self.ids) - num_new + 1, min(len(self.ids), count) + 1):
            if texts.completed(stop, (before + self.ids[:end])[-count:]):
                del self.ids[end:], self._logprobs[end:], self._steps[end:]
                return True
        return False
