"""Saving a store on disk: as of one moment, and with a few groups in memory at a time."""

import asyncio
import weakref

import pytest
from replay_factory import make_group, names

from forebay.replay import FIFOReplayPolicy, IndexedStorage, ReplayBuffer, SQLStorage
from forebay.replay.format import tables
from forebay.replay.format.packed import GroupCodec
from forebay.replay.stores.sql import rows as sql
from forebay.replay.stores.sql.store import GROUPS_AT_ONCE
from forebay.types import Status

COMPLETED = Status.COMPLETED
NUM_GROUPS, PIECE_ROLLOUTS = 200, 16


class CountsAlive(GroupCodec):
    """Knows how many of the groups that it decoded are still in memory."""

    def __init__(self):
        super().__init__()
        self.decoded, self.most_alive = [], 0

    def decode(self, data):
        group = super().decode(data)
        self.decoded.append(weakref.ref(group[0].response_ids))
        self.most_alive = max(self.most_alive, sum(array() is not None for array in self.decoded))
        return group


async def test_a_save_holds_a_few_groups_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BATCH_ROLLOUTS", PIECE_ROLLOUTS)
    codec = CountsAlive()
    buffer = ReplayBuffer(FIFOReplayPolicy(), SQLStorage(str(tmp_path / "b.db")))
    buffer.storage.use_codec(codec)
    await buffer.put_groups([make_group(str(n), steps=[1, 2]) for n in range(NUM_GROUPS)], "math")
    codec.decoded.clear()
    await buffer.save(tmp_path / "saved")
    assert len(codec.decoded) == NUM_GROUPS
    # What was read, what is being written, and the piece before it, which Arrow may still hold.
    assert codec.most_alive <= GROUPS_AT_ONCE + 2 * PIECE_ROLLOUTS
    await buffer.close()
    other = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await other.resume(tmp_path / "saved")
    assert names(await other.get(999, "math", COMPLETED)) == [str(n) for n in range(NUM_GROUPS)]


async def test_what_happens_while_it_is_written_is_not_in_it(tmp_path, monkeypatch):
    """The first payloads are read when others have taken groups, put some and committed."""
    loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    attach = sql.attach_payloads

    def attach_later(*args, **options):
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        attach(*args, **options)

    buffer = ReplayBuffer(FIFOReplayPolicy(), SQLStorage(str(tmp_path / "b.db")))
    await buffer.put_groups([make_group(str(n), steps=[1]) for n in range(40)], "math", current_train_step=3)
    monkeypatch.setattr(sql, "attach_payloads", attach_later)
    saving = asyncio.create_task(buffer.save(tmp_path / "saved"))
    await begun.wait()
    monkeypatch.undo()
    await buffer.get(35, "math", COMPLETED)
    await buffer.put(make_group("late"), "math")
    await buffer.refresh_staleness({"math": 2}, 9)
    go_on.set()
    await saving
    assert await buffer.count("math", COMPLETED) == 1
    other = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await other.resume(tmp_path / "saved")
    assert names(await other.get(99, "math", COMPLETED)) == [str(n) for n in range(40)]
    await buffer.close()


async def test_after_a_save_that_fails_the_store_can_be_written_and_saved(tmp_path, monkeypatch):
    def damaged(*_, **__):
        raise ValueError("damaged")

    buffer = ReplayBuffer(FIFOReplayPolicy(), SQLStorage(str(tmp_path / "b.db")))
    await buffer.put(make_group("a"), "math")
    with monkeypatch.context() as patched:
        patched.setattr(sql, "attach_payloads", damaged)
        with pytest.raises(ValueError, match="damaged"):
            await buffer.save(tmp_path / "saved")
    assert list((tmp_path / "saved").iterdir()) == []
    await buffer.put(make_group("b"), "math")
    await buffer.save(tmp_path / "saved")
    await buffer.close()
