"""The separate run end to end: a background producer and the trainer, a real tiny model and engine."""

import asyncio
import json
import os
import signal
import sys
import time
import tomllib
from collections import Counter
from multiprocessing import active_children

import pytest
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.config import ConfigError, parse_config
from forebay.engines import EngineLost
from forebay.ledger import Ledger
from forebay.metrics import read_jsonl
from forebay.produce import ProductionError
from forebay.runs import steps
from forebay.runs.config import SEPARATE_DEFAULTS, ProduceConfig, RunConfig, to_toml
from forebay.runs.folder import list_checkpoints, saved_config
from forebay.runs.launch import launch
from forebay.runs.placement import is_apart
from forebay.train import TrainController
from forebay.train.objective.losses import POLICY_LOSSES
from forebay.train.parallel.ranks import LocalRanks, RankError
from forebay.watching.stalls import StallError

STEPS, BATCH_SIZE, GROUP_SIZE = 6, 4, 4


def run_table(output, **changes):
    data = {"source": "sorting", "arguments": {"length": 3, "letters": 5}}
    table = {
        "name": "run",
        "seed": 3,
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "rollouts_per_prompt": GROUP_SIZE,
        "output": str(output),
        "model": {"source": "tiny", "tiny": {"hidden_size": 32, "num_layers": 2, "num_heads": 2}},
        "tasks": [
            {
                "name": "sorting",
                "data": {**data, "size": 60},
                "eval_data": {**data, "start": 60, "size": 10},
                "judge": {"name": "exact_match", "arguments": {"partial_credit": True}},
                "sample": {"max_tokens": 5},
            }
        ],
        "produce": {
            "mode": "separate",
            "max_staleness": 1,
            "staleness_rule": "drop",
            "over_sample_threshold": 0.5,
            "enable_partial_rollout": True,
        },
        "train": {"lr": 1e-3, "token_budget": 512},
    }
    return {**table, **changes}


def config(output, **changes):
    return parse_config(RunConfig, run_table(output, **changes))


def train(output, **changes):
    return asyncio.run(launch(config(output, **changes)))


def train_rows(folder):
    return [row for row in read_jsonl(folder / "metrics.jsonl") if row["train_step"]]


def events(folder, kind):
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def check_books(folder, num_steps=STEPS):
    ledger = Ledger.read(folder / "ledger.jsonl")
    balance = ledger.balance(ledger.count_live())
    assert balance.ok, balance
    assert balance.trained == num_steps * BATCH_SIZE


def test_a_separate_run_leaves_everything_it_promises(tmp_path, capsys):
    line, interrupted = train(tmp_path, evaluate={"every": 2}, checkpoint_every=3)
    folder = tmp_path / "run"
    assert line.startswith("held-out accuracy: ")
    assert not interrupted
    rows = train_rows(folder)
    assert [row["train_step"] for row in rows if "train/loss" in row] == list(range(1, STEPS + 1))
    assert all(0 <= row["staleness"] < 2 for row in rows if "staleness" in row)
    assert [path.name for path in list_checkpoints(folder)] == ["step_000003", "step_000006"]
    timeline = tmp_path / "timeline.json"
    result = CliRunner().invoke(app, ["board", str(folder), "--export", str(timeline)])
    assert result.exit_code == 0, result.output
    stages = {event.get("cat") for event in json.loads(timeline.read_text())}
    assert stages >= {"generate", "judge", "put", "train", "sync", "evaluate", "checkpoint"}
    check_books(folder)
    trained = [event["group"] for event in events(folder, "trained")]
    assert len(trained) == len(set(trained))
    assert "\x1b" not in capsys.readouterr().out


