"""Runs several tasks: splits the batch, drives the strategies, takes the batch, reports what was done.

One colocated step::

    produce_batch(batch_size, train_step, model_step)
        continue engines -> every task's strategy, concurrently -> pause -> take the batch (archived under
        train_step) -> dropped groups leave the buffer and enter the ledger -> ProduceBatchResult

A separate run, where `produce_loop` goes on beside the trainer (`forebay.produce.background`)::

    get_batch(batch_size, train_step)
        age the groups -> wait until the buffer has the batch -> take it -> age for the next step -> result
    pause_produce -> synchronize weights, evaluate, save -> continue_produce(model_step)

The manager owns no device and starts no engine; it is the one writer of progress and ledger. Evaluation has
priority over production by being done between `pause_produce` and `continue_produce`.
"""

import asyncio
import contextlib
import copy
import json
import logging
import math
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from fractions import Fraction
from numbers import Integral
from pathlib import Path

from forebay.io.safe_files import check
from forebay.ledger import Ledger
from forebay.produce.background import BackgroundProducer, Mode, TaskRunner, pause_tasks, produce_tasks, tell
from forebay.produce.batches import Batches, ColocatedRound
from forebay.produce.progress import ProduceProgress
from forebay.produce.recovery import GROUPS, Cut, sampler_path, settle
from forebay.produce.results import ProduceBatchResult
from forebay.produce.strategies.base import ProduceBatchStatus
from forebay.produce.strategies.context import Generation, GroupCallback, ProduceContext
from forebay.produce.strategies.pending import ProductionError
from forebay.produce.strategies.rules import GroupRules
from forebay.produce.unfinished import copies_saved
from forebay.replay import ReplayBuffer
from forebay.types import RolloutState
from forebay.watching.activity import WAIT_BATCH, Activities
from forebay.watching.stalls import StallWatch

logger = logging.getLogger(__name__)


