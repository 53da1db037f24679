"""Whole runs with ``cluster = "ray"``: the same work as in one process, also when its parts are killed."""

import asyncio
import itertools
import json
import os
import signal

import pytest
import test_evaluation

from forebay.config import ConfigError, parse_config
from forebay.ledger import Ledger
from forebay.metrics import read_jsonl
from forebay.produce import Sampler
from forebay.produce.prompts.dataset import load_prompts
from forebay.replay import AsyncReplayBufferConfig
from forebay.runs import steps
from forebay.runs.config import RunConfig
from forebay.runs.folder import list_checkpoints, saved_config
from forebay.runs.launch import launch, launch_evaluation, try_all
from forebay.runs.placement import PartLost, make_cluster
from forebay.runs.record.history import read_spans
from forebay.runs.record.rerun import Rerun
from forebay.runs.show.surroundings import ask_to_scale
from forebay.runs.verify import WeightCheck

STEPS, BATCH_SIZE, GROUP_SIZE = 6, 4, 2


def run_config(output, **changes):
    data = {"source": "sorting", "arguments": {"length": 3, "letters": 8}}
    table = {
        "name": "run",
        "seed": 3,
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "rollouts_per_prompt": GROUP_SIZE,
        "output": str(output),
        "checkpoint_every": 2,
        "model": {"source": "tiny", "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 1}},
        "tasks": [
            {
                "name": "sorting",
                "data": {**data, "size": 200},
                "judge": {"name": "exact_match", "arguments": {"partial_credit": True}},
                "sample": {"max_tokens": 6},
            }
        ],
        "train": {"lr": 1e-3},
    }
    return parse_config(RunConfig, {**table, **changes})


SEPARATE = {
    "mode": "separate",
    "max_staleness": 1,
    "staleness_rule": "drop",
    "over_sample_threshold": 1.0,
    "enable_partial_rollout": True,
}


def train_rows(folder):
    return [row for row in read_jsonl(folder / "metrics.jsonl") if "train/loss" in row]


def trained_groups(folder):
    """Group ids by train step, of what counts after the last rewinding."""
    ledger = Ledger.read(folder / "ledger.jsonl")
    names = {event["group"] for event in events(folder, "trained")}
    lives = [ledger.life(name, "sorting") for name in names]
    steps_of = {life.group_id: life.train_step for life in lives if life.place == "trained"}
    return {step: sorted(g for g, s in steps_of.items() if s == step) for step in sorted(set(steps_of.values()))}


def check_books(folder, num_steps=STEPS):
    ledger = Ledger.read(folder / "ledger.jsonl")
    balance = ledger.balance(ledger.count_live())
    assert balance.ok, balance
    assert balance.trained == num_steps * BATCH_SIZE
    trained = trained_groups(folder)
    assert list(trained) == list(range(1, num_steps + 1))
    assert all(len(groups) == BATCH_SIZE for groups in trained.values())
    assert [row["train_step"] for row in train_rows(folder)] == list(range(1, num_steps + 1))


def test_a_run_on_ray_is_tried_before_it_starts(ray, tmp_path):
    config, said = run_config(tmp_path, cluster="ray"), []
    asyncio.run(asyncio.wait_for(try_all(config, said.append), 500))
    assert [line.split()[0] for line in said] == ["folder", "data", "model", "engine", "judge"]
    assert not config.folder.exists()


def test_a_run_on_ray_does_what_one_in_a_process_does(ray, tmp_path):
    held_out = {"source": "sorting", "arguments": {"length": 3, "letters": 8}, "start": 200, "size": 4}
    tasks = [{**run_config(tmp_path).tasks[0].model_dump(), "eval_data": held_out}]
    changes = {"steps": 3, "tasks": tasks, "train": {"lr": 1e-3, "overlong": 0.5}}
    here = run_config(tmp_path / "here", **changes)
    there = run_config(tmp_path / "there", **changes, cluster={"name": "ray", "arguments": {"num_workers": 2}})
    for config in (here, there):
        asyncio.run(launch(config))
        check_books(config.folder, num_steps=3)
    assert trained_groups(here.folder) == trained_groups(there.folder)
    for ours, theirs in zip(train_rows(here.folder), train_rows(there.folder), strict=True):
        for name in ("reward", "response_tokens", "samples", "staleness"):
            assert theirs[name] == ours[name]
        for name in ("train/loss", "train/grad_norm", "train/overlong_penalty"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-7)
    assert list_checkpoints(there.folder)[-1].name == "step_000003"
    assert {span.stage for span in read_spans(there.folder)} >= {"generate", "train", "sync"}
    assert ray.is_initialized()  # it was here before
    assert (there.folder / "buffer.db").exists()  # to go on from
    tried = asyncio.run(launch_evaluation(saved_config(there.folder)))
    last = [row for row in read_jsonl(there.folder / "metrics.jsonl") if "eval/score" in row][-1]
    assert tried["eval/score"] == last["eval/score"]


def test_evaluations_beside_production_hold_the_weights_of_their_step_also_if_their_parts_are_killed(
    ray, tmp_path, monkeypatch
):
    paused = test_evaluation.train(tmp_path / "here", evaluate={"every": 2}, steps=4)
    report = steps.report

    def reported(run, train_step, batch, metrics):
        report(run, train_step, batch, metrics)
        if train_step in (1, 3):
            cluster = run.cluster
            parts = {1: cluster._eval_workers.all, 3: cluster._eval_engines}
            os.kill(parts[train_step][0].pid, signal.SIGKILL)

    monkeypatch.setattr(steps, "report", reported)
    # While its parts are started again, the next evaluation would be left out.
    monkeypatch.setattr(steps, "evaluate", test_evaluation.evaluate_in_turn)
    beside = {"every": 2, "mode": "beside"}
    folder = test_evaluation.train(tmp_path / "there", evaluate=beside, steps=4, cluster="ray")
    expected, found = test_evaluation.evaluations(paused), test_evaluation.evaluations(folder)
    assert [row["train_step"] for row in found] == [0, 2, 4]
    assert len({row["eval/score"] for row in found}) > 1
    assert rounded(found) == rounded(expected)
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "eval/score" in row]
    assert [(row["train_step"], row["eval/model_step"]) for row in rows] == [(0, 0), (2, 2), (4, 4)]
    stages = {span.stage for span in read_spans(folder)}
    assert "evaluate_beside" in stages
    assert "evaluate" not in stages
    restarted = {event["part"] for event in events(folder, "restarted")}
    # Production had the first of each.
    assert restarted <= {"engine 1", "worker 1"}
    assert "worker 1" in restarted


