"""Engines in other processes: what runs there, and the two sides that use one.

::

    run's process   PlacedEngine   pause, resume, load_weights: what is wanted of it, kept and told
                        |  its process ended: told again all that is wanted, before it serves
                        v
                    EngineActor    the engines that the run file names, standing in for each other
                        ^
    rollout worker  RayEngine      generate, abort: the requests, which survive its end on another engine

    EngineActor: start --> engines built, not serving --load_weights--> serving --> a stream of completions
                              | a request now is answered "lost": it would get the first weights
    live: signs of life, and that every engine is lost for good, as a server that does not come back; then the
          run ends this process, and another one builds engines anew      serving: ends with the first weights
    asleep: no server has memory of ranks' GPUs; a process that starts then is told so first, and wakes with weights
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from forebay.aio.tasks import unless
from forebay.aio.time_limits import timeout
from forebay.cluster.calls import ActorLost, BatchedCalls, as_they_end, built
from forebay.cluster.feeding import FarWeights
from forebay.cluster.library import PartSpec, Published, find_modules_in, import_ray, why
from forebay.cluster.supervisor import BEAT_EVERY_S, Supervised
from forebay.config import Component
from forebay.engines.base import Completion, Engine, EngineHealth, EngineLost, GenerateRequest, WeightsGone
from forebay.engines.members import Judged, Work, add
from forebay.engines.pool import LOAD_LIMIT_S, EnginePool
from forebay.engines.servers.dialects import Call
from forebay.engines.servers.link import ServerLink
from forebay.engines.weights.between_processes import take_over
from forebay.io.shared import Layout
from forebay.models import load_tokenizer
from forebay.models.starting_weights import AdapterConfig, AdaptersRefusedError
from forebay.runs.placement import PartLost, engines_each
from forebay.types import ByteArray

logger = logging.getLogger(__name__)


class EngineActor:
    """The engines of one process; see `forebay.engines.pool` for the meaning of its methods.

    Invariants: nothing is generated before weights were loaded into this process; a request is known by its
    caller from its first moment to its end.

    ::

        actor = ray.remote(EngineActor).remote()
        pid = ray.get(actor.start.remote(spec))
    """

    def __init__(self) -> None:
        self._pool: EnginePool | None = None
        self._building = asyncio.Lock()
        self._serving = asyncio.Event()
        self._has_weights = False
        self._links: dict[str, ServerLink] = {}
        """Servers that the trainer gives weights, by the names of their transfers."""
        self._lost_because = ""
        self._is_lost = asyncio.Event()

    async def start(self, spec: EngineSpec) -> int:
        """Build the engines, if this process has not yet; the id of the process.

        Raises:
            ConfigError: they cannot run the model.
        """
        # A caller that lost its connection asks again, perhaps while the first call still builds.
        async with self._building:
            if self._pool is None:
                find_modules_in(spec.search_path)
                # In a thread, so that the process gives signs of life meanwhile.
                self._pool = EnginePool(await asyncio.to_thread(_build, spec))
                if spec.serves_at_once:
                    self._serving.set()
        return os.getpid()

    async def facts(self) -> tuple[int, bool, bool]:
        """`EnginePool.max_context_tokens` and `takes_adapters`; whether a trainer gives the servers of all weights."""
        pool = built(self._pool)
        are_fed = all(getattr(engine, "takes_buckets", False) for engine in pool.engines)
        return pool.max_context_tokens, pool.takes_adapters, are_fed

    async def live(self) -> AsyncIterator[tuple[str, Work, Work]]:
        """A sign of life now and then: why every engine is lost for good, if it is; see `Members.measured`.

        It never ends.
        """
        while True:
            yield self._lost_because, *built(self._pool).measured()
            with contextlib.suppress(TimeoutError):
                async with timeout(BEAT_EVERY_S):
                    await self._is_lost.wait()
                    self._is_lost.clear()

    async def serving(self) -> int | None:
        """Return once there are weights to generate with; `EnginePool.max_running`."""
        await self._serving.wait()
        return built(self._pool).max_running

    async def generate(
        self, requests: Sequence[GenerateRequest], caller: str
    ) -> AsyncIterator[list[tuple[int, Completion | ValueError]] | dict[int, int]]:
        """The completions of `requests`, numbered, as they end; a `ValueError` for one that can never run.

        Now and then the number of tokens of those that run, by number; -1 of those that are queued.
        """

        def how_far(number: int) -> int:
            pool, name = built(self._pool), requests[number].request_id
            return -1 if pool.is_queued(name) else pool.num_made(name)

        async for some in as_they_end([self._generate(request, caller) for request in requests], how_far):
            yield some

    async def _generate(self, request: GenerateRequest, caller: str) -> Completion | ValueError:
        if not self._serving.is_set():
            return Completion(finish_reason="error", error_msg="the engine has no weights yet", lost=True)
        try:
            return await built(self._pool).complete(request, caller=caller)
        except ValueError as error:
            # As a value: raised, it would end the stream, and with it the requests that came along.
            return error
        except EngineLost as error:
            self._lose(error)
            return Completion(finish_reason="error", error_msg=str(error), lost=True)
        # A fault of this request; the others that came with it go on.
        except Exception as error:
            return Completion(finish_reason="error", error_msg=why(error))

    async def pause(self) -> None:
        """End every request and take no new one."""
        await built(self._pool).pause_generation()

    async def resume(self) -> None:
        """Take requests again."""
        await built(self._pool).continue_generation()
        if self._has_weights:
            self._serving.set()

    async def sleep(self, keep_weights: bool) -> None:
        """Have servers give back the memory of their GPUs, and start none there, until they get weights or `wake`."""
        await built(self._pool).sleep(keep_weights=keep_weights)

    async def wake(self) -> None:
        """Have them serve again, now or when a pause ends."""
        await built(self._pool).wake()

    async def gpus(self) -> str:
        """The GPUs that Ray gave to this process, for ranks that share them."""
        return os.environ["CUDA_VISIBLE_DEVICES"]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; at an engine that is lost they have ended."""
        await built(self._pool).abort(request_ids)

    async def forget(self, caller: str) -> None:
        """End the requests of a caller whose process has ended."""
        if self._pool is not None:
            await self._pool.abort(list(self._pool.progress(caller)))

    async def load_weights(
        self, weights: tuple[Layout, ByteArray] | Any, model_step: int, adapters: AdapterConfig | None = None
    ) -> None:
        """Take over the weights that are laid out in these bytes, or the adapters, or those of a trainer, and serve.

        Raises:
            EngineLost, AdaptersRefusedError: as of `take_over`.
            WeightsGone: the trainer has ended.
        """
        pool = built(self._pool)
        try:
            if not isinstance(weights, tuple):
                far: Any = FarWeights(weights, self._links)
                # A server that is just started would wait for the weights of another trainer.
                await unless(far.gone, pool.update_weights(far, model_step))
                if far.gone.is_set():
                    raise WeightsGone(f"the trainer ended over the weights of step {model_step}")
            elif adapters is not None and not pool.takes_adapters:
                raise AdaptersRefusedError("an engine takes whole weights only")
            else:
                await take_over(pool, weights[0], _readable(weights[1]), model_step, adapters=adapters)
        except EngineLost as error:
            self._lose(error)
            raise
        self._has_weights = True
        # One that begins in a pause would abort what comes, where the others run already, until it is resumed.
        if not pool.is_paused:
            self._serving.set()

    async def do(self, transfer: str, calls: Sequence[Call], takes_long: bool) -> Any:
        """Have a server do what the trainer asks for that gives it weights; the last answer.

        Raises:
            EngineLost: as of `ServerLink.do`.
            KeyError: the transfer was given up.
        """
        return await self._links[transfer].do(calls, takes_long=takes_long)

    async def health(self) -> EngineHealth:
        """All engines of this process together."""
        health = await built(self._pool).health()
        return replace(health, ok=health.ok and self._serving.is_set())

    async def close(self) -> None:
        """Free the engines, and end what they started."""
        if self._pool is not None:
            await self._pool.close()

    def _lose(self, error: EngineLost) -> None:
        """Serve no more: callers that wait for this engine wait for another process."""
        self._serving.clear()
        self._has_weights = False
        self._lost_because = str(error)
        self._is_lost.set()


