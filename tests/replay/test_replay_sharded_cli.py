"""``forebay buffer`` on the snapshot of a sharded buffer, and such a snapshot in a single one."""

import asyncio

import pyarrow.parquet as pq
import pytest
from replay_factory import make_group, names
from typer.testing import CliRunner

from forebay.cli import app
from forebay.replay import FIFOReplayPolicy, IndexedStorage, PrioritizedReplayPolicy, ReplayBuffer
from forebay.replay.sharded import ShardedReplayBuffer
from forebay.types import Status

NUM_GROUPS = 12


def run(*arguments, exit_code=0):
    result = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture
def saved(tmp_path):
    return tmp_path / "checkpoint", asyncio.run(fill(tmp_path / "checkpoint" / "buffer"))


async def fill(path):
    """The uid of each group."""
    shards = [ReplayBuffer(FIFOReplayPolicy(), IndexedStorage()) for _ in range(3)]
    buffer = ShardedReplayBuffer(shards, FIFOReplayPolicy())
    for number in range(NUM_GROUPS):
        group = make_group(str(number), steps=[3] * (number + 1))
        await buffer.put(group, "math", current_train_step=6, tags={"n": number})
    await buffer.take_batch({"math": 2}, train_step=6)
    await buffer.save(path)
    rows = await buffer.storage.get({"status": {"$in": ["completed", "archived"]}}, rows_only=True)
    return {row.tags["n"]: row.uid for row in rows}


def test_all_shards_are_shown_as_one_buffer(saved, tmp_path):
    path, uids = saved
    shown = [line.split() for line in run("buffer", "inspect", path).splitlines()]
    assert shown[1][:2] == ["3", "shards,"]
    assert ["math", str(NUM_GROUPS - 2), "2", str(NUM_GROUPS - 2)] in shown
    assert "12 groups" in run("buffer", "query", path, '{"status": {"$in": ["completed", "archived"]}}')
    for n in (5, 11):
        found = run("buffer", "query", path, f'{{"tags.n": {n}}}')
        assert "1 group" in found
        assert str(uids[n]) in found
        assert f"prompt {n}" in run("buffer", "show", path, uids[n])
    target = tmp_path / "all.parquet"
    run("buffer", "export", path, target)
    table = pq.read_table(target)
    by_group = dict(zip(table["group_id"].to_pylist(), table["uid"].to_pylist(), strict=True))
    assert by_group == {str(n): uid for n, uid in uids.items() if n >= 2}
    assert table["uid"].to_pylist().count(uids[5]) == 2


def test_they_are_migrated_and_resumed_as_one(saved, tmp_path):
    path, _ = saved
    run("buffer", "migrate", path, tmp_path / "one")
    asyncio.run(check_resumed(tmp_path / "one", path / "buffer"))


async def check_resumed(*places):
    for place in places:
        single = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
        await single.resume(place)
        await single.restore(0)
        assert names(await single.get(99, "math", Status.COMPLETED)) == [str(n) for n in range(NUM_GROUPS)]
    with pytest.raises(ValueError, match="same policy"):
        await ReplayBuffer(PrioritizedReplayPolicy(), IndexedStorage()).resume(places[-1])
