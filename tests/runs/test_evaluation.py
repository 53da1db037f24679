"""Evaluations beside production: whose weights answer, what goes on meanwhile, and what a crash leaves."""

import asyncio
import contextlib
import json
import os
import signal

import pyarrow.parquet as pq
import pytest

from forebay.agents import SingleTurnAgentLoop
from forebay.config import ConfigError, parse_config
from forebay.engines import EngineLost
from forebay.evaluate import Evaluator
from forebay.ledger import Ledger
from forebay.metrics import read_jsonl
from forebay.replay import SQLStorage
from forebay.runs import evaluation, steps
from forebay.runs import launch as launching
from forebay.runs.config import RunConfig
from forebay.runs.evaluation import is_due
from forebay.runs.folder import list_checkpoints, saved_config
from forebay.runs.launch import launch
from forebay.runs.record.history import list_parts
from forebay.train import weight_sync
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


held, tried = set(), []


async def gated_judge(state):
    """Held-out rollouts by the weights of the steps `held` wait until these are let go; notes the steps `tried`."""
    if "/-1/" not in str(state.rollout_id):
        return odd_share(state)
    [step] = set(made_by(state).tolist())
    while step in held:
        await asyncio.sleep(0.01)
    tried.append(step)
    return 2.0 if step == 2 else odd_share(state)


async def evaluate_in_turn(run, *arguments):
    """What is due waits for an evaluation that nothing holds: on a busy machine it would be left out."""
    if run.evaluating is not None and run.evaluating_step not in held:
        await asyncio.wait([run.evaluating])
    await evaluation.evaluate(run, *arguments)


@pytest.fixture(autouse=True)
def in_turn(monkeypatch):
    held.clear()
    tried.clear()
    monkeypatch.setattr(steps, "evaluate", evaluate_in_turn)


GATED = {
    "tasks": [task(judge={"name": f"{__name__}:gated_judge", "timeout_s": 200})],
    "evaluate": {"every": 2, "mode": "beside"},
    "checkpoint_every": 1,
}


@contextlib.asynccontextmanager
async def begun(*arguments, **changes):
    """A run at work; at the end of the block it is cut off, unless it has ended."""
    running = asyncio.create_task(launch(*arguments, **changes))
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(running, holds):
    while not holds():
        assert not running.done(), running.result()
        await asyncio.sleep(0.01)


def trained(folder):
    return max((row["train_step"] for row in _rows(folder)), default=0)


def evaluated(folder):
    return [row["train_step"] for row in _rows(folder) if "eval/model_step" in row]


def test_a_slow_one_holds_neither_training_nor_checkpoints(tmp_path, capsys):
    num_steps, folder = 12, tmp_path / "run"
    changes = {**GATED, "checkpoint_every": 2, "keep_checkpoints": 1, "steps": num_steps}
    held.add(2)

    async def go():
        async with begun(config(tmp_path, **changes)) as running:
            # It waits for the result only when all steps are done.
            await until(running, lambda: trained(folder) == num_steps)
            # The checkpoint of step 2 waits for its result, which may make it the best one; that of step 8 goes.
            last = ["step_000002", "step_000010"]
            await until(running, lambda: [path.name for path in list_checkpoints(folder)] == last)
            states = [json.loads((path / "run.json").read_text()) for path in list_checkpoints(folder)]
            assert [state["evaluating"] for state in states] == [2, 2]
            assert evaluated(folder) == [0]
            held.clear()
            await running

    asyncio.run(go())
    assert evaluated(folder) == [0, 2, num_steps]
    assert [row["train_step"] for row in _rows(folder) if row.get("eval/left_out")] == [4, 6, 8, 10]
    assert [path.name for path in list_checkpoints(folder)] == ["step_000002", f"step_{num_steps:06d}"]
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("step 4 is not evaluated, since the evaluation of step 2 is under way: raise evaluate") == 1
    assert "step 6 is not evaluated" not in said
    assert "step_000002 (eval/score 2)" in said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    changes = {**GATED, "evaluate": {"every": 2}}
    return {row["train_step"]: row for row in evaluations(train(tmp_path_factory.mktemp("undisturbed"), **changes))}


