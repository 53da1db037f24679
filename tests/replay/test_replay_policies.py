"""The policies on their own, above every store."""

from collections import Counter

import pytest
from replay_factory import make_group, make_row

from forebay.replay import (
    FIFOReplayPolicy,
    IndexedStorage,
    NaiveStorage,
    PrioritizedReplayPolicy,
    StalenessReplayPolicy,
)
from forebay.replay.stores.contract import revive_row
from forebay.types import Status


async def fill(store, priorities):
    for name, priority in priorities.items():
        await store.put(make_row(name, priority=priority))


@pytest.mark.parametrize("policy", [FIFOReplayPolicy, StalenessReplayPolicy, PrioritizedReplayPolicy])
async def test_every_policy_takes_what_matches_and_no_more(store, policy):
    policy = policy()
    for number in range(6):
        await policy.put(make_row(number, status="failed" if number == 0 else "completed"), store)
    assert await policy.count({"status": "completed"}, store) == 5
    first = await policy.get(2, {"status": "completed"}, store)
    rest = await policy.get(99, {"status": "completed"}, store)
    assert (len(first), len(rest)) == (2, 3)
    assert sorted(first + rest) == [1, 2, 3, 4, 5]
    assert await policy.get(1, {"status": "completed"}, store) == []
    assert len(store) == 1


@pytest.mark.parametrize("policy", [FIFOReplayPolicy, StalenessReplayPolicy, PrioritizedReplayPolicy])
async def test_a_rival_process_between_ranking_and_taking(store, make_store, policy):
    """Rows that another process took meanwhile are replaced by the next ones."""

    class WithRival(make_store):
        stolen = ()

        async def take(self, uids, **options):
            if not self.stolen:
                self.stolen = [row.item for row in await super().take(list(uids)[:2], train_step=9)]
            return await super().take(uids, **options)

    store = WithRival()
    await fill(store, dict.fromkeys("abcdef", 1.0))
    taken = await policy().get(4, {"status": "completed"}, store)
    assert sorted([*taken, *store.stolen]) == list("abcdef")


async def test_draws_are_seeded_and_resumed(make_store):
    async def draw(policy, batches):
        store = make_store()
        await fill(store, {n: 1.0 + n % 3 for n in range(30)})
        return [item for _ in range(batches) for item in await policy.get(4, {}, store)]

    assert await draw(PrioritizedReplayPolicy(seed=1), 5) == await draw(PrioritizedReplayPolicy(seed=1), 5)
    assert await draw(PrioritizedReplayPolicy(seed=1), 5) != await draw(PrioritizedReplayPolicy(seed=2), 5)
    one, other = PrioritizedReplayPolicy(seed=1), PrioritizedReplayPolicy(seed=2)
    await draw(one, 2)
    other.load_state_dict(one.state_dict())
    assert await draw(one, 5) == await draw(other, 5)


async def test_draws_are_proportional_to_priority():
    """First draws of 3000 trials against the probabilities; four standard errors of slack, seed fixed."""
    policy, first, trials = PrioritizedReplayPolicy(seed=3), Counter(), 3000
    store = IndexedStorage()
    await fill(store, {"a": 1.0, "b": 2.0, "c": 5.0, "never": 0.0})
    for _ in range(trials):
        (name,) = await policy.get(1, {}, store)
        first[name] += 1
        await fill(store, {name: {"a": 1.0, "b": 2.0, "c": 5.0}[name]})
    for name, share in {"a": 1 / 8, "b": 2 / 8, "c": 5 / 8}.items():
        slack = 4 * (share * (1 - share) / trials) ** 0.5
        assert abs(first[name] / trials - share) < slack
    assert first["never"] == 0


async def test_priority_zero_comes_last_but_comes(store):
    await fill(store, {"zero": 0.0, "a": 0.1, "b": 3.0})
    assert (await PrioritizedReplayPolicy().get(3, {}, store))[2] == "zero"


