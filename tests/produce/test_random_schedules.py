"""Random schedules of the whole producer on virtual time.

Nothing is lost, doubled, too old, mislabeled or stuck; `schedule_trainer` has what is checked.

Everything of a schedule follows from its seed. Of a failure, this runs that schedule alone::

    FOREBAY_SCHEDULES=17 python -m pytest tests/produce/test_random_schedules.py

and ``FOREBAY_SCHEDULES=1000:4000`` those of a range of seeds.
"""

import asyncio
import logging
import os
import traceback
from collections import Counter

import pytest
from production_world import World
from schedule_plan import draw_plan
from schedule_trainer import try_seed

from forebay.aio import virtual_time
from forebay.produce import STALENESS_RULES, AsyncProduceStrategyConfig
from forebay.types import RolloutState, Status

NUM_SCHEDULES = 10_000 if os.environ.get("FOREBAY_SOAK") == "1" else 100
NUM_SHOWN = 5
"""Failures of which the traceback is shown."""


def wanted_seeds():
    first, _, end = os.environ.get("FOREBAY_SCHEDULES", f"0:{NUM_SCHEDULES}").partition(":")
    return range(int(first), int(end or int(first) + 1))


@pytest.fixture
def _quiet():
    """Faults are logged with their traceback, as they should be; thousands of them are planned here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_quiet")
def test_random_schedules_lose_double_age_and_mislabel_nothing_and_never_get_stuck():
    endings, failures = Counter(), []
    for seed in wanted_seeds():
        try:
            endings[try_seed(seed)] += 1
        # Whatever it is: it belongs to its seed, and the others are tried all the same.
        except Exception:
            failures.append(
                f"FOREBAY_SCHEDULES={seed} python -m pytest tests/produce/test_random_schedules.py\n"
                + traceback.format_exc()
                if len(failures) < NUM_SHOWN
                else f"seed {seed}"
            )
    assert not failures, "\n".join([f"{len(failures)} schedules failed:", *failures])
    if endings.total() >= 100:
        # Some may give up, and some hang by design; that must stay the exception.
        assert endings["finished"] > 0.85 * endings.total(), endings
        assert endings["stalled"] > 0


def test_the_schedules_have_everything_that_a_run_may_have():
    plans = [draw_plan(seed) for seed in range(300)]
    configs = [task.strategy for plan in plans for task in plan.tasks.values()]
    asynchronous = [config for config in configs if isinstance(config, AsyncProduceStrategyConfig)]
    assert {config.staleness_rule for config in asynchronous} == set(STALENESS_RULES)
    on_policy = [
        plan
        for plan in plans
        if plan.interval == 1 and all(getattr(task.strategy, "max_staleness", 1) == 0 for task in plan.tasks.values())
    ]
    assert len(on_policy) >= 20
    assert sum(plan.may_stall for plan in plans) >= 20
    shrinking = [plan for plan in plans if plan.members and plan.may_give_up]
    assert len(shrinking) >= 100
    assert sum(plan.members.most_tokens < plan.longest for plan in shrinking) >= 30
    assert sum(plan.limit is not None for plan in plans) >= 50
    assert sum(plan.habits.crashes > 0 and plan.habits.saves > 0 for plan in plans) >= 50
    assert sum(plan.habits.ends_early > 0 and plan.habits.num_disturbances > 0 for plan in plans) >= 50


def test_a_put_that_was_on_its_way_for_a_step_smuggles_no_stale_group_into_the_next_batch():
    """Found by a schedule with a slow store: it had the step, and the threshold, of when it began."""

    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(max_staleness=0)).build()

        async def put(name, model_step, train_step):
            state = RolloutState([], group_id=name, rollout_id=name, task_name="t", status=Status.COMPLETED)
            state.append([1], model_step=model_step)
            await world.buffer.put([state], "t", current_train_step=train_step, stale_threshold=1)

        waiting = asyncio.create_task(world.manager.get_batch(1, 2))
        await asyncio.sleep(1)
        await put("late", model_step=0, train_step=1)
        await asyncio.sleep(1)
        assert not waiting.done()
        await put("in time", model_step=1, train_step=2)
        ((state,),) = (await waiting).rollout_states
        assert (state.group_id, state.seq_staleness) == ("in time", 0)

    virtual_time.run(main())
