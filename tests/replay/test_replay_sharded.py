"""Several buffers as one: the same groups, counts and order as a single buffer, whatever is done."""

import asyncio
import os
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_factory import make_group, make_state, names, same

from forebay.replay import (
    ConnectionLost,
    FIFOReplayPolicy,
    IndexedStorage,
    PrioritizedReplayPolicy,
    RemoteReplayBuffer,
    ReplayBuffer,
    SQLStorage,
    StalenessReplayPolicy,
    serve,
)
from forebay.replay.sharded import ShardedReplayBuffer
from forebay.types import Status

COMPLETED, ABORTED, EXPIRED, ARCHIVED = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.ARCHIVED
TASKS = ("math", "code")
STATUSES = (COMPLETED, ABORTED, EXPIRED, Status.FAILED, ARCHIVED)
POLICIES = {"fifo": FIFOReplayPolicy, "staleness": StalenessReplayPolicy}


def make_sharded(number, policy=FIFOReplayPolicy, make_storage=IndexedStorage):
    return ShardedReplayBuffer([ReplayBuffer(policy(), make_storage()) for _ in range(number)], policy())


STEPS, NAMES = st.integers(1, 6), st.sampled_from(TASKS)
GROUPS = st.lists(
    st.tuples(st.sampled_from([COMPLETED, COMPLETED, ABORTED, Status.FAILED]), st.integers(-1, 4)),
    min_size=1,
    max_size=4,
)
OPERATIONS = st.one_of(
    st.tuples(st.just("put"), GROUPS, NAMES, st.none() | STEPS, st.none() | st.integers(1, 4)),
    st.tuples(st.just("get"), st.integers(0, 4), NAMES, st.sampled_from([COMPLETED, ABORTED, EXPIRED])),
    st.tuples(st.just("take"), st.integers(0, 4), st.integers(0, 4), st.none() | STEPS),
    st.tuples(st.just("commit"), STEPS),
    st.tuples(st.just("restore"), STEPS),
    st.tuples(st.just("refresh"), st.integers(1, 5), STEPS),
    st.tuples(st.just("prioritise"), st.integers(0, 3), st.floats(0, 9)),
    st.tuples(st.just("move"), st.integers(1, 4)),
)


class Both:
    """One buffer and a sharded one, to which the same is done; what was put and what became of it."""

    def __init__(self, shards, policy):
        self.policy = policy
        self.one = ReplayBuffer(policy(), IndexedStorage())
        self.many = make_sharded(shards, policy)
        self.put, self.gone = 0, 0

    async def put_(self, buffer, specs, task, step, threshold):
        groups = [
            make_group(f"{self.put + number}", status=status, steps=[model_step] if model_step >= 0 else [])
            for number, (status, model_step) in enumerate(specs)
        ]
        tags = {"number": self.put % 4}
        await buffer.put_groups(groups, task, current_train_step=step, stale_threshold=threshold, tags=tags)
        return groups

    async def get(self, buffer, number, task, status):
        return await buffer.get(number, task, status)

    async def take(self, buffer, first, second, step):
        return await buffer.take_batch({"math": first, "code": second}, train_step=step)

    async def commit(self, buffer, step):
        before = await buffer.storage.count({"status": ARCHIVED})
        await buffer.commit(step)
        return before - await buffer.storage.count({"status": ARCHIVED})

    async def restore(self, buffer, step):
        await buffer.restore(step)

    async def refresh(self, buffer, threshold, step):
        return await buffer.refresh_staleness(dict.fromkeys(TASKS, threshold), step)

    async def prioritise(self, buffer, number, priority):
        return await buffer.update_priorities({number: priority}, by="tags.number")

    async def check(self):
        counts = [await buffer.count_statuses(TASKS, STATUSES) for buffer in (self.one, self.many)]
        assert counts[0] == counts[1]
        assert len(self.one) == len(self.many)
        order = self.policy.order
        rows = [await buffer.storage.get({}, order=order, rows_only=True) for buffer in (self.one, self.many)]
        assert [(row.status, row.staleness, row.tags, row.priority) for row in rows[0]] == [
            (row.status, row.staleness, row.tags, row.priority) for row in rows[1]
        ]
        return counts[1]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@given(shards=st.integers(1, 4), operations=st.lists(OPERATIONS, max_size=14))
