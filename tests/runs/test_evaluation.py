"""Evaluations beside production: whose weights answer, what goes on meanwhile, and what a crash leaves."""

import asyncio
import json

import pyarrow.parquet as pq
import pytest

from forebay.agents import SingleTurnAgentLoop
from forebay.config import ConfigError, parse_config
from forebay.evaluate import Evaluator
from forebay.ledger import Ledger
from forebay.metrics import read_jsonl
from forebay.replay import SQLStorage
from forebay.runs import evaluation
from forebay.runs.config import RunConfig
from forebay.runs.evaluation import is_due
from forebay.runs.folder import list_checkpoints, saved_config
from forebay.runs.launch import launch
from forebay.runs.record.history import list_parts
from forebay.types import RolloutState, made_by
from forebay.watching.stalls import StallError

STEPS, BATCH_SIZE, GROUP_SIZE, HELD_OUT = 6, 4, 2, 6


def odd_share(state):
    """Of an untrained model's answers, too, every one has a score of its own."""
    return float((state.response_ids % 2).mean())


def task(name="sorting", **changes):
    data = {"source": "sorting", "arguments": {"length": 3, "letters": 5}}
    return {
        "name": name,
        "data": {**data, "size": 60},
        "eval_data": {**data, "start": 60, "size": HELD_OUT},
        "judge": {"name": f"{__name__}:odd_share"},
        "sample": {"max_tokens": 5},
        **changes,
    }


def config(output, **changes):
    table = {
        "name": "run",
        "seed": 3,
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "rollouts_per_prompt": GROUP_SIZE,
        "output": str(output),
        "model": {"source": "tiny", "tiny": {"hidden_size": 32, "num_layers": 2, "num_heads": 2}},
        "tasks": [task()],
        # On-policy: the batches do not depend on timing, and neither do the weights.
        "produce": {"mode": "separate", "max_staleness": 0},
        "train": {"lr": 3e-3, "token_budget": 512},
    }
    return parse_config(RunConfig, {**table, **changes})


def train(output, **changes):
    made = config(output, **changes)
    asyncio.run(launch(made))
    return made.folder


def evaluations(folder):
    """The rows of all evaluations that the last checkpoint has."""
    return json.loads((list_checkpoints(folder)[-1] / "run.json").read_text())["evaluations"]


@pytest.fixture(scope="module")
def paused(tmp_path_factory):
    return train(tmp_path_factory.mktemp("paused"), evaluate={"every": 2})


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("engine", ["transformers", {"name": "process", "arguments": {"engines": 2}}])
def test_it_finds_what_an_evaluation_with_production_at_rest_finds(paused, tmp_path, engine):
    beside = train(tmp_path, evaluate={"every": 2, "mode": "beside"}, engine=engine)
    assert evaluations(beside) == evaluations(paused)
    assert [row["train_step"] for row in evaluations(beside)] == [0, 2, 4, 6]
    # Something was learned, so weights of another step would have answered otherwise.
    assert len({row["eval/score"] for row in evaluations(beside)}) > 1
    rows = [row for row in read_jsonl(beside / "metrics.jsonl") if "eval/score" in row]
    assert [row["eval/model_step"] for row in rows] == [0, 2, 4, 6]
    assert all(row["eval/model_step"] == row["train_step"] for row in rows)


judged = {"trained": 0, "held_out_after": []}


async def patient_judge(state):
    """Scores a held-out rollout only after groups to train on were scored since it came."""
    if "/-1/" not in str(state.rollout_id):
        judged["trained"] += 1
        return odd_share(state)
    before = judged["trained"]
    while judged["trained"] < before + BATCH_SIZE * GROUP_SIZE:
        await asyncio.sleep(0.005)
    judged["held_out_after"].append(judged["trained"] - before)
    return 0.5


