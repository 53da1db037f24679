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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from forebay.cluster.calls import ActorLost, BatchedCalls
from forebay.cluster.engine_actor import EngineFacts, EngineSpec
from forebay.cluster.library import import_ray, why
from forebay.cluster.supervisor import START_LIMIT_S, TELL_LIMIT_S, NotBuilt, Supervisor
from forebay.cluster.weights import Published
from forebay.engines.base import Completion, EngineHealth, EngineLost, GenerateRequest
from forebay.engines.pool import LOAD_LIMIT_S, MAX_RETRIES
from forebay.runs.placement import PartLost
from forebay.watching.stalls import StallError, answered

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

TOLD_LOAD_LIMIT_S = LOAD_LIMIT_S + 60.0
"""For taking weights over, their way here included: longer than the pool in the engine's process gives one
engine, so that it is that engine which is lost, and not the process with all of them."""


class RayEngine:
    """The engine behind an `EngineActor`, for the rollouts of one process; it can be lost and come back.

    Who runs the engine is the run's own process: `pause`, `resume`, `load_weights` and `close` of others
    change nothing.

    >>> controller = RolloutController([RayEngine(actor, facts, caller="worker 0")])
    """

    def __init__(self, actor: Any, max_context_tokens: int, *, caller: str) -> None:
        self.actor = actor
        """Ray's handle."""
        self._caller = caller
        self._max_context_tokens = max_context_tokens
        self._model_step = 0
        self._num_made: dict[str, int] = {}
        stream = actor.generate.options(num_returns="streaming").remote
        self._calls: BatchedCalls[GenerateRequest, Completion | ValueError] = BatchedCalls(
            partial(_ask, stream, caller)
        )

    @property
    def model_step(self) -> int:
        """The step of the latest weights that tokens came from."""
        return self._model_step

    @property
    def max_context_tokens(self) -> int:
        """The most tokens, prompt and response together, one request may reach."""
        return self._max_context_tokens

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
        """See `forebay.engines.base`."""
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
            self._model_step = int(completion.model_steps[-1])
        return completion

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``"abort"``."""
        await self.actor.abort.remote(list(request_ids))

    async def pause(self) -> None:
        """Nothing: see the class."""

    async def resume(self) -> None:
        """Nothing: see the class."""

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None:
        """Nothing: see the class."""

    async def look(self) -> None:
        """Bring `num_made` up to date, as far as the engine answers."""
        try:
            self._num_made = await self.actor.num_made.remote(self._caller)
        except import_ray().exceptions.RayError:
            self._num_made = {}

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request had at the last `look`; else 0."""
        return self._num_made.get(request_id, 0)

    async def health(self) -> EngineHealth:
        """See `forebay.engines.base`."""
        try:
            health: EngineHealth = await self.actor.health.remote()
        except import_ray().exceptions.RayError as error:
            raise EngineLost(why(error)) from error
        return health

    async def close(self) -> None:
        """Nothing: see the class."""


def _ask(stream: Any, caller: str, requests: list[GenerateRequest]) -> Any:
    return stream(requests, caller)