def test_without_staleness_every_token_is_on_policy(tmp_path):
    # With an entropy bonus passes are made over groups without an advantage too, and are measured.
    train(
        tmp_path,
        produce={"mode": "separate", "max_staleness": 0, "over_sample_threshold": 0.5},
        train={"lr": 1e-3, "token_budget": 512, "entropy_coef": 1e-4},
    )
    rows = [row for row in train_rows(tmp_path / "run") if "staleness" in row]
    assert [row["staleness"] for row in rows] == [0] * STEPS
    assert all(abs(row["train/mismatch_kl"]) < 1e-4 for row in rows)
    check_books(tmp_path / "run")


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_separate_run_that_loses_its_trainer_goes_back_and_generates_nothing_again(tmp_path, monkeypatch, store):
    """The trainer's process is killed in the fifth step; the last checkpoint is of the third."""
    call, lost = LocalRanks.call, []

    def kill_once(self, method, arguments):
        if method == "update" and not lost and arguments[0][1] == 4:
            # It is written beside the steps.
            while not (tmp_path / "run" / "checkpoints" / "step_000003").exists():
                time.sleep(0.01)
            os.kill(self.pids[0], signal.SIGKILL)
            lost.append(self.pids[0])
        return call(self, method, arguments)

    monkeypatch.setattr(LocalRanks, "call", kill_once)
    _, interrupted = train(tmp_path, checkpoint_every=3, replay={"store": store})
    assert lost
    assert not interrupted
    folder = tmp_path / "run"
    check_books(folder)
    rows = [row["train_step"] for row in train_rows(folder) if "train/loss" in row]
    assert rows == [*range(1, STEPS + 1)]
    # No group is begun again: the books are taken back to the checkpoint, and those since are found in the store.
    admitted = events(folder, "admitted")
    assert max(Counter(event["group"] for event in admitted if not event.get("found")).values()) == 1
    assert any(event.get("found") for event in events(folder, "produced"))
    assert events(folder, "rewound")
    # What the next resume need not read again is of the last checkpoint.
    kept = json.loads((folder / "books" / "place.json").read_text())
    state = json.loads((list_checkpoints(folder)[-1] / "manager" / "manager.json").read_text())
    assert kept["place"] == [state["ledger"]["num_bytes"], state["ledger"]["num_events"]]
    assert not [child for child in active_children() if child.name.startswith("forebay-rank")]


def broken(inputs, config):
    raise KeyError("it is broken")


def test_an_error_in_a_loss_ends_the_run_and_is_not_tried_again(tmp_path, capsys):
    with pytest.raises(RankError, match=r"(?s)rank 0 of 1 failed in update: KeyError: 'it is broken'.*in broken"):
        train(tmp_path, train={"lr": 1e-3, "token_budget": 512, "loss": f"{__name__}:broken"})
    assert "the run goes back" not in capsys.readouterr().out


def test_a_loss_of_the_script_itself_is_found_in_the_process_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "own_loss", POLICY_LOSSES["clipped"], raising=False)
    assert is_apart(config(tmp_path))
    assert not is_apart(config(tmp_path, train={"loss": "__main__:own_loss"}))


def test_separate_mode_has_defaults_of_its_own_that_keep_long_groups(tmp_path):
    resolved = config(tmp_path, produce={"mode": "separate"})
    assert resolved.produce == ProduceConfig(mode="separate", **SEPARATE_DEFAULTS)
    assert resolved.train.correction == "ratio"
    # The resolved file says all of it, and reads back as the same run.
    assert parse_config(RunConfig, tomllib.loads(to_toml(resolved))) == resolved
    # What the file says stands.
    own = {"mode": "separate", "staleness_rule": "drop", "over_sample_threshold": 0.0}
    assert config(tmp_path, produce=own).produce.model_dump() == {**resolved.produce.model_dump(), **own}
    assert config(tmp_path, produce=own).train.correction == "none"
    corrected = config(tmp_path, produce={"mode": "separate"}, train={"correction": "token_tis"})
    assert corrected.train.correction == "token_tis"
    with pytest.raises(ConfigError, match=r"train\.correction = 'none'"):
        config(tmp_path, produce={"mode": "separate"}, train={"correction": "none"})
    # Tail batches are made of what expires or starts over.
    tail = {"mode": "separate", "tail_batch_trigger_size": 2, "tail_batch_max_tries": 2}
    produce = config(tmp_path, produce=tail).produce
    assert (produce.staleness_rule, produce.enable_partial_rollout) == ("drop", False)
    assert config(tmp_path, produce={}).produce == ProduceConfig()


