"""From a rollout to an engine and back: remaining budget, seed, choice of engine, what happened.

::

    generate_sample(state) -> place (concurrency) -> engine -> state.append(ids, logprobs, steps)
        tokens, budget left, seed                              finish_reason, status, error_msg

It does not chat, decode or judge: tokens in, tokens out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from forebay.activity import Activity
from forebay.engines.base import Completion, Engine, EngineHealth, GenerateRequest
from forebay.stalls import ANSWER_LIMIT_S, StallError, answered
from forebay.types import (
    RolloutState,
    SampleParams,
    fill_token_fields,
    status_from_finish_reason,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOAD_LIMIT_S = 600.0
"""For taking over weights and for freeing them: minutes are usual where a model is large."""

_MAX_SESSIONS = 65_536
"""Sessions whose engine is remembered; more than run at once, so only finished ones are forgotten."""


@dataclass(eq=False, slots=True)
class _Call:
    """A request at an engine."""

    engine: Engine
    request: GenerateRequest
    num_counted: int = 0
    """Its tokens that `RolloutController.count_tokens_made` has seen."""

    def num_made(self) -> int:
        return self.engine.num_made(self.request.request_id)


class RolloutController:
    """Continues rollouts on one engine or several.

    Invariants: a rollout never gets more policy tokens than its ``sample_params.max_tokens``, over all its
    calls; what it draws depends on the run's seed, its ids, its try and its length so far, not on the engine,
    the time or other rollouts; every call ends with a status and a finish reason.

    A rollout that was aborted (a pause, its time limit) keeps its tokens and goes on with the next call, as
    if it had not been interrupted: the same budget, the same random numbers. `update_weights` needs no pause:
    what runs goes on over the new weights, and every token keeps the model step that made it.

    >>> controller = RolloutController(ScriptedEngine(lambda request: [7, 8]))
    >>> state = RolloutState([], rollout_id=1, prompt_ids=[5])
    >>> asyncio.run(controller.generate_sample(state)).response_ids.tolist()
    [7, 8]
    """

    def __init__(
        self,
        engines: Engine | Sequence[Engine],
        *,
        seed: int = 0,
        concurrency: int | None = None,
        time_limit_s: float | None = None,
    ) -> None:
        """`concurrency` limits the rollouts that engines see at once, over all engines; None: no limit.

        `time_limit_s` is what one call may run: a straggler ends ABORTED with its tokens, others go on.

        Raises:
            ValueError: no engine, a concurrency below 1, or a time limit that is not positive.
        """
        self.engines: tuple[Engine, ...] = tuple(engines) if isinstance(engines, Sequence) else (engines,)
        if not self.engines:
            raise ValueError("a rollout controller needs at least one engine, got none")
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency must be at least 1 or None, got {concurrency}")
        if time_limit_s is not None and time_limit_s <= 0:
            raise ValueError(f"time_limit_s must be positive or None, got {time_limit_s}")
        self._time_limit_s = time_limit_s
        self._seed = seed
        self._places = None if concurrency is None else asyncio.Semaphore(concurrency)
        self._num_in_flight = [0] * len(self.engines)
        self._engine_of_session: dict[str, int] = {}
        self._num_unnamed = 0
        self._at_engine: dict[str | int | None, _Call] = {}
        self._num_tokens_made = 0

    @property
    def model_step(self) -> int:
        """The oldest step of the weights that any engine makes its next token with."""
        return min(engine.model_step for engine in self.engines)

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Continue ``state.tokens`` (the prompt, if empty) in place within the remaining budget; return it.

        A rollout that has used up its budget or the context finishes with ``"length"``. An engine error
        makes it FAILED with the engine's message.

        Raises:
            ValueError: the state has no tokens, or its prompt does not fit the engine's context.
        """
        if len(state.tokens) == 0:
            state.tokens = state.prompt_ids
        if len(state.tokens) == 0:
            raise ValueError(
                f"rollout {state.rollout_id!r} has neither tokens nor prompt_ids; render its messages first"
            )
        fill_token_fields(state)
        params = state.sample_params or SampleParams()
        budget = params.max_tokens - int(state.response_mask.sum())
        async with self._engine_for(_session_name(state)) as engine:
            context_used_up = len(state.response_ids) and len(state.tokens) >= engine.max_context_tokens
            if budget <= 0 or context_used_up:
                completion = Completion(finish_reason="length")
            else:
                completion = await self._generate(engine, state, self._request(state, params, budget))
        state.append(completion.response_ids, logprobs=completion.logprobs, model_step=completion.model_steps)
        state.finish_reason = completion.finish_reason
        state.status = status_from_finish_reason(completion.finish_reason)
        state.error_msg = None
        if completion.error_msg is not None:
            state.error_msg = f"rollout {state.rollout_id}: {completion.error_msg}"
        return state

    generate = generate_sample

    def describe(self, activity: Activity) -> str:
        """How far the rollout that `activity` is named after is ("412 tokens"); empty if it is at no engine.

        For `forebay.stalls.StallWatch`.
        """
        if activity.name not in self._at_engine:
            return ""
        call = self._at_engine[activity.name]
        return f"{call.request.num_earlier + call.num_made()} tokens"

    def count_tokens_made(self) -> int:
        """Tokens that engines have made so far, those of running requests included; it never falls.

        For `forebay.stalls.StallWatch`. It asks for every request at an engine: not for every token.
        """
        for call in self._at_engine.values():
            self._note_made(call, call.num_made())
        return self._num_tokens_made

    async def pause_generation(self) -> None:
        """End what runs and waits as aborted, and take nothing new until `continue_generation`.

        Raises:
            StallError: an engine did not answer within a minute; the others are paused.
        """
        await self._ask_all("pause", lambda engine: engine.pause())

    async def continue_generation(self) -> None:
        """Take rollouts again.

        Raises:
            StallError: an engine did not answer within a minute.
        """
        await self._ask_all("resume", lambda engine: engine.resume())

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None:
        """Give every engine the weights after train step `model_step`.

        Raises:
            StallError: an engine did not take them within ten minutes.
        """
        shared = list(weights)
        await self._ask_all(
            f"load the weights of step {model_step}",
            lambda engine: engine.load_weights(shared, model_step),
            LOAD_LIMIT_S,
        )

    async def health(self) -> EngineHealth:
        """All engines together: ok if all are, sums of requests, the oldest model step.

        Raises:
            StallError: an engine did not answer within a minute.
        """
        parts = await self._ask_all("report its health", lambda engine: engine.health())
        return EngineHealth(
            ok=all(part.ok for part in parts),
            num_running=sum(part.num_running for part in parts),
            num_waiting=sum(part.num_waiting for part in parts),
            model_step=min(part.model_step for part in parts),
            detail="; ".join(f"engine {i}: {part.detail}" for i, part in enumerate(parts) if part.detail),
        )

    async def close(self) -> None:
        """End everything and free the engines; one that does not answer is left as it is."""
        try:
            await self._ask_all("close", lambda engine: engine.close(), LOAD_LIMIT_S)
        except StallError:
            # The end of a run: there is nobody left whom an error would help.
            logger.exception("an engine was not closed")

    async def _ask_all(
        self, what: str, ask: Callable[[Engine], Awaitable[T]], limit_s: float = ANSWER_LIMIT_S
    ) -> list[T]:
        """What every engine answers; the error of the first that gives none, once all others have."""

        async def asked(number: int, engine: Engine) -> T:
            # Called only here: cancelled before it has begun, nothing is left that was never awaited.
            who = f"engine {number} ({type(engine).__name__})"
            return await answered(ask(engine), f"{who} was asked to {what}", limit_s)

        answers = await asyncio.gather(
            *(asked(number, engine) for number, engine in enumerate(self.engines)), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return cast("list[T]", answers)

    @contextlib.asynccontextmanager
    async def _engine_for(self, session_id: str | None) -> AsyncIterator[Engine]:
        """A place on the session's engine, else on the least busy one (the first of equals)."""
        async with self._places or contextlib.nullcontext():
            least_busy = self._num_in_flight.index(min(self._num_in_flight))
            index = self._engine_of_session.get(session_id or "", least_busy)
            if session_id is not None:
                self._remember(session_id, index)
            self._num_in_flight[index] += 1
            try:
                yield self.engines[index]
            finally:
                self._num_in_flight[index] -= 1

    async def _generate(self, engine: Engine, state: RolloutState, request: GenerateRequest) -> Completion:
        # Those without an id have a request id that is theirs alone.
        name, call = (
            request.request_id if state.rollout_id is None else state.rollout_id,
            _Call(engine, request),
        )
        self._at_engine[name] = call
        try:
            completion = await engine.generate(request)
        finally:
            self._at_engine.pop(name, None)
        self._note_made(call, len(completion.response_ids))
        return completion

    def _note_made(self, call: _Call, num_made: int) -> None:
        # An engine that fails takes back what it has made; what was counted stays counted.
        self._num_tokens_made += max(0, num_made - call.num_counted)
        call.num_counted = max(call.num_counted, num_made)

    def _remember(self, session_id: str, index: int) -> None:
        self._engine_of_session.pop(session_id, None)
        self._engine_of_session[session_id] = index
        if len(self._engine_of_session) > _MAX_SESSIONS:
            # The first is the one unused for longest.
            del self._engine_of_session[next(iter(self._engine_of_session))]

    def _request(self, state: RolloutState, params: SampleParams, budget: int) -> GenerateRequest:
        name = state.rollout_id
        if name is None:
            # Without an id the rollouts of one prompt would all draw alike; count them instead.
            self._num_unnamed += 1
            name = f"unnamed-{self._num_unnamed}"
        length = len(state.response_ids)
        return GenerateRequest(
            request_id=f"{name}:{state.num_tries}:{length}",
            input_ids=state.tokens,
            params=params,
            max_tokens=budget,
            seed=request_seed(self._seed, name, state.num_tries, 0)
            if params.seed is None
            else request_seed(params.seed, 0),
            session_id=_session_name(state),
            time_limit_s=self._time_limit_s,
        )


def _session_name(state: RolloutState) -> str | None:
    return None if state.session_id is None else str(state.session_id)


def request_seed(*parts: str | int) -> int:
    """A seed of 63 bits that depends on all of `parts` and is the same in every process and version.

    Rollouts' seeds end in a 0, which recorded runs have; without it they could not be repeated.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
