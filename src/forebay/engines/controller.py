"""From a rollout to an engine and back: remaining budget, seed, what happened.

::

    generate_sample(state) -> place (concurrency) -> engine pool -> state.append(ids, logprobs, steps)
        tokens, budget left, seed                                   finish_reason, status, error_msg

It does not chat, decode or judge: tokens in, tokens out. Which engine makes them, and what happens where one
is lost, is `forebay.engines.pool`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from forebay.engines.base import (
    Completion,
    Engine,
    EngineHealth,
    GenerateRequest,
    joined_experts,
    request_seed,
)
from forebay.engines.pool import EnginePool
from forebay.models.starting_weights import AdapterConfig, Weights
from forebay.types import RolloutState, SampleParams, fill_token_fields, status_from_finish_reason
from forebay.watching.activity import Activity


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
        goes_on: bool = False,
    ) -> None:
        """`concurrency` limits the rollouts that engines see at once, over all engines; None: no limit.

        `time_limit_s` is what one request may run: a straggler ends ABORTED with its tokens, others go on. If
        it `goes_on`, another request follows at once, and so a rollout has its tokens after each limit; the
        engine computes its context anew each time.

        Raises:
            ValueError: no engine, a concurrency below 1, or a time limit that is not positive.
        """
        self._pool = EnginePool(engines if isinstance(engines, Sequence) else [engines])
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency must be at least 1 or None, got {concurrency}")
        if time_limit_s is not None and time_limit_s <= 0:
            raise ValueError(f"time_limit_s must be positive or None, got {time_limit_s}")
        self._time_limit_s = time_limit_s
        self._goes_on = goes_on
        self._seed = seed
        self._places = None if concurrency is None else asyncio.Semaphore(concurrency)
        self._num_unnamed = 0
        self._at_engine: dict[str | int | None, GenerateRequest] = {}
        """Running requests, by the rollout."""

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All engines; may be replaced before the first use, say by some that record what they do."""
        return self._pool.engines

    @engines.setter
    def engines(self, engines: Sequence[Engine]) -> None:
        self._pool.engines = engines

    @property
    def model_step(self) -> int:
        """The oldest step of the weights that any engine makes its next token with; of those that are up."""
        return self._pool.model_step

    @property
    def engines_up(self) -> dict[int, Engine]:
        """Those that take rollouts now, by their place in `engines`: none is starting, lost or given up."""
        return self._pool.up

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Continue ``state.tokens`` (the prompt, if empty) in place within the remaining budget; return it.

        A rollout that has used up its budget or the context finishes with ``"length"``. An engine error
        makes it FAILED with the engine's message.

        Raises:
            ValueError: the state has no tokens, or its prompt does not fit the engine's context.
            EngineLost: all engines are lost for good.
        """
        if len(state.tokens) == 0:
            state.tokens = state.prompt_ids
        if len(state.tokens) == 0:
            raise ValueError(
                f"rollout {state.rollout_id!r} has neither tokens nor prompt_ids; render its messages first"
            )
        fill_token_fields(state)
        time_limit_s = self._time_limit_s
        while True:
            completion = await self._continue(state, time_limit_s)
            ids, logprobs, steps = completion.response_ids, completion.logprobs, completion.model_steps
            state.append(ids, logprobs=logprobs, model_step=steps)
            experts = joined_experts(state.routed_experts, completion.routed_experts, len(state.tokens) - 1)
            state.routed_experts = experts
            # An abort with a message is that of the time limit.
            if not (self._goes_on and completion.finish_reason == "abort" and completion.error_msg):
                break
            # A request that made nothing in its time, for its long context perhaps, would never end.
            time_limit_s = self._time_limit_s if len(completion.response_ids) else None
        state.finish_reason = completion.finish_reason
        state.status = status_from_finish_reason(completion.finish_reason)
        state.error_msg = None
        if completion.error_msg is not None:
            state.error_msg = f"rollout {state.rollout_id}: {completion.error_msg}"
        return state

    async def _continue(self, state: RolloutState, time_limit_s: float | None) -> Completion:
        """The answer to one request for what is left of the budget."""
        budget = (state.sample_params or SampleParams()).max_tokens - int(state.response_mask.sum())
        context_used_up = len(state.response_ids) and len(state.tokens) >= self._pool.max_context_tokens
        if budget <= 0 or context_used_up:
            return Completion(finish_reason="length")
        async with self._places or contextlib.nullcontext():
            request = self._request(state, budget, time_limit_s)
            # Those without an id have a request id that is theirs alone.
            name = request.request_id if state.rollout_id is None else state.rollout_id
            self._at_engine[name] = request
            try:
                return await self._pool.generate(request)
            finally:
                self._at_engine.pop(name, None)

    generate = generate_sample

    def describe(self, activity: Activity) -> str:
        """How far the rollout that `activity` is named after is ("412 tokens"); empty if it is at no engine.

        For `forebay.watching.stalls.StallWatch`.
        """
        if (request := self._at_engine.get(activity.name)) is None:
            return ""
        return f"{request.num_earlier + self._pool.num_made(request.request_id)} tokens"

    def count_tokens_made(self) -> int:
        """Tokens that engines have made so far, those of running requests included; it never falls.

        For `forebay.watching.stalls.StallWatch`. It asks for every request at an engine: not for every token.
        """
        return self._pool.count_tokens_made()

    async def pause_generation(self) -> None:
        """End what runs and waits as aborted, and take nothing new until `continue_generation`.

        Raises:
            StallError: an engine of this process did not answer within a minute; the others are paused.
        """
        await self._pool.pause()

    async def continue_generation(self) -> None:
        """Take rollouts again.

        Raises:
            StallError: an engine of this process did not answer within a minute.
        """
        await self._pool.resume()

    async def sleep(self, *, keep_weights: bool) -> None:
        """Pause, and have engines that sleep give their device's memory back to a trainer.

        Weights that are not kept are gone: `update_weights` comes before the next rollouts. Those and
        `continue_generation` take the memory again. When this returns or raises, no engine holds any.

        Raises:
            EngineLost: all engines are lost for good.
        """
        await self._pool.sleep(keep_weights=keep_weights)

    async def update_weights(self, weights: Weights, model_step: int) -> None:
        """Give every engine the weights after train step `model_step`.

        An engine that is lost meanwhile, or refuses them, takes them over when it comes back.

        Raises:
            StallError: an engine of this process did not take them within ten minutes.
            EngineLost: all engines are lost for good.
            ConfigError: the weights cannot be written to where servers read them.
        """
        await self._pool.load_weights(weights, model_step)

    @property
    def takes_live_weights(self) -> bool:
        """Whether `update_weights` takes `LiveWeights`, which engines read from the trainer's memory."""
        return self._pool.takes_live_weights

    @property
    def takes_adapters(self) -> bool:
        """Whether `update_adapters` may be called: all engines keep their starting weights."""
        return self._pool.takes_adapters

    async def update_adapters(self, adapters: Weights, model_step: int, *, config: AdapterConfig) -> None:
        """Give every engine the LoRA adapters after train step `model_step`, for its starting weights.

        Raises:
            BaseDiffersError: an engine has others (`config` says which are meant), until `update_weights`.
            AdaptersRefusedError: an engine cannot use such adapters; give it all weights.
            StallError, EngineLost: as for `update_weights`.
        """
        await self._pool.load_adapters(adapters, model_step, config=config)

    async def health(self) -> EngineHealth:
        """All engines together: ok if all are, sums of requests, the oldest model step.

        Raises:
            StallError: an engine did not answer within a minute.
        """
        return await self._pool.health()

    def counts(self) -> dict[str, float]:
        """For a run's metrics: ``retries`` and ``engine_restarts`` so far, because engines were lost."""
        return dict(self._pool.counts)

    async def close(self) -> None:
        """End everything and free the engines; one that does not answer is left as it is."""
        await self._pool.close()

    def _request(self, state: RolloutState, budget: int, time_limit_s: float | None) -> GenerateRequest:
        name, params = state.rollout_id, state.sample_params or SampleParams()
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
            # The name is mixed into a user's seed too, or a group would be k equal rollouts.
            seed=request_seed(self._seed if params.seed is None else params.seed, name, state.num_tries, 0),
            session_id=None if state.session_id is None else str(state.session_id),
            time_limit_s=time_limit_s,
        )
