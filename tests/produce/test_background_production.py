"""The separate run: producer and consumer over a real buffer, engine and controller, under virtual time."""

import asyncio
import logging
import random

import numpy as np
import pytest
from production_world import World, train

from forebay.aio import virtual_time
from forebay.produce import (
    AgentLoopManager,
    AsyncProduceStrategyConfig,
    ProduceBatchStatus,
    ProduceStrategy,
    ProductionError,
    ProductionStopped,
    SyncProduceStrategyConfig,
    TaskRunner,
)
from forebay.produce.background import pause_tasks
from forebay.produce.batches import HELD_UP_S, HUNGRY_BATCHES, START_GRACE_S
from forebay.replay import AsyncReplayBufferConfig, BufferClosed, ConnectionLost
from forebay.types import RolloutState, Status
from forebay.watching.activity import Activities
from forebay.watching.stalls import StallError, StallWatch


def now():
    return asyncio.get_running_loop().time()


def ids(groups):
    return [group[0].group_id for group in groups]


def completed(index, task="t", step=0):
    return [
        RolloutState(
            [],
            group_id=f"{task}/{index}",
            rollout_id=f"{task}/{index}/0",
            task_name=task,
            prompt_ids=[1],
            response_ids=[2],
            response_model_steps=[step],
            reward={"score": 1.0},
            status=Status.COMPLETED,
        )
    ]


async def stop(world, producing):
    await world.manager.shutdown()
    await producing
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_the_consumer_wakes_at_the_deciding_put_and_not_before():
    async def main():
        world = World().build()
        waiting = asyncio.create_task(world.manager.get_batch(3, 1))
        for index in range(3):
            await asyncio.sleep(1)
            assert not waiting.done()
            await world.buffer.put(completed(index), "t")
        await asyncio.sleep(0.005)
        assert waiting.done()
        assert ids((await waiting).rollout_states) == ["t/0", "t/1", "t/2"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


def test_production_runs_ahead_as_far_as_the_weights_allow_and_then_waits_for_newer_ones():
    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(max_staleness=2)).build()
        producing = asyncio.create_task(world.manager.produce_loop(4))
        await asyncio.sleep(1000)
        # Steps 1, 2 and 3 can be trained with the weights of step 0; step 4 cannot.
        assert world.manager.status is ProduceBatchStatus.EXPIRED_BATCH
        assert world.manager.progress.producer_future_step == 4
        assert world.manager.progress.target_samples == {"t": 12}
        assert await world.buffer.count("t", Status.COMPLETED) == 12
        for step in (1, 2, 3):
            result = await world.manager.get_batch(4, step)
            assert result.status is ProduceBatchStatus.NORMAL
            assert {state.seq_staleness for g in result.rollout_states for state in g} == {step - 1}
        empty = await world.manager.get_batch(4, 4)
        assert (empty.rollout_states, empty.status) == ([], ProduceBatchStatus.EXPIRED_BATCH)
        assert world.manager.progress.consumed_samples == {"t": 12}
        await world.sync(3)
        result = await world.manager.get_batch(4, 4)
        assert {step for g in result.rollout_states for s in g for step in s.response_model_steps} == {3}
        await stop(world, producing)

    virtual_time.run(main())


def test_tasks_do_not_evict_each_other_for_ever_for_steps_that_the_buffer_has_no_room_for():
    def accept(samples):
        return random.Random(samples[0].group_id).random() > 0.5

    async def main():
        rule = AsyncProduceStrategyConfig(is_valid_sample_fn=accept, max_staleness=1, over_sample_threshold=0.5)
        world = World(strategy=rule, weights={"a": 1.0, "b": 2.0}, limit=6, num_prompts=50).build()
        async with asyncio.timeout(400):
            batches = await train(world, 6, 8, train_s=0.5)
        assert [len(groups) for groups in batches.values()] == [6] * 8
        await world.check_balance()

    virtual_time.run(main())


def test_what_a_batch_dropped_is_not_dropped_again_when_it_is_given_back():
    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(max_staleness=3)).build()
        world.manager.batches.keeps_dropped, told = True, []
        world.manager.batches.on_drop = lambda group, task, reason: told.append((group[0].group_id, reason))
        rejected = completed(9)
        for state in rejected:
            state.status = Status.FILTERED
        for group in (completed(0), rejected, completed(1)):
            await world.buffer.put(group, "t")
        batch = await world.manager.get_batch(2, 1)
        await world.manager.give_back(batch.rollout_states, 1)
        assert told == [("t/9", "filtered")]
        assert await world.buffer.count("t", Status.COMPLETED) == 2
        await world.manager.get_batch(2, 1)
        assert told == [("t/9", "filtered")]

    virtual_time.run(main())


