"""The history of a run: every rollout that left it once, across merges, resumes, limits and failing disks."""

import asyncio
import gc
import json
import logging
import threading
import weakref

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.ledger import GroupLife
from forebay.runs.record import history
from forebay.runs.record.columns import Left, rollouts_table
from forebay.runs.record.history import History, list_parts
from forebay.train import TrainBatch
from forebay.types import RolloutState, Status, made_by


def make_group(name, *, size=2, score=1.0, text="b", task="math"):
    return [
        RolloutState(
            [{"role": "user", "content": f"prompt {name}"}],
            rollout_id=f"{name}/{member}",
            group_id=str(name),
            task_name=task,
            prompt_ids=[1],
            response=text,
            response_ids=[2, 3 + member],
            logprobs=[-0.5, -1.0],
            response_model_steps=[4, 5],
            reward={"score": score},
            status=Status.COMPLETED,
        )
        for member in range(size)
    ]


def read(folder, kind="rollouts"):
    return [
        row
        for part in list_parts(folder, kind)
        for row in pq.read_table(part.path).to_pylist()
        if part.until is None or row["train_step"] <= part.until
    ]


actions = st.lists(
    st.one_of(st.tuples(st.just("left"), st.integers(1, 3)), st.just("flush"), st.just("span"), st.just("kill")),
    max_size=60,
)


@given(actions)
@settings(max_examples=25, deadline=None)
def test_every_rollout_that_counts_has_one_line(tmp_path_factory, taken):
    folder = tmp_path_factory.mktemp("run")
    model, step, saved = [], 0, 0

    async def act():
        nonlocal model, step, saved
        written = History(folder, limit_bytes=10**9)
        for action in taken:
            if action == "flush":
                written._flush()
            elif action == "span":
                # A flush without rollouts: the numbers of their files have gaps.
                written._flush()
                written._spans.append((0.0, 1.0, "train", "step", "", "", ""))
                written._flush()
            elif action == "kill":
                written.close()
                written = History(folder, limit_bytes=10**9, resumed_from=saved)
                model, step = [row for row in model if row[1] <= saved], saved
            else:
                step += 1
                groups = [make_group(f"{len(model)}-{number}") for number in range(action[1])]
                written.left(groups, "trained", train_step=step)
                model += [(state.rollout_id, step) for group in groups for state in group]
                if step % 3 == 0:
                    saved = step
        written.close()

    fanout, history.FANOUT = history.FANOUT, 3
    try:
        asyncio.run(act())
    finally:
        history.FANOUT = fanout
    assert sorted((row["rollout_id"], row["train_step"]) for row in read(folder)) == sorted(model)
    # No file is left half done, and few are left at all.
    assert not list(folder.rglob("*.tmp"))


async def test_small_files_on_both_sides_of_a_larger_one_keep_their_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "FANOUT", 3)
    written = History(tmp_path, limit_bytes=10**9)
    # Rollouts in the flush 0 alone of the first three, in all of the second three, and in the last two.
    for flush, has_rollouts in enumerate([1, 0, 0, 1, 1, 1, 1, 1]):
        if has_rollouts:
            written.left([make_group(flush, size=1)], "trained", train_step=flush)
        written._spans.append((0.0, 1.0, "train", "step", "", "", ""))
        written._flush()
    written.close()
    assert [row["train_step"] for row in read(tmp_path)] == [0, 3, 4, 5, 6, 7]
    names = [part.path.stem for part in list_parts(tmp_path, "rollouts")]
    assert names == ["rollouts_000000_000000", "rollouts_000003_000005", "rollouts_000006_000007"]


async def test_files_that_would_be_too_large_stay_apart_at_the_end_too(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "_MAX_FILE_BYTES", 1)
    written = History(tmp_path, limit_bytes=10**9)
    for step in range(2):
        written.left([make_group(step, size=1)], "trained", train_step=step)
        written._flush()
    written.close()
    assert len(list_parts(tmp_path, "rollouts")) == 2


