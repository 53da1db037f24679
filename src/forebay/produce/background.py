"""The producer of a separate run: works for one future train step after the other, beside the trainer.

A round ends when every task has its share, so no task runs ahead of a slower one by more than a batch and its
over-sampling; the weights' age bounds how far all of them run ahead of the trainer. While the weights are too
old for the next step, groups that were lost (expired, evicted) for steps that they still serve are replaced.

The producer neither takes batches nor ages groups: `forebay.produce.batches` does.
"""

import asyncio
import enum
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from forebay.aio.changed import Changes
from forebay.aio.tasks import others_first
from forebay.aio.time_limits import timeout
from forebay.produce.progress import ProduceProgress
from forebay.produce.sampler import Sampler
from forebay.produce.strategies.base import ProduceBatchStatus, ProduceStrategy, worst_status
from forebay.produce.strategies.context import Generation, GroupGenerator, ProduceContext
from forebay.produce.strategies.pending import ProductionError
from forebay.replay import ConnectionLost
from forebay.watching.stalls import ANSWER_LIMIT_S, answered

END_GRACE_S = 0.5
"""How long the end of production waits for groups to stop by themselves, as an engine nearby can make them.
To keep the tokens made so far, pause before the shutdown."""
CONTROLLER_LIMIT_S = 1.5 * ANSWER_LIMIT_S
"""Longer than for one engine, so that a controller can say first which engine it is."""


class Mode(enum.Enum):
    """May the producer work? See `BackgroundProducer`."""

    PRODUCING = enum.auto()
    EXHAUSTED = enum.auto()
    """There is nothing that these weights may be used for."""
    PAUSED = enum.auto()
    SHUT_DOWN = enum.auto()