def test_any_operations_have_the_same_results_as_on_one_buffer(policy, shards, operations, tmp_path_factory):
    async def run():
        both = Both(shards, policy)
        committed = 0
        for operation in operations:
            what, *arguments = operation
            if what == "move":
                # Another number of shards goes on where the last one was.
                path = tmp_path_factory.mktemp("moved") / "snapshot"
                await both.many.save(path)
                both.many = make_sharded(*arguments, policy)
                await both.many.resume(path)
                continue
            method = both.put_ if what == "put" else getattr(both, what)
            results = [await method(buffer, *arguments) for buffer in (both.one, both.many)]
            assert same(*results)
            if what == "put":
                both.put += len(arguments[0])
            elif what == "get":
                both.gone += len(results[0])
            elif what == "take" and arguments[-1] is None:
                both.gone += sum(map(len, results[0][0].values()))
            elif what == "commit":
                committed += results[0]
        counts = await both.check()
        held = sum(sum(cells.values()) for cells in counts.values())
        assert both.put == held + both.gone + committed

    asyncio.run(run())


async def test_a_group_is_in_one_shard_and_always_the_same():
    buffer = make_sharded(3)
    groups = [make_group(f"{number}") for number in range(60)]
    await buffer.put_groups(groups, "math")
    for number, shard in enumerate(buffer.shards):
        rows = await shard.storage.get({})
        assert len(rows) > 5
        assert {buffer.shard_of(row.item) for row in rows} == {number}
    # Of text that says the same, and of no group id, too.
    assert buffer.shard_of([make_state(7)]) == buffer.shard_of([make_state("7")])
    state = make_state("x")
    state.group_id = None
    assert buffer.shard_of([state]) == buffer.shard_of([make_state("x/0")])


async def test_what_it_refuses():
    with pytest.raises(ValueError, match="at least one shard"):
        ShardedReplayBuffer([], FIFOReplayPolicy())
    with pytest.raises(ValueError, match="PrioritizedReplayPolicy has no order"):
        make_sharded(2, PrioritizedReplayPolicy)
    policies = FIFOReplayPolicy(), StalenessReplayPolicy()
    shards = [ReplayBuffer(policy, IndexedStorage()) for policy in policies]
    with pytest.raises(ValueError, match="shard 1 has StalenessReplayPolicy"):
        ShardedReplayBuffer(shards, policies[0])
    buffer = make_sharded(2)
    for wrong in ({"stale_threshold": 0}, {"priority": -1}, {"tags": {"": 1}}):
        with pytest.raises(ValueError, match=r"threshold|priority|tag"):
            await buffer.put(make_group("a"), "math", **wrong)
    assert (len(buffer), await buffer.get(0, "math", COMPLETED)) == (0, [])
    await buffer.put([], "math")
    with pytest.raises(ValueError, match="rows only"):
        await buffer.storage.get({})


async def test_waiting_for_any_shard():
    buffer = make_sharded(3)
    waiting = asyncio.create_task(buffer.wait_for_change(buffer.version))
    await asyncio.sleep(0)
    assert not waiting.done()
    await buffer.put(make_group("a"), "math")
    assert await waiting == buffer.version == 1
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_evictions_are_counted_and_told():
    shards = [ReplayBuffer(FIFOReplayPolicy(), IndexedStorage(), limit=2) for _ in range(2)]
    buffer = ShardedReplayBuffer(shards, FIFOReplayPolicy())
    evicted = []
    buffer.on_evict = lambda row: evicted.append(row.item[0].group_id)
    await buffer.put_groups([make_group(str(number)) for number in range(12)], "math")
    assert (len(buffer), len(evicted), buffer.num_evicted) == (4, 8, {"math": 8})
    rows = await buffer.storage.get({}, rows_only=True)
    assert len({row.uid for row in rows}) == 4
    assert await buffer.update_priorities({rows[0].uid: 5.0, 10**6: 1.0, "x": 1.0}) == 1
    changed = await buffer.storage.get({"priority": 5.0}, rows_only=True)
    assert [row.uid for row in changed] == [rows[0].uid]