def test_with_max_staleness_0_the_separate_run_is_the_colocated_one(tmp_path):
    rows = {}
    for mode in ("colocated", "separate"):
        produce = {"mode": mode} if mode == "colocated" else {"mode": mode, "max_staleness": 0}
        train(tmp_path / mode, produce=produce, steps=4)
        rows[mode] = [
            (row["reward"], row["train/loss"], row["train/grad_norm"])
            for row in train_rows(tmp_path / mode / "run")
            if "reward" in row
        ]
    assert len(rows["separate"]) == 4
    assert rows["separate"] == rows["colocated"]


def test_a_resumed_run_goes_on_with_every_group_once(tmp_path):
    train(tmp_path, checkpoint_every=2, keep_checkpoints=3)
    folder = tmp_path / "run"
    # As if the run had been killed after step 5: the last complete checkpoint is that of step 4.
    (folder / "checkpoints" / "step_000006").rename(folder / "checkpoints" / "step_000006.tmp")
    asyncio.run(launch(saved_config(folder), resume=folder))
    assert sorted(row["train_step"] for row in train_rows(folder) if "train/loss" in row) == list(range(1, STEPS + 1))
    check_books(folder)


def test_weights_updated_in_flight_label_the_tokens_that_they_make(tmp_path, monkeypatch):
    mixed = []
    fit = TrainController.fit

    def watched(self, groups, **kwargs):
        mixed.extend(state for group in groups for state in group if len(set(state.response_model_steps)) > 1)
        return fit(self, groups, **kwargs)

    monkeypatch.setattr(TrainController, "fit", watched)
    produce = {**run_table(tmp_path)["produce"], "in_flight_update": True, "over_sample_threshold": 2.0}
    train(tmp_path, produce=produce, tasks=[{**run_table(tmp_path)["tasks"][0], "sample": {"max_tokens": 24}}])
    check_books(tmp_path / "run")
    for state in mixed:
        assert (state.response_model_steps[:-1] <= state.response_model_steps[1:]).all()


@pytest.mark.parametrize("rule", ["drop", "requeue", "admit"])
def test_the_staleness_rules_keep_the_bound_and_the_books(tmp_path, rule):
    produce = {
        "mode": "separate",
        "max_staleness": 0,
        "sync_weights_interval": 2,
        "over_sample_threshold": 1.0,
        "enable_partial_rollout": True,
        "staleness_rule": rule,
    }
    train(tmp_path, produce=produce)
    rows = [row for row in train_rows(tmp_path / "run") if "staleness" in row]
    assert all(row["staleness"] < 2 for row in rows)
    check_books(tmp_path / "run")


def test_a_stop_while_the_trainer_waits_saves_and_leaves(tmp_path, monkeypatch):
    next_batch = steps.next_batch

    async def stopped_meanwhile(run, train_step):
        if train_step == 3:
            asyncio.get_running_loop().call_soon(run.stop.set)
        return await next_batch(run, train_step)

    monkeypatch.setattr(steps, "next_batch", stopped_meanwhile)
    _, interrupted = train(tmp_path)
    assert interrupted
    folder = tmp_path / "run"
    done = int(list_checkpoints(folder)[-1].name.removeprefix("step_"))
    assert done in (2, 3)
    monkeypatch.undo()
    asyncio.run(launch(saved_config(folder), resume=folder))
    check_books(folder)


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (ValueError, ConfigError, "train step 4: of no use"),
        (FloatingPointError, FloatingPointError, "train step 4: of no use"),
        (EngineLost, EngineLost, "of no use"),
    ],
)
def test_a_batch_that_cannot_be_trained_is_kept_with_the_last_finished_step(
    tmp_path, monkeypatch, raised, expected, message
):
    fit = TrainController.fit

    def refuse_the_fourth(trainer, groups, **options):
        if trainer.train_step == 3:
            raise raised("of no use")
        return fit(trainer, groups, **options)

    monkeypatch.setattr(TrainController, "fit", refuse_the_fourth)
    with pytest.raises(expected, match=message):
        train(tmp_path)
    folder = tmp_path / "run"
    assert [path.name for path in list_checkpoints(folder)] == ["step_000003"]
    monkeypatch.undo()
    asyncio.run(launch(saved_config(folder), resume=folder))
    check_books(folder)