async def test_a_line_says_what_is_known(tmp_path):
    group = make_group("g")
    batch = TrainBatch.from_groups([group])
    batch.advantages = np.array([1, 1, -1, -1], np.float32)
    batch.trainer_logprobs = np.array([-0.5, -0.75, -0.5, -0.25], np.float32)
    written = History(tmp_path, limit_bytes=10**9)
    written.left([group], "trained", train_step=6, learned=batch)
    wiped = [RolloutState([], rollout_id="w/0", group_id="w", task_name="math", status=Status.EXPIRED)]
    life = GroupLife("w", "math", "live", None, None, 0, 0, 0, 0.0, 1.0, 40, 2.5, 0.25)
    written.left([wiped], "dropped", reason="expired", train_step=7, life=life)
    written.close()
    first, second, dropped = read(tmp_path)
    assert first["outcome"] == "trained"
    assert (first["prompt"], first["response"], first["score"]) == ("prompt g", "b", 1.0)
    assert (first["first_model_step"], first["last_model_step"], first["num_tokens"]) == (4, 5, 2)
    assert first["trainer_logprobs"] == [-0.5, -0.75]
    assert (first["advantage"], second["advantage"]) == (1.0, -1.0)
    assert first["prompt_hash"] == second["prompt_hash"] != dropped["prompt_hash"]
    # Of a wiped group the books know the length and the score.
    assert (dropped["reason"], dropped["num_tokens"], dropped["score"]) == ("expired", 40, 0.25)
    assert dropped["advantage"] is None


async def test_files_that_were_put_together_count_once_while_both_are_there(tmp_path):
    written = History(tmp_path, limit_bytes=10**9)
    for step in range(3):
        written.left([make_group(step, size=1)], "trained", train_step=step)
        written._flush()
    written._submit(written._files.finish)
    written.close()
    (whole,) = list_parts(tmp_path, "rollouts")
    left_over = pq.read_table(whole.path).slice(0, 1)
    pq.write_table(left_over, whole.path.with_name("rollouts_000001_000001.parquet"))
    assert [row["group_id"] for row in read(tmp_path)] == ["0", "1", "2"]


async def test_files_that_are_put_together_while_activities_are_read(tmp_path, monkeypatch):
    written = History(tmp_path, limit_bytes=10**9)
    written._spans.append((0.0, 1.0, "train", "step", "", "", ""))
    written.close()
    true = list_parts(tmp_path, "spans")
    gone = [part._replace(path=tmp_path / "gone.parquet") for part in true]
    listed = iter([gone, gone, true])
    monkeypatch.setattr(history, "list_parts", lambda *_: next(listed))
    assert [span.stage for span in history.read_spans(tmp_path)] == ["train"]


async def test_files_that_a_power_cut_left_in_part_do_not_keep_others_from_being_removed(tmp_path):
    def wrote(steps):
        written = History(tmp_path, limit_bytes=45_000)
        for step in steps:
            written.left([make_group(step, size=1)], "trained", train_step=step)
            written._spans += [(0.0, 1.0, "train", f"step {step}", "", "", "")] * 3
            written._flush()
        written.close()

    wrote([1])
    cut = list((tmp_path / "history").glob("segment_*/*.parquet"))
    for path in cut:
        path.write_bytes(path.read_bytes()[:50])
    wrote(range(2, 10))
    assert len(cut) == 2
    assert not any(path.exists() for path in cut)
    # The lines that stood in them cannot be counted.
    removed = json.loads((tmp_path / "history" / "removed.json").read_text())
    assert 0 < removed["rollouts"] < removed["until_train_step"]


async def test_beyond_the_limit_the_oldest_lines_go_and_are_counted(tmp_path):
    written = History(tmp_path, limit_bytes=45_000)
    for step in range(1, 9):
        written.left([make_group(step, size=1)], "trained", train_step=step)
        written._spans += [(0.0, 1.0, "train", f"step {step}", "", "", "")] * 3
        written._flush()
    written.close()
    removed = json.loads((tmp_path / "history" / "removed.json").read_text())
    kept = [row["train_step"] for row in read(tmp_path)]
    assert removed["rollouts"] == removed["until_train_step"] == 8 - len(kept)
    assert removed["spans"] == 24 - len(read(tmp_path, "spans")) > 0
    assert kept == list(range(9 - len(kept), 9))
    assert kept