@dataclass(eq=False)
class BackgroundProducer:
    """Runs rounds of production until it is shut down, and knows why it stands still.

    Its mode; the arrows are methods, except for the weights' age, which `run` looks at::

            +---------- weights too old ---------+
            |                                    v
        PRODUCING <--- reconsider, resume --- EXHAUSTED
          |    ^                                 |
        pause  +-- resume --+                  pause        any mode --shutdown--> SHUT_DOWN
          |                 |                    |
          +-------------> PAUSED <---------------+          (however `run` ends, it pauses first)

    A round of `run`, in the mode PRODUCING::

        next step f: the first one without its groups --> every task up to its target --> f + 1 --> next round

    Invariants: while paused, nothing is in flight and nothing starts; however `run` ends, everything that was
    in flight is stored first; a round's contexts carry the model step of the weights that generate.

    consumes: targets of the progress; waits for: a round, newer weights, room, the end of a pause; woken by:
    `resume`, `pause`, `reconsider`, `shutdown`; produces: stored groups, and `changes`.
    """

    runners: "Mapping[str, TaskRunner]"
    """The tasks, by name."""
    progress: ProduceProgress
    """Shared with the consumer."""
    allocate: Callable[[int, int], dict[str, int]]
    """Splits a batch of this size for this train step."""
    make_context: "Callable[[TaskRunner, int, int], ProduceContext]"
    """Takes a task, its share and the train step."""
    fresh_sizes: Callable[[Mapping[str, int], int], Awaitable[dict[str, int]]]
    """The part of shares at a train step that has to be new groups."""
    controller: Generation | None
    """Told to pause and to go on."""
    limit: int | None = None
    """Live groups that the buffer holds; None: any number."""

    def __post_init__(self) -> None:
        self._switching = asyncio.Lock()
        self._contexts: dict[str, ProduceContext] = {}
        """Contexts of the present round by task; empty between rounds."""
        self._commands = Changes()
        """Everything that `run` may stand still for."""
        self.changes = Changes()
        """Everything that others may wait for: a round or the whole has ended, the mode has changed."""
        self.update_event = asyncio.Event()
        self.model_step = 0
        self.mode = Mode.PRODUCING
        self.failure: BaseException | None = None
        """The error that ended `run`."""
        self.pauses_s = dict.fromkeys(self.runners, 0.0)
        """Seconds of the pauses since `consume_pauses`, by task."""
        self._ended: asyncio.Future[None] | None = None
        """Done when `run` has ended; None before its first call."""

    @property
    def status(self) -> ProduceBatchStatus:
        """NORMAL while it produces or could."""
        statuses = {Mode.PRODUCING: ProduceBatchStatus.NORMAL, Mode.EXHAUSTED: ProduceBatchStatus.EXPIRED_BATCH}
        return statuses.get(self.mode, ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT)

    @property
    def was_started(self) -> bool:
        """Whether `run` was ever called."""
        return self._ended is not None

    @property
    def is_running(self) -> bool:
        """Whether `run` is at work, or standing still."""
        return self._ended is not None and not self._ended.done()

    @property
    def has_ended(self) -> bool:
        """Whether no further group will come from it."""
        return self.mode is Mode.SHUT_DOWN or (self.was_started and not self.is_running)

    @property
    def is_in_round(self) -> bool:
        """Whether strategies are at work."""
        return bool(self._contexts)

    def reconsider(self) -> None:
        """Something that the producer stood still for may have changed."""
        if self.mode is Mode.EXHAUSTED:
            self.mode = Mode.PRODUCING
        self._commands.note()

    async def run(self, batch_size: int) -> None:
        """Produce until `shutdown`.

        Raises:
            RuntimeError: it is running already.
            ConnectionLost, ProductionError: production cannot go on.
        """
        if self.is_running:
            raise RuntimeError("produce_loop is running already; start it once")
        self._ended, self.failure = asyncio.get_running_loop().create_future(), None
        try:
            await self._run(batch_size)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            try:
                await self._end()
            finally:
                self._ended.set_result(None)
                self.changes.note()

    async def _run(self, batch_size: int) -> None:
        while self.mode is not Mode.SHUT_DOWN:
            seen = self._commands.version
            if self.mode is Mode.PAUSED:
                await self._commands.wait(seen)
                # A consumer that has ended a pause asks for its batch now: it stands still until it has that.
                await others_first()
                continue
            step = await self._next_step(batch_size)
            status = ProduceBatchStatus.EXPIRED_BATCH
            if step is not None:
                is_ahead = step == self.progress.producer_future_step
                status = await self._produce_for(step, batch_size)
                if status is ProduceBatchStatus.NORMAL and not is_ahead:
                    # The strategies have what they want of a step that was covered already. Whether their
                    # counts look like too few from here or not: to ask again at once would be to spin.
                    status = ProduceBatchStatus.EXPIRED_BATCH
            if status is ProduceBatchStatus.EXPIRED_BATCH and self._commands.version == seen:
                self.mode = Mode.EXHAUSTED
                self.changes.note()
                # Every command sets another mode.
                await self._commands.wait(seen)
            # A strategy that has nothing to do returns at once; others want their turn.
            await asyncio.sleep(0)

    async def _next_step(self, batch_size: int) -> int | None:
        """The train step to produce for; None while there is nothing that these weights may do."""
        progress = self.progress
        step = progress.producer_future_step
        # Of more batches than a buffer holds, one task would evict another's share, whose round is over, for ever.
        room = math.inf if self.limit is None else max(0, self.limit - batch_size)
        # Ahead first: a step that was covered already is looked at only while the weights allow no new one.
        if (step - progress.next_consumer_step) * batch_size <= room and self._can_produce_for(step, batch_size):
            return step
        covered = progress.target_upto_future_step
        if covered == 0 or not self._can_produce_for(covered, batch_size):
            return None
        # Every task had its target when the last round ended; groups may have expired or been evicted since.
        for name, runner in self.runners.items():
            available = await self.make_context(runner, 0, 0).available_count()
            if runner.produce_strategy.should_continue_fn(available, progress.target_samples[name]):
                return covered
        return None

    def _can_produce_for(self, step: int, batch_size: int) -> bool:
        is_ahead = step > self.progress.next_consumer_step
        for name, size in self.allocate(batch_size, step).items():
            strategy = self.runners[name].produce_strategy
            is_too_old = strategy.is_model_expired(step, self.model_step)
            if size > 0 and (is_too_old or (is_ahead and not strategy.works_ahead)):
                return False
        return True

    async def _produce_for(self, step: int, batch_size: int) -> ProduceBatchStatus:
        progress, clock = self.progress, asyncio.get_running_loop().time
        sizes = progress.ensure_target_upto(
            batch_size=batch_size, future_step=step, allocate_batch_sizes=self.allocate
        )
        # New groups in the places of past ones would wait for the next step, and expire there if they may not.
        new = await self.fresh_sizes(sizes, step) if step == progress.next_consumer_step else sizes
        self._contexts = {
            name: replace(self.make_context(runner, sizes[name], step), num_past=sizes[name] - new[name])
            for name, runner in self.runners.items()
            if progress.target_samples[name] > 0
        }
        started_s = clock()
        try:
            status = worst_status((await produce_tasks(self.runners, self._contexts)).values())
        finally:
            self._contexts = {}
            progress.add_produce_time(clock() - started_s)
            self.changes.note()
        if status is ProduceBatchStatus.NORMAL and step == progress.producer_future_step:
            progress.advance_future_step()
        return status

    async def pause(self) -> float:
        """Stop, and have everything in flight stored; the seconds it took, summed over the tasks.

        Raises:
            StallError: a strategy or the controller does not answer; what was in flight is stored.
            ConnectionLost: the buffer is lost, or was when `run` ended.
            ProductionError: groups could not be stored, or their agents did not stop.
        """
        # One pause or resume at a time: a resume that takes its time must not undo a later pause.
        async with self._switching:
            self.stop_starting()
            step = self.progress.producer_future_step
            contexts = {name: self.make_context(runner, 0, step) for name, runner in self.runners.items()}
            try:
                seconds = await pause_tasks(self.runners, contexts, self.controller)
            finally:
                if self.is_in_round:
                    await answered(self._end_of_round(), f"tasks {list(self._contexts)} were asked to pause")
        if isinstance(self.failure, ConnectionLost):
            # Groups that could not be stored are missing: the rest must not be saved as if it were all.
            raise ConnectionLost(str(self.failure)) from self.failure
        for name, pause_s in seconds.items():
            self.pauses_s[name] += pause_s
        return sum(seconds.values())

    def consume_pauses(self) -> dict[str, float]:
        """Seconds of each task's pauses since the last call."""
        pauses_s, self.pauses_s = self.pauses_s, dict.fromkeys(self.runners, 0.0)
        return pauses_s

    async def _end_of_round(self) -> None:
        while self.is_in_round:
            await self.changes.wait(self.changes.version)

    async def _end(self) -> None:
        """Store what is in flight, and cut it short where that takes long."""
        self.stop_starting()
        try:
            # Engines nearby stop at once, and the tokens so far are kept; nothing else is waited for.
            async with timeout(END_GRACE_S):
                await self.pause()
        except TimeoutError:
            ending = [runner.produce_strategy.cut_short() for runner in self.runners.values()]
            for error in await asyncio.gather(*ending, return_exceptions=True):
                if error is not None:
                    raise error from None

    def stop_starting(self) -> None:
        """Start no group any more, as after a `pause`; groups in flight go on."""
        if self.mode is not Mode.SHUT_DOWN:
            self.mode = Mode.PAUSED
        self.update_event.set()
        self._commands.note()

    async def resume(self, model_step: int) -> None:
        """Go on, with the weights of `model_step`; without a pause before, what is in flight goes on too.

        Raises:
            StallError: the controller does not answer.
        """
        async with self._switching:
            self.model_step = model_step
            # A round that saw nothing of a short pause goes on, and must label with the new step.
            for ctx in self._contexts.values():
                ctx.model_step = model_step
            await tell(self.controller, "go on")
            if self.mode is not Mode.SHUT_DOWN:
                self.mode = Mode.PRODUCING
                self.update_event.clear()
            self._commands.note()

    def shutdown(self) -> Awaitable[None]:
        """End `run`, which stores what is in flight first; await the result to wait for its end."""
        self.mode = Mode.SHUT_DOWN
        self.update_event.set()
        self._commands.note()
        self.changes.note()
        if self._ended is None:
            # It was never started: there is no end to wait for.
            self._ended = asyncio.get_running_loop().create_future()
            self._ended.set_result(None)
        # A caller that stops waiting must not cancel it for the others.
        return asyncio.shield(self._ended)