@dataclass(frozen=True, kw_only=True)
class EngineSpec(PartSpec):
    """All that an engine's process is told."""

    device: str
    """``cuda`` where the cluster gave it one."""
    serves_at_once: bool
    """Whether it serves with the weights in the model folder: it will be given no others."""


TOLD_LOAD_LIMIT_S = LOAD_LIMIT_S + 60.0
"""For taking weights over, their way here included: longer than the pool in the engine's process gives one
engine, so that it is that engine which is lost, and not the process with all of them."""


class PlacedEngine(Supervised):
    """The run's own side of an engine elsewhere: says what the engine is to do, and keeps it up.

    Invariant: an engine that serves has the weights given last, and is paused if the last call was `pause`.
    A call while its process is being started again returns at once: it is told when it is there.

    ::

        engine = PlacedEngine(spec)
        engine.begin(actor, ray.get(actor.start.remote(spec)))
        await engine.load_weights(Published(ref, model_step=3), 3)
    """

    kind = EngineActor
    max_context_tokens = 0
    """The most tokens, prompt and response together, one request may reach."""
    weights: Published | None = None
    """The weights given last, which a process that is started again gets."""
    takes_adapters = True
    """Until it has refused some: whole weights that it got since then are no base for others."""
    takes_buckets = False
    """Whether its servers take weights that the trainer offers."""
    sleeps = False
    """Whether its servers are on GPUs of ranks, and sleep while these train: see `forebay.runs.turns`."""
    on_work: Callable[[], None] = staticmethod(lambda: None)
    """Called when it has told how fast it is."""
    is_asleep = _lacks_weights = False
    """Whether they do now; and whether its process, which was started anew, could not be given weights yet."""

    def use(self, actor: Any) -> None:
        """Send calls and requests to this actor."""
        super().use(actor)
        self._requests = RayEngine(actor, caller="the run")
        self.judged = Judged()
        """The requests that it had of anyone."""

    @property
    def model_step(self) -> int:
        """The step of the weights given last."""
        return 0 if self.weights is None else self.weights.model_step

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
            AdaptersRefusedError: they are adapters that the engine does not take.
            PartLost: the weights themselves are lost.
        """
        assert weights.model_step == model_step
        self.weights, self.is_asleep, self._lacks_weights = weights, False, False
        try:
            await self.tell("load_weights", weights.ref, model_step, weights.adapters, limit_s=TOLD_LOAD_LIMIT_S)
        except AdaptersRefusedError:
            self.takes_adapters = False
            raise
        except (import_ray().exceptions.ObjectLostError, WeightsGone) as error:
            raise PartLost(f"the weights of step {model_step} are lost: {why(error)}") from error

    async def sleep(self, *, keep_weights: bool) -> None:
        """Return once its servers have given their memory back; none is started before weights come, or `wake`."""
        if self._lacks_weights and not self.is_asleep:
            # A server that was to read those of a lost trainer waits for the next, and does nothing else before.
            self.suspect(self.incarnation, EngineLost("it waits for weights"), has_to_end=True)
        self.is_asleep = True
        while True:
            seen = self.changes.version
            await self.tell("sleep", keep_weights, limit_s=TOLD_LOAD_LIMIT_S)
            if self.is_up:
                return
            # A process that is just starting takes memory until it is there, and has been told to sleep.
            await self.changes.wait(seen)

    async def wake(self) -> None:
        """Have its servers serve with the weights given last, now or when a pause ends."""
        self.is_asleep = False
        if self._lacks_weights and self.weights is not None:
            await self.load_weights(self.weights, self.model_step)
        await self.tell("wake")

    async def health(self) -> EngineHealth:
        """Whether it can serve, and how busy it is.

        Raises:
            EngineLost: its process ended over the question.
        """
        if self.is_up:
            return await self._requests.health()
        step = self.model_step
        return EngineHealth(ok=False, num_running=0, num_waiting=0, model_step=step, detail="starting again")

    def hear(self, said: tuple[str, Work, Work]) -> None:
        """Have a process whose engines are lost for good end; note how fast it is."""
        lost_because, ended, self.judged.running = said
        self.judged.ended = add(self.judged.ended, ended)
        if lost_because:
            self.suspect(self.incarnation, EngineLost(lost_because), has_to_end=True)
        self.on_work()

    def forget(self, caller: str) -> None:
        """End the requests of a caller whose process has ended; needs no answer."""
        if self.is_up:
            self.actor.forget.remote(caller)

    def _wanted(self) -> tuple[Any, ...]:
        return *super()._wanted(), self.weights, self.is_asleep

    async def _follow_pause(self) -> None:
        self._lacks_weights = self.is_asleep
        if self.is_asleep:
            # First: at anything else servers would be started.
            await self.actor.sleep.remote(True)
        await super()._follow_pause()

    async def _bring_up_to_date(self) -> None:
        """Give it its weights, with which it begins to serve; it sleeps without any."""
        if (weights := self.weights) is not None and not self.is_asleep:
            try:
                await self.actor.load_weights.remote(weights.ref, weights.model_step, weights.adapters)
            except (import_ray().exceptions.ObjectLostError, WeightsGone, AdaptersRefusedError) as error:
                # As before the first ones: it begins to serve with the next.
                self.takes_adapters &= not isinstance(error, AdaptersRefusedError)
                self._lacks_weights = True
                logger.warning("%s cannot have the weights of step %d: %s", self.name, weights.model_step, why(error))


class RayEngine:
    """The engine behind an `EngineActor`, for the rollouts of one process; it can be lost and come back.

    The run's own process drives the engine: `pause`, `resume`, `load_weights` and `close` of others change
    nothing.

    ::

        controller = RolloutController([RayEngine(actor, caller="worker 0", max_context_tokens=4096)])
    """

    def __init__(self, actor: Any, *, caller: str, max_context_tokens: int = 0) -> None:
        self.actor = actor
        """Ray's handle."""
        self.max_context_tokens = max_context_tokens
        """The most tokens, prompt and response together, one request may reach."""
        self.max_running: int | None = None
        """The requests that its process runs at once, all workers' together; None: not known."""
        self.model_step = 0
        """The step of the latest weights that tokens came from."""
        self._num_made: dict[str, int] = {}
        stream = actor.generate.options(num_returns="streaming").remote
        self._calls: BatchedCalls[GenerateRequest, Completion | ValueError] = BatchedCalls(
            lambda requests: stream(requests, caller), self._note_made
        )

    async def bring_up(self) -> None:
        """Wait until the engine serves, or is replaced: the run's own process sees to both."""
        try:
            self.max_running = await self.actor.serving.options(max_task_retries=-1).remote()
        except import_ray().exceptions.RayError as error:
            logger.debug("an engine has ended for good: %s", why(error))
            # Until the worker hears of the actor in its place, removes this engine and ends the wait.
            await asyncio.Event().wait()

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
            # By its id: the call that carries it carries others.
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
        """End these requests with ``"abort"``; EngineLost if it has ended, and they with it."""
        # The actor does not know of these yet.
        self._calls.answer_unsent(Completion(finish_reason="abort"), lambda r: r.request_id in request_ids)
        try:
            await self.actor.abort.remote(list(request_ids))
        except import_ray().exceptions.RayError as error:
            raise EngineLost(why(error)) from error

    def _note_made(self, request: GenerateRequest, num_tokens: int) -> None:
        self._num_made[request.request_id] = num_tokens

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request had when the engine last said so; else 0; -1 if it was queued."""
        return self._num_made.get(request_id, 0)

    async def health(self) -> EngineHealth:
        """Whether it can serve, and how busy it is; EngineLost if its process ended over the question."""
        try:
            return cast("EngineHealth", await self.actor.health.remote())
        except import_ray().exceptions.RayError as error:
            raise EngineLost(why(error)) from error

    async def _leave_alone(self, *_: Any) -> None:
        """Do nothing: the run itself pauses, loads and closes its engines."""

    pause = resume = load_weights = close = _leave_alone


def _readable(data: ByteArray) -> Any:
    with warnings.catch_warnings():
        # That it must not be written to is known: an engine does not write to what it was lent.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(data)


def _build(spec: EngineSpec) -> list[Engine]:
    from forebay.runs.rollouts import build_run_engines

    config = spec.config
    number = spec.name.removeprefix("engine ")
    torch.set_num_threads(config.threads)
    return build_run_engines(
        config.model_copy(update={"engine": engine_on(spec.device, config.engine)}),
        spec.model_folder,
        load_tokenizer(spec.model_folder),
        scratch=config.folder / "engines" / number,
        lora_rank=0 if spec.serves_at_once else config.train.lora_rank,
        first=int(number) * engines_each(config),
    )


def engine_on(device: str, engine: Component) -> Component:
    """`engine` on the device that Ray gave, if it computes in this process or a child, and names none."""
    inner = engine.arguments.get("engine", "transformers") if engine.name == "process" else engine.name
    if inner != "transformers":
        return engine
    # A device that the run file names stands before Ray's.
    return engine.model_copy(update={"arguments": {"device": device, **engine.arguments}})