def test_a_batch_that_waits_is_handed_out_before_new_groups_are_generated():
    """The trainer stands still until it has its batch, and prompts that begin take the interpreter."""

    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(max_staleness=1)).build()
        producing = asyncio.create_task(world.manager.produce_loop(4))
        await world.manager.get_batch(4, 1)
        await asyncio.sleep(1000)
        asked = []
        generate = world.engine.generate

        async def counted(request):
            asked.append(request)
            return await generate(request)

        world.engine.generate = counted
        await world.sync(1)
        assert len((await world.manager.get_batch(4, 2)).rollout_states) == 4
        assert not asked
        assert len((await world.manager.get_batch(4, 3)).rollout_states) == 4
        assert len(asked) >= 8
        await stop(world, producing)

    virtual_time.run(main())


def test_a_group_that_expires_is_replaced_while_the_weights_still_serve():
    """Nobody but the producer can help, although it has reached its target and waits for newer weights."""

    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(max_staleness=1)).build()
        producing = asyncio.create_task(world.manager.produce_loop(4))
        await asyncio.sleep(1000)
        lost = await world.buffer.get(5, "t", Status.COMPLETED)
        assert len(lost) == 5
        result = await world.manager.get_batch(4, 1)
        assert len(result.rollout_states) == 4
        await stop(world, producing)

    virtual_time.run(main())


def test_a_pause_leaves_nothing_in_flight_and_continue_labels_with_the_new_step():
    async def main():
        world = World(
            strategy=AsyncProduceStrategyConfig(
                max_staleness=5, over_sample_threshold=1.0, enable_partial_rollout=True
            ),
            longest=60,
        ).build()
        producing = asyncio.create_task(world.manager.produce_loop(4))
        await asyncio.sleep(1.05)
        await world.manager.pause_produce()
        assert world.manager.pending_task_count() == {"t": 0}
        assert world.manager.status is ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        partial = await world.buffer.get(100, "t", Status.ABORTED)
        assert len(partial) > 2
        assert {len(s.response_ids) for g in partial for s in g if s.status is Status.ABORTED} == {10}
        for group in partial:
            await world.buffer.put(group, "t")
        await world.controller.update_weights([], 1)
        await world.manager.continue_produce(1)
        assert world.manager.model_step == 1
        result = await world.manager.get_batch(4, 2)
        mixed = [
            state.response_model_steps.tolist()
            for g in result.rollout_states
            for state in g
            if set(state.response_model_steps) == {0, 1}
        ]
        assert mixed
        for steps in mixed:
            assert steps == sorted(steps)
            assert steps.count(0) == 10
        await stop(world, producing)

    virtual_time.run(main())


def test_a_strategy_that_sees_nothing_of_a_short_pause_still_labels_with_the_new_step():
    """Pause and continue in one turn of the loop: the round in progress must not go on with its old step."""

    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(max_staleness=5)).build()
        labels = []
        world.manager.task_runners[0].agent_loop = Bare()
        world.manager.on_group = lambda task, group: labels.append(group[0].response_model_steps.tolist())
        producing = asyncio.create_task(world.manager.produce_loop(2))
        await asyncio.sleep(0)
        for step in (1, 2):
            await world.manager.pause_produce()
            await world.manager.continue_produce(step)
        await world.manager.get_batch(2, 3)
        await asyncio.sleep(0.5)
        assert labels[-1] == [2]
        await stop(world, producing)

    virtual_time.run(main())


class Bare:
    """An agent loop that labels nothing; a second per group."""

    async def generate_group(self, states, *, enable_partial_rollout=False):
        await asyncio.sleep(1)
        for state in states:
            state.response_ids, state.status = [1], Status.COMPLETED
        return states

    async def pause(self):
        pass


def test_weights_updated_under_a_running_round_label_what_starts_from_then_on():
    async def main():
        world = World(
            strategy=AsyncProduceStrategyConfig(
                max_staleness=5, is_valid_sample_fn=lambda group: group[0].group_id in valid
            )
        ).build()
        world.manager.task_runners[0].agent_loop = Bare()
        sampler, valid = world.manager.task_runners[0].sampler, set()
        producing = asyncio.create_task(world.manager.produce_loop(2))
        await asyncio.sleep(0.5)
        assert sampler.position == 2
        await world.manager.continue_produce(1)
        await asyncio.sleep(1)
        # The first two were rejected; their replacements began with the new weights, in the same round.
        valid |= {group[0].group_id for group in world.manager.task_runners[0].produce_strategy.pending_groups()}
        result = await world.manager.get_batch(2, 2)
        assert {g[0].group_id for g in result.rollout_states} == valid
        assert [g[0].response_model_steps.tolist() for g in result.rollout_states] == [[1], [1]]
        await stop(world, producing)

    virtual_time.run(main())