@pytest.fixture
async def remote(tmp_path):
    """Three servers, two of them on a database; the stack of each, and a sharded buffer over all."""
    stacks = []
    async with AsyncExitStack() as clients:
        shards = []
        for number in range(3):
            storage = IndexedStorage() if number == 0 else SQLStorage(tmp_path / f"{number}.db")
            stacks.append(AsyncExitStack())
            local = ReplayBuffer(StalenessReplayPolicy(), storage)
            stacks[-1].push_async_callback(local.close)
            await stacks[-1].enter_async_context(serve(local, tmp_path / f"{number}.sock"))
            client = await RemoteReplayBuffer.connect(tmp_path / f"{number}.sock")
            shards.append(await clients.enter_async_context(client))
        yield ShardedReplayBuffer(shards, StalenessReplayPolicy()), stacks
    for stack in stacks:
        await stack.aclose()


async def test_over_servers(remote, tmp_path):
    buffer, _ = remote
    groups = [make_group(str(number), steps=[number % 5]) for number in range(40)]
    await buffer.put_groups(groups, "math", current_train_step=6, stale_threshold=5)
    assert sum(group[0].status is EXPIRED for group in groups) == 8
    assert await buffer.count("math", COMPLETED) == len(buffer) - 8 == 32
    taken, counts = await buffer.take_batch({"math": 20}, train_step=6)
    expected = sorted((n for n in range(40) if n % 5), key=lambda n: (n % 5, n))
    assert names(taken["math"]) == [str(n) for n in expected[:20]]
    assert counts == {"math": 20}
    await buffer.save(tmp_path / "saved")
    await buffer.restore(5)
    groups = await buffer.get(99, "math", COMPLETED)
    assert names(groups) == [str(n) for n in expected]
    moved = make_sharded(2, StalenessReplayPolicy)
    await moved.resume(tmp_path / "saved")
    assert await moved.count("math", ARCHIVED) == 20
    await moved.restore(5)
    assert same(await moved.get(99, "math", COMPLETED), groups)


async def test_a_shard_that_is_gone_is_named_and_the_others_take_puts(remote):
    buffer, stacks = remote
    of_shards = [[], [], []]
    for number in range(30):
        group = make_group(str(number), steps=[1])
        of_shards[buffer.shard_of(group)].append(group)
    await buffer.put_groups([group for of_shard in of_shards for group in of_shard[:2]], "math")
    await stacks[1].aclose()
    for call in (
        buffer.put(of_shards[1][2], "math"),
        buffer.count("math", COMPLETED),
        buffer.take_batch({"math": 2}, train_step=3),
        buffer.get(2, "math", COMPLETED),
        buffer.commit(1),
    ):
        with pytest.raises(ConnectionLost, match=r"shard 1 \(unix:.*1.sock\)"):
            await call
    for number in (0, 2):
        await buffer.put(of_shards[number][2], "math")
        assert await buffer.shards[number].count("math", COMPLETED) == 3


class FailsOnce(FIFOReplayPolicy):
    """Of a shard whose next take fails, when the others have taken."""

    others: tuple = ()

    async def get(self, count, query, storage_backend):
        for other in self.others:
            while other.version < 2:
                await other.wait_for_change(other.version)
        if self.others:
            self.others = ()
            raise OSError("disk")
        return await super().get(count, query, storage_backend)


async def rows_by_group(buffer):
    """What the row of each group says, but its place."""
    query = {"status": {"$in": list(STATUSES)}}
    rows = [row for shard in buffer.shards for row in await shard.storage.get(query)]
    return {
        row.item[0].group_id: (
            row.status,
            row.train_step,
            row.status_before,
            row.tags,
            row.priority,
            row.staleness,
        )
        for row in rows
    }


