"""A recorded run, replayed: the same batches and losses without an engine, whatever happened to the run."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.config import parse_config
from forebay.engines.base import request_seed
from forebay.metrics import read_jsonl
from forebay.replay import (
    FIFOReplayPolicy,
    IndexedStorage,
    PrioritizedReplayPolicy,
    ReplayBuffer,
    StalenessReplayPolicy,
)
from forebay.runs.config import RunConfig, to_toml
from forebay.runs.folder import saved_config
from forebay.runs.launch import launch
from forebay.runs.record.events import BufferRerun, observe_buffer
from forebay.runs.record.history import read_spans
from forebay.runs.record.journal import BACKLOG, Recorder, Segment, _Files, read_events, read_history
from forebay.runs.record.rerun import Rerun
from forebay.train import TrainController
from forebay.types import RolloutState, Status

STEPS, BATCH_SIZE, GROUP_SIZE = 6, 4, 4


def odd_share(state):
    """Scores differ within nearly every group, so that every step has something to learn from."""
    return float((state.response_ids % 2).mean())


def task(name, source, **changes):
    arguments = {"sorting": {"length": 3, "letters": 5}, "addition": {"digits": 1}}[source]
    return {
        "name": name,
        "data": {"source": source, "arguments": arguments, "size": 60},
        "judge": {"name": f"{__name__}:odd_share"},
        "sample": {"max_tokens": 8},
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
        "record": True,
        "model": {"source": "tiny", "tiny": {"hidden_size": 32, "num_layers": 2, "num_heads": 2}},
        "tasks": [task("sorting", "sorting")],
        "produce": {
            "mode": "separate",
            "max_staleness": 1,
            "staleness_rule": "drop",
            "over_sample_threshold": 1.0,
            "enable_partial_rollout": True,
            "in_flight_update": True,
        },
        "warmup": {"steps": 2, "batch_size": 4},
        "train": {"lr": 1e-3, "token_budget": 512},
    }
    return parse_config(RunConfig, {**table, **changes})


def train(output, **changes):
    asyncio.run(launch(config(output, **changes)))
    return output / "run"


def replay(folder, *, until=None, **options):
    async def all_steps():
        run = Rerun(folder, **options)
        return run, [step async for step in run.steps(until=until)]

    return asyncio.run(all_steps())


def check_equal(folder, num_steps=STEPS):
    """Every step is replayed bit by bit, and ends at the run's own weights."""
    run, steps = replay(folder)
    assert [step.train_step for step in steps] == list(range(1, num_steps + 1))
    assert [step.differences for step in steps] == [[]] * num_steps
    rows = {row["train_step"]: row for row in read_jsonl(folder / "metrics.jsonl")}
    assert [step.again["train/loss"] for step in steps] == [
        rows[step]["train/loss"] for step in range(1, num_steps + 1)
    ]
    # Something was learned from: a replay of nothing would be equal, too.
    assert sum(step.again["train/loss"] != 0 for step in steps) > num_steps / 2
    run.trainer.save(folder.parent / "replayed")
    weights = [path / "model" / "model.safetensors" for path in (folder, folder.parent / "replayed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    return steps


def events(folder, kind, segment=0):
    lines = (folder / "record" / f"segment_{segment:03d}" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A separate run of two tasks, recorded; tests may not change it."""
    tasks = [task("sorting", "sorting"), task("addition", "addition", weight=0.5)]
    return train(tmp_path_factory.mktemp("recorded"), tasks=tasks)


def test_a_separate_run_of_two_tasks_is_replayed_bit_by_bit(recorded):
    steps = check_equal(recorded)
    tasks = [{group[0].task_name for group in step.groups} for step in steps]
    assert {"sorting", "addition"} in tasks


def test_every_put_and_take_is_recorded_and_the_rest_is_in_the_history(recorded):
    trained = [name for event in events(recorded, "train") for name in event["groups"]]
    assert len(trained) == len(set(trained)) == STEPS * BATCH_SIZE
    assert {event["group"] for event in events(recorded, "put")} >= set(trained)
    takes = events(recorded, "take_batch")
    taken = [name for event in takes for ids in event["result"].values() for name in ids]
    assert set(taken) >= set(trained)
    spans = list(read_spans(recorded))
    assert {span.name for span in spans if span.stage == "judge"} >= set(trained)
    members = {f"{name}/{member}" for name in trained for member in range(GROUP_SIZE)}
    assert {span.name for span in spans if span.stage == "generate"} >= members
    waits = [span.name for span in spans if span.stage == "wait_batch"]
    assert waits == [f"the batch of train step {step}" for step in range(1, STEPS + 1)]


def test_the_rollouts_are_an_arrow_stream_with_the_version_of_every_token(recorded):
    with pa.ipc.open_stream(recorded / "record" / "segment_000" / "rollouts.arrows") as stream:
        table = stream.read_all()
    assert set(table["uid"].to_pylist()) == {event["number"] for event in events(recorded, "put")}
    for ids, versions in zip(table["response_ids"], table["response_model_steps"], strict=True):
        assert len(ids) == len(versions)
        assert min(versions.as_py(), default=0) >= 0


def test_the_command_says_that_all_is_equal(recorded):
    result = CliRunner().invoke(app, ["replay", str(recorded)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"{STEPS} steps, bit-equal"
    checked = CliRunner().invoke(app, ["replay", str(recorded), "--batches-only"])
    assert checked.exit_code == 0, checked.output
    assert checked.output.splitlines()[-1] == f"{STEPS} steps, the same batches"


def test_until_stops_shows_the_batch_and_saves_what_helps(recorded, tmp_path):
    output = tmp_path / "step_3"
    command = ["replay", str(recorded), "--until", "3", "--output", str(output)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "3 steps, bit-equal"
    batch = events(recorded, "train")[2]["groups"]
    for group in batch:
        line = next(line for line in result.output.splitlines() if line.startswith(f"{group}/0 "))
        assert str(request_seed(3, f"{group}/0", 0, 0)) in line
        assert "step " in line
    table = pq.read_table(output / "batches.parquet")
    assert sorted(set(table["train_step"].to_pylist())) == [1, 2, 3]
    last = table.filter(pa.compute.equal(table["train_step"], 3))
    assert list(dict.fromkeys(last["group_id"].to_pylist())) == batch
    assert json.loads((output / "trainer" / "trainer.json").read_text())["train_step"] == 3
    assert (output / "buffer" / "manifest.json").exists()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "not empty" in again.output
    beyond = CliRunner().invoke(app, ["replay", str(recorded), "--until", "9"])
    assert beyond.exit_code == 2
    assert "the record ends with step 6" in beyond.output


@pytest.mark.parametrize(
    ("produce", "table"),
    [
        ({}, {"lr": 1e-3, "mini_batches": 2, "kl_coef": 0.01}),
        ({"max_staleness": 1}, {"lr": 1e-3, "advantage": "gae", "critic_lr": 1e-3}),
        ({"mode": "separate"}, {"lr": 1e-3, "lora_rank": 4, "correction": "token_tis"}),
    ],
    ids=["colocated with reference", "asynchronous with critic", "separate with adapters"],
)
def test_other_trainers_and_modes_are_replayed_bit_by_bit(tmp_path, produce, table):
    check_equal(train(tmp_path, produce=produce, train=table))


def test_masked_tokens_and_dropped_groups_are_replayed_bit_by_bit(tmp_path):
    produce = {
        "mode": "separate",
        "sync_weights_interval": 2,
        "over_sample_threshold": 3.0,
        "staleness_rule": "mask",
        "filter": "reward_variance",
    }
    check_equal(train(tmp_path, produce=produce, replay={"limit": 6}))


@pytest.mark.parametrize("mode", ["separate", "colocated"])
def test_past_groups_are_replayed_bit_by_bit_also_after_a_resume(tmp_path, mode):
    replay = {"reuse": {"times": 2, "share": 0.5}}
    folder = train(tmp_path, produce={"mode": mode}, replay=replay, steps=4)
    asyncio.run(launch(saved_config(folder, [f"steps={STEPS}"]), resume=folder))
    steps = check_equal(folder)
    past = {step.train_step: step.recorded.get("produce/past_groups", 0) for step in steps}
    uses = [event for segment in (0, 1) for event in events(folder, "use_again", segment)]
    assert {use["train_step"]: sum(map(len, use["result"].values())) for use in uses} == past
    assert past[4] > 0 < past[5]
    named = [use["result"]["sorting"] for use in uses]
    trained = {step.train_step: [group[0].group_id for group in step.groups] for step in steps}
    assert all(set(names) <= set(trained[use["train_step"]]) for names, use in zip(named, uses, strict=True))


def test_a_training_that_failed_fails_again_at_the_same_step(tmp_path, monkeypatch):
    step_of = TrainController.train

    def failing(self, batch):
        if self.train_step == 2:
            raise FloatingPointError("a gradient is not finite")
        return step_of(self, batch)

    monkeypatch.setattr(TrainController, "train", failing)
    with pytest.raises(FloatingPointError, match="in train step 3"):
        train(tmp_path)
    folder, output = tmp_path / "run", tmp_path / "output"
    _, steps = replay(folder)
    assert [(step.train_step, step.failure is None, step.differences) for step in steps] == [
        (1, True, []),
        (2, True, []),
        (3, False, []),
    ]
    result = CliRunner().invoke(app, ["replay", str(folder), "--until", "3", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "3 steps, bit-equal up to step 2"
    assert not (output / "trainer").exists()
    # A step that had a result, and fails now, is a difference.
    row = json.dumps({"train_step": 3, "train/loss": 0.5})
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(f"{row}\n")
    assert CliRunner().invoke(app, ["replay", str(folder)]).exit_code == 1


def test_a_resumed_run_is_replayed_along_the_segments_that_stand(tmp_path):
    folder = train(tmp_path, steps=4, checkpoint_every=2, keep_checkpoints=3)
    # Killed before the checkpoint of step 5 was there: the record speaks of it, the run goes on from step 4.
    asyncio.run(launch(saved_config(folder, ["steps=5"]), resume=folder))
    (folder / "checkpoints" / "step_000005").rename(tmp_path / "lost")
    changes = ["steps=6", "train.lr=5e-4", "replay.limit=40"]
    asyncio.run(launch(saved_config(folder, changes), resume=folder))
    # What does not count is not read: damage in it costs nothing.
    left = folder / "record" / "segment_001" / "events.jsonl"
    first, *others = left.read_text().splitlines()
    left.write_text("\n".join([first, "damaged", *others[1:], ""]))
    history = read_history(folder)
    assert [(part.folder.name, part.resumed_from, part.until) for part in history] == [
        ("segment_000", None, 4),
        ("segment_002", 4, None),
    ]
    steps = check_equal(folder)
    assert steps[3].again["train/lr"] == 1e-3
    assert steps[4].again["train/lr"] == 5e-4


@pytest.mark.usefixtures("warm")
def test_a_killed_run_is_replayed_as_far_as_it_came_and_after_it_went_on(tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(config(tmp_path, steps=50, checkpoint_every=2)))
    command = [sys.executable, "-c", "from forebay.cli import main; main()", "train", str(run_file)]
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as child:
        for line in child.stdout:
            if line.split()[:1] == ["7/50"]:
                os.kill(child.pid, signal.SIGKILL)
                break
    folder = tmp_path / "run"
    # What the writer had not written yet is lost, but nothing that a checkpoint needs.
    _, steps = replay(folder)
    assert len(steps) >= 6
    assert all(not step.differences for step in steps)
    asyncio.run(launch(saved_config(folder, ["steps=9"]), resume=folder))
    assert len(read_history(folder)) == 2
    check_equal(folder, num_steps=9)


def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "model", "*.png"))


def rewrite(folder, change):
    file = folder / "record" / "segment_000" / "events.jsonl"
    file.write_text("".join(f"{line}\n" for line in change(file.read_text().splitlines())))


def change_logprob(folder, group):
    """Add 0.5 to one logprob of the group, in a record that is otherwise as it was."""
    file = folder / "record" / "segment_000" / "rollouts.arrows"
    with pa.ipc.open_stream(file) as stream:
        table = stream.read_all()
    row = table["group_id"].to_pylist().index(group)
    logprobs = table["logprobs"].to_pylist()
    logprobs[row][0] += 0.5
    column = table.schema.get_field_index("logprobs")
    table = table.set_column(column, table.schema.field(column), pa.array(logprobs, table.schema.types[column]))
    # The whole stream as one piece.
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_batch(table.combine_chunks().to_batches()[0])


def test_one_changed_logprob_is_noticed(recorded, tmp_path):
    folder = copy(recorded, tmp_path)
    change_logprob(folder, events(folder, "train")[1]["groups"][0])
    result = CliRunner().invoke(app, ["replay", str(folder)])
    assert result.exit_code == 1, result.output
    assert [line.split()[0] for line in result.output.splitlines() if "NO: train/" in line] == ["2"]
    assert result.output.splitlines()[-1] == f"{STEPS} steps, 1 differ, the first is step 2"


def test_other_groups_than_those_taken_are_one_clear_error(recorded, tmp_path):
    folder = copy(recorded, tmp_path)
    batches = [event["result"] for event in events(folder, "take_batch")]
    first, other = batches[1]["sorting"][0], batches[2]["sorting"][0]

    def exchange(lines):
        return [line.replace(first, other) if '"event":"take_batch"' in line else line for line in lines]

    rewrite(folder, exchange)
    result = CliRunner().invoke(app, ["replay", str(folder)])
    assert result.exit_code == 2
    message = " ".join(result.output.split("error: ")[1].split())
    assert message.startswith("train step 2 (event ")
    assert f"recorded {other}" in message
    assert f"now {first}" in message


def cut_rollouts(folder):
    file = folder / "record" / "segment_000" / "rollouts.arrows"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def spoil_rollouts(folder):
    file = folder / "record" / "segment_000" / "rollouts.arrows"
    data = bytearray(file.read_bytes())
    with pa.ipc.open_stream(bytes(data)) as stream:
        place = stream.schema.serialize().size
    data[place + 8 : place + 72] = b"\xff" * 64
    file.write_bytes(data)


DAMAGES = {
    "a line is missing": (lambda folder: rewrite(folder, lambda lines: lines[:9] + lines[10:]), "comes next"),
    "a line is broken": (
        lambda folder: rewrite(folder, lambda lines: [*lines[:9], lines[9][:20], *lines[10:]]),
        "line 10",
    ),
    "a fact is missing": (
        lambda folder: rewrite(
            folder, lambda lines: [line.replace('"task_batch_sizes"', '"sizes"') for line in lines]
        ),
        "missing 1 required positional argument: 'task_batch_sizes'",
    ),
    "another format": (
        lambda folder: rewrite(folder, lambda lines: [line.replace("record/2", "record/1") for line in lines]),
        "not a record that this release reads",
    ),
    "no journal": (lambda folder: (folder / "record/segment_000/events.jsonl").unlink(), "missing"),
    "no rollouts": (lambda folder: (folder / "record/segment_000/rollouts.arrows").unlink(), "No such file"),
    "cut rollouts": (cut_rollouts, "is damaged"),
    "spoilt rollouts": (spoil_rollouts, "is damaged"),
    "no record": (lambda folder: (folder / "record").rename(folder / "gone"), "record = true"),
    "no metrics": (lambda folder: (folder / "metrics.jsonl").unlink(), "nothing to compare with"),
    "no warm-up": (lambda folder: (folder / "warmup").rename(folder / "gone"), "no model folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_one_clear_error(recorded, tmp_path, damage):
    folder = copy(recorded, tmp_path)
    do, message = DAMAGES[damage]
    do(folder)
    result = CliRunner().invoke(app, ["replay", str(folder)])
    assert result.exit_code == 2, result.output
    assert result.output.count("error: ") == 1
    assert message in result.output.split("error: ")[1]


def test_an_unfinished_tail_is_left_out_with_a_message(recorded, tmp_path, caplog):
    folder = copy(recorded, tmp_path)
    file = folder / "record" / "segment_000" / "events.jsonl"
    data = file.read_bytes()
    last = data.rindex(b'"event":"train"')
    file.write_bytes(data[: last + 40])
    with (folder / "record" / "segment_000" / "rollouts.arrows").open("ab") as rollouts:
        rollouts.write(b"half a piece")
    _, steps = replay(folder, trains=False)
    assert [step.train_step for step in steps] == list(range(1, STEPS))
    assert "the last line was not finished" in caplog.text


async def test_a_run_that_was_not_recorded_from_its_start_says_so(tmp_path):
    Recorder(tmp_path, run_file="", resumed_from=2).close()
    with pytest.raises(ValueError, match="begins at train step 2"):
        Rerun(tmp_path)


# The recorder on its own


def rollout(number, group, steps=(0, 0)):
    state = RolloutState(
        [{"role": "user", "content": "?"}],
        rollout_id=f"{group}/{number}",
        group_id=group,
        task_name="math",
        prompt_ids=[1],
        status=Status.COMPLETED,
        reward={"score": 0.5},
    )
    state.append([2] * len(steps), logprobs=[-0.5] * len(steps), model_step=list(steps))
    return state


async def test_a_writer_that_falls_behind_is_waited_for_and_nothing_is_lost(tmp_path, monkeypatch):
    go_on, add = threading.Event(), _Files.add

    def slow(self, line, group):
        go_on.wait()
        add(self, line, group)

    monkeypatch.setattr(_Files, "add", slow)
    recorder = Recorder(tmp_path, run_file="")
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    observe_buffer(recorder, buffer)
    for number in range(BACKLOG + 10):
        recorder.note("filler", place=number)
    putting = asyncio.create_task(buffer.put([rollout(0, "g")], "math"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not putting.done()
    assert len(buffer) == 0
    go_on.set()
    await putting
    recorder.close()
    found = [event.facts for event in read_events(Segment(recorder.segment, None, None))]
    assert [facts["place"] for facts in found if facts["event"] == "filler"] == list(range(BACKLOG + 10))
    assert found[-1]["event"] == "put"


async def test_a_disk_that_is_full_at_the_end_is_a_warning_and_no_error(tmp_path, caplog):
    recorder = Recorder(tmp_path, run_file="")
    await recorder.checkpoint(0)
    files = recorder._files
    files._events.close()
    # Takes what is buffered, and refuses to write it: by flush, and again by close.
    files._events = open("/dev/full", "wb")  # noqa: SIM115
    recorder.note("train", train_step=1)
    recorder.close()
    assert files._events.closed
    assert files._rollouts.closed
    assert "is not complete: OSError" in caplog.text
    assert "No space left" in caplog.text


async def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(self):
        raise OSError("no space left on device")

    recorder = Recorder(tmp_path, run_file="")
    monkeypatch.setattr(_Files, "flush", full)
    recorder.note("filler")
    await recorder.checkpoint(1)
    recorder.note("filler")
    recorder.close()
    recorder.close()
    assert caplog.text.count("no space left on device") == 1


POLICIES = (FIFOReplayPolicy, StalenessReplayPolicy, PrioritizedReplayPolicy)
OPERATIONS = ("put", "put", "put", "get", "take", "take", "commit", "restore", "refresh", "priorities")


async def do(buffer, name, numbers, place):
    step, size = numbers
    match name:
        case "put":
            group = [rollout(member, f"g{place}", (step, step + size)) for member in range(2)]
            if size == 0:
                group[0].status = Status.ABORTED
            await buffer.put(group, "math", current_train_step=step + 1, stale_threshold=size + 1, priority=size + 0.5)
        case "get":
            await buffer.get(size, "math", Status.ABORTED)
        case "take":
            await buffer.take_batch({"math": size}, train_step=step + 1)
        case "commit":
            await buffer.commit(step)
        case "restore":
            await buffer.restore(step)
        case "refresh":
            await buffer.refresh_staleness({"math": size + 1}, step + 1)
        case "priorities":
            await buffer.update_priorities({f"g{size}": step + 1.0}, by="uid" if step % 2 else "task_name")


def content(buffer):
    state = buffer.storage.state_dict()
    rows = [
        (item.uid, item.timestamp_id, item.status, item.staleness, item.priority, item.item[0].group_id)
        for item in state["items"]
    ]
    return rows, state["next_uid"], state["train_steps"], buffer.num_evicted, buffer.policy.state_dict()


@given(
    policy=st.sampled_from(POLICIES),
    done=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.tuples(st.integers(0, 5), st.integers(0, 3))), max_size=30
    ),
    limit=st.sampled_from([None, 3]),
)
def test_whatever_is_done_to_a_buffer_is_done_again_alike(tmp_path_factory, policy, done, limit):
    async def check():
        recorder = Recorder(tmp_path_factory.mktemp("record"), run_file="")
        buffer = ReplayBuffer(policy(), IndexedStorage(), limit=limit)
        observe_buffer(recorder, buffer)
        for place, (name, numbers) in enumerate(done):
            await do(buffer, name, numbers, place)
        recorder.close()
        rerun = BufferRerun(ReplayBuffer(policy(), IndexedStorage(), limit=limit))
        for event in read_events(Segment(recorder.segment, None, None)):
            await rerun.execute(event)
        assert content(rerun.buffer) == content(buffer)

    asyncio.run(check())