def test_a_pause_is_over_only_when_the_strategies_have_returned(tmp_path):
    async def main():
        class Slow(RecordingStrategy):
            async def produce_batch(self, ctx):
                result = await super().produce_batch(ctx)
                await asyncio.sleep(3)
                return result

        strategy = Slow([])
        sampler = World().build().manager.task_runners[0].sampler
        manager = AgentLoopManager(
            task_runners=[TaskRunner(task_name="t", agent_loop=None, produce_strategy=strategy, sampler=sampler)],
            replay_buffer=AsyncReplayBufferConfig().build(),
        )
        producing = asyncio.create_task(manager.produce_loop(1))
        await asyncio.sleep(1)
        with pytest.raises(RuntimeError, match="going on"):
            await manager.save(tmp_path)
        await manager.pause_produce()
        assert now() == 4.0
        await manager.save(tmp_path)
        await manager.shutdown()
        await producing

    virtual_time.run(main())


def test_a_pause_after_a_continue_that_takes_its_time_is_not_lost():
    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(max_staleness=3)).build()
        continue_generation = world.controller.continue_generation

        async def slow():
            await asyncio.sleep(5)
            await continue_generation()

        world.controller.continue_generation = slow
        producing = asyncio.create_task(world.manager.produce_loop(2))
        await world.manager.pause_produce()
        continuing = asyncio.create_task(world.manager.continue_produce(1))
        await asyncio.sleep(1)
        await world.manager.pause_produce()
        await continuing
        assert world.manager.status is ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        started = world.manager.task_runners[0].sampler.position
        await asyncio.sleep(10)
        assert world.manager.task_runners[0].sampler.position == started
        await stop(world, producing)

    virtual_time.run(main())


def test_what_is_too_old_for_the_next_step_is_replaced_while_the_trainer_trains():
    async def main():
        world = World(
            strategy=AsyncProduceStrategyConfig(max_staleness=0, over_sample_threshold=1.0, tail_batch_trigger_size=99)
        ).build()
        producing = asyncio.create_task(world.manager.produce_loop(4))
        await asyncio.sleep(1000)
        assert await world.buffer.count("t", Status.COMPLETED) == 8
        await world.manager.get_batch(4, 1)
        counts = await world.buffer.count_statuses(["t"], [Status.COMPLETED, Status.EXPIRED])
        assert counts["t"] == {Status.COMPLETED: 0, Status.EXPIRED: 4}
        await stop(world, producing)

    virtual_time.run(main())


def test_a_batch_that_shrinks_between_the_look_and_the_grasp_is_not_taken():
    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(max_staleness=1)).build()
        take_batch, thefts = world.buffer.take_batch, [1]

        async def robbed(sizes, **options):
            if thefts:
                thefts.pop()
                await world.buffer.get(7, "t", Status.COMPLETED)
            return await take_batch(sizes, **options)

        world.buffer.take_batch = robbed
        producing = asyncio.create_task(world.manager.produce_loop(4))
        await asyncio.sleep(1000)
        result = await world.manager.get_batch(4, 1)
        assert len(result.rollout_states) == 4
        assert world.manager.progress.consumed_samples == {"t": 4}
        balance = world.manager.ledger.balance(await world.manager.count_live())
        # Only what was stolen is missing, and what the first grasp got is live again.
        assert (balance.trained, balance.difference) == (4, 7)
        await stop(world, producing)

    virtual_time.run(main())


@pytest.mark.parametrize("turns", range(40))
def test_a_cancelled_get_batch_has_consumed_nothing(turns):
    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(max_staleness=1)).build()
        slow_down(world.buffer)
        producing = asyncio.create_task(world.manager.produce_loop(2))
        await asyncio.sleep(100)
        getting = asyncio.create_task(world.manager.get_batch(2, 1))
        for _ in range(turns):
            await asyncio.sleep(0)
        getting.cancel()
        result = (await asyncio.gather(getting, return_exceptions=True))[0]
        expected = 2
        if isinstance(result, asyncio.CancelledError):
            assert world.manager.progress.consumed_samples == {"t": 0}
            assert world.manager.progress.next_consumer_step == 1
            assert await world.buffer.count("t", Status.COMPLETED) == 4
            result = await world.manager.get_batch(2, 1)
        assert len(result.rollout_states) == expected
        assert world.manager.progress.consumed_samples == {"t": 2}
        assert (await world.check_balance()).trained == 2
        await stop(world, producing)

    virtual_time.run(main())


def slow_down(buffer):
    """Every call takes some turns of the loop before and after, as with a store on disk."""
    for name in ("take_batch", "count_statuses", "count", "get", "refresh_staleness"):
        method = getattr(buffer, name)

        def make(method):
            async def slow(*args, **kwargs):
                for _ in range(2):
                    await asyncio.sleep(0)
                result = await method(*args, **kwargs)
                for _ in range(2):
                    await asyncio.sleep(0)
                return result

            return slow

        setattr(buffer, name, make(method))


def test_a_batch_that_is_given_back_comes_again():
    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(max_staleness=1)).build()
        producing = asyncio.create_task(world.manager.produce_loop(2))
        first = await world.manager.get_batch(2, 1)
        await world.manager.give_back(first.rollout_states, 1)
        assert world.manager.progress.consumed_samples == {"t": 0}
        await world.check_balance()
        again = await world.manager.get_batch(2, 1)
        assert ids(again.rollout_states) == ids(first.rollout_states)
        assert (await world.check_balance()).trained == 2
        await stop(world, producing)

    virtual_time.run(main())