async def test_priorities_that_change_change_the_draws(make_store):
    """The same numbers draw the same groups, whether a priority was put or came later."""

    async def draw(early, late):
        store, policy = make_store(), PrioritizedReplayPolicy(seed=5)
        await fill(store, dict.fromkeys(range(40), 1.0) | early)
        first = await policy.get(3, {"task_name": "math", "status": "completed"}, store)
        rows = {row.item: row.uid for row in await store.get({})}
        changes = {rows[name]: priority for name, priority in late.items() if name in rows}
        assert await store.update_priorities(changes) == len(changes)
        return first, await policy.get(40, {"task_name": "math", "status": "completed"}, store)

    late = {number: float(number % 4) for number in range(40)}
    first, rest = await draw({}, late)
    assert (await draw(dict.fromkeys(first, 1.0), late)) == (first, rest)
    zeros = [number for number in range(40) if number % 4 == 0 and number not in first]
    assert rest[-len(zeros) :] == zeros


async def test_stores_draw_the_same_groups_for_any_query():
    """An index draws from its sum tree where it can; the scan ranks all rows every time."""
    queries = [
        {"task_name": "math", "status": "completed"},
        {"task_name": "math", "status": "completed", "tags.level": 1},
        {"status": "completed"},
        {"task_name": "math", "status": {"$in": ["aborted", "archived"]}},
        {"task_name": "math"},
    ]
    draws = []
    for store in (IndexedStorage(), NaiveStorage()):
        policy = PrioritizedReplayPolicy(seed=11)
        for round_ in range(4):
            for number in range(60):
                status, task = ("completed", "aborted")[number % 3 == 0], ("math", "code")[number % 5 == 0]
                name = (round_, number)
                row = make_row(name, task, status, tags={"level": number % 2}, priority=number % 7 / 4)
                await store.put(row)
            for query in queries:
                draws.append(await policy.get(3, query, store))
                (row,) = await store.take_drawn(1, query, lambda: 0.5, train_step=round_)
                draws.append(row.item)
            archived = await store.get({"status": "archived"}, rows_only=True)
            await store.update([revive_row(row) for row in archived[::2]])
    half = len(draws) // 2
    assert draws[:half] == draws[half:]


async def test_a_buffer_changes_priorities_by_uid_field_or_tag(buffer):
    for number in range(6):
        await buffer.put(make_group(number), "math" if number < 4 else "code", tags={"level": number % 2})

    async def priorities():
        return [row.priority for row in await buffer.storage.get({}, rows_only=True)]

    assert await buffer.update_priorities({1: 0.5, 77: 3.0}) == 1
    assert await buffer.update_priorities({1: 4}, by="tags.level", task_name="code") == 1
    assert await priorities() == [1.0, 0.5, 1.0, 1.0, 1.0, 4.0]
    assert await buffer.update_priorities({Status.COMPLETED: 2.0, "failed": 3.0}, by="status") == 6
    assert await priorities() == [2.0] * 6
    for wrong, options, named in [
        ({0: 5.0, 1: -1.0}, {}, "-1.0"),
        ({0: 5.0}, {"by": "reward"}, "'reward'"),
        ({(0,): 5.0}, {}, r"\(0,\)"),
    ]:
        with pytest.raises(ValueError, match=named):
            await buffer.update_priorities(wrong, **options)
    assert await priorities() == [2.0] * 6


async def test_what_was_consumed_keeps_its_priority(buffer):
    await buffer.put(make_group("a"), "math", priority=3.0)
    await buffer.put(make_group("b"), "math", priority=3.0)
    await buffer.take_batch({"math": 1}, train_step=1)
    assert await buffer.update_priorities({0: 9.0, 1: 9.0}) == 1
    await buffer.restore(0)
    rows = await buffer.storage.get({}, rows_only=True)
    assert [row.priority for row in rows] == [3.0, 9.0]


def test_damaged_random_state_is_an_error_and_changes_nothing():
    policy = PrioritizedReplayPolicy(seed=1)
    before = policy.state_dict()
    good = before["random"]
    for wrong in ({}, {"random": None}, {"random": {}}, {"random": {**good, "bit_generator": "MT19937"}}):
        with pytest.raises(ValueError, match="random"):
            policy.load_state_dict(wrong)
    for wrong in ({"state": -1, "inc": 1}, {"state": 10**99, "inc": 1}, {"state": "a", "inc": 1}, {}, 3):
        with pytest.raises(ValueError, match="random"):
            policy.load_state_dict({"random": {**good, "state": wrong}})
    assert policy.state_dict() == before


def test_a_policy_without_state_refuses_one():
    FIFOReplayPolicy().load_state_dict({})
    with pytest.raises(ValueError, match="random"):
        FIFOReplayPolicy().load_state_dict(PrioritizedReplayPolicy().state_dict())
