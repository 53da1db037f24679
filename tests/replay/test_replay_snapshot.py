"""Snapshots: whole, exact, atomic, and refusing what is damaged or foreign."""

import asyncio
import json
import os
import threading
import zlib

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_factory import make_group, make_state, names, same

from forebay.io import safe_files
from forebay.replay import (
    FIFOReplayPolicy,
    IndexedStorage,
    NaiveStorage,
    PrioritizedReplayPolicy,
    ReplayBuffer,
    StalenessReplayPolicy,
)
from forebay.replay.format import snapshot
from forebay.types import RolloutState, SampleParams, Status

EVERYTHING = {"status": {"$in": [status.value for status in Status]}}


def fifo(store=IndexedStorage):
    return ReplayBuffer(FIFOReplayPolicy(), store())


async def filled_buffer(store=IndexedStorage):
    """All statuses, labels or none, tags, an archive, and every kind of field."""
    buffer = fifo(store)
    rich = RolloutState(
        [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"image": b"\x00\xff"}]}],
        rollout_id=7,
        group_id="7",
        session_id=2**70,
        task_name="math \ud800",
        num_tries=2,
        prompt_ids=[1, 2],
        tokens=[1, 2, 3],
        tools=[{"name": "f", "parameters": {}}],
        tool_choice="auto",
        sample_params=SampleParams(max_tokens=9, stop=("x",)),
        data_source={"file": "a.jsonl", "line": 3},
        reward_model={"ground_truth": (1, None)},
        mm_info={"pixels": np.arange(6, dtype=np.float16).reshape(2, 3), "grid": {1: np.int64(2)}},
        response="ok",
        response_ids=[3],
        routed_experts=np.arange(4, dtype=np.uint8).reshape(1, 2, 2),
        tool_calls=[],
        finish_reason="stop",
        reward={"score": np.float32(0.5), "detail": float("nan")},
        status=Status.COMPLETED,
        extra_fields={"status": Status.ABORTED, "array": np.zeros(0), "ids": [1, "1", True, 1.0]},
    )
    await buffer.put([rich, make_state("second")], "math", tags={"a": 1, "b": True, "c": "x", "d": 1.5})
    await buffer.put(make_group("labeled", steps=[2, 3]), "math", current_train_step=5, priority=0.25)
    for status in (Status.ABORTED, Status.FAILED, Status.EXPIRED, Status.FILTERED, Status.MAX_TRIES):
        await buffer.put(make_group(status.value, 1, status=status, error_msg="why", seq_staleness=3), "code")
    await buffer.put(make_group("consumed", 3, steps=[1]), "code")
    await buffer.take_batch({"code": 1}, train_step=5)
    return buffer


async def content(buffer):
    rows = await buffer.storage.get(EVERYTHING)
    return [(row, [list(row.item)]) for row in rows]