_NUM_NAMED = 8
"""Group ids that an error message names; the count says how many more there are."""


@dataclass(kw_only=True)
class TaskRunner:
    """One task: the source of its prompts, the agent that rolls them out, and the strategy."""

    task_name: str
    agent_loop: GroupGenerator
    produce_strategy: ProduceStrategy
    sampler: Sampler
    weight: float = 1.0
    """Share of the batch, relative to the other tasks; 0 disables the task."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"task {self.task_name!r}: weight must not be negative, got {self.weight}")

    def name_pending(self) -> str:
        """How many groups are in flight, and which, for people."""
        groups, count = self.produce_strategy.pending_groups(), self.produce_strategy.pending_task_count()
        named = ", ".join(str(group[0].group_id) for group in groups[:_NUM_NAMED])
        return f"{count} ({named}{', ...' if len(groups) > _NUM_NAMED else ''})"


async def produce_tasks(
    runners: Mapping[str, TaskRunner], contexts: Mapping[str, ProduceContext]
) -> dict[str, ProduceBatchStatus]:
    """One call of every task's strategy, all at once; the first that raises ends the others.

    Raises:
        ConnectionLost: the buffer is lost.
        ProductionError: production cannot go on.
    """
    try:
        async with asyncio.TaskGroup() as group:
            calls = {
                name: group.create_task(runners[name].produce_strategy.produce_batch(ctx), name=f"produce {name}")
                for name, ctx in contexts.items()
            }
    except BaseExceptionGroup as errors:
        # One of the tasks ended the others: its reason is the one to show.
        reason = _reason_among(errors.exceptions)
        raise reason from reason.__cause__
    return {name: call.result() for name, call in calls.items()}


async def pause_tasks(
    runners: Mapping[str, TaskRunner], contexts: Mapping[str, ProduceContext], controller: Generation | None
) -> dict[str, float]:
    """Stop the engines, then collect every task's groups, all at once; the seconds it took each task.

    An error of one of them keeps none of the others from stopping; it is raised when all have ended.

    Raises:
        StallError: the controller does not answer.
        ConnectionLost: the buffer is lost.
        ProductionError: a task could not be paused; the first of them.
    """
    # The engines come first: a strategy that knows no controller can only wait for its groups to end, and
    # after its time-out it throws their tokens away.
    asked: list[Awaitable[Any]] = [tell(controller, "pause")]
    asked += [runners[name].produce_strategy.pause_produce(ctx) for name, ctx in contexts.items()]
    engines_error, *answers = await asyncio.gather(*asked, return_exceptions=True)
    if engines_error is not None:
        raise engines_error
    seconds: dict[str, Any] = dict(zip(contexts, answers, strict=True))
    errors = {name: answer for name, answer in seconds.items() if isinstance(answer, BaseException)}
    if not errors:
        return seconds
    reason = _reason_among(list(errors.values()))
    if isinstance(reason, ProductionError | ConnectionLost) or not isinstance(reason, Exception):
        raise reason
    name = next(name for name, error in errors.items() if error is reason)
    raise ProductionError(f"task {name!r} could not be paused: {type(reason).__name__}: {reason}") from reason


def _reason_among(errors: Sequence[BaseException]) -> BaseException:
    """A lost buffer, which fails others and may be brought back; else why production cannot go on."""
    kinds = (ConnectionLost, ProductionError)
    return min(errors, key=lambda error: [not isinstance(error, kind) for kind in kinds])


async def tell(controller: Generation | None, what: Literal["pause", "go on"]) -> None:
    """Have `controller`, if there is one, end what runs as aborted, or take requests again.

    Raises:
        StallError: it does not answer.
    """
    if controller is not None:
        call = controller.pause_generation if what == "pause" else controller.continue_generation
        await answered(call(), f"{type(controller).__name__} was asked to {what}", CONTROLLER_LIMIT_S)
