"""The trainer of a random schedule, whoever disturbs it, and everything that must hold at any instant."""

import asyncio
import contextlib
import itertools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from schedule_plan import draw_plan
from schedule_world import Record, ScheduleWorld, score_of, why_untrainable

from forebay.aio import virtual_time
from forebay.produce import ProduceBatchStatus, ProductionError, ProductionStopped, SyncProduceStrategyConfig
from forebay.types import RolloutState, Status, calculate_seq_staleness
from forebay.watching.stalls import StallError

EMPTY_IN_A_ROW = 3
"""An empty batch asks for a weight sync, after which there is one."""

STALLED = re.compile(
    r"no progress for \d+ s; \d+ in flight: .*"
    r"(rollout [abc]/\d+/\d+/\d+/\d+ generating|group [abc]/\d+/\d+/\d+ being judged) for \d+ s"
)


@dataclass
class Saved:
    """A checkpoint: what a new world goes on from, and what had happened by then."""

    folder: Path
    record: Record
    step: int


class Crash(Exception):
    """The process is gone; a new one goes on from the latest checkpoint."""


class Trainer:
    """One process of a run: from a checkpoint, or the start, to the end, a crash or a shutdown."""

    def __init__(self, plan, world, step, folder):
        self.plan, self.world, self.manager, self.record = plan, world, world.manager, world.record
        self.step, self.folder = step, folder
        self.model_step = 0
        self.saved = None
        self.ended = False
        self.empty_in_a_row = 0
        self.switch = asyncio.Lock()
        """Held by who pauses, changes weights and continues."""

    def chance(self, name):
        return self.plan.chance(getattr(self.plan.habits, name))

    # -- The separate run

    async def run(self):
        await self.world.controller.update_weights([], self.step)
        self.model_step = self.step
        if self.plan.colocated:
            return await self.run_colocated()
        self.producing = asyncio.create_task(self.manager.produce_loop(self.plan.batch_size))
        watchers = [asyncio.create_task(self.observe()), asyncio.create_task(self.disturb())]
        try:
            await self.manager.continue_produce(self.model_step)
            while self.step < self.plan.steps:
                await self.do_step()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await self.settle(watchers)
        await self.check_quiet()

    async def settle(self, watchers):
        """End everything; the first thing that went wrong is raised."""
        found = await asyncio.gather(*watchers, return_exceptions=True)
        await self.manager.shutdown()
        (ending,) = await asyncio.gather(self.producing, return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        if isinstance(ending, BaseException) and not isinstance(ending, asyncio.CancelledError | ProductionError):
            raise ending

    async def do_step(self):
        step = self.step + 1
        result = await self.get_batch(step)
        if not result.rollout_states:
            await self.sync_for(result, step)
            return
        self.empty_in_a_row = 0
        await self.check_batch(result, step)
        if self.chance("gives_back"):
            await self.manager.give_back(result.rollout_states, step)
            return
        self.train(result, step)
        await asyncio.sleep(self.plan.seconds(self.plan.train_s))
        self.step = step
        if not self.chance("skips_commit"):
            await self.world.buffer.commit(step)
        await self.after_step()

    async def sync_for(self, result, step):
        """Only newer weights can help, and there are some."""
        assert result.status is ProduceBatchStatus.EXPIRED_BATCH
        self.empty_in_a_row += 1
        assert self.empty_in_a_row <= EMPTY_IN_A_ROW, "syncing does not help"
        assert step > 1
        await self.sync()

    async def get_batch(self, step):
        """Sometimes cancelled on the way, at any instant: then nothing was taken."""
        batch_size = self.plan.batch_size
        while self.chance("cancels_get"):
            getting = asyncio.create_task(self.manager.get_batch(batch_size, step))
            await self.wait_a_little()
            getting.cancel()
            (result,) = await asyncio.gather(getting, return_exceptions=True)
            if not isinstance(result, BaseException):
                return result
            if not isinstance(result, asyncio.CancelledError):
                raise result
        return await self.manager.get_batch(batch_size, step)

    async def wait_a_little(self):
        await asyncio.sleep(self.plan.random.choice([0.0, 0.0, 0.3, 2.0]))
        for _ in range(self.plan.random.randrange(10)):
            await asyncio.sleep(0)

    async def after_step(self):
        """What comes between two steps; saving before or after the sync."""
        is_due = self.step % self.plan.interval == 0
        saves = self.chance("saves")
        if saves and self.plan.random.random() < 0.5:
            await self.save()
            saves = False
        if is_due:
            await self.sync()
        if self.chance("evaluates"):
            await self.evaluate()
        if saves:
            await self.save()
        if self.saved is not None and self.chance("crashes"):
            raise Crash

    async def sync(self):
        """Give the engines the weights of the latest step."""
        async with self.switch:
            # A disturbance syncs while the next step ends.
            step = self.step
            if self.chance("updates_in_flight"):
                await self.world.controller.update_weights([], step)
            else:
                await self.manager.pause_produce()
                await self.check_paused()
                await self.world.controller.update_weights([], step)
            self.model_step = step
            await self.manager.continue_produce(self.model_step)

    async def evaluate(self):
        """Before everything else, and with one version of the weights from the first to the last token."""
        async with self.switch:
            await self.manager.pause_produce()
            await self.check_paused()
            await self.world.controller.continue_generation()
            states = [RolloutState([], rollout_id=f"eval/{self.step}/{i}", prompt_ids=[1 + i]) for i in range(2)]
            with contextlib.suppress(BrokenPipeError):
                await asyncio.gather(*map(self.world.controller.generate_sample, states))
            await self.world.controller.pause_generation()
            for state in states:
                assert set(state.response_model_steps.tolist()) <= {self.model_step}
            await self.check_paused()
            await self.manager.continue_produce(self.model_step)

    async def save(self):
        async with self.switch:
            await self.manager.pause_produce()
            await self.write_checkpoint()
            await self.manager.continue_produce(self.model_step)

    async def write_checkpoint(self):
        await self.check_paused()
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        await self.manager.save(folder)
        self.saved = Saved(folder, self.record.copied(), self.step)

    # -- The colocated run

    async def run_colocated(self):
        while self.step < self.plan.steps:
            step = self.step + 1
            result = await self.produce_batch(step)
            await self.check_batch(result, step)
            self.train(result, step)
            self.step = step
            await self.world.buffer.commit(step)
            if step % self.plan.interval == 0:
                await self.world.controller.update_weights([], step)
                self.model_step = step
            if self.chance("saves"):
                await self.write_checkpoint()
            if self.saved is not None and self.chance("crashes"):
                raise Crash
        await self.check_quiet()

    async def produce_batch(self, step):
        while self.chance("cancels_get"):
            arguments = self.plan.batch_size, step, self.model_step
            producing = asyncio.create_task(self.manager.produce_batch(*arguments))
            await self.wait_a_little()
            producing.cancel()
            (result,) = await asyncio.gather(producing, return_exceptions=True)
            if not isinstance(result, BaseException):
                return result
            if not isinstance(result, asyncio.CancelledError):
                raise result
            # Cancelled while it paused, it leaves groups in flight: the next call has them.
            await self.check_places()
        return await self.manager.produce_batch(self.plan.batch_size, step, self.model_step)

    # -- Disturbances

    async def disturb(self):
        habits = self.plan.habits
        # Not for ever: who is interrupted more often than a rollout takes gets nowhere.
        while habits.num_disturbances > 0 and not self.ended:
            habits.num_disturbances -= 1
            await asyncio.sleep(self.plan.random.expovariate(1 / habits.disturbed_every_s))
            if self.chance("ends_early"):
                self.ended = True
                return await self.end_early()
            action = self.plan.random.choice([self.pause, self.pause, self.sync, self.evaluate, self.save_now])
            await action()

    async def end_early(self):
        if self.plan.random.random() < 0.3:
            self.producing.cancel()
        else:
            # It takes effect whether it is awaited or not.
            ended = self.manager.shutdown()
            if self.plan.random.random() < 0.5:
                await ended

    async def pause(self):
        """Once or twice, sometimes cancelled; then go on, once or twice."""
        rng = self.plan.random
        async with self.switch:
            if rng.random() < 0.3:
                pausing = asyncio.create_task(self.manager.pause_produce())
                await self.wait_a_little()
                pausing.cancel()
                await asyncio.gather(pausing, return_exceptions=True)
            calls = [self.manager.pause_produce() for _ in range(rng.choice([1, 1, 2]))]
            await asyncio.gather(*calls)
            await self.check_paused()
            await asyncio.sleep(rng.choice([0.0, 0.2, 3.0]))
            await self.check_paused()
            for _ in range(rng.choice([1, 1, 2])):
                await self.manager.continue_produce(self.model_step)

    async def save_now(self):
        """Without a pause: refused if anything is in flight, and the message names it."""
        async with self.switch:
            pending = self.pending()
            if not pending:
                return
            with pytest.raises(RuntimeError, match="in flight") as refusal:
                await self.manager.save(self.folder / "refused")
            assert any(group_id in str(refusal.value) for group_id in pending)

    # -- What must hold

    async def observe(self):
        """At random instants, everything that holds at any instant."""
        while True:
            await asyncio.sleep(self.plan.random.choice([0.2, 4.0, 20.0]))
            await self.check_places()

    def pending(self):
        """The groups that strategies have in flight."""
        strategies = self.world.strategies.values()
        return [group[0].group_id for strategy in strategies for group in strategy.pending_groups()]

    async def check_places(self):
        """Every group is in exactly one place, and the ledger says the same."""
        record, buffer, manager = self.record, self.world.buffer, self.manager
        live, taken = await buffer.groups({}), await buffer.groups({"status": Status.ARCHIVED})
        # Without a turn of the event loop from here on.
        pending = self.pending()
        assert sorted(pending) == sorted(record.out)
        trained = set(record.trained) - set(taken)
        places = [*live, *taken, *pending, *record.dropped, *trained]
        assert len(places) == len(set(places)), sorted(p for p in places if places.count(p) > 1)
        assert set(places) == set(record.members), set(places) ^ set(record.members)
        for group_id, task_name in record.task_of.items():
            life = manager.ledger.life(group_id, task_name)
            assert life is not None, f"the ledger does not know {group_id}"
            assert (life.place == "dropped") == (group_id in record.dropped), life
            assert life.reason == record.dropped.get(group_id), life
            assert group_id not in record.trained or life.place == "trained", life
            # Rollouts are conserved too: each shares its group's place, or has left it.
            assert life.num_left == len(record.left[group_id]), (life, record.left[group_id])
        balance = manager.ledger.balance(await manager.count_live())
        assert balance.ok, balance
        assert balance.left == sum(map(len, record.left.values()))

    async def check_paused(self):
        """Nothing is in flight, nothing runs in an engine."""
        assert sum(self.manager.pending_task_count().values()) == 0
        assert not self.record.out
        assert not self.record.generating
        health = await self.world.controller.health()
        assert (health.num_running, health.num_waiting) == (0, 0)
        await self.check_places()

    async def check_quiet(self):
        """After the end: besides, no task is left."""
        await self.check_paused()
        assert asyncio.all_tasks() == {asyncio.current_task()}, asyncio.all_tasks()
        assert not self.world.activities.in_flight()

    async def check_batch(self, result, step):
        """The right number of each task's groups, each whole, fresh enough and rightly labeled."""
        sizes = self.manager.get_task_batch_sizes(self.plan.batch_size, step)
        names = [group[0].task_name for group in result.rollout_states]
        assert names == [name for name, size in sizes.items() for _ in range(size)]
        assert result.task_batch_sizes == sizes
        # What nobody will train or make again has left the buffer with the batch.
        assert not self.record.terminal & set(await self.world.buffer.groups({}))
        for group in result.rollout_states:
            self.record.check_members(group)
            assert group[0].group_id not in self.record.trained
            num_left = len(self.record.left[group[0].group_id])
            assert len(group) + num_left == len(self.record.members[group[0].group_id][0])
            for state in group:
                self.check_rollout(state, step)
            self.check_age(group, step)

    def check_rollout(self, state, step):
        pieces = self.record.response_of(state.rollout_id)
        assert state.status is Status.COMPLETED
        assert why_untrainable(self.plan, state) is None
        assert state.response_ids.tolist() == [number for piece in pieces for number in piece.ids]
        assert len(state.logprobs) == len(state.response_mask) == len(state.response_ids) > 0
        assert state.prompt_ids.tolist() == [1 + int(state.message[0]["content"])]
        assert state.tokens.tolist() == [*state.prompt_ids.tolist(), *state.response_ids.tolist()]
        made_with = [steps for piece in pieces for steps in piece.steps]
        for label, steps in zip(state.response_model_steps.tolist(), made_with, strict=True):
            assert label in steps, (label, steps)
            assert label < step
        assert state.reward == {"score": score_of(state)}
        if not getattr(self.plan.tasks[state.task_name].strategy, "enable_partial_rollout", False):
            assert len(pieces) == 1

    def check_age(self, group, step):
        strategy = self.world.strategies[group[0].task_name]
        ages = [calculate_seq_staleness(min(state.response_model_steps.tolist()), step) for state in group]
        assert [state.seq_staleness for state in group] == ages
        if strategy.stale_threshold is not None:
            assert max(ages) < strategy.stale_threshold
        config = self.plan.tasks[group[0].task_name].strategy
        if isinstance(config, SyncProduceStrategyConfig):
            # A producer in the background begins with a step before the weights of the last one are there.
            assert max(ages) < self.plan.interval + (not self.plan.colocated)
        if strategy.stale_threshold is not None and self.plan.interval == 1 and config.max_staleness == 0:
            assert set(ages) == {0}, "not on-policy"

    def train(self, result, step):
        for group in result.rollout_states:
            assert group[0].group_id not in self.record.trained
            self.record.trained[group[0].group_id] = step


async def run_schedule(seed, folder):
    """Processes of a run, one after the other, until it has finished; how the last one ended."""
    plan, numbers = draw_plan(seed), itertools.count(100)
    record, saved, lives = Record(), None, 0
    while True:
        world, step = ScheduleWorld(plan, record, numbers), 0
        if saved is not None:
            assert await world.manager.resume(saved.folder) <= saved.step
            step = saved.step
        trainer, ending = Trainer(plan, world, step, folder), "finished"
        trainer.saved = saved
        try:
            await trainer.run()
        except Crash:
            # Rarer each time, or it might never get to the end.
            saved, lives = trainer.saved, lives + 1
            plan.habits.crashes /= 2
            record = saved.record.copied()
            continue
        except (ProductionError, StallError) as error:
            ending = check_ending(trainer, error)
            await trainer.check_quiet()
        assert ending != "finished" or len(record.trained) == plan.steps * plan.batch_size
        if ending == "shut down" and trainer.step < plan.steps:
            saved = await stopped(trainer)
            record, plan.habits.ends_early = saved.record.copied(), 0.0
            continue
        return ending


async def stopped(trainer):
    """The checkpoint that a run leaves when it is stopped."""
    await trainer.write_checkpoint()
    return trainer.saved


def check_ending(trainer, error):
    """How the run ended, if it may end like this; else the error is raised."""
    if isinstance(error, ProductionStopped) and trainer.ended:
        return "shut down"
    if isinstance(error, StallError) and trainer.plan.may_stall:
        assert STALLED.search(str(error)), error
        return "stalled"
    if trainer.ended and "production has failed: CancelledError" in str(error):
        return "shut down"
    if trainer.plan.may_give_up and " are needed" in str(error):
        return "gave up"
    if trainer.plan.colocated and trainer.plan.limit is not None and "no whole batch" in str(error):
        # What the pause stores evicts what is complete.
        return "gave up"
    raise error


def try_seed(seed):
    """`run_schedule` under virtual time."""
    with tempfile.TemporaryDirectory() as folder:
        return virtual_time.run(run_schedule(seed, Path(folder)))