@pytest.mark.parametrize("status", [COMPLETED, ARCHIVED])
@pytest.mark.parametrize("train_step", [None, 4])
async def test_a_take_that_fails_half_way_gives_back_all_that_rows_had(train_step, status):
    shards = [ReplayBuffer(FailsOnce(), IndexedStorage()) for _ in range(3)]
    buffer = ShardedReplayBuffer(shards, FIFOReplayPolicy())
    for number in range(20):
        group = make_group(str(number), steps=[number % 3])
        await buffer.put(group, "math", current_train_step=4, tags={"n": number}, priority=number + 0.5)
    if status is ARCHIVED:
        await buffer.take_batch({"math": 20}, train_step=3)
    before = await rows_by_group(buffer)
    versions = [shard.version for shard in shards]

    class Shard:
        """Changed since the take began."""

        def __init__(self, shard, version):
            self.shard, self.seen = shard, version

        version = property(lambda self: 2 if self.shard.version > self.seen else 0)

        async def wait_for_change(self, _):
            await self.shard.wait_for_change(self.seen)

    shards[2].policy.others = tuple(map(Shard, shards[:2], versions[:2]))
    with pytest.raises(OSError, match="disk") as raised:
        await buffer.take_batch({"math": 12}, train_step=train_step, group_status=status)
    assert raised.value.__notes__ == ["in shard 2 (in this process)"]
    assert await rows_by_group(buffer) == before
    groups, _ = await buffer.take_batch({"math": 20}, train_step=train_step, group_status=status)
    assert sorted(map(int, names(groups["math"]))) == list(range(20))


async def test_all_shards_are_asked_to_take_back_and_those_that_cannot_are_named():
    shards = [ReplayBuffer(FailsOnce(), BrokenOnce() if n < 2 else IndexedStorage()) for n in range(4)]
    buffer = ShardedReplayBuffer(shards, FIFOReplayPolicy())
    await buffer.put_groups([make_group(str(number)) for number in range(40)], "math")
    held = [await shard.count("math", COMPLETED) for shard in shards]
    shards[3].policy.others = tuple(shards[:3])
    for shard in shards[:2]:
        shard.storage.is_broken = True
    with pytest.raises(OSError, match="disk") as raised:
        await buffer.take_batch({"math": 40})
    assert raised.value.__notes__ == [
        "in shard 3 (in this process)",
        "and shard 0 did not take back what it had given: OSError('full')",
        "and shard 1 did not take back what it had given: OSError('full')",
    ]
    assert [await shard.count("math", COMPLETED) for shard in shards] == [0, 0, *held[2:]]


class BrokenOnce(IndexedStorage):
    """Stores nothing any more when told so."""

    is_broken = False

    async def put(self, item):
        if self.is_broken:
            raise OSError("full")
        return await super().put(item)


async def test_over_servers_a_failed_take_gives_back_what_was_kept_in_its_place(tmp_path):
    async with AsyncExitStack() as stack:
        clients = []
        buffers = [ReplayBuffer(FIFOReplayPolicy(), IndexedStorage()) for _ in range(3)]
        for number, shard in enumerate(buffers):
            path = str(tmp_path / f"{number}.sock")
            await stack.enter_async_context(serve(shard, path))
            clients.append(await stack.enter_async_context(await RemoteReplayBuffer.connect(path)))
        buffer = ShardedReplayBuffer(clients, FIFOReplayPolicy())
        for number in range(12):
            await buffer.put(make_group(str(number)), "math", tags={"n": number}, priority=number + 0.5)
        before = [await shard.storage.get({}, rows_only=True) for shard in buffers]
        # Handed over and kept by the others, not by the last one.
        begin = clients[2].begin_take

        async def begin_and_fail(*args):
            take = await begin(*args)
            take.keep = fail
            return take

        async def fail():
            raise OSError("disk")

        clients[2].begin_take = begin_and_fail
        with pytest.raises(OSError, match="disk"):
            await buffer.take_batch({"math": 12}, train_step=3)
        assert [await shard.storage.get({}, rows_only=True) for shard in buffers] == before
        clients[2].begin_take = begin
        groups, _ = await buffer.take_batch({"math": 12}, train_step=3)
        assert [int(name) for name in names(groups["math"])] == list(range(12))


