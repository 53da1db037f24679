"""Engines in other processes, as the two sides see them that use one.

::

    run's process   PlacedEngine   pause, resume, load_weights: what is wanted of it, kept and told
                        |  its process ended: told again all that is wanted, before it serves
                        v
                    EngineActor
                        ^
    rollout worker  RayEngine      generate, abort: the requests, which survive its end on another engine
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from forebay.cluster.calls import ActorLost, BatchedCalls
from forebay.cluster.engine_actor import EngineSpec
from forebay.cluster.library import Published, import_ray, why
from forebay.cluster.supervisor import START_LIMIT_S, Listener, Supervised
from forebay.engines.base import Completion, EngineHealth, EngineLost, GenerateRequest
from forebay.engines.pool import LOAD_LIMIT_S
from forebay.runs.placement import PartLost
from forebay.watching.stalls import StallError, answered

logger = logging.getLogger(__name__)

TOLD_LOAD_LIMIT_S = LOAD_LIMIT_S + 60.0
"""For taking weights over, their way here included: longer than the pool in the engine's process gives one
engine, so that it is that engine which is lost, and not the process with all of them."""


class PlacedEngine(Supervised):
    """The run's own side of an engine elsewhere: says what the engine is to do, and keeps it up.

    Invariant: an engine that serves has the weights given last, and is paused if the last call was `pause`.
    A call while its process is being started again returns at once: it is told when it is there. So does one
    to an engine that is gone for good, which is no loss while others are left (`none_is_left`).

    >>> engine = PlacedEngine(spec, actor, pid, 4096)
    >>> await engine.load_weights(Published(ref, model_step=3), 3)
    """

    def __init__(
        self,
        spec: EngineSpec,
        actor: Any,
        pid: int,
        max_context_tokens: int,
        on_restart: Listener = lambda part, reason: None,
    ) -> None:
        self.max_context_tokens = max_context_tokens
        """The most tokens, prompt and response together, one request may reach."""
        self._weights: Published | None = None
        super().__init__(spec, actor, pid, on_restart)

    def begin(self, actor: Any, pid: int) -> None:
        """As `Supervised.begin`."""
        super().begin(actor, pid)
        self._requests = RayEngine(actor, self.max_context_tokens, caller="the run")

    @property
    def model_step(self) -> int:
        """The step of the weights given last."""
        return 0 if self._weights is None else self._weights.model_step

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue ``request.input_ids``, for probes: rollouts come from the workers.

        An engine that is lost meanwhile gives a completion that says ``lost``.
        """
        incarnation = self.incarnation
        completion = await self._requests.generate(request)
        if completion.lost:
            self.suspect(incarnation, EngineLost(completion.error_msg))
        return completion

    async def load_weights(self, weights: Published, model_step: int) -> None:
        """Have these weights in use; those of an engine that starts again too.

        Raises:
            PartLost: the weights themselves are lost.
        """
        assert weights.model_step == model_step
        self._weights = weights
        try:
            await self.tell("load_weights", weights.ref, model_step, limit_s=TOLD_LOAD_LIMIT_S)
        except import_ray().exceptions.ObjectLostError as error:
            raise PartLost(f"the weights of step {model_step} are lost: {why(error)}") from error

    async def health(self) -> EngineHealth:
        """Whether it can serve, and how busy it is.

        Raises:
            EngineLost: its process ended over the question.
        """
        if self.is_up:
            return await self._requests.health()
        detail = "starting again" if self.gone is None else str(self.gone)
        return EngineHealth(ok=False, num_running=0, num_waiting=0, model_step=self.model_step, detail=detail)

    def forget(self, caller: str) -> None:
        """End the requests of a caller whose process has ended; needs no answer."""
        if self.is_up:
            self.actor.forget.remote(caller)

    def _wanted(self) -> tuple[Any, ...]:
        return *super()._wanted(), self._weights

    async def _bring_up_to_date(self) -> None:
        """Give it its weights, with which it begins to serve."""
        if (weights := self._weights) is not None:
            try:
                await self.actor.load_weights.remote(weights.ref, weights.model_step)
            except import_ray().exceptions.ObjectLostError as error:
                # As before the first ones: it begins to serve with the next.
                logger.warning("the weights of step %d are lost: %s", weights.model_step, why(error))

    async def _failure(self) -> str:
        reason: str = await self.actor.failure.remote()
        return reason


class RayEngine:
    """The engine behind an `EngineActor`, for the rollouts of one process; it can be lost and come back.

    The run's own process drives the engine: `pause`, `resume`, `load_weights` and `close` of others change
    nothing.

    >>> controller = RolloutController([RayEngine(actor, 4096, caller="worker 0")])
    """

    def __init__(self, actor: Any, max_context_tokens: int, *, caller: str) -> None:
        self.actor = actor
        """Ray's handle."""
        self.max_context_tokens = max_context_tokens
        """The most tokens, prompt and response together, one request may reach."""
        self.model_step = 0
        """The step of the latest weights that tokens came from."""
        self._caller = caller
        self._num_made: dict[str, int] = {}
        stream = actor.generate.options(num_returns="streaming").remote
        self._calls: BatchedCalls[GenerateRequest, Completion | ValueError] = BatchedCalls(
            lambda requests: stream(requests, caller)
        )

    async def bring_up(self) -> None:
        """Wait until the engine serves; the run's own process sees to it.

        Raises:
            EngineLost: it does not come.
        """
        waiting = self.actor.serving.options(max_task_retries=-1).remote()
        try:
            await answered(waiting, "an engine was waited for", START_LIMIT_S)
        except (import_ray().exceptions.RayError, StallError) as error:
            raise EngineLost(why(error)) from error

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue ``request.input_ids``; an actor that ends gives an error completion that says ``lost``.

        Raises:
            ValueError: the request can never run.
        """
        try:
            completion = await self._calls.ask(request)
        except ActorLost as error:
            return Completion(finish_reason="error", error_msg=str(error), lost=True)
        except asyncio.CancelledError:
            self.actor.abort.remote([request.request_id])
            raise
        finally:
            self._num_made.pop(request.request_id, None)
        if isinstance(completion, ValueError):
            raise completion
        if len(completion.model_steps):
            self.model_step = int(completion.model_steps[-1])
        return completion

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``"abort"``."""
        await self.actor.abort.remote(list(request_ids))

    async def look(self) -> None:
        """Bring `num_made` up to date, as far as the engine answers."""
        try:
            self._num_made = await self.actor.made_for.remote(self._caller)
        except import_ray().exceptions.RayError:
            self._num_made = {}

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request had at the last `look`; else 0."""
        return self._num_made.get(request_id, 0)

    async def health(self) -> EngineHealth:
        """Whether it can serve, and how busy it is.

        Raises:
            EngineLost: its process ended over the question.
        """
        try:
            health: EngineHealth = await self.actor.health.remote()
        except import_ray().exceptions.RayError as error:
            raise EngineLost(why(error)) from error
        return health

    async def _leave_alone(self, *_: Any) -> None:
        """Nothing: see the class."""

    pause = resume = load_weights = close = _leave_alone