class PlacedEngine:
    """What the run's own process has of an engine elsewhere: says what the engine is to do, and keeps it up.

    Invariant: an engine that serves has the weights given last, and is paused if the last call was `pause`.
    A call while its process is being started again returns at once: it is told when it is there. So does one
    to an engine that is gone for good, which is nobody's loss while others are left (`none_is_left`).

    >>> engine = PlacedEngine(spec, actor, facts)
    >>> await engine.load_weights(Published(ref, model_step=3), 3)
    """

    def __init__(
        self,
        spec: EngineSpec,
        actor: Any,
        facts: EngineFacts,
        *,
        on_restart: Callable[[str, str], None] = lambda part, reason: None,
    ) -> None:
        """`on_restart` is told the name of the engine, and why it was started again."""
        self.spec = spec
        self.actor = actor
        self._facts = facts
        self.supervisor = Supervisor(
            f"engine {spec.number}",
            actor,
            self._set_up,
            pid=facts.pid,
            on_restart=on_restart,
            failure=self._failure,
        )
        self._requests = RayEngine(actor, facts.max_context_tokens, caller="the run")
        self._weights: Published | None = None
        self._is_paused = False

    @property
    def model_step(self) -> int:
        """The step of the weights given last."""
        return 0 if self._weights is None else self._weights.model_step

    @property
    def max_context_tokens(self) -> int:
        """The most tokens, prompt and response together, one request may reach."""
        return self._facts.max_context_tokens

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `forebay.engines.base`; rollouts come from the workers, this is for probes.

        If the engine is lost meanwhile it is waited for, and asked again; one that does not come back, or is
        lost again and again, gives a completion that says ``lost``.
        """
        self.supervisor.watch()
        for num_lost in range(MAX_RETRIES + 1):
            try:
                await self.supervisor.until_up()
            except PartLost as error:
                return Completion(finish_reason="error", error_msg=str(error), lost=True)
            incarnation = self.supervisor.incarnation
            completion = await self._requests.generate(request)
            if completion.lost:
                self.supervisor.suspect(incarnation, EngineLost(completion.error_msg))
            if not completion.lost or num_lost == MAX_RETRIES:
                break
        return completion

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `forebay.engines.base`."""
        await self._requests.abort(request_ids)

    def num_made(self, request_id: str) -> int:
        """See `forebay.engines.base`."""
        return self._requests.num_made(request_id)

    async def pause(self) -> None:
        """See `forebay.engines.base`."""
        self._is_paused = True
        await self._tell("pause")

    async def resume(self) -> None:
        """See `forebay.engines.base`."""
        self._is_paused = False
        await self._tell("resume")

    async def load_weights(self, weights: Published, model_step: int) -> None:
        """Have these weights in use; those of an engine that starts again too."""
        assert weights.model_step == model_step
        self._weights = weights
        await self._tell("load_weights", weights.ref, model_step)

    async def health(self) -> EngineHealth:
        """See `forebay.engines.base`.

        Raises:
            EngineLost: its process ended over the question.
        """
        if not self.supervisor.is_up:
            gone = self.supervisor.gone
            detail = "starting again" if gone is None else str(gone)
            return EngineHealth(
                ok=False, num_running=0, num_waiting=0, model_step=self.model_step, detail=detail
            )
        try:
            health: EngineHealth = await self.actor.health.remote()
        except import_ray().exceptions.RayError as error:
            raise EngineLost(why(error)) from error
        return health

    def forget(self, caller: str) -> None:
        """End the requests of a caller whose process has ended; needs no answer."""
        if self.supervisor.is_up:
            self.actor.forget.remote(caller)

    async def close(self) -> None:
        """Free the engine; its process stays."""
        await self.supervisor.stop()
        if self.supervisor.is_up:
            await self.actor.close.remote()

    async def _failure(self) -> str:
        reason: str = await self.actor.failure.remote()
        return reason

    async def _tell(self, method: str, *arguments: Any) -> None:
        self.supervisor.watch()
        if not self.supervisor.is_up:
            return
        incarnation = self.supervisor.incarnation
        limit_s = TOLD_LOAD_LIMIT_S if method == "load_weights" else TELL_LIMIT_S
        try:
            call = getattr(self.actor, method).remote(*arguments)
            await answered(call, f"{self.supervisor.name} was asked to {method}", limit_s)
        except (EngineLost, StallError) as error:
            self.supervisor.suspect(incarnation, error, has_to_end=True)
        except (import_ray().exceptions.RayActorError, NotBuilt) as error:
            self.supervisor.suspect(incarnation, error)
        except import_ray().exceptions.ObjectLostError as error:
            raise PartLost(f"the weights of step {self.model_step} are lost: {why(error)}") from error

    async def _set_up(self) -> int:
        """A new process: built, paused or not, and last with weights, with which it begins to serve."""
        actor = self.actor
        self._facts = await actor.start.remote(self.spec)
        told = None
        while told != (wanted := (self._is_paused, self._weights)):
            told = wanted
            await (actor.pause if self._is_paused else actor.resume).remote()
            if (weights := self._weights) is not None:
                try:
                    await actor.load_weights.remote(weights.ref, weights.model_step)
                except import_ray().exceptions.ObjectLostError as error:
                    # As before the first ones: it begins to serve with the next.
                    logger.warning("the weights of step %d are lost: %s", weights.model_step, why(error))
        return self._facts.pid


def none_is_left(engines: Sequence[PlacedEngine]) -> PartLost | None:
    """Why there is no engine any more; None: one is there, or coming back."""
    gone = [engine.supervisor.gone for engine in engines]
    return None if None in gone else gone[0]