def same_content(a, b):
    def light(row):
        return {name: getattr(row, name) for name in type(row).__slots__ if name != "item"}

    return len(a) == len(b) and all(
        same(light(x), light(y)) and same(p, q) for (x, p), (y, q) in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("target", [NaiveStorage, IndexedStorage])
async def test_everything_comes_back_on_every_store(make_store, target, tmp_path):
    buffer = await filled_buffer(make_store)
    await buffer.save(tmp_path / "deep" / "snapshot")
    resumed = fifo(target)
    await resumed.resume(tmp_path / "deep" / "snapshot")
    assert same_content(await content(buffer), await content(resumed))
    assert len(resumed) == len(buffer) == 7
    assert await resumed.storage.get_train_step("math") == 5
    for one in (buffer, resumed):
        await one.put(make_group("new"), "math")
        await one.restore(0)
    assert same_content(await content(buffer), await content(resumed))


async def test_tables_in_many_pieces_come_back(tmp_path, monkeypatch):
    from forebay.replay.format import tables

    monkeypatch.setattr(tables, "BATCH_GROUPS", 3)
    monkeypatch.setattr(tables, "BATCH_ROLLOUTS", 2)
    buffer = await filled_buffer()
    await buffer.save(tmp_path)
    resumed = fifo()
    await resumed.resume(tmp_path)
    assert same_content(await content(buffer), await content(resumed))


async def test_the_checksum_in_the_manifest_is_the_crc_32_of_the_file(tmp_path):
    await (await filled_buffer()).save(tmp_path)
    files = json.loads((tmp_path / "manifest.json").read_text())["files"]
    for entry in files.values():
        data = (tmp_path / entry["name"]).read_bytes()
        assert (entry["bytes"], entry["crc32"]) == (len(data), zlib.crc32(data))


async def test_restored_arrays_can_be_written_to(tmp_path):
    buffer = await filled_buffer()
    await buffer.save(tmp_path)
    resumed = fifo()
    await resumed.resume(tmp_path)
    (group,) = await resumed.get(1, "math", Status.COMPLETED)
    group[0].response_mask[0] = 0
    group[0].mm_info["pixels"][0, 0] = 9


async def test_ids_do_not_rewind_when_a_drained_buffer_is_resumed(make_store, tmp_path):
    buffer = fifo(make_store)
    for name in "abc":
        await buffer.put(make_group(name), "math")
    last = (await buffer.storage.get({}))[-1]
    await buffer.get(3, "math", Status.COMPLETED)
    await buffer.save(tmp_path)
    resumed = fifo(make_store)
    await resumed.resume(tmp_path)
    assert len(resumed) == 0
    await resumed.put(make_group("d"), "math")
    (row,) = await resumed.storage.get({})
    assert row.uid > last.uid
    assert row.timestamp_id > last.timestamp_id


async def test_policy_state_and_evictions_are_saved(tmp_path):
    def build():
        return ReplayBuffer(PrioritizedReplayPolicy(seed=4), IndexedStorage(), limit=20)

    buffer = build()
    for number in range(25):
        await buffer.put([make_state(number)], "math", priority=1.0 + number % 3)
    await buffer.get(3, "math", Status.COMPLETED)
    await buffer.save(tmp_path)
    resumed = build()
    await resumed.resume(tmp_path)
    assert resumed.num_evicted == {"math": 5}
    assert names(await buffer.get(9, "math", Status.COMPLETED)) == names(
        await resumed.get(9, "math", Status.COMPLETED)
    )


async def test_an_earlier_snapshot_is_replaced_and_nothing_is_left_over(tmp_path):
    buffer = await filled_buffer()
    await buffer.save(tmp_path)
    await buffer.put(make_group("later"), "math")
    await buffer.save(tmp_path)
    await buffer.save(tmp_path)
    assert len(os.listdir(tmp_path)) == 3
    resumed = fifo()
    await resumed.resume(tmp_path)
    assert len(resumed) == len(buffer)


@pytest.mark.parametrize("step", ["_write_arrow", "_digest_of", "sync"])
async def test_a_save_that_dies_leaves_the_earlier_snapshot(tmp_path, monkeypatch, step):
    """Whatever step fails, what lies there afterwards is one whole snapshot, and the next save cleans up."""
    buffer = await filled_buffer()
    await buffer.save(tmp_path)
    before = await content(buffer)
    await buffer.get(1, "math", Status.COMPLETED)
    module = safe_files if step == "sync" else snapshot
    original, calls = getattr(module, step), []

    def die_later(*args):
        calls.append(args)
        # The second call: after the groups table, or after the first directory entry, was written.
        if len(calls) == 2 or step == "_digest_of":
            raise OSError("disk full")
        return original(*args)

    monkeypatch.setattr(module, step, die_later)
    with pytest.raises(OSError, match="disk full"):
        await buffer.save(tmp_path)
    monkeypatch.undo()
    resumed = fifo()
    await resumed.resume(tmp_path)
    found = await content(resumed)
    assert same_content(found, before) or (step == "sync" and same_content(found, await content(buffer)))
    await buffer.save(tmp_path)
    assert len(os.listdir(tmp_path)) == 3


async def test_a_first_save_that_died_is_no_obstacle(tmp_path):
    (tmp_path / "manifest.json.tmp").write_bytes(b"half")
    (tmp_path / f"rollouts-{'0' * 16}.arrow.tmp").write_bytes(b"half")
    (tmp_path / f"groups-{'0' * 16}.arrow").write_bytes(b"half")
    buffer = await filled_buffer()
    await buffer.save(tmp_path)
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", "groups-1.arrow", "folder"])
async def test_foreign_content_is_not_touched(tmp_path, name):
    path = tmp_path / "foreign"
    path.mkdir()
    if name == "folder":
        (path / name).mkdir()
    else:
        (path / name).write_text('{"format": "other"}')
    with pytest.raises(ValueError, match=name):
        await fifo().save(path)
    assert os.listdir(path) == [name]
    with pytest.raises(ValueError, match="foreign"):
        await fifo().resume(path)


async def test_a_file_is_not_a_directory(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    for call in (fifo().save, fifo().resume):
        with pytest.raises(ValueError, match="file"):
            await call(path)
    assert path.read_text() == "mine"


async def test_nothing_to_resume(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        await fifo().resume(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"manifest\.json"):
        await fifo().resume(tmp_path)


async def test_resume_needs_an_empty_buffer_and_the_same_policy(tmp_path):
    buffer = await filled_buffer()
    await buffer.save(tmp_path)
    with pytest.raises(RuntimeError, match="7 groups"):
        await buffer.resume(tmp_path)
    with pytest.raises(ValueError, match=r"FIFOReplayPolicy.*StalenessReplayPolicy"):
        await ReplayBuffer(StalenessReplayPolicy(), IndexedStorage()).resume(tmp_path)
    drained = fifo()
    await drained.put(make_group("old"), "math")
    await drained.take_batch({"math": 1}, train_step=1)
    await drained.resume(tmp_path)
    assert same_content(await content(buffer), await content(drained))


async def test_another_format_version_is_named(tmp_path):
    await fifo().save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))
    with pytest.raises(ValueError, match="99"):
        await fifo().resume(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")

    async def save():
        await (await filled_buffer()).save(path)

    asyncio.run(save())
    return {file.name: file.read_bytes() for file in path.iterdir()}


DAMAGES = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True), st.just(0)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.integers(0, 255)),
    st.tuples(st.just("remove"), st.just(0.0), st.just(0)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["manifest", "groups", "rollouts"]), damage=DAMAGES)
