"""Random schedules of the separate run on virtual time: nothing lost, doubled, too old or mislabelled."""

import asyncio
import os
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from production_world import World, length_of

from forebay import virtual_time
from forebay.engines.base import GenerateRequest
from forebay.produce import AsyncProduceStrategyConfig
from forebay.types import SampleParams, Status

NUM_SCHEDULES = 2000 if os.environ.get("FOREBAY_SOAK") == "1" else 40


@st.composite
def worlds(draw):
    partial = draw(st.booleans())
    config = AsyncProduceStrategyConfig(
        max_staleness=draw(st.integers(0, 2)),
        over_sample_threshold=draw(st.sampled_from([0.0, 0.5, 2.0])),
        enable_partial_rollout=partial,
        staleness_rule=draw(st.sampled_from(["drop", "requeue", "admit", "mask", "correct"])),
        tail_batch_trigger_size=draw(st.sampled_from([0, 0, 3])),
        tail_batch_max_tries=draw(st.sampled_from([0, 0, 2])),
        max_retries=draw(st.integers(0, 2)),
        pause_timeout_s=draw(st.sampled_from([0.0, 60.0])),
    )
    return World(
        strategy=config,
        weights=draw(st.sampled_from([{"t": 1}, {"a": 1, "b": 2}])),
        interval=draw(st.integers(1, 2)),
        k=draw(st.integers(1, 3)),
        num_prompts=50,
        seed=draw(st.integers(0, 2**16)),
        longest=draw(st.sampled_from([1, 10, 40])),
        slots=draw(st.sampled_from([None, 2, 8])),
        judge_s=draw(st.sampled_from([0.0, 0.25])),
        faults=tuple(draw(st.lists(st.integers(0, 60), max_size=4))),
    )


class Trainer:
    """The trainer of a separate run, with everything that may come between two steps."""

    def __init__(self, world, seed, batch_size, steps):
        self.world, self.manager = world, world.manager
        self.random = random.Random(seed)
        self.batch_size, self.steps = batch_size, steps
        self.model_step = 0
        self.trained = []

    async def run(self):
        producing = asyncio.create_task(self.manager.produce_loop(self.batch_size))
        observing = asyncio.create_task(self.observe())
        step = 1
        try:
            while step <= self.steps:
                result = await self.get_batch(step)
                if not result.rollout_states:
                    # Only newer weights can help, and there are some.
                    assert self.model_step < step - 1
                    await self.sync(step - 1)
                    continue
                self.check(result, step)
                await asyncio.sleep(self.random.choice([0.0, 0.3, 2.0]))
                await self.world.buffer.commit(step)
                if step % self.world.interval == 0:
                    await self.sync(step)
                step += 1
        finally:
            observing.cancel()
            await self.manager.shutdown()
            await asyncio.gather(producing, observing, return_exceptions=True)
        if not producing.cancelled():
            producing.result()

    async def get_batch(self, step):
        """Sometimes cancelled on the way, at any instant."""
        while self.random.random() < 0.3:
            getting = asyncio.create_task(self.manager.get_batch(self.batch_size, step))
            await asyncio.sleep(self.random.choice([0.0, 0.1, 0.7]))
            for _ in range(self.random.randrange(8)):
                await asyncio.sleep(0)
            getting.cancel()
            (result,) = await asyncio.gather(getting, return_exceptions=True)
            if not isinstance(result, BaseException):
                return result
            assert isinstance(result, asyncio.CancelledError), result
        return await self.manager.get_batch(self.batch_size, step)

    async def sync(self, model_step):
        if self.random.random() < 0.3:
            # Under running generations.
            await self.world.controller.update_weights([], model_step)
        else:
            await self.manager.pause_produce()
            assert sum(self.manager.pending_task_count().values()) == 0
            held = await self.manager.count_live()
            await asyncio.sleep(self.random.choice([0.0, 0.5]))
            assert await self.manager.count_live() == held
            await self.world.controller.update_weights([], model_step)
        self.model_step = model_step
        await self.manager.continue_produce(model_step)

    async def observe(self):
        """The books balance at any instant, and no group is in flight while it is in the buffer."""
        while True:
            await asyncio.sleep(self.random.choice([0.01, 0.07, 0.31]))
            await self.world.check_balance()
            rows = await self.world.buffer.storage.get({}, rows_only=True)
            groups = [
                *(row.uid for row in rows),
                *(
                    group[0].group_id
                    for runner in self.manager.task_runners
                    for group in runner.produce_strategy.pending_groups()
                ),
            ]
            assert len(set(groups)) == len(groups)

    def check(self, result, step):
        world, strategy = self.world, self.manager.task_runners[0].produce_strategy
        assert len(result.rollout_states) == self.batch_size
        for group in result.rollout_states:
            self.trained.append(group[0].group_id)
            assert len(group) == world.k
            for state in group:
                steps = state.response_model_steps.tolist()
                assert state.status is Status.COMPLETED
                assert state.reward == {"score": float(len(steps))}
                # Every token once, in order, and with the step of the weights that made it.
                assert state.response_ids.tolist() == list(range(100, 100 + whole_length(world, state)))
                assert steps == sorted(steps)
                assert 0 <= steps[0] <= steps[-1] <= step - 1
                assert state.seq_staleness == step - 1 - steps[0]
                if strategy.stale_threshold is not None:
                    assert state.seq_staleness < strategy.stale_threshold
                if not world.strategy.enable_partial_rollout:
                    assert state.num_tries == 0 or len(steps) > 0


def whole_length(world, state):
    request = GenerateRequest(
        request_id=f"{state.rollout_id}:0:0",
        input_ids=state.prompt_ids,
        params=SampleParams(),
        max_tokens=1,
        seed=0,
    )
    return length_of(request, seed=world.seed, longest=world.longest)


@given(worlds(), st.integers(0, 2**16), st.integers(1, 5))
@settings(deadline=None, max_examples=NUM_SCHEDULES)
def test_random_schedules_lose_double_age_and_mislabel_nothing(world, seed, batch_size):
    async def main():
        trainer = Trainer(world.build(), seed, batch_size, steps=6)
        await trainer.run()
        assert len(set(trainer.trained)) == len(trainer.trained) == 6 * batch_size
        balance = await world.check_balance()
        assert balance.trained == 6 * batch_size
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())