def rounded(rows):
    return [{name: round(value, 6) for name, value in row.items()} for row in rows]


def test_a_run_on_ray_is_recorded_like_any_other(ray, tmp_path):
    config = run_config(tmp_path, steps=2, cluster="ray", record=True)
    asyncio.run(launch(config))

    async def differences():
        return [step.differences async for step in Rerun(config.folder, trains=False).steps()]

    assert asyncio.run(differences()) == [[], []]


def deadly_judge(state, marker, spared):
    """Takes its process down the first time; not the run's own, which tries it before the start."""
    if os.getpid() == spared:
        return 0.0
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return float(len(state.response_ids))
    os._exit(1)


def poisoned_judge(state, group):
    """Takes its process down whenever it sees one group."""
    if state.group_id == group:
        os._exit(1)
    return float(len(state.response_ids))


def with_judge(tmp_path, name, **arguments):
    judge = {"name": f"{__name__}:{name}", "arguments": arguments}
    return [{**run_config(tmp_path).tasks[0].model_dump(), "judge": judge}]


def events(folder, kind):
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def pids_of(cluster):
    """The process of every part, by its name."""
    there = {part.name: part.pid for part in (*cluster._engines, *cluster._workers.all)}
    return there | (cluster._trainer.pids if cluster._trainer is not None else {})