def test_what_kills_production_reaches_the_consumer_with_every_counter():
    async def main():
        world = World(faults=tuple(range(10_000))).build()
        producing = asyncio.create_task(world.manager.produce_loop(2))
        with pytest.raises(ProductionError, match=r"no disk.*'failed': .*in flight \{'t': 0\}.*running: False"):
            await world.manager.get_batch(2, 1)
        with pytest.raises(ProductionError, match="no disk"):
            await producing
        await world.check_balance()
        assert (await world.engine.health()).num_running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


def test_a_broken_sampler_ends_production_with_its_reason():
    async def main():
        world = World().build()

        async def sample(task_name, group_status=None):
            raise ValueError("the dataset is gone")

        world.manager.task_runners[0].sampler.sample = sample
        producing = asyncio.create_task(world.manager.produce_loop(2))
        with pytest.raises(ProductionError, match="dataset is gone"):
            await world.manager.get_batch(2, 1)
        with pytest.raises(ProductionError, match="dataset is gone"):
            await producing
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


def test_waiting_for_a_producer_that_nobody_started_is_an_error_after_a_grace():
    async def main():
        world = World().build()
        waiting = asyncio.create_task(world.manager.get_batch(3, 1))
        # Somebody else fills the buffer, and then no more.
        for index in range(2):
            await asyncio.sleep(9)
            await world.buffer.put(completed(index), "t")
        with pytest.raises(ProductionError, match=r"produce_loop was never started.*train step 1 needs"):
            await waiting
        assert now() == 18 + START_GRACE_S
        # One that starts within the grace is not missed, whenever it gets to its first group.
        waiting = asyncio.create_task(world.manager.get_batch(3, 1))
        await asyncio.sleep(9)
        world.token_s = 1000
        producing = asyncio.create_task(world.manager.produce_loop(3))
        assert len((await waiting).rollout_states) == 3
        await stop(world, producing)

    virtual_time.run(main())


def test_a_closed_buffer_ends_the_wait():
    async def main():
        world = World().build()
        waiting = asyncio.create_task(world.manager.get_batch(3, 1))
        await asyncio.sleep(1)
        await world.buffer.close()
        with pytest.raises(BufferClosed):
            await waiting
        assert now() == 1.0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


def test_an_engine_that_never_answers_a_pause_is_named_and_what_was_in_flight_is_kept():
    async def main():
        world = World(longest=10**5).build()
        producing = asyncio.create_task(world.manager.produce_loop(3))
        await asyncio.sleep(1)
        world.engine.pause = asyncio.Event().wait
        with pytest.raises(StallError, match=r"engine 0 \(ScriptedEngine\) was asked to pause: no answer"):
            await world.manager.pause_produce()
        assert world.manager.pending_task_count() == {"t": 0}
        assert await world.buffer.count("t", Status.ABORTED) == 3
        assert world.manager.status is ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        started_s = now()
        await stop(world, producing)
        assert now() <= started_s + 1
        await world.check_balance()

    virtual_time.run(main())


def test_a_controller_or_a_strategy_of_someone_elses_that_never_answers_is_named():
    async def main():
        strategy = RecordingStrategy([ProduceBatchStatus.EXPIRED_BATCH])
        manager = AgentLoopManager(
            task_runners=[TaskRunner(task_name="t", agent_loop=None, produce_strategy=strategy, sampler=None)],
            replay_buffer=AsyncReplayBufferConfig().build(),
            rollout_controller=Silent(),
        )
        producing = asyncio.create_task(manager.produce_loop(1))
        await asyncio.sleep(1)
        with pytest.raises(StallError, match="Silent was asked to pause"):
            await manager.pause_produce()
        with pytest.raises(StallError, match="Silent was asked to go on"):
            await manager.continue_produce(1)

        async def hang(ctx):
            await asyncio.Event().wait()

        manager.rollout_controller = manager._background.controller = None
        strategy.produce_batch = hang
        await manager.continue_produce(1)
        await asyncio.sleep(1)
        with pytest.raises(StallError, match=r"tasks \['t'\] were asked to pause"):
            await manager.pause_produce()
        producing.cancel()
        await asyncio.wait([producing])

    virtual_time.run(main())


class Silent:
    """A controller that never answers."""

    async def pause_generation(self):
        await asyncio.Event().wait()

    continue_generation = pause_generation