async def test_a_full_disk_ends_the_history_and_not_the_run(tmp_path, monkeypatch, caplog):
    def fail(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "ParquetWriter", fail)
    written = History(tmp_path, limit_bytes=10**9)
    written.left([make_group(1)], "trained", train_step=1)
    with caplog.at_level(logging.WARNING):
        written.close()
    assert "the history of the run is not complete" in caplog.text


async def test_lines_that_cannot_be_written_are_left_out_with_one_warning(tmp_path, caplog):
    class Odd:
        def __str__(self):
            raise RuntimeError("no text")

    written = History(tmp_path, limit_bytes=10**9)
    for step, text in enumerate(["a", Odd(), Odd(), "b"]):
        written.left([make_group(step, size=1, text=text)], "trained", train_step=step)
        written._flush()
    written.close()
    assert [row["train_step"] for row in read(tmp_path)] == [0, 3]
    assert caplog.text.count("not complete: RuntimeError: no text") == 1


class Group(list):
    """One that can be looked for in memory."""


async def test_a_disk_that_hangs_takes_no_more_and_more_memory(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(history, "_MOST_QUEUED", 3)
    written, goes_on = History(tmp_path, limit_bytes=10**9), threading.Event()
    written._submit(goes_on.wait)
    groups = [Group(make_group(step, size=1)) for step in range(20)]
    left = [weakref.ref(group) for group in groups]
    for step in range(len(groups)):
        written.left([groups.pop(0)], "trained", train_step=step)
        written._flush()
    gc.collect()
    kept = [step for step, group in enumerate(left) if group() is not None]
    assert 0 < len(kept) <= 3
    goes_on.set()
    await asyncio.wrap_future(written._writer.submit(lambda: None))
    # The disk has caught up.
    written.left([make_group(20, size=1)], "trained", train_step=20)
    written.close()
    assert [row["train_step"] for row in read(tmp_path)] == [*kept, 20]
    assert caplog.text.count("not complete: the disk is too slow") == 1


async def test_text_that_no_file_can_hold_is_kept_as_far_as_it_goes(tmp_path):
    written = History(tmp_path, limit_bytes=10**9)
    written.left([make_group(1, size=1, text="a\ud800b\0")], "trained", train_step=1)
    written.close()
    assert read(tmp_path)[0]["response"] == "a?b\0"
    assert pa.types.is_large_string(pq.read_schema(list_parts(tmp_path, "rollouts")[0].path).field("prompt").type)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 2**32 - 1)), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_a_line_counts_generated_tokens_alone(rollouts):
    states, rows, advantages = [], [], []
    for number, (length, has_mask, seed) in enumerate(rollouts):
        random = np.random.default_rng(seed)
        mask = random.integers(0, 2, length if has_mask else 0)
        (state,) = make_group(number, size=1)
        state.response_ids, state.response_mask = random.integers(9, size=length), mask
        state.response_model_steps, state.logprobs = random.integers(-1, 3, length), random.random(length)
        states.append(state)
        rows += [number] * length
        advantages.append(random.normal(size=length).astype(np.float32))
    batch = TrainBatch.__new__(TrainBatch)
    batch.rollout_ids, batch.response_rows = [state.rollout_id for state in states], np.array(rows, int)
    batch.trainer_logprobs, batch.advantages = None, np.concatenate(advantages)
    lines = rollouts_table([Left([states], "trained", None, 1, 0.0, batch, None)]).to_pylist()
    for line, state, own in zip(lines, states, advantages, strict=True):
        made = made_by(state)
        expected = (made.min(), made.max()) if len(made) else (-1, -1)
        assert (line["first_model_step"], line["last_model_step"]) == expected
        counted = own[state.response_mask != 0] if len(state.response_mask) else own
        assert (line["advantage"] is None) == (not len(counted))
        if len(counted):
            np.testing.assert_allclose(line["advantage"], counted.mean(), rtol=1e-5, atol=1e-6)
