"""Damaged payloads of a SQL store: never wrong data, one error that names the row."""

import sqlite3
from random import Random

import pytest
from replay_factory import make_group, make_row, names, same

from forebay.replay import FIFOReplayPolicy, RemoteReplayBuffer, ReplayBuffer, SQLStorage, serve
from forebay.replay.stores.errors import DamagedRowError
from forebay.types import Status

NUM_CHANGED = 400


def changed(data, rng):
    """The bytes with a few others, without some, with some more, or in another order."""
    data = bytearray(data)
    kind = rng.randrange(5)
    start = rng.randrange(len(data))
    if kind < 2:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del data[start : start + rng.randrange(1, 9)]
    elif kind == 3:
        data[start:start] = rng.randbytes(rng.randrange(1, 9))
    else:
        data[start : start + 4] = rng.randbytes(4)
    return bytes(data)


async def test_changed_payloads_never_give_wrong_data(tmp_path):
    rng, path = Random(11), tmp_path / "b.db"
    groups = [make_group(f"g{number}", steps=[number, number + 1]) for number in range(8)]
    buffer = ReplayBuffer(FIFOReplayPolicy(), SQLStorage(path))
    await buffer.put_groups(groups, "math")
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA synchronous=OFF")
    stored = dict(database.execute("SELECT uid, data FROM forebay_payloads"))
    num_refused = 0
    for _ in range(NUM_CHANGED):
        uid = rng.choice(sorted(stored))
        # Another row's bytes are whole, and not this row's.
        damaged = stored[(uid + 1) % 8] if rng.random() < 0.1 else changed(stored[uid], rng)
        database.execute("UPDATE forebay_payloads SET data = ? WHERE uid = ?", (damaged, uid))
        if damaged == stored[uid]:
            continue
        with pytest.raises(DamagedRowError, match=f"uid {uid} is damaged") as error:
            await buffer.storage.get({"uid": uid})
        assert error.value.uid == uid
        num_refused += 1
        database.execute("UPDATE forebay_payloads SET data = ? WHERE uid = ?", (stored[uid], uid))
    assert num_refused > NUM_CHANGED * 0.9
    rows = await buffer.storage.get({})
    assert all(same(list(row.item), group) for row, group in zip(rows, groups, strict=True))
    database.close()
    await buffer.close()


@pytest.mark.parametrize("train_step", [None, 3])
async def test_a_damaged_row_costs_no_other_and_can_be_removed(open_store, train_step):
    buffer = ReplayBuffer(FIFOReplayPolicy(), open_store())
    for name in "abc":
        await buffer.put(make_group(name), "math", tags={"name": name})
    with buffer.storage._writing() as connection:
        connection.exec_driver_sql("UPDATE forebay_payloads SET checksum = checksum + 1 WHERE uid = 1")
    with pytest.raises(DamagedRowError, match=r"`storage.delete\(\[1\]\)` removes this one"):
        await buffer.take_batch({"math": 3}, train_step=train_step)
    assert len(buffer) == 3
    assert names(await buffer.get(1, "math", Status.COMPLETED, tags={"name": "a"})) == ["a"]
    await buffer.storage.delete([1])
    assert names(await buffer.get(9, "math", Status.COMPLETED)) == ["c"]


async def test_a_payload_that_is_missing_is_damaged(open_store):
    store = open_store()
    await store.put_many([make_row("a"), make_row("b")])
    with store._writing() as connection:
        connection.exec_driver_sql("DELETE FROM forebay_payloads WHERE uid = 0")
    with pytest.raises(DamagedRowError, match=r"uid 0 is damaged \(it is missing"):
        await store.take_first(2, {})
    assert [row.item for row in await store.get({"uid": 1})] == ["b"]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE forebay_payloads SET checksum = checksum + 1 WHERE uid = 0",
        "DELETE FROM forebay_payloads WHERE uid = 0",
    ],
    ids=["changed", "missing"],
)
async def test_a_damaged_row_that_is_evicted_costs_no_put_and_is_told_by_its_columns(
    open_store, tmp_path, caplog, damage
):
    evicted = []
    buffer = ReplayBuffer(FIFOReplayPolicy(), open_store(), limit=2, on_evict=evicted.append)
    for name in "ab":
        await buffer.put(make_group(name), "math", tags={"group": name})
    with buffer.storage._writing() as connection:
        connection.exec_driver_sql(damage)
    await buffer.put_groups([make_group("c"), make_group("d")], "math")
    assert names([row.item for row in evicted]) == ["a", "b"]
    assert (evicted[0].task_name, evicted[0].item[0].status) == ("math", Status.COMPLETED)
    assert "the payload of the row with uid 0 is damaged" in caplog.text
    assert buffer.num_evicted == {"math": 2}
    with buffer.storage._writing() as connection:
        connection.exec_driver_sql(damage.replace("uid = 0", "uid = 2"))
    # A client is told, too.
    async with serve(buffer, tmp_path / "socket"), await RemoteReplayBuffer.connect(tmp_path / "socket") as client:
        told = []
        client.on_evict = told.append
        await client.put(make_group("e"), "math")
        assert [row.uid for row in told] == [2]
        # Its row had no tag.
        assert names([row.item for row in told]) == [None]
    assert names(await buffer.get(9, "math", Status.COMPLETED)) == ["d", "e"]
