"""Runs whose judge or agent fails on some rollouts: they train to the end with the others."""

import asyncio
import json
import re

import pytest
from typer.testing import CliRunner

from forebay.agents import SingleTurnAgentLoop
from forebay.cli.commands import app
from forebay.config import parse_config
from forebay.ledger import Ledger
from forebay.metrics import read_jsonl
from forebay.produce import ProductionError
from forebay.runs import steps
from forebay.runs.config import RunConfig
from forebay.runs.folder import saved_config
from forebay.runs.launch import launch
from forebay.runs.record.rerun import Rerun
from forebay.runs.rollouts import group_rules
from forebay.types import RolloutState, SampleParams, Status

STEPS, BATCH_SIZE, GROUP_SIZE, TOKEN_BUDGET = 3, 2, 8, 64


def member_of(state):
    """Its place in the group; of the rollout that the judge is tried with before the start, 0."""
    place = state.rollout_id.rpartition("/")[2]
    return int(place) if place.isdigit() else 0


def judge_that_fails_on_one_of_eight(state):
    if member_of(state) == 3:
        raise KeyError(f"no answer in {state.response!r}")
    return float(member_of(state) % 2)


def judge_that_fails(state):
    """In the run; not when it is tried before the start."""
    if state.rollout_id[-1].isdigit():
        raise KeyError("the answer")
    return 1.0


class Careless(SingleTurnAgentLoop):
    """Loses a score, goes over what the trainer packs, and has a score that is no number."""

    async def generate_group(self, states, *, enable_partial_rollout=False):
        group = await super().generate_group(states, enable_partial_rollout=enable_partial_rollout)
        for state in group:
            if state.status is not Status.COMPLETED:
                continue
            if member_of(state) == 0:
                state.reward = None
            if member_of(state) == 1 and len(state.response_ids) < TOKEN_BUDGET:
                state.append([5] * TOKEN_BUDGET, logprobs=[-1.0] * TOKEN_BUDGET)
            if member_of(state) == 2:
                state.reward = {"score": float("nan")}
        return group


SEPARATE = {"mode": "separate", "max_staleness": 1, "enable_partial_rollout": True}


def config(output, *, produce=(), agent="single_turn", judge="judge_that_fails_on_one_of_eight", **changes):
    agent = {"name": agent if agent == "single_turn" else f"{__name__}:{agent}"}
    table = {
        "name": "run",
        "seed": 3,
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "rollouts_per_prompt": GROUP_SIZE,
        "output": str(output),
        "model": {"source": "tiny", "tiny": {"hidden_size": 32, "num_layers": 1, "num_heads": 2}},
        "tasks": [
            {
                "name": "sorting",
                "data": {"source": "sorting", "arguments": {"length": 3, "letters": 5}, "size": 60},
                "agent": agent,
                "judge": {"name": f"{__name__}:{judge}"},
                "sample": {"max_tokens": 5},
            }
        ],
        "produce": dict(produce),
        "train": {"lr": 1e-3, "token_budget": TOKEN_BUDGET, "mini_batches": 3},
    }
    return parse_config(RunConfig, {**table, **changes})


def train(output, **changes):
    asyncio.run(launch(config(output, **changes)))
    return output / "run"


def books(folder):
    ledger = Ledger.read(folder / "ledger.jsonl")
    balance = ledger.balance(ledger.count_live())
    assert balance.ok, balance
    return balance


def events(folder, kind):
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def steps_of(folder):
    return [row for row in read_jsonl(folder / "metrics.jsonl") if "train/loss" in row]


@pytest.mark.parametrize("produce", [{}, SEPARATE], ids=["colocated", "separate"])
def test_a_judge_that_fails_on_one_rollout_of_eight_lets_the_run_train_to_the_end(tmp_path, produce, capsys):
    folder = train(tmp_path, produce=produce, record=True)
    rows = steps_of(folder)
    assert [row["samples"] for row in rows] == [BATCH_SIZE * (GROUP_SIZE - 1)] * STEPS
    balance = books(folder)
    assert balance.trained == STEPS * BATCH_SIZE
    assert balance.left >= balance.trained
    left = events(folder, "left")
    assert {event["rollout"].rpartition("/")[2] for event in left} == {"3"}
    line = judge_that_fails_on_one_of_eight.__code__.co_firstlineno + 2
    assert {event["at"] for event in left} == {f"{__file__}, line {line}"}
    assert "rollouts left out (failed)" in capsys.readouterr().out

    report = CliRunner().invoke(app, ["ledger", str(folder)]).output
    assert re.search(rf"rollouts left *$.*^ +sorting .* {balance.left} *$", report, re.M | re.S), report

    async def replay():
        return [step.differences async for step in Rerun(folder).steps()]

    # The record has the groups as they were trained, so the training can be run again.
    assert asyncio.run(replay()) == [[]] * STEPS