async def test_damage_is_an_error_or_harmless(saved, tmp_path_factory, kind, damage):
    """Any one change of any file: one ValueError and an untouched buffer (or, in white space, no loss)."""
    path = tmp_path_factory.mktemp("damaged")
    how, where, value = damage
    for name, data in saved.items():
        if name.startswith(kind):
            place = int(where * len(data))
            if how == "remove":
                continue
            changed = bytearray(data)
            if how == "flip":
                changed[place] ^= value
            elif how == "cut":
                del changed[place:]
            else:
                changed.insert(place, value)
            data = bytes(changed)
        (path / name).write_bytes(data)
    buffer = fifo()
    await buffer.put(make_group("archived"), "math")
    await buffer.take_batch({"math": 1}, train_step=1)
    try:
        await buffer.resume(path)
    except ValueError:
        assert len(buffer) == 0
        assert await buffer.count("math", Status.ARCHIVED) == 1
    else:
        assert kind == "manifest"
        assert same_content(await content(buffer), await content(await filled_buffer()))


async def test_a_value_that_cannot_be_stored_is_named(tmp_path):
    buffer = fifo()
    state = make_state("g")
    await buffer.put([state], "math")
    # A put refuses it; a rollout that was put is not to be changed, but Python lets it happen.
    state.extra_fields["model"] = object()
    with pytest.raises(ValueError, match=r"rollout 'g/0': extra_fields\['model'\]"):
        await buffer.save(tmp_path)
    assert os.listdir(tmp_path) == []