def test_production_and_training_go_on_meanwhile(tmp_path):
    judged.update(trained=0, held_out_after=[])
    produce = {"mode": "separate", "max_staleness": 2, "over_sample_threshold": 1.0}
    tasks = [task(judge={"name": f"{__name__}:patient_judge", "timeout_s": 200})]
    # The last evaluation has nothing beside it, so there is none: it is stopped one step before its end.
    folder = tmp_path / "run"

    async def stopped():
        running = asyncio.create_task(
            launch(config(tmp_path, produce=produce, tasks=tasks, steps=40, evaluate={"every": 3, "mode": "beside"}))
        )
        # The groups that the judge waited for may be of step 4, whose row comes a moment later.
        while not (
            [row for row in _rows(folder) if row.get("eval/model_step") == 3]
            and max(row["train_step"] for row in _rows(folder)) > 3
        ):
            assert not running.done(), running.result()
            await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(stopped())
    assert len(judged["held_out_after"]) >= 2 * HELD_OUT
    (row,) = [row for row in _rows(folder) if row.get("eval/model_step") == 3]
    assert row["eval/failed"] == 0
    # The result came later, and stands in the row of its own step.
    assert row["train_step"] == 3


def _rows(folder):
    path = folder / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


is_open = True


async def gated_judge(state):
    """Held-out rollouts wait for a gate, so that the run can be cut off there."""
    while not is_open and "/-1/" in str(state.rollout_id):
        await asyncio.sleep(0.01)
    return odd_share(state)


def test_a_run_that_is_cut_off_in_the_middle_does_it_again(tmp_path, monkeypatch):
    tasks = [task(judge={"name": f"{__name__}:gated_judge", "timeout_s": 200})]
    changes = {"tasks": tasks, "evaluate": {"every": 2, "mode": "beside"}, "checkpoint_every": 1}
    whole = train(tmp_path / "whole", **changes)
    folder = tmp_path / "cut" / "run"

    async def cut_off():
        global is_open
        running = asyncio.create_task(launch(config(tmp_path / "cut", **changes)))
        while not list_checkpoints(folder):
            await asyncio.sleep(0.01)
        is_open = False
        while max([row["train_step"] for row in _rows(folder)], default=0) < 3:
            assert not running.done(), running.result()
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        is_open = True

    asyncio.run(cut_off())
    # No checkpoint is there whose evaluations were not ended.
    left = list_checkpoints(folder)[-1]
    assert int(left.name[-1]) < 4
    asyncio.run(launch(saved_config(folder), resume=folder))
    assert evaluations(folder) == evaluations(whole)
    assert [row["train_step"] for row in evaluations(folder)] == [0, 2, 4, 6]
    rows = [row["eval/model_step"] for row in read_jsonl(folder / "metrics.jsonl") if "eval/score" in row]
    assert sorted(set(rows)) == [0, 2, 4, 6]


def test_an_evaluation_that_fails_beside_takes_no_batch_with_it(tmp_path, monkeypatch):
    changes = {"evaluate": {"every": 2, "mode": "beside"}}
    train(tmp_path / "whole", **changes)
    folder = tmp_path / "failed" / "run"
    answer, calls = evaluation.evaluation_groups, []

    async def fail_second(eval_sets, stall_watch=None):
        calls.append(eval_sets)
        if len(calls) == 2:
            raise StallError("nothing has moved")
        return await answer(eval_sets, stall_watch)

    monkeypatch.setattr(evaluation, "evaluation_groups", fail_second)
    with pytest.raises(StallError, match="nothing has moved"):
        asyncio.run(launch(config(tmp_path / "failed", **changes)))
    asyncio.run(launch(saved_config(folder), resume=folder))
    whole, failed = (Ledger.read(path / "ledger.jsonl") for path in (tmp_path / "whole" / "run", folder))
    assert failed.balance({}).trained == whole.balance({}).trained == STEPS * BATCH_SIZE
    at = [{r["train_step"]: r["reward"] for r in _rows(p) if "reward" in r} for p in (folder, tmp_path / "whole/run")]
    assert at[0] == at[1]
    assert len(at[0]) == STEPS


class SometimesRaises(SingleTurnAgentLoop):
    """Fails on one of the held-out prompts, outside of what an agent loop catches itself."""

    async def generate_group(self, states, *, enable_partial_rollout=False):
        if states[0].group_id.endswith("/-1/0/1"):
            raise RuntimeError("no such prompt")
        return await super().generate_group(states, enable_partial_rollout=enable_partial_rollout)


