"""Failures, engines that join or leave, checkpoints and evaluations in simulated runs."""

import asyncio
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest
from simulated_runs import PARTIAL, cluster, run_config

from forebay.config import ConfigError
from forebay.engines import RolloutController
from forebay.simulation import simulate
from forebay.simulation.cluster import changed_cluster
from forebay.simulation.engine import ModeledEngine
from forebay.simulation.prediction import synchronous
from forebay.simulation.world import EnoughSteps, SimulationLoop, build_world
from forebay.testing import run_in_virtual_time
from forebay.types import RolloutState, SampleParams, Status
from forebay.watching.activity import EVALUATE_BESIDE, GENERATE

TAILED = {"p50": 50, "p99": 400}
TRIED = {
    "name": "t",
    "data": {"source": "sorting", "arguments": {"length": 3, "letters": 5}},
    "eval_data": {"source": "sorting", "arguments": {"length": 3, "letters": 5}},
    "judge": {"name": "exact_match"},
    "sample": {"max_tokens": 10_000},
}


@pytest.mark.parametrize("mode", ["colocated", "separate"])
def test_without_a_failure_every_number_is_as_before_to_the_last_bit(mode):
    config = run_config(produce=PARTIAL) if mode == "separate" else synchronous(run_config())
    usual = {"engines": 3, "lengths": TAILED, "judge_s": 0.3, "filtered_share": 0.1}
    # The first failure is centuries after the end, and nothing else ever takes up these settings.
    ready = {"failures_per_hour": 1e-6, "restart_s": 7.0, "keeps_tokens": False, "scale": [[1e9, 1]]}
    one, other = (simulate(config, cluster(**usual, **more), steps=8).numbers() for more in ({}, ready))
    assert one == other


def run_world(config, described, folder):
    """A whole run; its world, its activities, and the balance of its books."""

    async def run():
        world = build_world(config, described, folder)
        ended = []
        world.run.activities.listen(lambda _: None, ended.append)
        with pytest.raises(EnoughSteps):
            await LOOPS[config.produce.mode](world.run)
        live = await world.run.manager.count_live()
        return world, ended, world.run.manager.ledger.balance(live)

    from forebay.runs.launch import LOOPS

    with asyncio.Runner(loop_factory=SimulationLoop) as runner:
        return runner.run(run())


@pytest.mark.parametrize("keeps_tokens", [True, False])
@pytest.mark.parametrize("mode", ["colocated", "separate"])
def test_the_books_balance_whatever_fails(tmp_path, mode, keeps_tokens):
    config = run_config(produce=PARTIAL, steps=40)
    config = config if mode == "separate" else synchronous(config)
    failing = cluster(engines=3, lengths=TAILED, failures_per_hour=60, restart_s=20, keeps_tokens=keeps_tokens)
    world, _, balance = run_world(config, failing, tmp_path)
    assert world.run.controller.counts()["engine_restarts"] > 5
    assert balance.ok, balance
    assert balance.trained == 40 * 4


def test_all_requests_of_a_lost_engine_are_answered_by_others():
    async def answers(keeps_tokens):
        def engine(*lives_s):
            return ModeledEngine(
                rate=lambda running: 10.0 * running,
                slots=4,
                length=lambda request: 50 - request.num_earlier,
                lives_s=lives_s,
                restart_s=60.0,
                keeps_tokens=keeps_tokens,
            )

        engines = [engine(2.0), engine()]
        controller = RolloutController(engines)
        await controller.update_weights([], 0)
        params = SampleParams(max_tokens=99)
        states = [RolloutState([], rollout_id=i, prompt_ids=[1], sample_params=params) for i in range(12)]
        await asyncio.gather(*map(controller.generate, states))
        assert all(state.status is Status.COMPLETED and len(state.response_ids) == 50 for state in states)
        made = sum(each.num_tokens for each in engines)
        await controller.close()
        return made, controller.counts()

    # Four at the first, which had 20 tokens when it failed; four were queued for either.
    assert run_in_virtual_time(answers(True)) == (12 * 50, {"retries": 4, "engine_restarts": 0})
    assert run_in_virtual_time(answers(False)) == (12 * 50 + 4 * 20, {"retries": 4, "engine_restarts": 0})


def test_more_failures_never_make_a_run_faster():
    def step_s(rate, seed):
        config = run_config(produce=PARTIAL, seed=seed)
        return simulate(config, cluster(engines=2, failures_per_hour=rate, restart_s=60), steps=15).step_s

    # 11 s, 17.7 s and 41.5 s with standard deviations of 3 s: an engine is away for 0%, 40% and 73%.
    means = [mean(step_s(rate, seed) for seed in range(2)) for rate in (0, 40, 160)]
    assert all(more > 1.2 * fewer for fewer, more in pairwise(means)), means


def test_what_is_generated_again_takes_longer_than_what_goes_on():
    failing = {"failures_per_hour": 60, "restart_s": 0.0, "lengths": {"constant": 400}}
    kept, again = (
        simulate(synchronous(run_config()), cluster(**failing, keeps_tokens=keeps), steps=20)
        for keeps in (True, False)
    )
    # One engine that is back at once loses nothing but the tokens.
    assert kept.step_s == pytest.approx(80 + 5 + 1, rel=0.01)
    assert again.step_s > 1.1 * kept.step_s
    assert kept.wasted_share == 0 < again.wasted_share


