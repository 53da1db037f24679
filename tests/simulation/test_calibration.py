"""Rates read off a run: from histories with known rates, and from a real run."""

import asyncio
import json
import os
import shutil

import pyarrow.parquet as pq
import pytest
from simulated_runs import run_config, run_table

from forebay.config import ConfigError, parse_config
from forebay.engines.base import DEFAULT_MAX_BATCH
from forebay.runs.config import RunConfig
from forebay.runs.record.columns import spans_table
from forebay.runs.record.history import FORMAT
from forebay.simulation import simulate
from forebay.simulation.calibration import calibrate, measure_rates, measure_start
from forebay.watching.activity import Span


def test_rates_are_those_that_the_requests_had():
    one_then_two = [(0.0, 4.0, 40), (2.0, 4.0, 10)]
    assert measure_rates(one_then_two, slots=8) == ((1, 10.0), (2, 15.0))
    # Three at once in two slots: some of them only waited.
    assert measure_rates([(0.0, 1.0, 5)] * 3, slots=2) == ((2, 15.0),)


def write_run(folder, num_steps=10, start_s=0.0, tried=False, taken_back=0, train_at_s=(0.0, 3.0)):
    """Steps of 4 s, 3 of them training; a rollout of 20 tokens in 2 s, and one interrupted half-way.

    Each request has 10 tokens a second, and waits `start_s` before the first. After every step held-out
    prompts may be `tried`, which have no limit. Some steps may have been `taken_back` and made again.
    """
    spans = []

    def bar(stage, name, start_s, end_s, note=""):
        spans.append(Span(start_s, end_s, stage, name, "t", name.partition(":")[0], note))

    for step in range(num_steps - taken_back, num_steps):
        # Right before the last step but one, and in other times than the steps have.
        at_s = 4.0 * (num_steps - 2) - 0.3
        for stage, took_s in (("train", 0.1), ("sync", 0.2), ("checkpoint", 0.3)):
            bar(stage, f"step {step}", at_s, at_s + took_s)
    for step in range(num_steps):
        at_s = 4.0 * step
        bar("train", f"step {step}", at_s + train_at_s[0], at_s + train_at_s[1])
        bar("sync", f"step {step}", at_s + 3, at_s + 3.5)
        bar("checkpoint", f"step {step}", at_s + 3.4, at_s + 3.5)
        bar("generate", f"t/{step}:0", at_s, at_s + start_s + 2, "completed, 20 tokens")
        bar("generate", f"t/{step}:1", at_s, at_s + start_s + 0.5, "aborted, 5 tokens")
        bar("generate", f"t/{step}:1", at_s + 0.5, at_s + 0.5 + start_s + 1, "completed, 15 tokens")
        bar("judge", f"t/{step}", at_s + 2, at_s + 2.25)
        if tried:
            bar("evaluate", f"step {step}", at_s + 3.5, at_s + 4)
            bar("generate", f"held out/{step}", at_s + 3.5, at_s + 4, "completed, 900 tokens")
            bar("judge", f"held out/{step}", at_s + 3.5, at_s + 4)
    segment = folder / "history" / "segment_000"
    segment.mkdir(parents=True)
    (segment / "segment.json").write_text(json.dumps({"format": FORMAT, "resumed_from": None}))
    pq.write_table(spans_table(spans), segment / "spans_000000_000000.parquet")
    row = {"step_s": 4.0, "staleness": 1, "time/generate_s": 3.0, "time/wait_s": 1.0, "time/checkpoint_s": 0.1}
    rows = [{"train_step": step + 1, **row} for step in range(num_steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def one_group(**changes):
    """The run of `write_run`."""
    return run_config(batch_size=1, **changes)


def test_a_run_is_measured(tmp_path):
    write_run(tmp_path)
    cluster, measured = calibrate(tmp_path, one_group())
    assert (measured.step_s, measured.staleness) == (4.1, 1)
    assert (cluster.train_s, cluster.sync_s, cluster.judge_s) == (3, 0.5, 0.25)
    assert cluster.checkpoint_s == pytest.approx(0.1)
    assert sorted(set(cluster.lengths.values)) == [15, 20]
    assert cluster.start_s == pytest.approx(0, abs=1e-6)
    assert cluster.tokens_per_s == ((1, pytest.approx(10)), (2, pytest.approx(20)))
    assert cluster.slots == DEFAULT_MAX_BATCH


def test_what_a_request_takes_before_its_first_token_is_measured(tmp_path):
    write_run(tmp_path, start_s=0.25)
    cluster, _ = calibrate(tmp_path, one_group())
    assert cluster.start_s == pytest.approx(0.25)
    # One token after the other is as fast as without.
    assert cluster.tokens_per_s == ((1, pytest.approx(10)), (2, pytest.approx(20)))
    assert measure_start([(0, 2.0, 20), (0, 2.1, 20), (0, 1.9, 20)]) == 0


def test_held_out_prompts_are_none_of_production(tmp_path):
    write_run(tmp_path / "without")
    write_run(tmp_path / "with", tried=True)
    without, with_tries = (calibrate(tmp_path / name, one_group())[0] for name in ("without", "with"))
    assert with_tries == without


@pytest.mark.parametrize("mode", ["colocated", "separate"])
def test_steps_that_were_made_again_count_once_in_every_measure(tmp_path, mode):
    write_run(tmp_path / "once", train_at_s=(3.0, 3.5))
    write_run(tmp_path / "again", train_at_s=(3.0, 3.5), taken_back=2)
    once, again = (calibrate(tmp_path / name, one_group(produce={"mode": mode})) for name in ("once", "again"))
    assert again == once
    assert once[0].train_s == pytest.approx(0.5 + 0.75)


def test_a_run_that_changed_its_mode_is_measured(tmp_path):
    write_run(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"time/wait_s": 1.0', '"buffer/size": 1'))
    # No step says how long it waited.
    assert calibrate(tmp_path, one_group(produce={"mode": "separate"}))[0].train_s == 3


@pytest.mark.parametrize("mode", ["colocated", "separate"])
def test_a_step_has_what_it_takes_beside_rollouts_and_training(tmp_path, mode):
    write_run(tmp_path, train_at_s=(3.0, 3.5))
    cluster, _ = calibrate(tmp_path, one_group(produce={"mode": mode}))
    # 3 s of generation, or 1 s of waiting, and training begins 0.75 s after the last verdict.
    assert cluster.train_s == pytest.approx(0.5 + 0.75)


def test_requests_of_several_engines_are_spread_over_them():
    # One alone is at one engine; four are two at each; of ten at each, eight run.
    alone, four, twenty = ([(start, start + 1.0, 10)] * count for start, count in ((0.0, 1), (1.0, 4), (2.0, 20)))
    assert measure_rates([*alone, *four, *twenty], slots=8, engines=2) == ((1, 10.0), (2, 20.0), (8, 100.0))


@pytest.mark.parametrize(
    ("changes", "engines"),
    [
        ({"engine": {"name": "process", "arguments": {"engines": 4, "max_batch": 2}}}, 4),
        ({"engine": {"arguments": {"max_batch": 2}}, "cluster": {"name": "ray", "arguments": {"num_engines": 4}}}, 4),
        ({"engine": {"name": "vllm", "arguments": {"servers": 3}}}, 3),
        ({"engine": {"name": "sglang", "arguments": {"urls": ["http://localhost:1", "http://localhost:2"]}}}, 2),
        ({"engine": {"arguments": {"max_batch": 2}}}, 1),
    ],
)
def test_a_run_with_several_engines_is_described_with_as_many(tmp_path, changes, engines):
    write_run(tmp_path)
    cluster, _ = calibrate(tmp_path, one_group(**changes))
    slots = changes["engine"]["arguments"].get("max_batch", DEFAULT_MAX_BATCH)
    assert (cluster.engines, cluster.slots) == (engines, slots)
    # Of two requests at a time, each is at an engine of its own if there are several.
    together = () if engines > 1 else ((2, pytest.approx(20)),)
    assert cluster.tokens_per_s == ((1, pytest.approx(10)), *together)


def test_a_run_without_a_history_is_refused(tmp_path):
    write_run(tmp_path)
    shutil.rmtree(tmp_path / "history")
    with pytest.raises(ConfigError, match="history_gb = 0"):
        calibrate(tmp_path, one_group())
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="no run in"):
        calibrate(tmp_path, one_group())


@pytest.mark.soak
def test_the_prediction_of_a_real_run_is_right(tmp_path):
    """Within 15% of the step time that a real separate run has on this machine, at its own rates."""
    from forebay.runs.launch import launch

    assert os.environ["OMP_NUM_THREADS"] == "1"
    table = run_table(
        output=str(tmp_path),
        name="real",
        steps=60,
        batch_size=16,
        rollouts_per_prompt=16,
        checkpoint_every=0,
        model={"source": "tiny", "tiny": {"hidden_size": 128, "num_layers": 4, "num_heads": 4}},
    )
    table["tasks"][0] |= {"sample": {"max_tokens": 8}}
    table["tasks"][0]["data"] |= {"arguments": {"length": 4, "letters": 12}, "size": 5000}
    table["produce"]["enable_partial_rollout"] = True
    config = parse_config(RunConfig, table)
    asyncio.run(launch(config))
    cluster, measured = calibrate(config.folder, config)
    assert simulate(config, cluster, steps=60).step_s == pytest.approx(measured.step_s, rel=0.15)
