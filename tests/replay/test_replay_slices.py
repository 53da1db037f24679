"""Work on many rows lets the event loop do other work, and nobody sees half of it."""

import asyncio

import pytest
from replay_factory import make_group, names

from forebay.replay import FIFOReplayPolicy, IndexedStorage, PrioritizedReplayPolicy, ReplayBuffer
from forebay.types import Status

COMPLETED = Status.COMPLETED
NUM_GROUPS = 6 * IndexedStorage.rows_at_once


async def fill(buffer, number=NUM_GROUPS):
    await buffer.put_groups([make_group(i, 1) for i in range(number)], "math")


async def turns_of(call):
    """Turns of the event loop while `call` is done, in each of which a look at the buffer is begun."""
    turns, task = 0, asyncio.ensure_future(call)
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns


@pytest.mark.parametrize("policy", [FIFOReplayPolicy, PrioritizedReplayPolicy])
async def test_other_work_goes_on_while_many_rows_change(policy):
    buffer = ReplayBuffer(policy(), IndexedStorage())
    await fill(buffer)
    least = NUM_GROUPS // IndexedStorage.rows_at_once
    assert await turns_of(buffer.update_priorities(dict.fromkeys(range(NUM_GROUPS), 2.0))) >= least
    assert await turns_of(buffer.take_batch({"math": NUM_GROUPS}, train_step=3)) >= least
    assert len(buffer) == 0
    assert await turns_of(buffer.restore(2)) >= least
    assert len(buffer) == NUM_GROUPS
    assert {row.priority for row in await buffer.storage.get({}, rows_only=True)} == {2.0}
    await buffer.take_batch({"math": NUM_GROUPS}, train_step=3)
    assert await turns_of(buffer.commit(3)) >= least
    assert await buffer.storage.count({"status": "archived"}) == 0


@pytest.mark.parametrize("what", ["commit", "restore", "take", "priorities"])
async def test_nobody_sees_half_of_it(what):
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await fill(buffer)
    if what in ("commit", "restore"):
        await buffer.take_batch({"math": NUM_GROUPS}, train_step=3)
    call = {
        "commit": lambda: buffer.commit(3),
        "restore": lambda: buffer.restore(2),
        "take": lambda: buffer.take_batch({"math": NUM_GROUPS}, train_step=3),
        "priorities": lambda: buffer.update_priorities(dict.fromkeys(range(NUM_GROUPS), 2.0)),
    }[what]()
    task, seen = asyncio.create_task(call), []
    await asyncio.sleep(0)
    while not task.done():
        counts = await buffer.count_statuses(["math"], [COMPLETED, Status.ARCHIVED])
        seen.append(tuple(counts["math"].values()))
        await asyncio.sleep(0)
    await task
    assert set(seen) <= {(NUM_GROUPS, 0), (0, NUM_GROUPS), (0, 0)}


@pytest.mark.parametrize("train_step", [None, 3])
async def test_a_large_batch_that_is_cancelled_comes_back_whole(train_step):
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await fill(buffer)
    task = asyncio.create_task(buffer.take_batch({"math": NUM_GROUPS}, train_step=train_step))
    while len(buffer) == NUM_GROUPS:
        await asyncio.sleep(0)
    assert len(buffer) > 0, "it was taken in slices"
    waiting = asyncio.create_task(buffer.wait_for_change(buffer.version))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await waiting
    assert len(buffer) == NUM_GROUPS
    # What was archived is in its old place, what was removed comes back as the newest.
    back = names(await buffer.get(NUM_GROUPS, "math", COMPLETED))
    assert sorted(back) == list(range(NUM_GROUPS))
    assert train_step is None or back == list(range(NUM_GROUPS))


async def test_what_a_commit_forgets_is_found_without_a_look_at_the_rest():
    """Consumed rows of later steps are passed over as a whole."""
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await fill(buffer, 40)
    for step in range(1, 5):
        await buffer.take_batch({"math": 10}, train_step=step)
    looked = []
    rows = buffer.storage._rows
    buffer.storage._rows = type("Rows", (dict,), {"__getitem__": lambda self, uid: looked.append(uid) or rows[uid]})(
        rows
    )
    found = await buffer.storage.get({"status": "archived", "train_step": {"$lte": 2}}, rows_only=True)
    assert len(found) == len(looked) == 20