class AgentLoopManager:
    """Runs several tasks over one replay buffer.

    Invariants: a batch comes back whole or not at all, with its groups in task order; what leaves the buffer
    is in the ledger; a group that was taken for a train step is ARCHIVED until that step is committed; a
    cancelled call has taken nothing.

    Args:
        task_runners: the tasks.
        replay_buffer: theirs together.
        rollout_controller: told to pause and to go on; None if nothing has to be told.
        ledger: a new one if None.
        on_group: told of every stored group; for displays, never for decisions.
        stall_watch: ends waits for production in which nothing has progressed for too long.
        activities: where waits and puts are noted.
        rules: what is asked of a generated group; None: groups are stored, and trained, as they are.
        keeps_dropped: dropped groups stay in the buffer, ARCHIVED, until it is told to `commit`.
        save_partial_every_s: no token of an unfinished group is lost by a kill that is this old, where the
            store is durable and the controller goes on at half of it; None: all are.
    """

    def __init__(
        self,
        *,
        task_runners: Sequence[TaskRunner],
        replay_buffer: ReplayBuffer,
        rollout_controller: Generation | None = None,
        ledger: Ledger | None = None,
        on_group: GroupCallback = lambda *_: None,
        stall_watch: StallWatch | None = None,
        activities: Activities | None = None,
        rules: GroupRules | None = None,
        keeps_dropped: bool = False,
        save_partial_every_s: float | None = None,
    ) -> None:
        names = [runner.task_name for runner in task_runners]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"tasks need unique names and there must be at least one, got {names}")
        self.task_runners = task_runners
        self.replay_buffer = replay_buffer
        self.rollout_controller = rollout_controller
        self.on_group = on_group
        self.stall_watch = stall_watch
        self.activities = Activities() if activities is None else activities
        self.save_partial_every_s = save_partial_every_s
        self.progress = ProduceProgress.build(names)
        """The progress of the separate run; one object for producer and consumer."""
        self._runners = {runner.task_name: runner for runner in task_runners}
        self._background = BackgroundProducer(
            self._runners,
            self.progress,
            allocate=self._split,
            make_context=self._context,
            fresh_sizes=lambda sizes, train_step: self.batches.fresh_sizes(sizes, train_step),
            controller=rollout_controller,
            # A buffer in another process does not tell of its own.
            limit=getattr(replay_buffer, "limit", None),
        )
        ledger = Ledger() if ledger is None else ledger
        self.batches = Batches(
            self._runners, replay_buffer, ledger, self._background, self.progress, rules, keeps_dropped
        )

    @property
    def ledger(self) -> Ledger:
        """The books of every group."""
        return self.batches.ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self.batches.ledger = ledger

    @property
    def task_names(self) -> list[str]:
        """Names of the tasks, in configured order."""
        return list(self._runners)

    @property
    def status(self) -> ProduceBatchStatus:
        """Of the background producer: NORMAL; UPDATE_WEIGHT_AND_ABORT: paused; EXPIRED_BATCH: standing still,
        because its weights are too old for the next step."""
        return self._background.status

    @property
    def model_step(self) -> int:
        """The step of the weights that the background producer generates with."""
        return self._background.model_step

    def get_task_batch_sizes(self, global_batch_size: int, train_step: int) -> dict[str, int]:
        """Groups per task in the batch of `train_step`; may be overridden, and is checked then."""
        return split_batch(global_batch_size, {name: r.weight for name, r in self._runners.items()})

    def _split(self, batch_size: int, train_step: int) -> dict[str, int]:
        """The checked answer of `get_task_batch_sizes`, before anything is produced or taken by it."""
        if (batch_size or 0) < 1:
            raise ValueError(f"batch_size must be at least 1 group, got {batch_size}")
        return check_split(self.get_task_batch_sizes(batch_size, train_step), self.task_names, batch_size)

    def pending_task_count(self) -> dict[str, int]:
        """Groups of each task that are in flight."""
        return {name: runner.produce_strategy.pending_task_count() for name, runner in self._runners.items()}

    async def count_live(self) -> dict[str, int]:
        """Groups of each task in the buffer and in flight, as `ledger.balance` takes them."""
        return await self.batches.count_live()

    # -- Colocated

    async def produce_batch(self, batch_size: int, train_step: int, model_step: int) -> ProduceBatchResult:
        """One batch of `batch_size` groups for `train_step`, made by the weights of `model_step`.

        Raises:
            ValueError: `batch_size` is less than 1, or an overridden `get_task_batch_sizes` gives no split.
            ProductionError: production cannot go on, or a task came back short; nothing was taken then.
        """
        model_step = check_model_step(model_step)
        clock, batches = asyncio.get_running_loop().time, self.batches
        started_s = clock()
        sizes = self._split(batch_size, train_step)
        # Leftovers may have grown too old: they would be counted now and expire when they are taken.
        await batches.age(train_step)
        new = await batches.fresh_sizes(sizes, train_step)
        progress = ProduceProgress.build_local(self.task_names, new, train_step)
        while True:
            num_untrainable = batches.num_untrainable
            done = await self._produce_colocated(new, train_step, model_step, progress)
            await batches.age(train_step)
            progress.add_produce_time(clock() - started_s)
            started_s = clock()
            result = await batches.take(sizes, train_step, done)
            if result is not None:
                return result
            if batches.num_untrainable == num_untrainable:
                raise ProductionError(f"no whole batch: {await batches.describe(sizes, train_step)}")
            # Groups that were dropped because they cannot be trained are replaced in another round.

    async def _produce_colocated(
        self, sizes: Mapping[str, int], train_step: int, model_step: int, progress: ProduceProgress
    ) -> ColocatedRound:
        """Continue, produce every task at once, pause. Engines are paused also when a task raises."""
        update_event = asyncio.Event()
        contexts = {
            name: replace(
                self._context(self._runners[name], size, train_step),
                # This round's own, in place of the background producer's.
                update_event=update_event,
                model_step=model_step,
                progress=progress,
            )
            for name, size in sizes.items()
            if size > 0
        }
        await tell(self.rollout_controller, "go on")
        try:
            async with self._watched(), self._copies_saved():
                statuses = await produce_tasks(self._runners, contexts)
        finally:
            # Before the pause: a group that is only being taken now is put back, not generated.
            update_event.set()
            pauses_s = await pause_tasks(self._runners, contexts, self.rollout_controller)
        return ColocatedRound(progress=progress, statuses=statuses, pauses_s=pauses_s)

    # -- Separate

    async def produce_loop(self, batch_size: int) -> None:
        """Produce in the background until `shutdown`; start it once, as a task.

        However it ends, everything that was in flight is in the buffer first.

        Raises:
            ValueError: `batch_size` is less than 1.
            RuntimeError: it is running already.
            ProductionError: production cannot go on; `get_batch` raises one, too.
        """
        self._split(batch_size, self.progress.producer_future_step)
        async with self._copies_saved():
            await self._background.run(batch_size)

    async def get_batch(self, batch_size: int, train_step: int) -> ProduceBatchResult:
        """Wait for the batch of `train_step` and take it.

        Empty, with EXPIRED_BATCH, if newer weights than the producer's exist and only they can help:
        synchronize, `continue_produce`, and ask again for the same step. An empty result carries what is left
        over and the time of the pauses since the last result; what was produced comes with the next batch.

        Raises:
            ValueError: `batch_size` is less than 1, or an overridden `get_task_batch_sizes` gives no split.
            ProductionError: no batch will come; the message states the counters.
            StallError: nothing has progressed for too long.
        """
        sizes = self._split(batch_size, train_step)
        # From here on, groups are stored for this step, and too old ones are not counted as ready.
        self.progress.begin_consume(train_step)
        await self.batches.age(train_step, anew=False)
        with self.activities.span(WAIT_BATCH, f"the batch of train step {train_step}"):
            while True:
                async with self._watched():
                    new = await self.batches.fresh_sizes(sizes, train_step)
                    is_ready = await self.batches.wait_for(new, train_step)
                if not is_ready:
                    # So that what was put without a threshold is told of as expired.
                    await self.batches.age(train_step)
                    return await self.batches.report_expired(sizes)
                result = await self.batches.take(sizes, train_step)
                if result is not None:
                    return result

    async def pause_produce(self) -> float:
        """Stop: afterwards nothing is in flight, and nothing starts before `continue_produce`.

        Returns the seconds it took, summed over the tasks. Cancelled, it has still stopped new work; call it
        again to wait for what was in flight.
        """
        # Not watched for a stall: a pause has its own time-out, and must work after one.
        return await self._background.pause()

    async def continue_produce(self, model_step: int) -> None:
        """Go on with the weights of `model_step`.

        Without a pause before, for weights that were replaced under running generations, what is in flight
        goes on as well.

        Raises:
            ValueError: it is no model step.
        """
        await self._background.resume(check_model_step(model_step))

    def shutdown(self) -> Awaitable[None]:
        """End `produce_loop` and all waits in `get_batch`.

        It takes effect at once; awaiting what it returns waits until the loop has ended.
        """
        return self._background.shutdown()

    async def give_back(self, groups: Sequence[Sequence[RolloutState]], train_step: int) -> None:
        """Undo `get_batch` or `produce_batch` of `train_step`: its groups are live again."""
        await self.batches.give_back(groups, train_step)

    # -- Both

    def _context(self, runner: TaskRunner, size: int, train_step: int) -> ProduceContext:
        """The context of the background producer for one task."""
        strategy = runner.produce_strategy
        return ProduceContext(
            agent_loop=runner.agent_loop,
            sampler=runner.sampler,
            replay_buffer=self.replay_buffer,
            task_batch_size=size,
            task_name=runner.task_name,
            train_step=train_step,
            update_event=self._background.update_event,
            model_step=self._background.model_step,
            progress=self.progress,
            is_valid_sample_fn=strategy.is_valid_sample_fn,
            stale_threshold=strategy.stale_threshold,
            ledger=self.ledger,
            on_group=self._note_group,
            activities=self.activities,
            rules=self.batches.rules,
        )

    def _note_group(self, task_name: str, group: Sequence[RolloutState]) -> None:
        if self.stall_watch is not None:
            self.stall_watch.progressed()
        self.on_group(task_name, group)

    def _copies_saved(self) -> contextlib.AbstractAsyncContextManager[None]:
        return copies_saved(self.replay_buffer, lambda: self.ledger, self._runners, self.save_partial_every_s)

    def _watched(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext() if self.stall_watch is None else self.stall_watch.guard()

    async def save(self, path: Path | str, *, model_step: int | None = None) -> None:
        """Samplers, buffer, progress and ledger into the folder `path`.

        `model_step` is that of the weights that a resumed run starts with; the present one if None.

        Raises:
            RuntimeError: groups are in flight, or production is going on; pause it first.
        """
        pending = {
            name: runner.name_pending()
            for name, runner in self._runners.items()
            if runner.produce_strategy.pending_task_count()
        }
        if pending:
            raise RuntimeError(f"cannot save while groups are in flight: {pending}; pause production first")
        if self._background.is_in_round:
            raise RuntimeError("cannot save while production is going on; pause it first")
        path = Path(path)
        async with contextlib.aclosing(await self.cut(path, model_step=model_step, with_groups=True)) as cut:
            await asyncio.to_thread(path.mkdir, parents=True, exist_ok=True)
            # Nothing is in flight, so they fit to the rest, whenever they are asked. A sampler of one's own
            # has `save` and `resume`; `state_dict` is that of a run's.
            for name, runner in self._runners.items():
                await asyncio.to_thread(runner.sampler.save, sampler_path(path, name))
            await cut.write(path)

    async def cut(
        self,
        path: Path,
        *,
        model_step: int | None = None,
        with_groups: bool | None = None,
        train_step: int | None = None,
    ) -> Cut:
        """Everything that `save` writes, as of one moment, to be written to `path`; production may go on.

        A group that is in flight is in the books, and not in the buffer. With a `train_step`, that of a run's
        checkpoint, a resume brings buffer and books together, and has such groups generated again; consumed
        groups are left out. Without `with_groups` the groups stay where they are, in a store that is durable;
        None: if it is.
        """
        write_groups = None
        async with AsyncExitStack() as opened:
            if with_groups or (with_groups is None and not self.replay_buffer.storage.is_durable):
                moment = self.replay_buffer.moment(train_step=train_step)
                write_groups = await opened.enter_async_context(moment)
            # Nothing is awaited from here on: the parts are of the same moment.
            state = {
                "tasks": self.task_names,
                "progress": copy.deepcopy(self.progress.state_dict()),
                "model_step": self.model_step if model_step is None else model_step,
                "ledger": self.ledger.checkpoint(path),
                "train_step": train_step,
            }
            # `save` has samplers write themselves: one of a user's own may know no `state_dict`.
            runners = self._runners if train_step is not None else {}
            samplers = {name: runner.sampler.state_dict() for name, runner in runners.items()}
            return Cut(state, samplers, self.ledger, write_groups, opened.pop_all())

    async def resume(self, path: Path | str, *, has_groups: bool = False) -> int:
        """Go back to what `save`, or a cut, wrote; return the model step. Production is paused afterwards.

        With `has_groups` the buffer holds the groups already, those that came after the cut too.

        Raises:
            RuntimeError: production is running, or the buffer holds groups.
            ValueError: the checkpoint has other tasks, a part of it does not fit, or is damaged.
        """
        path = Path(path)
        if self._background.is_running and self._background.mode is not Mode.PAUSED:
            raise RuntimeError("cannot resume while production is going on; pause it first")
        await asyncio.to_thread(check, path)
        state = json.loads(await asyncio.to_thread((path / "manager.json").read_text, "utf-8"))
        if set(state["tasks"]) != set(self._runners):
            raise ValueError(
                f"the checkpoint at {str(path)!r} has tasks {sorted(state['tasks'])}, "
                f"the run has {sorted(self._runners)}"
            )
        if not has_groups:
            await self.replay_buffer.resume(path / GROUPS)
        for name, runner in self._runners.items():
            await asyncio.to_thread(runner.sampler.resume, sampler_path(path, name))
        self.progress.load_state_dict(state["progress"])
        await asyncio.to_thread(self.ledger.restore, state["ledger"], path)
        if self.ledger.lost_events:
            logger.warning(
                "%d events are missing in the ledger's file: a power cut or the disk took them. The run goes "
                "on; the books of the groups that they were about are not complete",
                self.ledger.lost_events,
            )
        if (train_step := state.get("train_step")) is not None:
            await self.settle(train_step)
        self._background.model_step = state["model_step"]
        self._background.stop_starting()
        return self.model_step

    async def settle(self, train_step: int) -> None:
        """Go on from the books of the checkpoint at `train_step`, with the groups that the buffer holds."""
        samplers = {name: runner.sampler for name, runner in self._runners.items()}
        await settle(self.replay_buffer, self.ledger, samplers, train_step)


def split_batch(batch_size: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split `batch_size` groups by weight: floor, then largest remainder, ties in order; the sum is exact.

    Raises:
        ValueError: no weight is positive.

    >>> split_batch(7, {"a": 1, "b": 2, "c": 0})
    {'a': 2, 'b': 5, 'c': 0}
    """
    # As written, not as binary fractions: equal remainders must come out equal.
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    if total <= 0:
        raise ValueError(f"at least one task needs a positive weight, got {dict(weights)}")
    shares = {name: batch_size * weight / total for name, weight in exact.items()}
    sizes = {name: math.floor(share) for name, share in shares.items()}
    # sorted() is stable: equal remainders stay in task order.
    by_remainder = sorted((name for name in weights if weights[name] > 0), key=lambda name: sizes[name] - shares[name])
    for name in by_remainder[: batch_size - sum(sizes.values())]:
        sizes[name] += 1
    return sizes


def check_model_step(model_step: object) -> int:
    """It as an int; ValueError if it is no whole number from 0 on: tokens labeled so would never count as stale."""
    if not isinstance(model_step, Integral) or model_step < 0:
        raise ValueError(f"model_step must be a whole number, 0 for the first weights, got {model_step!r}")
    return int(model_step)


def check_split(sizes: object, task_names: Collection[str], batch_size: int) -> dict[str, int]:
    """`sizes`, the groups of each task in a batch, in the order of `task_names`.

    `AgentLoopManager.get_task_batch_sizes` may be overridden, and its answer decides what is taken.

    Raises:
        ValueError: a task is missing or unknown, a size is negative or no whole number, or the sum is wrong.
    """
    problem = None
    if not isinstance(sizes, Mapping) or set(sizes) != set(task_names):
        problem = f"it must name the tasks {list(task_names)}, each once (0 for one without a share)"
    elif any(isinstance(size, bool) or not isinstance(size, Integral) or size < 0 for size in sizes.values()):
        problem = "the sizes must be whole numbers of at least 0"
    elif sum(sizes.values()) != batch_size:
        problem = f"the sizes must sum to the batch of {batch_size}, not to {sum(sizes.values())}"
    if problem is not None:
        raise ValueError(f"get_task_batch_sizes returned {sizes!r:.500}: {problem}")
    assert isinstance(sizes, Mapping)
    return {name: int(sizes[name]) for name in task_names}