async def test_a_snapshot_is_of_one_moment_and_nobody_waits_for_it(tmp_path, monkeypatch):
    """While it is written, groups are taken, continued and expired; the snapshot has them as they were."""
    buffer = fifo()
    for name in "abc":
        await buffer.put(make_group(name, steps=[0], status=Status.ABORTED), "math", current_train_step=1)
    before = await content(buffer)
    expected = [[list(group[0][i].response_ids) for i in range(2)] for _, group in before]
    go_on, writing = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    original = snapshot._claim

    def wait_for_the_test(path):
        loop.call_soon_threadsafe(writing.set)
        assert go_on.wait(timeout=300)
        original(path)

    monkeypatch.setattr(snapshot, "_claim", wait_for_the_test)
    saving = asyncio.create_task(buffer.save(tmp_path))
    await writing.wait()
    (group,) = await buffer.get(1, "math", Status.ABORTED)
    group[0].append([7, 8], model_step=1)
    group[0].message[0]["content"] = "changed"
    assert await buffer.refresh_staleness({"math": 2}, 5) == {"math": 2}
    go_on.set()
    await saving
    resumed = fifo()
    await resumed.resume(tmp_path)
    found = [row.item for row in await resumed.storage.get({})]
    assert [[list(state.response_ids) for state in group] for group in found] == expected
    assert names(found) == ["a", "b", "c"]
    assert found[0][0].message[0]["content"] == "prompt a"
    assert all(state.status is Status.ABORTED for group in found for state in group)


async def test_a_cancelled_save_ends_before_the_next_begins(tmp_path, monkeypatch):
    buffer = await filled_buffer()
    go_on, writing = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    original = snapshot._claim

    def wait_for_the_test(path):
        loop.call_soon_threadsafe(writing.set)
        assert go_on.wait(timeout=300)
        original(path)

    monkeypatch.setattr(snapshot, "_claim", wait_for_the_test)
    saving = asyncio.create_task(buffer.save(tmp_path))
    await writing.wait()
    saving.cancel()
    await asyncio.sleep(0)
    assert not saving.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    resumed = fifo()
    await resumed.resume(tmp_path)
    assert same_content(await content(buffer), await content(resumed))


async def test_pandas_opens_it(tmp_path):
    buffer = await filled_buffer()
    await buffer.save(tmp_path)
    (groups_file,) = tmp_path.glob("groups-*.arrow")
    (rollouts_file,) = tmp_path.glob("rollouts-*.arrow")
    groups, rollouts = pd.read_feather(groups_file), pd.read_feather(rollouts_file)
    assert groups["status"].tolist().count("archived") == 1
    assert groups.loc[groups["priority"] == 0.25, "staleness"].tolist() == [2]
    assert len(rollouts) == groups["num_rollouts"].sum()
    labeled = rollouts[rollouts["group_id"] == "labeled"].iloc[0]
    assert labeled["response_ids"].dtype == np.int32
    assert labeled["response_model_steps"].tolist() == [2, 3]
    assert rollouts.iloc[0]["rollout_id"] == "7"
    assert rollouts.iloc[0]["score"] == 0.5


def test_no_group_is_split_over_batches(monkeypatch):
    from forebay.replay.format import tables
    from forebay.replay.groups import StoredGroup
    from forebay.replay.stores.contract import StorageItem

    monkeypatch.setattr(tables, "BATCH_TOKENS", 25)
    monkeypatch.setattr(tables, "BATCH_ROLLOUTS", 7)
    items = [
        StorageItem(StoredGroup(make_group(uid, 1 + uid % 4, num_tokens=uid % 3)), uid, uid, "t", Status.INIT, 0)
        for uid in range(20)
    ]
    batches = list(tables.rollout_batches(items))
    assert len(batches) > 3
    read = dict(pair for batch in batches for pair in tables.read_groups(batch))
    assert all(same(list(read[item.uid]), list(item.item)) for item in items)
