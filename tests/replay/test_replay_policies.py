"""The policies on their own, above every store."""

from collections import Counter

import pytest
from replay_factory import make_row

from forebay.replay import FIFOReplayPolicy, IndexedStorage, PrioritizedReplayPolicy, StalenessReplayPolicy


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


def test_a_policy_without_state_refuses_one():
    FIFOReplayPolicy().load_state_dict({})
    with pytest.raises(ValueError, match="random"):
        FIFOReplayPolicy().load_state_dict(PrioritizedReplayPolicy().state_dict())