@pytest.mark.parametrize("colocated", [False, True])
def test_a_pause_stops_the_engines_of_a_strategy_that_knows_no_controller(colocated):
    """Its groups end at once and keep their tokens; they would go on until the pause's time-out."""

    async def main():
        strategy = AsyncProduceStrategyConfig(enable_partial_rollout=True, over_sample_threshold=3.0, max_staleness=1)
        world = World(longest=10**5, strategy=strategy).build()
        (runner,) = world.manager.task_runners
        runner.produce_strategy.rollout_controller = None

        async def pause():
            """Agents that leave it to others."""

        runner.agent_loop.pause = pause
        if colocated:
            producing = asyncio.create_task(world.manager.produce_batch(1, 1, 0))
            await asyncio.sleep(50)
            producing.cancel()
            await asyncio.wait([producing])
        else:
            producing = asyncio.create_task(world.manager.produce_loop(1))
            await asyncio.sleep(50)
            assert await world.manager.pause_produce() < 1
        assert now() < 51
        kept = await world.buffer.get(9, "t", Status.ABORTED)
        assert len(kept) == 4
        assert min(len(state.response_ids) for group in kept for state in group) >= 490
        await world.manager.shutdown()
        await asyncio.wait([producing])

    virtual_time.run(main())


def test_storing_that_fails_during_a_pause_is_an_error_of_production():
    async def main():
        world = World(longest=1000).build()
        producing = asyncio.create_task(world.manager.produce_loop(3))
        await asyncio.sleep(1)

        async def put(*_, **__):
            raise OSError("no space")

        store, world.buffer.put = world.buffer.put, put
        with pytest.raises(ProductionError, match="OSError: no space"):
            await world.manager.pause_produce()
        world.buffer.put = store
        await world.manager.pause_produce()
        await stop(world, producing)

    virtual_time.run(main())


def test_a_buffer_that_is_lost_ends_production_as_what_it_is():
    async def main():
        world = World().build()

        async def put(*_, **__):
            raise ConnectionLost("the buffer's process is gone")

        world.buffer.put = put
        producing = asyncio.create_task(world.manager.produce_loop(2))
        with pytest.raises(ConnectionLost, match="process is gone"):
            await world.manager.get_batch(2, 1)
        with pytest.raises(ConnectionLost, match="process is gone"):
            await producing
        # Nor may a checkpoint be saved without what could not be stored.
        with pytest.raises(ConnectionLost, match="process is gone"):
            await world.manager.pause_produce()
        with pytest.raises(ConnectionLost, match="process is gone"):
            await world.manager.produce_batch(2, 1, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


def test_of_several_errors_that_of_the_buffer_is_told():
    def pause(*ends):
        class Ending(RecordingStrategy):
            async def pause_produce(self, ctx):
                if isinstance(ends[ctx], Exception):
                    raise ends[ctx]
                return ends[ctx]

        runner = TaskRunner(task_name="any", agent_loop=None, produce_strategy=Ending([]), sampler=None)
        names = "abc"[: len(ends)]
        contexts = {name: number for number, name in enumerate(names)}
        return virtual_time.run(pause_tasks(dict.fromkeys(names, runner), contexts, None))

    lost, failed = ConnectionLost("gone"), ProductionError("too many failed")
    for errors in ([failed, lost], [OSError("no"), lost]):
        with pytest.raises(ConnectionLost):
            pause(*errors)
    with pytest.raises(ProductionError, match="too many"):
        pause(1.0, OSError("no"), failed)
    with pytest.raises(ProductionError, match="'b' could not be paused: OSError: no"):
        pause(1.0, OSError("no"))
    assert pause(1.0) == {"a": 1.0}


def test_a_producer_that_cannot_help_is_an_error_and_not_a_hang():
    async def main():
        world = World().build()
        producing = asyncio.create_task(world.manager.produce_loop(2))
        with pytest.raises(ProductionError, match="no newer weights"):
            await world.manager.get_batch(3, 1)
        await stop(world, producing)

    virtual_time.run(main())


def test_shutdown_ends_the_loop_and_who_waits_and_keeps_what_was_in_flight():
    async def main():
        world = World(longest=1000, strategy=AsyncProduceStrategyConfig(enable_partial_rollout=True)).build()
        producing = asyncio.create_task(world.manager.produce_loop(3))
        waiting = asyncio.create_task(world.manager.get_batch(3, 1))
        await asyncio.sleep(1)
        world.manager.shutdown()
        with pytest.raises(ProductionStopped, match="shut down"):
            await waiting
        await producing
        assert await world.buffer.count("t", Status.ABORTED) == 3
        await world.manager.shutdown()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await world.check_balance()

    virtual_time.run(main())


def test_the_end_does_not_wait_for_what_does_not_stop():
    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(max_staleness=3)).build()

        class Deaf(Bare):
            async def generate_group(self, states, *, enable_partial_rollout=False):
                await asyncio.Event().wait()

        world.manager.task_runners[0].agent_loop = Deaf()
        producing = asyncio.create_task(world.manager.produce_loop(3))
        await asyncio.sleep(1)
        await stop(world, producing)
        assert now() <= 2.0
        assert await world.buffer.count("t", Status.ABORTED) == 3
        await world.check_balance()

    virtual_time.run(main())


def test_a_cancelled_produce_loop_leaves_nothing_behind_and_says_so():
    async def main():
        world = World(longest=1000).build()
        producing = asyncio.create_task(world.manager.produce_loop(3))
        waiting = asyncio.create_task(world.manager.get_batch(3, 1))
        await asyncio.sleep(1)
        producing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await producing
        with pytest.raises(ProductionError, match="CancelledError"):
            await waiting
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert await world.buffer.count("t", Status.ABORTED) == 3

    virtual_time.run(main())


