"""Several engines that stand in for each other: which one gets a request, is lost, comes back.

::

    complete(request) --> queued: continued rollouts first, then in order of arrival
                              |
                          [the session's engine, else the least busy that is up and has room]
                              |                              |
                          completion                    lost, with the tokens so far
                                                             |
          another engine (or the same, brought up again) <---+   at most MAX_RETRIES times

    bring up   consumes: an engine that is lost       waits for: its server, its weights
               woken by: the loss; its first use      produces: an engine that is up, or is given up

An engine that comes back gets the weights of now, and is paused if the others are, before it gets a request.
While those sleep that share a trainer's device, none of them is brought up; their requests go on at others, or wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from forebay.aio.changed import Changes
from forebay.engines.base import Completion, Engine, EngineHealth, EngineLost, GenerateRequest
from forebay.engines.call import UNSEEN, Call, Within
from forebay.engines.members import Member, Members, Work, said_by_all
from forebay.io.shared import LentTensors
from forebay.models.live_weights import LiveWeights
from forebay.models.starting_weights import AdapterConfig, Weights
from forebay.watching.activity import Activity, Span, loop_time
from forebay.watching.stalls import ANSWER_LIMIT_S, StallError, answered

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOAD_LIMIT_S = 600.0
"""The time to take over weights, and to free them: minutes are usual where a model is large."""

MAX_RETRIES = 3
"""Engines that one call may lose before it fails: a request that brings down every server must end."""

_BRING_UP_TRIES, _TRY_AGAIN_S = 3, 10.0
"""With one that was up before, or comes up and does not follow the others; and the pause between two of them."""


class EnginePool:
    """Engines that stand in for each other: requests are completed by some, weights and pauses are for all.

    Invariants: a request is at one engine at a time, and no engine has more than it has room for (`Members`);
    what waits is overtaken by continued rollouts alone; tokens that a lost engine made are kept, and the
    next engine gets them as input; an engine gets requests only with the latest weights; every wait ends, at
    the latest with the limits of ``bring_up``. Engines without ``bring_up`` are always up.

    >>> from forebay.engines import ScriptedEngine
    >>> from forebay.types import SampleParams
    >>> pool = EnginePool([ScriptedEngine(lambda request: [7, 8]) for _ in range(2)])
    >>> request = GenerateRequest(request_id="a", input_ids=[1], params=SampleParams(), max_tokens=2, seed=0)
    >>> asyncio.run(pool.complete(request)).response_ids.tolist()
    [7, 8]
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        """ValueError without any engine."""
        if not engines:
            raise ValueError("a rollout controller needs at least one engine, got none")
        self.engines = tuple(engines)
        self._calls: dict[str, Call] = {}
        self._num_tokens_made = 0
        self._given_step: int | None = None
        """Step of the weights that the engines should have."""
        self.is_paused = self._asleep = self._closed = False
        """Whether requests end as aborted, from `pause_generation` on; whether a trainer has shared devices."""
        self._changes = Changes()
        """An engine came back, or was given up; a pause or the end began."""
        self._counts = {"retries": 0.0, "engine_restarts": 0.0}
        self.on_request: Callable[[Span], None] = lambda span: None
        """Told of each request that left one of several engines: by stage the engine, by name the rollout."""

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All of them, up or not; may be replaced before the first use, say to record what they do."""
        return tuple(member.engine for member in self._members)

    @engines.setter
    def engines(self, engines: Sequence[Engine]) -> None:
        self._members, self._are_started = Members(), False
        self._context: int | None = None
        self._another = getattr(engines[0], "another", None)
        for engine in engines:
            self._members.add(engine)

    @property
    def model_step(self) -> int:
        """The oldest step of weights that an engine makes its next token with; those away come with the latest."""
        up = [member.engine.model_step for member in self._members if member.is_up]
        if not up and self._given_step is not None:
            return self._given_step
        return min(up or [member.engine.model_step for member in self._members])

    @property
    def engines_up(self) -> dict[int, Engine]:
        """The engines that are up, by their place in `engines`, also asleep; others start, or are lost."""
        return {member.number: member.engine for member in self._members if member.is_up}

    def away(self) -> str:
        """The names of those that are not."""
        return ", ".join(str(member) for member in self._members if not member.is_up)

    @property
    def max_context_tokens(self) -> int:
        """The smallest context of all engines."""
        if self._context is None:
            self._context = min(member.engine.max_context_tokens for member in self._members)
        return self._context

    @property
    def max_running(self) -> int | None:
        """Requests that all engines together run at once; None: one of them does not say."""
        each: list[Any] = [getattr(member.engine, "max_running", None) for member in self._members]
        return None if None in each else sum(each)

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request has by now, over all engines it was at; else 0."""
        return self._calls[request_id].num_made() if request_id in self._calls else 0

    def is_queued(self, request_id: str) -> bool:
        """Whether a request waits for an engine."""
        return request_id in self._calls and self._calls[request_id].is_queued

    def measured(self) -> tuple[Work, Work]:
        """See `Members.measured`."""
        return self._members.measured()

    async def complete(self, request: GenerateRequest, *, caller: str = "", queued: Within = UNSEEN) -> Completion:
        """Continue ``request.input_ids`` on some engine, and on another where that one is lost.

        `caller` is the process that asks, where several do: see `progress`. It waits for an engine within
        `queued`, perhaps several times.

        Raises:
            EngineLost: no engine is left, and none will come back.
            ValueError: the engine refuses the request.
        """
        call = self._calls[request.request_id] = Call(request, caller, queued)
        try:
            completion = call.joined(await self._last_part(call))
        finally:
            # Another of the same id, as of a group that is made again elsewhere, keeps its place.
            if self._calls.get(request.request_id) is call:
                del self._calls[request.request_id]
        self._note_made(call, len(completion.response_ids))
        return completion

    async def _last_part(self, call: Call) -> Completion:
        """The last part of the call's completion; the parts of lost engines are with the call."""
        lost: list[str] = []

        def ends() -> bool:
            return self.is_paused or self._closed or call.is_aborted

        while True:
            self._start()
            if (entered := await self._members.enter(call, ends)) is None:
                if not ends():
                    # None is left, which it raises.
                    await self._change()
                return Completion(finish_reason="abort")
            member, begun = entered
            rest, num_tokens, num_sleeps = call.rest(), 0, member.num_sleeps
            call.engine = member.engine
            try:
                completion = await member.engine.generate(rest)
                num_tokens = len(completion.response_ids)
            finally:
                call.engine = None
                self._members.end(member, begun, num_tokens, rest.num_earlier)
                # The lane of an only engine would be that of the rollouts again.
                if len(self._members) > 1:
                    rollout = call.request.request_id.rsplit(":", 2)[0]
                    self.on_request(Span(begun[1], loop_time(), f"engine {member.number}", rollout, "", "", ""))
                fell_asleep = member.num_sleeps > num_sleeps
                if has_left := member not in self._members:
                    self._note()
            if completion.lost:
                why = completion.error_msg or "lost"
                self._lose(member, why)
                lost.append(f"{member}: {why}")
                if len(lost) > MAX_RETRIES:
                    return replace(completion, error_msg=f"given up after {len(lost)} lost engines: {'; '.join(lost)}")
            elif completion.finish_reason != "abort" or self.is_paused or not (has_left or fell_asleep):
                return completion
            call.parts.append(completion)
            rest = call.rest()
            if rest.max_tokens < 1 or len(rest.input_ids) >= self.max_context_tokens:
                return Completion(finish_reason="length")
            self._counts["retries"] += not fell_asleep

    def progress(self, caller: str = "") -> dict[str, int]:
        """How many tokens each running request of `caller` has by now, by its id."""
        return {name: call.num_made() for name, call in self._calls.items() if call.caller == caller}

    def count_tokens_made(self) -> int:
        """Tokens that engines have made so far, those of running requests included; it never falls.

        For `forebay.watching.stalls.StallWatch`. It asks for every request at an engine: not for every token.
        """
        for call in self._calls.values():
            self._note_made(call, call.num_made())
        return self._num_tokens_made

    def _note_made(self, call: Call, num_made: int) -> None:
        # An engine that fails takes back what it has made; what was counted stays counted.
        self._num_tokens_made += max(0, num_made - call.num_counted)
        call.num_counted = max(call.num_counted, num_made)

    async def pause_generation(self) -> None:
        """End what runs and waits as aborted, and take nothing new until `continue_generation`.

        A remote engine that does not do so within a minute is lost, which is no error.

        Raises:
            StallError: an engine of this process did not answer within a minute; the others are paused.
        """
        self.is_paused = True
        self._note()
        await self._ask_all("pause", self._follow_pause)

    async def continue_generation(self) -> None:
        """Take requests again; engines that do not answer are as for `pause_generation`, and the others go on."""
        self.is_paused = False
        self._note()
        await self._ask_all("resume", self._follow_pause)

    async def sleep(self, *, keep_weights: bool) -> None:
        """Have the engines that share a trainer's device give its memory back, in any case; the others go on.

        `update_weights` takes that of the weights again, before `wake` where weights are not kept. One that
        cannot do it is lost, and is not brought up again before the others wake up.

        Raises:
            EngineLost: no engine is left.
        """
        self._asleep = True
        self._note()
        # One that is just starting takes memory whatever it is told meanwhile.
        while any(member.is_starting for member in self._members if member.sleeps):
            await self._change()
        sleeping = [member for member in self._members.left if member.sleeps]
        for member in sleeping:
            member.is_asleep, member.num_sleeps = True, member.num_sleeps + 1
        await self._ask_all(
            "sleep",
            lambda member: cast("Any", member.engine).sleep(keep_weights=keep_weights),
            among=sleeping,
            limit_s=LOAD_LIMIT_S,
        )

    async def wake(self) -> None:
        """Have those that sleep serve again, now or when a pause ends: the trainer has left their device."""
        self._asleep = False
        self._note()
        sleeping = [member for member in self._members if member.is_up and member.is_asleep]
        await self._ask_all("wake up", self._follow_pause, among=sleeping)

    async def update_weights(self, weights: Weights, model_step: int) -> None:
        """Give every engine the weights after train step `model_step`; return once one at least has them.

        Those that are lost, or start, take them over by themselves: no hand-over waits for them while another
        is up. A remote one that refuses them is lost, too: brought up again, it may take them.

        Raises:
            StallError: an engine of this process did not take them within ten minutes.
            EngineLost: no engine is left.
            ConfigError: they cannot be written to where the engines read them.
        """
        shared = weights if isinstance(weights, LiveWeights | LentTensors) else list(weights)
        await self._load(model_step, lambda member: member.engine.load_weights(shared, model_step))

    takes_live_weights = said_by_all("takes_live_weights")
    """Whether `update_weights` takes `LiveWeights`, which engines read from the trainer's memory."""
    casts_weights = said_by_all("casts_weights")
    """Whether `update_weights` takes weights of any dtype: all engines cast them into their own."""
    takes_adapters = said_by_all("takes_adapters")
    """Whether `update_adapters` may be called: all engines keep their starting weights."""

    async def update_adapters(self, adapters: Weights, model_step: int, *, config: AdapterConfig) -> None:
        """As `update_weights`, with LoRA adapters on starting weights; for engines that take them.

        Starting weights are those that an engine began with, or was last given whole. `adapters` and `config`
        are what peft writes to ``adapter_model.safetensors`` and ``adapter_config.json``.

        Raises:
            BaseDiffersError: `config` names other starting weights; nothing has changed.
            AdaptersRefusedError: an engine cannot use them exactly; others may have done so.
            StallError, EngineLost: as for `update_weights`.
        """
        shared = list(adapters)
        await self._load(
            model_step, lambda member: cast("Any", member.engine).load_adapters(shared, model_step, config=config)
        )

    async def _load(self, model_step: int, load: Callable[[Member], Awaitable[None]]) -> None:
        self._given_step, self._asleep = model_step, False
        self._note()
        what = f"load the weights of step {model_step}"
        left = self._members.left
        if any(member.is_up for member in left):
            for member in left:
                if not member.is_up:
                    loading = answered(load(member), f"{member} was asked to {what}", LOAD_LIMIT_S)
                    member.loading = asyncio.gather(loading, return_exceptions=True)
            left = [member for member in left if member.is_up]
        await self._ask_all(what, load, among=left, limit_s=LOAD_LIMIT_S)
        while not any(member.is_up for member in self._members):
            await self._change()

    def check_left(self) -> None:
        """Raise EngineLost if all engines are lost for good: then nothing takes weights either."""
        if all(member.gone for member in self._members):
            why = "; ".join(f"{member}: {member.lost_because}" for member in self._members)
            raise EngineLost(f"no engine is left: {why}")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``"abort"``, queued ones in their turn; at a lost engine they have ended."""
        for call in filter(None, map(self._calls.get, request_ids)):
            call.is_aborted = True
        self._note()
        aborting = (member.engine.abort(request_ids) for member in self._members)
        for error in filter(None, await asyncio.gather(*aborting, return_exceptions=True)):
            logger.debug("an engine was asked to abort: %s", error)

    async def health(self) -> EngineHealth:
        """All engines together: ok if all are, sums of requests, the oldest model step.

        Raises StallError: an engine did not answer within a minute.
        """
        parts = await self._ask_all("report its health", lambda member: member.engine.health())
        details = {member.number: member.lost_because for member in self._members}
        details |= {number: health.detail for number, health in parts.items()}
        return EngineHealth(
            ok=len(parts) == len(self._members) and all(part.ok for part in parts.values()),
            num_running=sum(part.num_running for part in parts.values()),
            num_waiting=sum(part.num_waiting for part in parts.values()),
            model_step=self.model_step,
            detail="; ".join(f"engine {number}: {detail}" for number, detail in details.items() if detail),
        )

    def describe(self, activity: Activity) -> str:
        """How far the rollout that `activity` is named after is; empty: none is known here by its name."""
        return ""

    def counts(self) -> dict[str, float]:
        """For a run's metrics: ``retries`` and ``engine_restarts`` so far, because engines were lost."""
        return dict(self._counts)

    async def close(self) -> None:
        """End everything and free the engines; one that does not answer is left as it is."""
        self._closed = True
        self._note()
        tasks = [member.bringing_up for member in self._members if member.bringing_up is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._ask_all(
                "close", lambda member: member.engine.close(), among=self._members, limit_s=LOAD_LIMIT_S
            )
        except StallError:
            # The end of a run: an error would help no caller any more.
            logger.exception("an engine was not closed")

    def _note(self) -> None:
        self._changes.note()
        self._members.wake(*self._members)

    async def scale(self, parts: str, change: str) -> str:
        """Have engines or other ``parts`` join or leave, as ``+2`` or ``-1``; ValueError, as here, if not."""
        raise ValueError(f"{parts}={change}: these engines neither join nor leave a run")

    def _start(self) -> None:
        """Begin to bring up what has not been started yet; here, because it needs the event loop."""
        if self._are_started:
            return
        self._are_started = True
        for member in self._members:
            if not (self._closed or member.is_up or member.gone or member.bringing_up):
                member.bringing_up = asyncio.create_task(self._bring_up(member, again=False))

    def _lose(self, member: Member, why: str) -> None:
        member.lost_because = why
        if member.is_up and member.is_remote and not self._closed:
            logger.warning("%s is lost: %s", member, why)
            member.is_up = False
            member.bringing_up = asyncio.create_task(self._bring_up(member, again=True))

    async def _bring_up(self, member: Member, *, again: bool) -> None:
        # One that never was up gets one try: it is set up wrongly.
        was_up = again
        try:
            for num_left in reversed(range(_BRING_UP_TRIES)):
                # After a try that failed, too: `sleep` waits for engines that start, and this for its end.
                member.is_starting = False
                self._note()
                if num_left < _BRING_UP_TRIES - 1:
                    await asyncio.sleep(_TRY_AGAIN_S)
                while self._asleep and member.sleeps:
                    await self._changes.wait(self._changes.version)
                member.is_starting, member.is_asleep = True, False
                try:
                    await cast("Any", member.engine).bring_up()
                    was_up = True
                    if (told := member.loading) and told.done() and isinstance(told.result()[0], EngineLost):
                        # It was away then, and has taken those weights by itself.
                        member.loading = None
                    await self._rest_as_others_do(member)
                    break
                except (EngineLost, StallError, ValueError) as error:
                    if not (num_left and was_up):
                        raise
                    logger.warning("%s is brought up once more: %s", member, error)
            member.is_up = True
            self._members.note_load(member)
            if again:
                self._counts["engine_restarts"] += 1
                logger.warning("%s is back", member)
        # Any error: callers must not wait for this engine any longer. Those that do are told the error.
        except Exception as error:
            member.gone, member.lost_because = True, str(error)
            logger.error("%s is given up: %s", member, error)
        finally:
            member.bringing_up, member.is_starting, self._context = None, False, None
            self._are_started &= member.is_up or member.gone
            self._note()

    async def _rest_as_others_do(self, member: Member) -> None:
        """Pause one that came up, if the others are; meanwhile a pause may begin or end, or weights come."""
        # Told in any case: one that answered a pause, but not what came after it, may still be paused.
        member.paused = not self.is_paused
        while member.loading is not None or member.paused is not self.is_paused:
            await member.loaded()
            await answered(self._follow_pause(member), f"{member} was asked to pause or resume")

    async def _follow_pause(self, member: Member) -> None:
        # Before the wait: if a pause begins or ends in it, `_rest_as_others_do` goes round again.
        member.paused = self.is_paused
        if member.is_asleep and (self.is_paused or self._asleep):
            return
        await (member.engine.pause() if member.paused else member.engine.resume())
        if member.is_asleep:
            member.is_asleep = False
            self._members.note_load(member)
            self._note()

    async def _change(self) -> None:
        """Wait until an engine comes back, is given up, or a pause begins; EngineLost if none is left to wait for."""
        if self._closed:
            raise EngineLost("the engines were closed")
        self.check_left()
        await self._changes.wait(self._changes.version)

    async def _ask_all(
        self,
        what: str,
        ask: Callable[[Member], Awaitable[T]],
        *,
        among: Iterable[Member] | None = None,
        limit_s: float = ANSWER_LIMIT_S,
    ) -> dict[int, T]:
        """The answers of every engine that is up, or `among` these, by its place.

        The error of the first that gives none is raised once all others have answered; a remote one that
        fails to answer is lost instead.
        """
        self._start()

        async def asked(member: Member) -> T:
            # Called only here: cancelled before it has begun, nothing is left that was never awaited.
            return await answered(ask(member), f"{member} was asked to {what}", limit_s)

        members = [member for member in self._members if member.is_up] if among is None else list(among)
        answers = await asyncio.gather(*map(asked, members), return_exceptions=True)
        good: dict[int, T] = {}
        failed: BaseException | None = None
        for member, answer in zip(members, answers, strict=True):
            if member not in self._members:
                # It has left meanwhile.
                continue
            if isinstance(answer, EngineLost) or (isinstance(answer, StallError) and member.is_remote):
                self._lose(member, str(answer))
            elif isinstance(answer, BaseException):
                failed = failed or answer
            else:
                good[member.number] = answer
        if failed is not None:
            raise failed
        return good