def broken_judge(state):
    # The row's own answer, with which a run tries its judge before it starts, passes.
    if state.response != state.reward_model["ground_truth"]:
        raise RuntimeError("the judge is broken")
    return 1.0


def test_a_producer_that_cannot_go_on_ends_the_run_with_its_reason(tmp_path):
    task = {**run_table(tmp_path)["tasks"][0], "judge": {"name": f"{__name__}:broken_judge"}}
    del task["eval_data"]
    with pytest.raises(ProductionError, match="the judge is broken"):
        train(tmp_path, tasks=[task])


@pytest.mark.parametrize(
    ("produce", "message"),
    [
        ({"in_flight_update": True}, "needs mode 'separate'"),
        ({"mode": "separate", "staleness_rule": "forget"}, "forget"),
        (
            {"mode": "separate", "enable_partial_rollout": True, "tail_batch_max_tries": 2},
            "tail_batch_max_tries = 2 counts rollouts that start over",
        ),
    ],
)
def test_settings_that_nothing_would_read_are_errors(tmp_path, produce, message):
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, produce=produce)
    assert not (tmp_path / "run").exists()


def test_a_tasks_own_staleness_that_nothing_would_read_is_an_error(tmp_path):
    tasks = [{**run_table(tmp_path)["tasks"][0], "max_staleness": 2}]
    with pytest.raises(ConfigError, match="max_staleness of task sorting: nothing is stale"):
        config(tmp_path, tasks=tasks, produce={})
    assert config(tmp_path, tasks=tasks).tasks[0].max_staleness == 2


HANGING = {"calls": 0, "from_call": 0}


async def hanging_judge(state):
    HANGING["calls"] += 1
    if HANGING["calls"] >= HANGING["from_call"]:
        await asyncio.Event().wait()
    return float(state.response_ids[0] % 2)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_run_that_stalls_says_what_hangs_and_is_saved(tmp_path, evaluates):
    judge = {"name": f"{__name__}:hanging_judge", "timeout_s": 100.0}
    task = {**run_table(tmp_path)["tasks"][0], "judge": judge}
    if not evaluates:
        del task["eval_data"]
    # Held-out prompts are judged first: ten of them before training. Then three batches and a bit.
    HANGING.update(calls=0, from_call=5 if evaluates else 4 * BATCH_SIZE * GROUP_SIZE)
    # Without a weight sync, whose pause would wait for the hanging judge, too.
    produce = {**run_table(tmp_path)["produce"], "stall_after_s": 1.0, "sync_weights_interval": 100}
    with pytest.raises(StallError, match=r"no progress for \d+ s; .*group sorting/\S+ being judged"):
        train(tmp_path, tasks=[task], produce=produce)
    if not evaluates:
        assert list_checkpoints(tmp_path / "run")


def test_a_limit_below_a_batch_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"replay.limit = 3 groups hold no whole batch of batch_size = 4"):
        config(tmp_path, replay={"limit": BATCH_SIZE - 1})
    assert config(tmp_path, replay={"limit": BATCH_SIZE}).replay.limit == BATCH_SIZE
    (task,) = run_table(tmp_path)["tasks"]
    produce = {**run_table(tmp_path)["produce"], "over_sample_threshold": 0.5}
    several = {"tasks": [task, {**task, "name": "other"}], "produce": produce}
    with pytest.raises(ConfigError, match=r"batch_size = 4 beside 2 in flight \(produce.over_sample_threshold\), and"):
        config(tmp_path, **several, replay={"limit": BATCH_SIZE + 1})
    assert config(tmp_path, **several, replay={"limit": BATCH_SIZE + 2}).replay.limit == BATCH_SIZE + 2