def test_a_second_produce_loop_is_refused():
    async def main():
        world = World().build()
        producing = asyncio.create_task(world.manager.produce_loop(1))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="already"):
            await world.manager.produce_loop(1)
        await stop(world, producing)

    virtual_time.run(main())


def test_saving_in_flight_is_refused_by_name_and_a_checkpoint_keeps_partial_tokens(tmp_path):
    config = AsyncProduceStrategyConfig(max_staleness=3, enable_partial_rollout=True, over_sample_threshold=1)

    async def main():
        world = World(strategy=config, longest=40).build()
        producing = asyncio.create_task(world.manager.produce_loop(3))
        await world.manager.get_batch(3, 1)
        await asyncio.sleep(0.35)
        with pytest.raises(RuntimeError, match=r"in flight.*t/0/0/"):
            await world.manager.save(tmp_path / "early")
        await world.manager.pause_produce()
        await world.manager.save(tmp_path / "saved", model_step=1)
        before = await contents(world)
        assert any(len(tokens) for _, status, tokens in before if status is Status.ABORTED)
        state, balance = world.manager.progress.state_dict(), await world.check_balance()
        await stop(world, producing)

        resumed = World(strategy=config, longest=40).build()
        progress = resumed.manager.progress
        assert await resumed.manager.resume(tmp_path / "saved") == resumed.manager.model_step == 1
        assert resumed.manager.progress is progress
        assert progress.state_dict() == state
        assert await resumed.check_balance() == balance
        assert await contents(resumed) == before
        assert resumed.manager.status is ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        producing = asyncio.create_task(resumed.manager.produce_loop(3))
        await asyncio.sleep(100)
        assert resumed.engine.requests == []
        # Nothing has become stale by the interruption.
        assert (await resumed.buffer.count_statuses(["t"], [Status.EXPIRED]))["t"][Status.EXPIRED] == 0
        await resumed.controller.update_weights([], 1)
        await resumed.manager.continue_produce(1)
        result = await resumed.manager.get_batch(3, 2)
        continued = [s for g in result.rollout_states for s in g if len(set(s.response_model_steps)) == 2]
        for state in continued:
            assert state.response_ids.tolist() == list(range(100, 100 + len(state.response_ids)))
        assert (await resumed.check_balance()).repeated == 0
        await stop(resumed, producing)

    async def contents(world):
        rows = await world.buffer.storage.get({})
        return sorted((row.item[0].group_id, row.status, [s.response_ids.tolist() for s in row.item]) for row in rows)

    virtual_time.run(main())


def test_a_stalled_wait_names_what_hangs():
    async def main():
        activities = Activities()
        watch = StallWatch(activities, warn_after_s=60, fail_after_s=600)
        world = World(token_s=10**6, manager_options={"stall_watch": watch, "activities": activities}).build()
        for loop in world.loops.values():
            loop.activities = activities
        producing = asyncio.create_task(world.manager.produce_loop(1))
        with pytest.raises(StallError, match=r"rollout t/0/0/\d+/0 generating for 600 s"):
            await world.manager.get_batch(1, 1)
        assert now() == 600.0
        await stop(world, producing)

    virtual_time.run(main())


def test_groups_that_ended_leave_the_buffer_with_their_reasons_after_each_batch():
    async def main():
        world = World(
            strategy=AsyncProduceStrategyConfig(
                max_staleness=1, is_valid_sample_fn=lambda group: len(group[0].response_ids) % 2 == 0
            ),
            faults=(0, 5),
        ).build()
        kept = []

        async def on_batch(step, result):
            kept.extend(result.rollout_states)
            counts = (await world.buffer.count_statuses(["t"], list(Status)))["t"]
            assert counts[Status.FILTERED] == counts[Status.FAILED] == counts[Status.EXPIRED] == 0
            await world.check_balance()

        batches = await train(world, 3, 5, on_batch=on_batch)
        assert len(batches) == 5
        assert all(len(group[0].response_ids) % 2 == 0 for group in kept)
        dropped = (await world.check_balance()).dropped
        assert dropped["failed"] == 2
        assert dropped["filtered"] > 0

    virtual_time.run(main())


def test_pause_times_and_windows_are_reported_with_the_next_batch():
    async def main():
        world = World(longest=40, strategy=AsyncProduceStrategyConfig(max_staleness=3)).build()
        producing = asyncio.create_task(world.manager.produce_loop(2))
        await asyncio.sleep(0.5)
        for runner in world.manager.task_runners:
            pause = runner.produce_strategy.pause_produce

            async def slow_pause(ctx, pause=pause):
                return await pause(ctx) + 2.5

            runner.produce_strategy.pause_produce = slow_pause
        assert await world.manager.pause_produce() == 2.5
        await world.manager.continue_produce(0)
        result = await world.manager.get_batch(2, 1)
        assert result.group_gen_pause_time_s == 2.5
        assert result.produced_samples >= 4
        assert result.produced_tokens >= sum(len(s.response_ids) for g in result.rollout_states for s in g)
        assert len(result.group_gen_times_s) == 2
        assert (await world.manager.get_batch(2, 2)).group_gen_pause_time_s == 0.0
        await stop(world, producing)

    virtual_time.run(main())