@pytest.mark.parametrize("mode", ["pause", "beside"])
def test_a_held_out_prompt_on_which_the_agent_raises_fails_alone(tmp_path, mode):
    agent = {"name": f"{__name__}:SometimesRaises"}
    folder = train(tmp_path, tasks=[task(agent=agent)], evaluate={"every": 3, "mode": mode}, steps=3)
    assert [row["train_step"] for row in evaluations(folder)] == [0, 3]
    assert [row["eval/failed"] for row in evaluations(folder)] == pytest.approx([1 / HELD_OUT] * 2)
    lines = [row for part in list_parts(folder, "rollouts") for row in pq.read_table(part.path).to_pylist()]
    errors = {row["error"] for row in lines if row["group_id"].endswith("/-1/0/1")}
    assert errors == {"RuntimeError: no such prompt"}


@pytest.mark.parametrize(("steps", "found"), [([], []), ([-1, -1, -1], []), ([2, 2], [2, 2]), ([2, 9, 2], [2, 2])])
def test_rollouts_of_which_not_all_is_known_are_evaluated_too(steps, found):
    state = RolloutState([], response_ids=[5, 6, 7], response_mask=[1, 0, 1], response_model_steps=steps)
    assert made_by(state).tolist() == found


def test_a_task_without_weight_is_only_evaluated_by_its_own_schedule(tmp_path):
    exam = task("exam", weight=0, evaluate={"every": 3, "rollouts_per_prompt": 3, "temperature": 1.0})
    del exam["data"]
    folder = train(tmp_path, tasks=[task(evaluate={"every": 2}), exam], evaluate={"mode": "beside"})
    tried = {
        row["train_step"]: {name.split("/")[1] for name in row if name.count("/") == 2 and "judge" not in name}
        for row in evaluations(folder)
    }
    both = {"sorting", "exam"}
    assert tried == {0: both, 2: {"sorting"}, 3: {"exam"}, 4: {"sorting"}, 6: both}
    rows = {row["train_step"]: row for row in evaluations(folder)}
    # Of a part of the tasks there is no score of all of them.
    assert [step for step, row in rows.items() if "eval/score" in row] == [0, 6]
    assert rows[3]["eval/exam/rollouts"] == 3 * HELD_OUT
    assert set(Ledger.read(folder / "ledger.jsonl").balance({}).by_task) == {"sorting"}


def test_the_best_checkpoint_stays_and_is_named(tmp_path, monkeypatch, capsys):
    planned = iter([0.1, 0.7, 0.3, 0.2])
    evaluate = Evaluator.evaluate
    monkeypatch.setattr(
        Evaluator,
        "evaluate",
        lambda self, groups, *, whole=True: evaluate(self, groups, whole=whole) | {"eval/score": next(planned)},
    )
    changes = {"evaluate": {"every": 2}, "checkpoint_every": 2, "keep_checkpoints": 1}
    folder = train(tmp_path, replay={"store": "sqlite"}, **changes)
    assert [path.name for path in list_checkpoints(folder)] == ["step_000002", "step_000006"]
    assert "step_000002 (eval/score 0.7)" in capsys.readouterr().out
    assert json.loads((folder / "live.json").read_text())["best_checkpoint"] == "step_000002 (eval/score 0.7)"
    # It does not hold what was consumed since.
    store = SQLStorage(folder / "buffer.db")
    assert asyncio.run(store.count({"status": "archived", "train_step": {"$gt": 2}})) == 0
    store.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"produce": {}}, "needs production that goes on beside training"),
        ({"tasks": [task(), {"name": "b", "judge": {"name": "exact_match"}}]}, "'tasks.1.data' is missing"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, evaluate={"mode": "beside"}, **changes)


def test_steps_that_are_due():
    assert [step for step in range(7) if is_due(step, 3)] == [0, 3, 6]
    assert not is_due(3, 0)
