"""What each staleness rule starts, keeps and trains; without tolerance it is the synchronous run."""

import asyncio
import runpy
from pathlib import Path

import pytest
from production_world import World, train

from forebay.aio import virtual_time
from forebay.produce import (
    STALENESS_RULES,
    AsyncProduceStrategyConfig,
    Outlook,
    ProduceBatchStatus,
    StalenessRule,
    SyncProduceStrategyConfig,
)
from forebay.produce.strategies.base import AdmitRule
from forebay.types import Status


def content(groups):
    """What is trained: every rollout's tokens and the steps that made them, by rollout."""
    return {
        state.rollout_id: (state.response_ids.tolist(), state.response_model_steps.tolist())
        for group in groups
        for state in group
    }


def long_enough(group):
    return sum(len(state.response_ids) for state in group) % 3 > 0


@pytest.mark.parametrize("rule", ["drop", "requeue", "admit", "mask", "correct"])
@pytest.mark.parametrize("weights", [{"t": 1}, {"a": 2, "b": 1}])
def test_without_tolerance_the_separate_run_trains_the_batches_of_the_synchronous_one(rule, weights):
    options = {"weights": weights, "longest": 30, "slots": 3, "judge_s": 0.05, "seed": 5}

    async def colocated():
        strategy = SyncProduceStrategyConfig(is_valid_sample_fn=long_enough)
        world = World(strategy=strategy, **options).build()
        batches = {}
        for step in range(1, 7):
            batches[step] = (await world.manager.produce_batch(5, step, step - 1)).rollout_states
            await world.controller.update_weights([], step)
        return batches

    async def separate():
        strategy = AsyncProduceStrategyConfig(max_staleness=0, staleness_rule=rule, is_valid_sample_fn=long_enough)
        world = World(strategy=strategy, **options).build()
        return await train(world, 5, 6, train_s=1.0)

    expected, actual = virtual_time.run(colocated()), virtual_time.run(separate())
    assert sorted(actual) == [1, 2, 3, 4, 5, 6]
    for step, groups in expected.items():
        assert content(actual[step]) == content(groups)
        assert {label for _, labels in content(groups).values() for label in labels} == {step - 1}


def started_by(rule, **options):
    """How many groups are started with the first weights, and how many expire in six steps."""

    async def main():
        world = World(
            strategy=AsyncProduceStrategyConfig(
                max_staleness=1, over_sample_threshold=0.5, staleness_rule=rule, **options
            ),
            longest=30,
        ).build()
        producing = asyncio.create_task(world.manager.produce_loop(4))
        await asyncio.sleep(1000)
        started = world.manager.task_runners[0].sampler.position
        seen = []
        for step in range(1, 7):
            result = await world.manager.get_batch(4, step)
            if not result.rollout_states:
                await world.sync(step - 1)
                result = await world.manager.get_batch(4, step)
            seen += [state.seq_staleness for group in result.rollout_states for state in group]
        await world.manager.shutdown()
        await producing
        balance = await world.check_balance()
        return started, balance, seen

    return virtual_time.run(main())


def test_admit_starts_what_can_be_fresh_and_nothing_expires():
    started, balance, seen = started_by("admit")
    # Steps 1 and 2 may use the first weights: twice four groups, and none beyond for over-sampling.
    assert started == 8
    assert "expired" not in balance.dropped
    assert max(seen) == 1


def test_drop_over_samples_and_drops_what_grew_too_old():
    started, balance, seen = started_by("drop")
    assert started == 10
    assert balance.dropped["expired"] > 0
    assert max(seen) == 1


def test_requeue_generates_expired_prompts_again():
    started, balance, seen = started_by("requeue")
    assert started == 10
    assert "expired" not in balance.dropped
    assert balance.retried > 0
    assert max(seen) == 1


@pytest.mark.parametrize("rule", ["mask", "correct"])
def test_mask_and_correct_keep_everything_for_the_trainer(rule):
    started, balance, seen = started_by(rule)
    assert started == 10
    assert balance.dropped == {}
    # The over-sampled groups are trained a step later than any rule would let them.
    assert max(seen) >= 2


def test_a_rule_that_wants_nothing_more_waits_for_newer_weights():
    class Half(StalenessRule):
        def limit(self, outlook):
            return outlook.target // 2

    async def main():
        world = World(strategy=AsyncProduceStrategyConfig(staleness_rule=Half(), max_staleness=9)).build()
        producing = asyncio.create_task(world.manager.produce_loop(4))
        await asyncio.sleep(10)
        assert world.manager.status is ProduceBatchStatus.EXPIRED_BATCH
        assert await world.buffer.count("t", Status.COMPLETED) == 2
        await world.manager.shutdown()
        await producing

    virtual_time.run(main())


@pytest.mark.parametrize("name", STALENESS_RULES)
def test_every_rule_reaches_the_target_so_that_none_can_starve_the_trainer(name):
    for target in (1, 7):
        for over_sample in (0, 3):
            for fresh in (target, target + 1, target + 9):
                outlook = Outlook(
                    target=target, available=0, in_flight=0, over_sample=over_sample, fresh_limit=fresh, num_expired=0
                )
                assert target <= STALENESS_RULES[name].limit(outlook) <= target + over_sample


def test_the_example_of_an_own_rule_over_samples_less_once_groups_expire():
    example = Path(__file__).parents[2] / "examples" / "own_staleness_rule.py"
    rule = runpy.run_path(str(example))["BackOff"]()
    outlook = {"target": 10, "available": 0, "in_flight": 0, "over_sample": 8, "fresh_limit": 10}
    assert rule.limit(Outlook(**outlook, num_expired=0)) == 18
    assert rule.limit(Outlook(**outlook, num_expired=2)) == 14
    assert rule.limit(Outlook(**outlook, num_expired=3)) == 12
    # Without further losses it comes back, a little with every batch.
    limits = [rule.limit(Outlook(**{**outlook, "target": t}, num_expired=3)) - t for t in range(20, 200, 10)]
    assert limits == sorted(limits)
    assert limits[-1] == 8
    started, balance, _ = started_by(runpy.run_path(str(example))["BackOff"]())
    assert started == 10
    assert 0 < balance.dropped["expired"] < started_by("drop")[1].dropped["expired"]


def test_a_rule_is_found_by_its_name_or_its_class() -> None:
    for rule in ("admit", "forebay.produce.strategies.base:AdmitRule", AdmitRule()):
        built = AsyncProduceStrategyConfig(staleness_rule=rule).build()
        assert isinstance(built.rule, AdmitRule)
    with pytest.raises(ValueError, match="unknown staleness_rule 'admitt'; did you mean 'admit'"):
        AsyncProduceStrategyConfig(staleness_rule="admitt")