def test_an_empty_result_carries_what_is_left_over_and_the_pauses_so_far():
    async def main():
        world = World(weights={"a": 1.0, "b": 1.0}).build()
        manager = world.manager
        producing = asyncio.create_task(manager.produce_loop(2))
        await manager.get_batch(2, 1)
        for runner in manager.task_runners:
            pause = runner.produce_strategy.pause_produce

            async def slow_pause(ctx, pause=pause):
                return await pause(ctx) + 1.5

            runner.produce_strategy.pause_produce = slow_pause
        await world.sync(0)
        await world.buffer.put(completed(9, "a"), "a")
        empty = await manager.get_batch(2, 2)
        assert (empty.rollout_states, empty.status) == ([], ProduceBatchStatus.EXPIRED_BATCH)
        assert (empty.group_gen_pause_time_s, empty.leftovers[Status.EXPIRED]) == (3.0, 1)
        of_a = empty.task_results["a"]
        assert (of_a.group_gen_pause_time_s, of_a.leftovers[Status.EXPIRED]) == (1.5, 1)
        assert of_a.status is ProduceBatchStatus.EXPIRED_BATCH
        assert empty.metrics()["produce/left_expired"] == 1.0
        # The next batch has its pauses too, and all that was produced.
        await world.sync(1)
        batch = await manager.get_batch(2, 2)
        assert batch.group_gen_pause_time_s == 6.0
        assert batch.produced_samples == 2 * world.k
        assert batch.metrics()["produce/pause_s"] == 6.0
        assert batch.metrics()["produce/b/pause_s"] == 3.0
        await stop(world, producing)

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"a": 2}, "must name the tasks"),
        ({"a": 1, "b": 0, "c": 1}, "must name the tasks"),
        ({"a": 3, "b": -1}, "at least 0"),
        ({"a": 1.0, "b": 1.0}, "whole numbers"),
        ({"a": True, "b": True}, "whole numbers"),
        ({"a": 1, "b": 0}, "must sum to the batch of 2, not to 1"),
        ({"a": 3, "b": 3}, "must sum to the batch of 2, not to 6"),
        ([1, 1], "must name the tasks"),
        (None, "must name the tasks"),
    ],
)
def test_a_split_of_ones_own_that_is_none_is_refused_before_anything_is_taken(sizes, message):
    async def main():
        world = World(weights={"a": 1.0, "b": 1.0}).build()
        manager, buffer = world.manager, world.buffer
        for index in range(8):
            await buffer.put(completed(index, "a"), "a")
            await buffer.put(completed(index, "b"), "b")
        manager.get_task_batch_sizes = lambda batch_size, train_step: sizes
        with pytest.raises(ValueError, match=f"get_task_batch_sizes returned .*{message}"):
            await manager.get_batch(2, 1)
        with pytest.raises(ValueError, match=message):
            await manager.produce_batch(2, 1, 0)
        with pytest.raises(ValueError, match=message):
            await manager.produce_loop(2)
        assert len(buffer) == 16
        assert await buffer.count("a", Status.ARCHIVED) == await buffer.count("b", Status.ARCHIVED) == 0
        assert manager.progress.consumed_samples == {"a": 0, "b": 0}
        assert not world.engine.requests
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


def test_a_split_of_ones_own_may_use_any_whole_numbers_in_any_order():
    async def main():
        world = World(weights={"a": 1.0, "b": 1.0}).build()
        world.manager.get_task_batch_sizes = lambda size, step: {"b": np.int64(size), "a": 0}
        result = await world.manager.produce_batch(2, 1, 0)
        assert [group[0].task_name for group in result.rollout_states] == ["b", "b"]
        assert list(result.task_batch_sizes.items()) == [("a", 0), ("b", 2)]

    virtual_time.run(main())


def test_a_synchronous_strategy_works_for_the_step_that_is_waited_for():
    async def main():
        world = World(strategy=SyncProduceStrategyConfig()).build()
        batches = await train(world, 3, 4, train_s=1.0)
        assert sorted(batches) == [1, 2, 3, 4]
        for step, groups in batches.items():
            assert {s for g in groups for state in g for s in state.response_model_steps} <= {step - 1, step - 2}
        assert (await world.check_balance()).trained == 12

    virtual_time.run(main())