@pytest.mark.parametrize("produce", [{}, SEPARATE], ids=["colocated", "separate"])
def test_what_the_trainer_cannot_take_fails_before_it_is_stored(tmp_path, produce):
    folder = train(tmp_path, agent="Careless", produce=produce)
    assert [row["samples"] for row in steps_of(folder)] == [BATCH_SIZE * (GROUP_SIZE - 4)] * STEPS
    assert books(folder).trained == STEPS * BATCH_SIZE
    reasons = {event["rollout"].rpartition("/")[2]: event["error"] for event in events(folder, "left")}
    assert reasons["0"].endswith("cannot be trained: no score")
    assert f"are more than train.token_budget = {TOKEN_BUDGET}" in reasons["1"]
    assert "the score nan is no finite number" in reasons["2"]


def test_a_judge_that_always_fails_ends_the_run_with_its_place_and_the_keys(tmp_path):
    with pytest.raises(ProductionError) as failure:
        train(tmp_path, judge="judge_that_fails", produce={"max_failed_groups": 1})
    line = judge_that_fails.__code__.co_firstlineno + 3
    assert f"KeyError: 'the answer' ({__file__}, line {line})" in str(failure.value)
    assert "produce.max_failed_groups, now 1" in str(failure.value)
    assert "2 failed groups" in str(failure.value)


@pytest.mark.parametrize(
    ("train_table", "expected"),
    [({}, 2), ({"advantage": "pass_at_5"}, 5), ({"mini_batches": 16}, 8), ({"mini_batches": 3}, 2)],
)
def test_a_batch_of_the_smallest_groups_is_enough_for_the_trainer(tmp_path, train_table, expected):
    """pass@k compares k attempts, and every mini-batch needs a sequence, whoever has left."""
    table = {"lr": 1e-3, "token_budget": TOKEN_BUDGET, **train_table}
    assert group_rules(config(tmp_path, train=table), context=512).min_members == expected


@pytest.mark.parametrize("produce", [{}, SEPARATE], ids=["colocated", "separate"])
def test_a_run_gets_past_a_group_that_an_older_version_stored(tmp_path, produce, monkeypatch):
    """It can be neither trained nor shrunk; the trainer would refuse its batch after every resume."""
    checkpoint = steps.checkpoint

    async def checkpoint_with_it(run):
        await run.manager.replay_buffer.put(old_group(), "sorting")
        run.manager.ledger.record("old", "sorting", "produced")
        return await checkpoint(run)

    monkeypatch.setattr(steps, "checkpoint", checkpoint_with_it)
    folder = train(tmp_path, produce=produce)
    monkeypatch.undo()
    asyncio.run(launch(saved_config(folder, [f"steps={STEPS + 2}"]), resume=folder))
    assert len(steps_of(folder)) == STEPS + 2
    (dropped,) = [event for event in events(folder, "dropped") if event["group"] == "old"]
    assert (dropped["reason"], dropped["error"]) == ("failed", "rollout old/1 cannot be trained: no score")
    trained = {event["group"] for event in events(folder, "trained")}
    assert len(trained) == (STEPS + 2) * BATCH_SIZE
    assert "old" not in trained


def old_group():
    return [
        RolloutState(
            [{"role": "user", "content": "cab"}],
            group_id="old",
            rollout_id=f"old/{member}",
            task_name="sorting",
            prompt_ids=[1, 2],
            response_ids=[3],
            logprobs=[-1.0],
            response_model_steps=[STEPS],
            status=Status.COMPLETED,
            reward={"score": 1.0} if member == 0 else None,
            sample_params=SampleParams(max_tokens=5),
        )
        for member in range(2)
    ]