def test_engines_that_join_or_leave_count_from_then_on():
    config = run_config(produce=PARTIAL)
    one, two = (simulate(config, cluster(engines=engines), steps=12) for engines in (1, 2))
    joined, left = (
        simulate(config, cluster(engines=engines, scale=[[2.0, change]]), steps=12)
        for engines, change in ((1, 1), (2, -1))
    )
    assert (joined.step_s, joined.generation_s) == pytest.approx((two.step_s, two.generation_s))
    assert (left.step_s, left.generation_s) == pytest.approx((one.step_s, one.generation_s))
    assert joined.engine_idle == pytest.approx(two.engine_idle)
    later = simulate(config, cluster(engines=1, scale=[[150.0, 1]]), steps=12)
    assert two.step_s < later.step_s < one.step_s
    assert left.wasted_share == 0
    # The newcomer takes what is queued at once, and some of the groups that were longest in flight expire.
    assert later.wasted_share < 0.01


def test_engines_that_cannot_leave_are_refused():
    with pytest.raises(ValueError, match="one at least has to stay"):
        cluster(engines=2, scale=[[5, -1], [9, -1]])
    with pytest.raises(ConfigError, match="failures_per_hour"):
        changed_cluster(cluster(), ["failures_per_hour=-1"])
    # Before the first weights are there, none is up.
    with pytest.raises(ValueError, match="no other is up"):
        simulate(run_config(), cluster(engines=2, scale=[[0.5, -1]]), steps=3)


@pytest.mark.parametrize("cost_s", [0.5, 30.0])
@pytest.mark.parametrize("every", [1, 3])
def test_a_checkpoint_lengthens_a_synchronous_run_by_exactly_its_cost(every, cost_s):
    config = synchronous(run_config(checkpoint_every=every))
    saved, plain = (simulate(config, cluster(checkpoint_s=each), steps=16) for each in (cost_s, 0.0))
    # The last step ends the run before its checkpoint; the first fifth (3 steps) is left out.
    num_saved = len([step for step in range(3, 16) if step % every == 0])
    assert saved.step_s * 13 == pytest.approx(plain.step_s * 13 + num_saved * cost_s)
    assert saved.trained_tokens == plain.trained_tokens


@pytest.mark.parametrize("train_s", [5.0, 40.0])
@pytest.mark.parametrize("in_flight_update", [False, True])
def test_a_checkpoint_lengthens_no_run_by_more_than_its_cost(in_flight_update, train_s):
    produce = {**PARTIAL, "in_flight_update": in_flight_update}
    config = run_config(produce=produce, checkpoint_every=3)
    saved, plain = (
        simulate(config, cluster(checkpoint_s=each, train_s=train_s), steps=21).step_s for each in (9.0, 0.0)
    )
    # Of 17 steps that count five end with a checkpoint.
    assert plain * 0.999 < saved < plain + 9.0 * 5 / 17 * 1.001
    if in_flight_update and train_s == 5.0:
        # The trainer waits for rollouts anyway, and they go on being made.
        assert saved == pytest.approx(plain, rel=0.01)


def test_evaluation_beside_costs_production_its_engine_and_nothing_else():
    usual = {"lengths": {"values": [80, 100, 120]}, "sync_s": 0.0}
    beside, pause = (
        run_config(produce=PARTIAL, tasks=[TRIED], evaluate={"every": 2, "mode": mode}) for mode in ("beside", "pause")
    )
    fewer = simulate(pause, cluster(engines=2, **usual), steps=12).numbers()
    # Of at most 12 s, and due every 20 s: none has to wait for the one before.
    assert simulate(beside, cluster(engines=3, held_out=4, **usual), steps=12).numbers() == fewer
    paused = simulate(pause, cluster(engines=2, held_out=4, **usual), steps=12)
    assert paused.step_s > 1.2 * fewer["step_s"]
    assert (paused.wasted_share, paused.trained_tokens) == (fewer["wasted_share"], fewer["trained_tokens"])
    # The run that takes turns tries them in its turns.
    assert synchronous(beside) == synchronous(pause)


def test_evaluation_beside_does_not_pause_production(tmp_path):
    config = run_config(produce=PARTIAL, tasks=[TRIED], steps=12, evaluate={"every": 2, "mode": "beside"})
    world, ended, balance = run_world(config, cluster(engines=2, held_out=16), tmp_path)
    tries = [each for each in ended if each.stage == EVALUATE_BESIDE]
    assert len(tries) >= 4
    starts = np.array([each.start_s for each in ended if each.stage == GENERATE])
    for each in tries[1:-1]:
        # Four rounds of ten seconds: rollouts to train on begin all the time.
        assert ((each.start_s < starts) & (starts < each.end_s)).sum() >= 8
    assert [row["eval/rollouts"] for row in world.run.evaluations] == [16.0] * len(world.run.evaluations)
    assert balance.ok