def test_a_slow_task_holds_back_the_fast_one_and_is_named(caplog):
    async def main():
        world = World(weights={"fast": 1, "slow": 1}, strategy=AsyncProduceStrategyConfig(max_staleness=50)).build()
        generate = world.loops["slow"].controller_call

        async def slow(state):
            await asyncio.sleep(3.5 * HELD_UP_S)
            return await generate(state)

        world.loops["slow"].controller_call = slow
        producing = asyncio.create_task(world.manager.produce_loop(4))
        with caplog.at_level(logging.WARNING):
            getting = asyncio.create_task(world.manager.get_batch(4, 1))
            await asyncio.sleep(3 * HELD_UP_S)
            # A whole share and no more, although the weights would allow fifty steps.
            assert await world.buffer.count("fast", Status.COMPLETED) == 2
            await getting
        held_up = [record.message for record in caplog.records if "has waited" in record.message]
        assert len(held_up) == 2
        assert "60 s for slow while others are ready: {'fast': '2 of 2', 'slow': '0 of 2'}" in held_up[0]
        await stop(world, producing)

    virtual_time.run(main())


def test_a_task_without_a_share_is_named(caplog):
    async def main():
        world = World(weights={"big": 1000, "tiny": 1}).build()
        with caplog.at_level(logging.WARNING):
            await train(world, 2, HUNGRY_BATCHES)
        (message,) = [record.message for record in caplog.records if "no share" in record.message]
        assert "task tiny (weight 1)" in message

    virtual_time.run(main())


def test_each_task_has_its_own_tolerance():
    async def main():
        patient = AsyncProduceStrategyConfig(max_staleness=9)
        world = World(
            weights={"strict": 1, "patient": 1},
            strategies={"strict": AsyncProduceStrategyConfig(), "patient": patient},
        ).build()
        seen = {"strict": set(), "patient": set()}

        async def on_batch(step, result):
            for group in result.rollout_states:
                seen[group[0].task_name] |= {state.seq_staleness for state in group}

        # As if an earlier run had left some over.
        for index in range(3):
            for task in seen:
                await world.buffer.put(completed(index, task), task, current_train_step=1)
        await train(world, 2, 6, on_batch=on_batch)
        assert seen["strict"] == {0}
        assert max(seen["patient"]) > 0

    virtual_time.run(main())


class RecordingStrategy(ProduceStrategy):
    """A strategy of someone else's: no more than `produce_batch` and `pause_produce`."""

    works_ahead = True

    def __init__(self, statuses):
        super().__init__()
        self.statuses, self.train_steps, self.model_steps = list(statuses), [], []

    async def produce_batch(self, ctx):
        self.train_steps.append(ctx.train_step)
        self.model_steps.append(ctx.model_step)
        if self.statuses:
            return self.statuses.pop(0)
        await ctx.update_event.wait()
        return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT

    async def pause_produce(self, ctx):
        return 1.5


def test_the_loop_goes_by_what_strategies_return():
    async def main():
        strategy = RecordingStrategy([ProduceBatchStatus.NORMAL, ProduceBatchStatus.EXPIRED_BATCH])
        manager = AgentLoopManager(
            task_runners=[TaskRunner(task_name="t", agent_loop=None, produce_strategy=strategy, sampler=None)],
            replay_buffer=AsyncReplayBufferConfig().build(),
        )
        manager.progress.producer_future_step = 3
        producing = asyncio.create_task(manager.produce_loop(1))
        await asyncio.sleep(1)
        assert manager.status is ProduceBatchStatus.EXPIRED_BATCH
        assert strategy.train_steps == [3, 4]
        await manager.continue_produce(model_step=9)
        await asyncio.sleep(1)
        assert strategy.train_steps == [3, 4, 4]
        assert strategy.model_steps[-1] == 9
        assert manager.status is ProduceBatchStatus.NORMAL
        assert await manager.pause_produce() == 1.5
        manager.shutdown()
        await producing

    virtual_time.run(main())


def test_colocated_steps_leave_over_what_was_over_sampled_and_use_it_next():
    async def main():
        world = World(
            strategy=AsyncProduceStrategyConfig(
                over_sample_threshold=1.0, enable_partial_rollout=True, max_staleness=1
            ),
            longest=40,
        ).build()
        for step in range(1, 6):
            result = await world.manager.produce_batch(4, step, step - 1)
            assert len(result.rollout_states) == 4
            assert world.manager.pending_task_count() == {"t": 0}
            assert max(s.seq_staleness for g in result.rollout_states for s in g) <= 1
            await world.check_balance()
            await world.buffer.commit(step)
            await world.controller.update_weights([], step)
            left = await world.buffer.count_statuses(["t"], [Status.ABORTED, Status.COMPLETED])
            assert sum(left["t"].values()) > 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


def test_leftovers_that_are_too_old_are_not_mistaken_for_the_next_colocated_batch():
    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(over_sample_threshold=1.0), longest=2).build()
        await world.manager.produce_batch(4, 1, 0)
        await world.controller.update_weights([], 1)
        result = await world.manager.produce_batch(4, 2, 1)
        assert len(result.rollout_states) == 4
        assert {state.seq_staleness for g in result.rollout_states for state in g} == {0}

    virtual_time.run(main())