@pytest.mark.parametrize(
    ("cut", "overrides", "steps_found"),
    [
        ("under way", [], [0, 2, 6]),
        ("under way", ["evaluate.mode=pause"], [0, 2, 6]),
        ("ended since the last checkpoint", [], [0, 2, 6]),
        ("stopped", [], [0, 2, 4, 6]),
        ("not saved", [], [0, 3, 4, 6]),
    ],
)
def test_a_run_that_is_cut_off_has_every_result_once(
    tmp_path, monkeypatch, capsys, undisturbed, cut, overrides, steps_found
):
    folder, report, count = tmp_path / "run", steps.report, tried.count
    tried.clear()
    held.update({2, STEPS})
    changes = {**GATED, "checkpoint_every": 3} if cut == "not saved" else GATED

    def reported(run, train_step, batch, metrics):
        report(run, train_step, batch, metrics)
        if train_step == 3 and cut == "stopped":
            run.stop.set()

    async def cut_off():
        async with begun(config(tmp_path, **changes)) as running:
            if cut == "stopped":
                # It does not wait for the result, which nothing lets go.
                await running
                return
            await until(running, lambda: trained(folder) == STEPS)
            last = "step_000003" if cut == "not saved" else "step_000005"
            await until(running, lambda: [path.name for path in list_checkpoints(folder)][-1:] == [last])
            if cut.startswith("ended"):
                held.remove(2)
                await until(running, lambda: 2 in evaluated(folder))

    monkeypatch.setattr(steps, "report", reported)
    asyncio.run(cut_off())
    left = list_checkpoints(folder)[-1]
    assert json.loads((left / "run.json").read_text())["evaluating"] == 2
    assert (2 in evaluated(folder)) == cut.startswith("ended")
    cut = ""
    held.clear()
    asyncio.run(launch(saved_config(folder, overrides), resume=folder))
    assert [row["train_step"] for row in evaluations(folder)] == evaluated(folder) == steps_found
    # By the weights of the step, as without the cut.
    for row in evaluations(folder):
        assert row["train_step"] == 3 or row == undisturbed[row["train_step"]]
        assert row["eval/model_step"] == row["train_step"]
        assert count(row["train_step"]) == HELD_OUT
    lines = [row for part in list_parts(folder, "rollouts") for row in pq.read_table(part.path).to_pylist()]
    assert {row["train_step"] for row in lines if row["outcome"] == "evaluated"} == set(steps_found)
    is_replaced = "step 3 is evaluated in place of step 2, which is gone" in " ".join(capsys.readouterr().out.split())
    assert is_replaced == (3 in steps_found)


def test_a_task_that_was_left_out_comes_with_the_next_evaluation(tmp_path, monkeypatch):
    exam = task("exam", weight=0, evaluate={"every": 4})
    del exam["data"]
    report = steps.report
    held.add(2)

    def reported(run, train_step, batch, metrics):
        report(run, train_step, batch, metrics)
        if train_step == 5:
            held.clear()

    monkeypatch.setattr(steps, "report", reported)
    folder = train(tmp_path, **{**GATED, "tasks": [*GATED["tasks"], exam], "steps": 8})
    scores = {row["train_step"]: [name for name in row if name.endswith("/score")] for row in evaluations(folder)}
    both = ["eval/score", "eval/sorting/score", "eval/exam/score"]
    assert scores == {0: both, 2: ["eval/sorting/score"], 6: both, 8: both}


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


def kill_each(engine, killed):
    """Kill the engine's process, unless that was done."""
    if engine.pid not in killed:
        killed.add(engine.pid)
        os.kill(engine.pid, signal.SIGKILL)


TWO_ENGINES = {
    "engine": {"name": "process", "arguments": {"engines": 2}},
    "evaluate": {"every": 2, "mode": "beside"},
    "produce": {"mode": "separate", "max_staleness": 1},
}


@pytest.mark.usefixtures("warm")
def test_a_run_goes_on_without_evaluations_when_their_engine_is_lost_for_good(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("forebay.engines.pool._TRY_AGAIN_S", 0.01)
    answers, killed, calls = evaluation._answers, set(), []
    sync, given = weight_sync.sync_weights, []

    async def noted(source, receiver, step, **how):
        given.append((receiver, step))
        return await sync(source, receiver, step, **how)

    async def lost_in_the_second(controller, *arguments):
        answering = asyncio.create_task(answers(controller, *arguments))
        calls.append(controller)
        while len(calls) == 2 and not answering.done():
            kill_each(controller.engines[0], killed)
            await asyncio.sleep(0.001)
        return await answering

    monkeypatch.setattr(evaluation, "_answers", lost_in_the_second)
    monkeypatch.setattr(weight_sync, "sync_weights", noted)
    folder = train(tmp_path, **TWO_ENGINES)
    # The engine's process and its three successors.
    assert len(killed) == 4
    assert [step for receiver, step in given if receiver is calls[0]] == [0, 2]
    assert trained(folder) == STEPS
    assert [row["train_step"] for row in _rows(folder) if any(name.startswith("eval/") for name in row)] == [0, 4, 6]
    assert [row["train_step"] for row in _rows(folder) if row.get("eval/left_out")] == [4, 6]
    assert evaluated(folder) == [row["train_step"] for row in evaluations(folder)] == [0]
    notes = [row["text"] for row in read_jsonl(folder / "notes.jsonl")]
    for text, times in {
        "the evaluation of step 2 is left out: its engine was lost, and is not back: engine 0: engine process": 1,
        "is not evaluated: no engine is left": 2,
        "failed": 0,
    }.items():
        assert sum(text in note for note in notes) == times, notes


@pytest.mark.usefixtures("warm")
def test_an_engine_for_evaluations_that_never_comes_up_ends_the_run(tmp_path, monkeypatch):
    killed, loops = set(), launching.LOOPS["separate"]

    async def without_engine(run):
        running = asyncio.create_task(loops(run))
        while not running.done():
            kill_each(run.eval_controller.engines[0], killed)
            await asyncio.sleep(0.001)
        await running

    monkeypatch.setitem(launching.LOOPS, "separate", without_engine)
    with pytest.raises(EngineLost, match=r"ended with code -9|no engine is left"):
        train(tmp_path, **TWO_ENGINES)
    assert not (tmp_path / "run" / "model").exists()


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
