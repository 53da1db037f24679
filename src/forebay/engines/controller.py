"""From a rollout to an engine and back: remaining budget, seed, what happened.

::

    generate_sample(state) -> complete(request): queued, at an engine -> state.append(ids, logprobs, steps)
        tokens, budget left, seed                                    finish_reason, status, error_msg

It does not chat, decode or judge: tokens in, tokens out. Which engine makes them, what happens where one is
lost, pauses and weights are in `forebay.engines.pool`.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from forebay.engines.base import Completion, Engine, EngineLost, GenerateRequest, joined_experts, request_seed
from forebay.engines.members import scale
from forebay.engines.pool import LOAD_LIMIT_S, EnginePool
from forebay.models.images import images_of, reply_images_of
from forebay.types import RolloutState, SampleParams, count_generated, fill_token_fields, status_from_finish_reason
from forebay.watching.activity import QUEUED, Activities, Activity
from forebay.watching.stalls import StallError, answered


class RolloutController(EnginePool):
    """Continues rollouts on one engine or several, which it pauses and gives weights as an `EnginePool`.

    Invariants: a rollout never gets more policy tokens than its ``sample_params.max_tokens``, over all its
    calls; what it draws depends on the run's seed, its ids, its try and its length so far, not on the engine,
    the time or other rollouts; every call ends with a status and a finish reason.

    A rollout that was aborted (a pause, its time limit) keeps its tokens and goes on with the next call, as
    if it had not been interrupted: the same budget, the same random numbers. `update_weights` needs no pause:
    what runs goes on over the new weights, and every token keeps the model step that made it.

    >>> from forebay.engines import ScriptedEngine
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
        time_limit_s: float | None = None,
        goes_on: bool = False,
        activities: Activities | None = None,
    ) -> None:
        """`activities` is where rollouts that wait for an engine are noted as queued.

        `time_limit_s` is what one request may run: a straggler ends ABORTED with its tokens, others go on. If
        it `goes_on`, another request follows at once, and so a rollout has its tokens after each limit; the
        engine computes its context anew each time.

        Raises:
            ValueError: no engine, or a time limit that is not positive.
        """
        super().__init__(engines if isinstance(engines, Sequence) else [engines])
        self._activities = activities or Activities()
        if time_limit_s is not None and time_limit_s <= 0:
            raise ValueError(f"time_limit_s must be positive or None, got {time_limit_s}")
        self._time_limit_s = time_limit_s
        self._goes_on = goes_on
        self._seed = seed
        self._num_unnamed = 0
        self._scaling = asyncio.Lock()
        self._running: dict[str | int | None, GenerateRequest] = {}
        """Requests that are queued or at an engine, by the rollout."""

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
        # Only the model's own tokens count: those of an environment have mask 0.
        budget = (state.sample_params or SampleParams()).max_tokens - count_generated(state)
        # Without a response it is the prompt that is too long, which the engine's own check refuses.
        context_used_up = len(state.response_ids) and len(state.tokens) >= self.max_context_tokens
        if budget <= 0 or context_used_up:
            return Completion(finish_reason="length")
        request = self._request(state, budget, time_limit_s)
        # Those without an id have a request id that is theirs alone.
        name = request.request_id if state.rollout_id is None else state.rollout_id
        self._running[name] = request
        queued = self._activities.span(QUEUED, name, task=state.task_name, group=state.group_id)
        try:
            return await self.complete(request, queued=queued)
        finally:
            self._running.pop(name, None)

    generate = generate_sample

    def describe(self, activity: Activity) -> str:
        """How far the rollout that `activity` is named after is ("queued, 412 tokens"); else empty.

        For `forebay.watching.stalls.StallWatch`.
        """
        if (request := self._running.get(activity.name)) is None:
            return ""
        waits = "queued, " if self.is_queued(request.request_id) else ""
        return f"{waits}{request.num_earlier + self.num_made(request.request_id)} tokens"

    def queued(self) -> frozenset[str]:
        """The names of the rollouts that wait for an engine."""
        return frozenset(str(name) for name, asked in self._running.items() if self.is_queued(asked.request_id))

    def rank(self, slowness: Mapping[Engine, float]) -> None:
        """See `Members.rank`."""
        self._members.rank(slowness)
        self._note()

    async def scale(self, parts: str, change: str) -> str:
        """Have engines join or leave; see `forebay.engines.members.scale`.

        None waits for one that joins: it gets requests once it has the weights of now. The requests of one
        that leaves go on elsewhere, with their tokens.

        Raises:
            ValueError: engines of this kind, or so many of them, cannot.
            ConfigError: no server that can be used is at the address.
        """

        if parts != "engines":
            raise ValueError(f"write engines=+2, got {parts}={change}")

        async def join(url: str) -> None:
            if self._another is None:
                raise ValueError("an engine in the run's own process is alone: set engine.name = 'process' or 'vllm'")
            if url in map(str, self.engines):
                raise ValueError(f"the engine at {url} is here already")
            self.add(await asyncio.to_thread(self._another, url))

        # In turn: the GPUs of one that leaves are free once it has ended.
        async with self._scaling:
            return await scale(self._members, change, join, lambda member: self.remove(member.engine))

    def add(self, engine: Engine) -> None:
        """Let `engine` join: it is brought up and gets the weights and the pause of the others."""
        self._members.add(engine)
        self._note()
        # `_start` goes through all of them again, and finds the newcomer.
        self._are_started, self._context = False, None
        self._start()

    async def remove(self, engine: Engine) -> None:
        """Let one go, and close it once its requests are elsewhere."""
        member = self._members.remove(engine)
        self._note()
        if (starting := member.bringing_up) is not None:
            starting.cancel()
            # It ends what it has started, whose GPUs the next may get.
            await asyncio.wait([starting])

        async def empty() -> None:
            # Aborted, not waited for: `_last_part` has another engine go on from their tokens.
            await engine.abort([name for name, _ in member.in_flight])
            while member.in_flight:
                await self._changes.wait(self._changes.version)

        for end in (empty, engine.close):
            # One that does not answer is left as it is.
            with contextlib.suppress(EngineLost, StallError):
                await answered(end(), f"{member} was asked to leave", LOAD_LIMIT_S)

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
            images=images_of(state) + reply_images_of(state),
            # The name is mixed into a user's seed too, or a group would be k equal rollouts.
            seed=request_seed(self._seed if params.seed is None else params.seed, name, state.num_tries, 0),
            session_id=None if state.session_id is None else str(state.session_id),
            time_limit_s=time_limit_s,
        )
