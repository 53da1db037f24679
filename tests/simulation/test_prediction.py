"""Whole simulations, against what can be worked out by hand."""

import json
import re

import pytest
from simulated_runs import PARTIAL, cluster, run_config

from forebay.produce import ProductionError
from forebay.runs.show.display import RunDisplay
from forebay.simulation import simulate
from forebay.simulation.prediction import synchronous


def test_a_synchronous_step_is_the_sum_of_its_parts():
    result = simulate(synchronous(run_config()), cluster(judge_s=0.5), steps=6)
    assert result.step_s == pytest.approx(20 + 0.5 + 5 + 1)
    assert (result.generation_s, result.training_s) == (20, 5)
    assert result.engine_idle == pytest.approx(1 - 20 / 26.5)
    assert result.trainer_idle == pytest.approx(1 - 5 / 26.5)
    assert result.sync_share == pytest.approx(1 / 26.5)
    assert (result.token_staleness.max, result.wasted_share, dict(result.dropped)) == (0, 0, {})


@pytest.mark.parametrize("train_s", [5.0, 30.0])
def test_an_asynchronous_step_is_the_slower_of_its_parts(train_s):
    produce = {**PARTIAL, "in_flight_update": True}
    result = simulate(run_config(produce=produce), cluster(train_s=train_s, sync_s=0.0), steps=12)
    assert result.step_s == pytest.approx(max(20, train_s), rel=0.01)
    assert result.over_bound == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("mode", ["colocated", "separate"])
def test_where_all_engines_sleep_over_training_a_step_is_the_sum_of_its_parts_and_of_the_turns(mode):
    config = run_config() if mode == "separate" else synchronous(run_config())
    result = simulate(config, cluster(sleeping=1, turn_s=2.0), steps=12)
    # The trainer takes the devices, and leaves them before the weights are handed over.
    assert result.step_s == pytest.approx(20 + 2 + 5 + 2 + 1, rel=0.01)
    assert result.dropped == {}


@pytest.mark.parametrize(("sleeping", "step_s"), [(0, 20.0), (1, 25.0), (2, 30.0)])
def test_engines_that_do_not_sleep_go_on_while_others_do(sleeping, step_s):
    two = cluster(engines=2, tokens_per_s=20.0, slots=2, train_s=10.0, sync_s=0.0, sleeping=sleeping)
    produce = {**PARTIAL, "in_flight_update": True}
    result = simulate(run_config(produce=produce), two, steps=30)
    # 800 tokens: 40 in a second, but for the ten of training, in which those that sleep make none.
    assert result.step_s == pytest.approx(step_s, rel=0.03)


def test_the_same_simulation_gives_the_same_numbers_and_timeline(tmp_path):
    tailed = cluster(lengths={"p50": 50, "p99": 400}, prefill_tokens_per_s=1000, judge_s=0.1)
    traces = tmp_path / "one.json", tmp_path / "other.json"
    one, other = (simulate(run_config(produce=PARTIAL), tailed, steps=5, trace=trace) for trace in traces)
    assert one.numbers() == other.numbers()
    assert traces[0].read_text() == traces[1].read_text()
    bars = [event for event in json.loads(traces[0].read_text()) if event["ph"] == "X"]
    assert {"generate", "judge", "train", "sync"} <= {bar["cat"] for bar in bars}
    assert max(bar["ts"] for bar in bars) / 1e6 == pytest.approx(5 * one.step_s, rel=0.5)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_staleness_stays_under_its_bound_and_every_token_is_accounted_for(max_staleness):
    produce = {**PARTIAL, "max_staleness": max_staleness}
    result = simulate(run_config(produce=produce), cluster(lengths={"p50": 50, "p99": 400}), steps=10)
    assert result.token_staleness.max <= result.group_staleness.max <= max_staleness
    assert sum(result.token_staleness.counts.values()) == result.trained_tokens
    assert sum(result.group_staleness.counts.values()) == 10 * 4
    assert result.made_tokens >= result.trained_tokens + result.kept_tokens
    assert 0 <= result.wasted_share < 1
    assert result.step_s >= result.training_s


def test_a_run_that_trains_again_on_groups_needs_fewer_new_ones():
    table = {"produce": PARTIAL, "train": {"correction": "ratio"}}
    once, again = (
        simulate(run_config(**table, replay={"reuse": {"times": times, "share": 0.5}}), cluster(), steps=12)
        for times in (1, 2)
    )
    assert again.trained_tokens == once.trained_tokens
    assert again.made_tokens < 0.8 * once.made_tokens
    assert again.step_s < 0.8 * once.step_s


def test_a_request_takes_its_start_before_its_tokens():
    config, started = synchronous(run_config()), cluster(start_s=3.0)
    # Two rounds of four requests.
    assert simulate(config, started, steps=4).step_s == pytest.approx(20 + 2 * 3 + 5 + 1)


def test_what_a_filter_rejects_is_dropped_and_generated_again():
    half = cluster(filtered_share=0.5)
    result = simulate(run_config(), half, steps=10)
    assert 0.3 < result.dropped["filtered"] / result.groups < 0.7
    assert result.step_s > simulate(run_config(), cluster(), steps=10).step_s


def test_tasks_have_their_share_and_their_own_lengths():
    data = {"source": "sorting", "arguments": {"length": 3, "letters": 5}}
    task = {"data": data, "judge": {"name": "exact_match"}, "sample": {"max_tokens": 10_000}}
    tasks = [{"name": "short", "weight": 3.0, **task}, {"name": "long", **task}]
    several = cluster(task_lengths={"long": {"constant": 500}})
    result = simulate(synchronous(run_config(tasks=tasks)), several, steps=3)
    assert result.mean_tokens == (3 * 100 + 500) / 4


def test_lengths_are_cut_by_the_budget_of_the_run_file():
    config = run_config()
    short = config.tasks[0].model_copy(update={"sample": config.tasks[0].sample.__class__(max_tokens=30)})
    result = simulate(config.model_copy(update={"tasks": [short]}), cluster(), steps=3)
    assert result.mean_tokens == 30


def test_a_run_that_cannot_go_on_says_so():
    with pytest.raises(ProductionError):
        simulate(run_config(), cluster(filtered_share=0.999), steps=3)
    with pytest.raises(ValueError, match="at least 2 steps, got 1"):
        simulate(run_config(), cluster(), steps=1)


def test_a_run_that_drops_by_length_says_so_once(monkeypatch):
    said = []
    monkeypatch.setattr(RunDisplay, "warning", lambda self, text: said.append(text))
    lengths = cluster(slots=16, tokens_per_s=160.0, lengths={"values": [20, 20, 20, 20, 20, 20, 400]})
    produce = {**PARTIAL, "max_staleness": 1}
    assert simulate(run_config(produce=produce), lengths, steps=30).dropped["expired"] > 5
    (message,) = said
    assert re.search(r"have \d.* times the tokens .*staleness_rule = 'correct' \(now 'drop'\)", message)
    said.clear()
    result = simulate(run_config(produce={"mode": "separate"}), lengths, steps=30)
    assert (result.dropped, said) == ({}, [])