def kill(run, part):
    os.kill(pids_of(run.cluster)[part], signal.SIGKILL)


def test_a_run_survives_the_end_of_each_of_its_parts(ray, tmp_path, monkeypatch):
    kills = {3: "trainer"}
    report, counts, probe, num_probes = steps.report, {}, WeightCheck.probe, itertools.count(1)

    async def probed(self, engine, number):
        if next(num_probes) == 2:
            os.kill(engine.pid, signal.SIGKILL)
        return await probe(self, engine, number)

    def reported(run, train_step, batch, metrics):
        report(run, train_step, batch, metrics)
        counts.update(run.cluster.counts())
        if train_step in kills:
            kill(run, kills.pop(train_step))

    monkeypatch.setattr(steps, "report", reported)
    monkeypatch.setattr(WeightCheck, "probe", probed)
    tasks = with_judge(tmp_path, "deadly_judge", marker=str(tmp_path / "marker"), spared=os.getpid())
    config = run_config(tmp_path, produce=SEPARATE, tasks=tasks, cluster="ray", verify_weights=True)
    asyncio.run(launch(config))
    assert not kills
    check_books(config.folder)
    assert any(event.get("reason") == "worker died" for event in events(config.folder, "retried"))
    assert all(0 <= row["staleness"] < 2 for row in train_rows(config.folder))
    assert counts.pop("cluster/groups_retried") > 0
    assert counts.pop("cluster/requests_retried") >= 0
    restarted = {event["part"]: event["reason"] for event in events(config.folder, "restarted")}
    assert sorted(restarted) == ["engine 0", "trainer", "worker 0"]
    assert all("process has ended" in reason for reason in restarted.values()), restarted
    assert counts == {"cluster/trainer_restarts": 1, "cluster/engine_restarts": 1, "cluster/worker_restarts": 1}


def test_a_trainer_that_is_well_stays_when_the_run_goes_back_for_others(ray, tmp_path, monkeypatch):
    losses, pids, counts, report = {}, set(), {}, steps.report

    def reported(run, train_step, batch, metrics):
        report(run, train_step, batch, metrics)
        losses.setdefault(train_step, []).append(metrics["train/loss"])
        pids.add(run.trainer.pids["trainer"])
        counts.update(run.cluster.counts())
        if train_step == 3 and len(losses[3]) == 1:
            # Engines and workers that are lost are replaced where they stood; this stands for a database.
            raise PartLost("the database of the replay buffer is lost")

    monkeypatch.setattr(steps, "report", reported)
    config = run_config(tmp_path, steps=4, cluster="ray")
    asyncio.run(launch(config))
    check_books(config.folder, num_steps=4)
    assert len(pids) == 1
    assert counts["cluster/trainer_restarts"] == 0
    # From the checkpoint of step 2 it has done step 3 as before.
    first, again = losses[3]
    assert again == pytest.approx(first, rel=1e-4, abs=1e-7)


async def ask(run, change):
    return await asyncio.to_thread(ask_to_scale, run.folder, change)


async def refused(run, change):
    with pytest.raises(ConfigError) as error:
        await ask(run, change)
    return str(error.value)