async def test_a_front_that_lags_behind_does_not_set_shards_apart():
    """Rows without a label keep their age, so what is most stale depends on the train step of the task."""
    single = ReplayBuffer(StalenessReplayPolicy(), IndexedStorage())
    shards = [ReplayBuffer(StalenessReplayPolicy(), IndexedStorage()) for _ in range(3)]
    ahead, behind, trainer = (ShardedReplayBuffer(shards, StalenessReplayPolicy()) for _ in range(3))
    for front in (ahead, single):
        for number in range(30):
            group = make_group(f"given/{number}", seq_staleness=number % 7)
            await front.put(group, "math")
    for number in range(30):
        await ahead.put(make_group(f"a/{number}", steps=[number % 5]), "math", current_train_step=8)
        await single.put(make_group(f"a/{number}", steps=[number % 5]), "math", current_train_step=8)
    # The one behind says 3 to all of them, the one ahead believes that they know 8.
    for front, step in ((behind, 3), (ahead, 8)):
        await front.put(make_group(f"late/{step}", steps=[2]), "math", current_train_step=step)
        await single.put(make_group(f"late/{step}", steps=[2]), "math", current_train_step=step)
    expected, _ = await single.take_batch({"math": 20})
    groups, _ = await trainer.take_batch({"math": 20})
    assert names(groups["math"]) == names(expected["math"])


@pytest.mark.parametrize("train_step", [None, 4])
@pytest.mark.parametrize("turns", range(0, 24, 3))
async def test_a_cancelled_take_has_taken_nothing(turns, train_step):
    buffer = make_sharded(3)
    await buffer.put_groups([make_group(str(number)) for number in range(9)], "math")
    taking = asyncio.create_task(buffer.take_batch({"math": 6}, train_step=train_step))
    for _ in range(turns):
        await asyncio.sleep(0)
    taking.cancel()
    try:
        groups, _ = await taking
        taken = len(groups["math"])
    except asyncio.CancelledError:
        taken = 0
    assert await buffer.count("math", COMPLETED) == 9 - taken


async def test_several_consumers_share_the_groups():
    shards = [ReplayBuffer(FIFOReplayPolicy(), IndexedStorage()) for _ in range(3)]
    fronts = [ShardedReplayBuffer(shards, FIFOReplayPolicy()) for _ in range(4)]
    for number, front in enumerate(fronts):
        await front.put_groups([make_group(f"{number}/{n}") for n in range(5)], "math")
    taken = await asyncio.gather(*(front.get(4, "math", COMPLETED) for front in fronts))
    assert sorted(name for groups in taken for name in names(groups)) == sorted(
        {name for groups in taken for name in names(groups)}
    )
    assert sum(map(len, taken)) + await fronts[0].count("math", COMPLETED) == 20


async def test_snapshots_of_shards(tmp_path):
    buffer = make_sharded(2)
    await buffer.put_groups([make_group(str(number)) for number in range(9)], "math")
    await buffer.save(tmp_path / "s")
    first = set(os.listdir(tmp_path / "s"))
    await buffer.save(tmp_path / "s")
    assert len(first & set(os.listdir(tmp_path / "s"))) == 1
    with pytest.raises(RuntimeError, match="empty buffer"):
        await buffer.resume(tmp_path / "s")
    with pytest.raises(ValueError, match="same policy"):
        await make_sharded(3, StalenessReplayPolicy).resume(tmp_path / "s")
    with pytest.raises(FileNotFoundError):
        await make_sharded(3).resume(tmp_path / "missing")
    # Of a single buffer, and into one.
    single = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await single.put(make_group("single"), "math")
    await single.save(tmp_path / "one")
    with pytest.raises(ValueError, match="not part of a snapshot of shards"):
        await buffer.save(tmp_path / "one")
    moved = make_sharded(3)
    await moved.resume(tmp_path / "one")
    assert names(await moved.get(9, "math", COMPLETED)) == ["single"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".resharded")]
    (tmp_path / "s" / "shards.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        await make_sharded(2).resume(tmp_path / "s")
