"""The producer of a separate run: works for one future train step after the other, beside the trainer.

::

                     +------------------------ weights too old --------------------+
                     v                                                             |
    paused <--> round for step f: every task up to its target --> f + 1 --> may start? --> next round
     ^  |                                                                          |
     |  `-- resume(model_step) <-- weights synchronized                            '-- shutdown --> end
     `----- pause(): everything in flight stored

A round ends when every task has its share, so no task runs ahead of a slower one by more than a batch and its
over-sampling; the weights' age bounds how far all of them run ahead of the trainer. While the weights are too
old for the next step, groups that were lost (expired, evicted) for steps that they still serve are replaced.

The producer neither takes batches nor ages groups: `forebay.produce.manager` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from forebay.aio.changed import Changes
from forebay.produce.progress import ProduceProgress
from forebay.produce.strategies.base import ProduceBatchStatus, ProduceStrategy
from forebay.produce.strategies.budget import ProductionError
from forebay.produce.strategies.context import ProduceContext, default_should_continue_fn
from forebay.produce.tasks import TaskRunner
from forebay.replay import ConnectionLost
from forebay.watching.stalls import ANSWER_LIMIT_S, answered

STATUS_PRECEDENCE = (ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT, ProduceBatchStatus.EXPIRED_BATCH)

END_GRACE_S = 0.5
"""How long the end of production waits for groups to stop by themselves, as an engine nearby can make them.
Who wants to keep the tokens made so far pauses before it shuts down."""


class ProductionStopped(ProductionError):
    """Production was shut down: there will be no further batch."""


class Generation(Protocol):
    """What production needs of a rollout controller."""

    async def pause_generation(self) -> None:
        """End what is running as aborted."""
        ...

    async def continue_generation(self) -> None:
        """Take requests again."""
        ...


CONTROLLER_LIMIT_S = 1.5 * ANSWER_LIMIT_S
"""Longer than for one engine, so that a controller can say first which engine it is."""


async def pause_generation(controller: Generation) -> None:
    """Have `controller` pause.

    Raises:
        StallError: it does not answer.
    """
    what = f"{type(controller).__name__} was asked to pause"
    await answered(controller.pause_generation(), what, CONTROLLER_LIMIT_S)


async def continue_generation(controller: Generation) -> None:
    """Have `controller` go on.

    Raises:
        StallError: it does not answer.
    """
    what = f"{type(controller).__name__} was asked to go on"
    await answered(controller.continue_generation(), what, CONTROLLER_LIMIT_S)


def worst_status(statuses: Iterable[ProduceBatchStatus]) -> ProduceBatchStatus:
    """What several tasks amount to together."""
    found = set(statuses)
    return next((status for status in STATUS_PRECEDENCE if status in found), ProduceBatchStatus.NORMAL)


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
                name: group.create_task(
                    runners[name].produce_strategy.produce_batch(ctx), name=f"produce {name}"
                )
                for name, ctx in contexts.items()
            }
    except BaseExceptionGroup as errors:
        # One of the tasks ended the others: its reason is the one to show.
        reason = _reason_among(errors.exceptions)
        raise reason from reason.__cause__
    return {name: call.result() for name, call in calls.items()}


def _reason_among(errors: Sequence[BaseException]) -> BaseException:
    """A lost buffer, which fails others and may be brought back; else why production cannot go on."""
    for kind in (ConnectionLost, ProductionError):
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[0]


async def stop_tasks(
    runners: Mapping[str, TaskRunner],
    contexts: Mapping[str, ProduceContext],
    controller: Generation | None,
) -> tuple[dict[str, float | BaseException], BaseException | None]:
    """Stop the engines, then collect every task's groups, all at once, whatever one of them raises.

    Returns each task's seconds, or its error; and the controller's error, if it raised one.
    """
    # The engines come first: a strategy that knows no controller can only wait for its groups to end, and
    # after its time-out it throws their tokens away.
    asked: list[Awaitable[Any]] = [] if controller is None else [pause_generation(controller)]
    asked += [runners[name].produce_strategy.pause_produce(ctx) for name, ctx in contexts.items()]
    answers: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
    engines_error = None if controller is None else answers.pop(0)
    return dict(zip(contexts, answers, strict=True)), engines_error


def pause_seconds(results: Mapping[str, float | BaseException]) -> dict[str, float]:
    """The seconds of `stop_tasks` by task.

    Raises:
        ConnectionLost: the buffer is lost.
        ProductionError: a task could not be paused; the first of them.
    """
    errors = {name: result for name, result in results.items() if isinstance(result, BaseException)}
    if errors:
        reason = _reason_among(list(errors.values()))
        if isinstance(reason, ProductionError | ConnectionLost) or not isinstance(reason, Exception):
            raise reason
        name = next(name for name, error in errors.items() if error is reason)
        raise ProductionError(
            f"task {name!r} could not be paused: {type(reason).__name__}: {reason}"
        ) from reason
    return {name: result for name, result in results.items() if not isinstance(result, BaseException)}


class BackgroundProducer:
    """Runs rounds of production until it is shut down, and knows why it stands still.

    Invariants: while paused, nothing is in flight and nothing starts; however `run` ends, everything that was
    in flight is stored first; a round's contexts carry the model step of the weights that generate.

    consumes: targets of the progress; waits for: a round, newer weights, room, the end of a pause; woken by:
    `resume`, `pause`, `reconsider`, `shutdown`; produces: stored groups, and `changes`.
    """

    def __init__(
        self,
        runners: Mapping[str, TaskRunner],
        progress: ProduceProgress,
        *,
        allocate: Callable[[int, int], dict[str, int]],
        make_context: Callable[[TaskRunner, int, int], ProduceContext],
        controller: Generation | None,
    ) -> None:
        """`allocate` splits a batch for a step; `make_context` takes a task, its share and the step."""
        self._runners = runners
        self._progress = progress
        self._allocate = allocate
        self._make_context = make_context
        self._controller = controller
        self._switching = asyncio.Lock()
        self._contexts: dict[str, ProduceContext] = {}
        """Of the present round."""
        self._commands = Changes()
        """What the producer may stand still for."""
        self.changes = Changes()
        """What others may wait for: a round or the whole has ended, the weights have become too old."""
        self.update_event = asyncio.Event()
        self.model_step = 0
        self.is_paused = False
        self.is_waiting_for_weights = False
        self.is_running = False
        self.is_shut_down = False
        self.has_ended = False
        self.failure: BaseException | None = None
        """What ended `run`, unless it was a shutdown."""

    @property
    def status(self) -> ProduceBatchStatus:
        """NORMAL while it produces or could."""
        if self.is_paused:
            return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        if self.is_waiting_for_weights:
            return ProduceBatchStatus.EXPIRED_BATCH
        return ProduceBatchStatus.NORMAL

    @property
    def was_started(self) -> bool:
        """Whether `run` was ever called."""
        return self.is_running or self.has_ended

    @property
    def is_in_round(self) -> bool:
        """Whether strategies are at work."""
        return bool(self._contexts)

    def reconsider(self) -> None:
        """Something that the producer stood still for may have changed."""
        self.is_waiting_for_weights = False
        self._commands.note()

    async def run(self, batch_size: int) -> None:
        """Produce until `shutdown`.

        Raises:
            RuntimeError: it is running already.
            ConnectionLost, ProductionError: production cannot go on.
        """
        if self.is_running:
            raise RuntimeError("produce_loop is running already; start it once")
        self.is_running, self.has_ended, self.failure = True, False, None
        try:
            await self._run(batch_size)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            try:
                await self._end()
            finally:
                self.is_running, self.has_ended = False, True
                self.changes.note()

    async def _run(self, batch_size: int) -> None:
        while not self.is_shut_down:
            seen = self._commands.version
            if self.is_paused:
                await self._commands.wait(seen)
                continue
            step = await self._next_step(batch_size)
            status = ProduceBatchStatus.EXPIRED_BATCH
            if step is not None:
                is_ahead = step == self._progress.producer_future_step
                status = await self._produce_for(step, batch_size)
                if status is ProduceBatchStatus.NORMAL and not is_ahead:
                    # The strategies have what they want of a step that was covered already. Whether their
                    # counts look like too few from here or not: to ask again at once would be to spin.
                    status = ProduceBatchStatus.EXPIRED_BATCH
            if status is ProduceBatchStatus.EXPIRED_BATCH and self._commands.version == seen:
                self.is_waiting_for_weights = True
                self.changes.note()
                await self._commands.wait(seen)
                self.is_waiting_for_weights = False
            # A strategy that has nothing to do returns at once; others want their turn.
            await asyncio.sleep(0)

    async def _next_step(self, batch_size: int) -> int | None:
        """The train step to produce for; None while there is nothing that these weights may do."""
        progress = self._progress
        if self._can_produce_for(progress.producer_future_step, batch_size):
            return progress.producer_future_step
        covered = progress.target_upto_future_step
        if covered > 0 and self._can_produce_for(covered, batch_size) and await self._is_lacking():
            return covered
        return None

    def _can_produce_for(self, step: int, batch_size: int) -> bool:
        for name, size in self._allocate(batch_size, step).items():
            strategy = self._runners[name].produce_strategy
            if size <= 0:
                continue
            if strategy.is_model_expired(step, self.model_step):
                return False
            if not getattr(strategy, "works_ahead", True) and step > self._progress.next_consumer_step:
                return False
        return True

    async def _is_lacking(self) -> bool:
        """Whether a task has less than its target, which it had when the last round ended."""
        for name, runner in self._runners.items():
            go_on = getattr(runner.produce_strategy, "should_continue_fn", default_should_continue_fn)
            available = await self._make_context(runner, 0, 0).available_count()
            if go_on(available, self._progress.target_samples[name]):
                return True
        return False

    async def _produce_for(self, step: int, batch_size: int) -> ProduceBatchStatus:
        progress, clock = self._progress, asyncio.get_running_loop().time
        sizes = progress.ensure_target_upto(
            batch_size=batch_size, future_step=step, allocate_batch_sizes=self._allocate
        )
        self._contexts = {
            name: self._make_context(runner, sizes.get(name, 0), step)
            for name, runner in self._runners.items()
            if progress.target_samples[name] > 0
        }
        started_s = clock()
        try:
            status = worst_status((await produce_tasks(self._runners, self._contexts)).values())
        finally:
            self._contexts = {}
            progress.add_produce_time(clock() - started_s)
            self.changes.note()
        if status is ProduceBatchStatus.NORMAL and step == progress.producer_future_step:
            progress.advance_future_step()
        return status

    async def pause(self) -> dict[str, float]:
        """Stop, and have everything in flight stored; the seconds it took each task.

        Raises:
            StallError: a strategy or the controller does not answer; what was in flight is stored.
            ConnectionLost: the buffer is lost, or was when `run` ended.
            ProductionError: groups could not be stored, or their agents did not stop.
        """
        async with self._switching:
            self._stop_starting()
            step = self._progress.producer_future_step
            contexts = {name: self._make_context(runner, 0, step) for name, runner in self._runners.items()}
            results, engines_error = await stop_tasks(self._runners, contexts, self._controller)
            if self.is_in_round:
                await answered(self._end_of_round(), f"tasks {list(self._contexts)} were asked to pause")
            if engines_error is not None:
                raise engines_error
        seconds = pause_seconds(results)
        if isinstance(self.failure, ConnectionLost):
            # What could not be stored is missing: nobody must save the rest as if it were all.
            raise ConnectionLost(str(self.failure)) from self.failure
        return seconds

    async def _end_of_round(self) -> None:
        while self.is_in_round:
            await self.changes.wait(self.changes.version)

    async def _end(self) -> None:
        """Store what is in flight, without much ado."""
        self._stop_starting()
        try:
            async with asyncio.timeout(END_GRACE_S):
                await self.pause()
        except TimeoutError:
            strategies = [runner.produce_strategy for runner in self._runners.values()]
            ending = [s.cut_short() for s in strategies if isinstance(s, ProduceStrategy)]
            for error in await asyncio.gather(*ending, return_exceptions=True):
                if error is not None:
                    raise error from None

    def _stop_starting(self) -> None:
        self.is_paused = True
        self.update_event.set()
        self._commands.note()

    async def resume(self, model_step: int) -> None:
        """Go on, with the weights of `model_step`; without a pause before, what is in flight goes on too.

        Raises:
            StallError: the controller does not answer.
        """
        async with self._switching:
            self.model_step = model_step
            for ctx in self._contexts.values():
                ctx.model_step = model_step
            if self._controller is not None:
                await continue_generation(self._controller)
            self.is_paused = False
            if not self.is_shut_down:
                self.update_event.clear()
            self.reconsider()

    def start_paused(self, model_step: int) -> None:
        """As after a `pause`, with the weights of `model_step`."""
        self.model_step = model_step
        self._stop_starting()

    def shutdown(self) -> None:
        """End `run`, which stores what is in flight first."""
        self.is_shut_down = True
        self.update_event.set()
        self._commands.note()
        self.changes.note()

    async def wait_for_end(self) -> None:
        """Until `run` has ended; at once if it does not run."""
        while self.is_running:
            await self.changes.wait(self.changes.version)