def test_engines_and_workers_join_and_leave_a_run_that_works(ray, tmp_path, monkeypatch):
    fit, parts, said, leaving = steps.fit, [], [], []

    async def scaled_in_fit(run, groups):
        if run.train_step == 1:
            said.extend([await ask(run, "engines=+1"), await ask(run, "workers=+1")])
            async with asyncio.timeout(500):
                while len(run.controller.engines_up) < 2 or not all(pids_of(run.cluster).values()):
                    await asyncio.sleep(0.05)
            parts.extend(sorted(pids_of(run.cluster)))
        if run.train_step == 3:
            # Beside the train steps, in which groups are on their way.
            leaving.extend(asyncio.ensure_future(ask(run, f"{part}=-1")) for part in ("engines", "workers"))
        if run.train_step == 5:
            said.extend([await task for task in leaving])
            said.append(sorted(pids_of(run.cluster)))
            said.extend([await refused(run, change) for change in ("engines=-1", "trainers=+1", "engines=+x")])
        return await fit(run, groups)

    monkeypatch.setattr(steps, "fit", scaled_in_fit)
    cluster = {"name": "ray", "arguments": {"cpus": 0.5, "placement_timeout_s": 60}}
    config = run_config(tmp_path, produce=SEPARATE, cluster=cluster, verify_weights=True)
    asyncio.run(launch(config))
    check_books(config.folder)
    assert parts == ["engine 0", "engine 1", "trainer", "worker 0", "worker 1"]
    up, down = "2 now, 1 of them up", "1 now, 1 of them up"
    assert said[:5] == [up, up, down, down, ["engine 0", "trainer", "worker 0"]]
    assert said[5:] == [
        "-1 would leave none of 1: one has to stay",
        "write engines=+2 or workers=+2, got 'trainers'",
        "write +2, -1, =4, +http://HOST:PORT or -http://HOST:PORT, got '+x'",
    ]
    # The newcomer's tokens were those of the trainer's weights.
    checked = [row for row in read_jsonl(config.folder / "metrics.jsonl") if "sync/engines_unchecked" in row]
    assert [row["sync/engines_unchecked"] for row in checked if row["train_step"] == 2] == [0]
    scaled = [event["part"] for event in events(config.folder, "scaled")]
    # Asked to leave at once, they are ready in either order.
    assert [*scaled[:2], *sorted(scaled[2:])] == ["engines", "workers"] * 2
    assert not events(config.folder, "restarted")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_engines": 0}, "'num_engines' = 0: .*greater than or equal to 1"),
        ({"num_wrokers": 2}, "did you mean 'num_workers'"),
        ({"gpus_per_engine": 1.5}, "'gpus_per_engine' = 1.5: must be a share of a GPU or a whole"),
        ({"cpus": 0}, "'cpus' = 0: .*greater than 0"),
        ({"cpus": "1"}, "'cpus' = '1': .*valid number"),
        ({"num_engines": True}, "'num_engines' = True: .*valid integer"),
        ({"placement_timeout_s": "long"}, "'placement_timeout_s' = 'long': .*valid number"),
        ({"address": 6379}, "'address' = 6379: .*valid string"),
        ({"address": "ray://10.0.0.1:10001"}, r"address must be 'auto' or host:port.*got 'ray://10"),
        ({"address": "10.0.0.1"}, r"address must be 'auto' or host:port.*got '10.0.0.1'"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_cluster(run_config(tmp_path, cluster={"name": "ray", "arguments": arguments}))


def test_servers_that_run_already_have_one_engine(tmp_path):
    engine = {"name": "vllm", "arguments": {"urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}}
    cluster = {"name": "ray", "arguments": {"num_engines": 2}}
    with pytest.raises(ConfigError, match=r"names servers that run already.*set num_engines to 1"):
        make_cluster(run_config(tmp_path, engine=engine, cluster=cluster))
    changes = {"evaluate": {"mode": "beside"}, "engine": engine, "cluster": "ray"}
    with pytest.raises(ConfigError, match=r"one engine drives all.*evaluate\.mode to 'pause'"):
        make_cluster(test_evaluation.config(tmp_path, **changes))


def test_what_no_machine_has_is_an_error_at_once(ray, tmp_path):
    config = run_config(tmp_path, cluster={"name": "ray", "arguments": {"gpus_per_trainer": 64}})
    with pytest.raises(ConfigError, match=r"no machine of the cluster has .* and 64 GPU.*the cluster has"):
        asyncio.run(launch(config))
    assert not config.folder.exists()


def test_what_others_hold_is_waited_for_but_not_for_ever(ray, tmp_path):
    arguments = {"num_workers": 40, "cpus": 0.5, "placement_timeout_s": 0.5}
    config = run_config(tmp_path, cluster={"name": "ray", "arguments": arguments})
    with pytest.raises(ConfigError, match=r"too few CPU in all.*lower num_engines, num_workers"):
        asyncio.run(launch(config))


def broken_agent(*arguments, **keywords):
    raise ValueError("this agent cannot be built")


@pytest.mark.soak
def test_a_group_that_takes_every_worker_down_fails_and_the_run_goes_on(ray, tmp_path):
    (task,) = run_config(tmp_path).tasks
    buffer = AsyncReplayBufferConfig().build()
    sampler = Sampler(load_prompts(task.data), buffer, task_name="sorting", prompt_repeat_k=1, seed=3)
    poisoned = [asyncio.run(sampler.sample("sorting"))[0].group_id for _ in range(3)][-1]
    tasks = with_judge(tmp_path, "poisoned_judge", group=poisoned)
    produce = {**SEPARATE, "max_retries": 0}
    config = run_config(tmp_path, tasks=tasks, produce=produce, steps=3, cluster="ray")
    asyncio.run(launch(config))
    check_books(config.folder, num_steps=3)
    (dropped,) = [event for event in events(config.folder, "dropped") if event["reason"] == "failed"]
    assert dropped["group"] == poisoned
    assert "3 workers ended over this group" in dropped["error"]


@pytest.mark.soak
def test_a_trainer_may_be_lost_while_the_run_goes_back(ray, tmp_path, monkeypatch):
    fit, resume, parts, counts = steps.fit, steps.resume, ["fit", "resume"], []

    async def killed_in_fit(run, groups):
        if run.train_step == 1 and "fit" in parts:
            parts.remove("fit")
            kill(run, "trainer")
        metrics = await fit(run, groups)
        counts.append(run.cluster.counts()["cluster/trainer_restarts"])
        return metrics

    async def killed_in_resume(run, path):
        if "resume" in parts:
            parts.remove("resume")
            kill(run, "trainer")
        await resume(run, path)

    monkeypatch.setattr(steps, "fit", killed_in_fit)
    monkeypatch.setattr(steps, "resume", killed_in_resume)
    config = run_config(tmp_path, steps=3, checkpoint_every=1, cluster="ray")
    asyncio.run(launch(config))
    assert counts[-1] == 2
    check_books(config.folder, num_steps=3)


@pytest.mark.soak
def test_the_end_of_a_rank_is_that_of_the_trainer(ray, tmp_path, monkeypatch):
    kills, counts, report = {2: "rank 1"}, {}, steps.report

    def reported(run, train_step, batch, metrics):
        report(run, train_step, batch, metrics)
        counts.update(run.cluster.counts())
        if train_step in kills:
            kill(run, kills.pop(train_step))

    monkeypatch.setattr(steps, "report", reported)
    config = run_config(tmp_path, steps=4, train={"lr": 1e-3, "ranks": 2}, cluster="ray")
    asyncio.run(launch(config))
    check_books(config.folder, num_steps=4)
    assert counts["cluster/trainer_restarts"] == 1


@pytest.mark.soak
def test_a_part_that_cannot_be_built_says_why(ray, tmp_path):
    tasks = [{**run_config(tmp_path).tasks[0].model_dump(), "agent": f"{__name__}:broken_agent"}]
    config = run_config(tmp_path, tasks=tasks, cluster="ray")
    with pytest.raises(ConfigError, match="this agent cannot be built"):
        asyncio.run(launch(config))


@pytest.mark.soak
def test_a_trainer_that_is_lost_again_and_again_ends_the_run(ray, tmp_path, monkeypatch):
    fit = steps.fit

    async def killed(run, groups):
        if run.train_step == 1:
            kill(run, "trainer")
        return await fit(run, groups)

    monkeypatch.setattr(steps, "fit", killed)
    config = run_config(tmp_path, checkpoint_every=1, cluster={"name": "ray", "arguments": {"max_restarts": 1}})
    with pytest.raises(PartLost, match="the trainer is lost"):
        asyncio.run(launch(config))
    monkeypatch.undo()
    asyncio.run(launch(saved_config(config.folder), resume=config.folder))
    check_books(config.folder)
