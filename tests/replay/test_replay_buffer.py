"""The replay buffer's methods, on every store."""

import asyncio
import re
from collections import Counter
from copy import deepcopy

import numpy as np
import pytest
from replay_factory import make_group, make_state, names, same

from forebay.config import ConfigError, parse_config
from forebay.produce.results import TaskResult, summarize
from forebay.replay import (
    AsyncReplayBufferConfig,
    FIFOReplayPolicy,
    IndexedStorage,
    ReplayBuffer,
    StalenessReplayPolicy,
    StorageIndices,
    SyncReplayBufferConfig,
)
from forebay.replay import buffer as buffer_module
from forebay.replay.remote import handover as server_handover
from forebay.replay.reuse import Reuse, ReuseConfig
from forebay.types import Status

COMPLETED, ABORTED, EXPIRED, ARCHIVED = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.ARCHIVED


async def put_named(buffer, text, task="math", **options):
    for name in text:
        await buffer.put(make_group(name, steps=[0]), task, **options)


async def test_put_labels_fills_and_ages(buffer):
    labeled = make_state("g", 0, steps=[1, -1, 4])
    partial = make_state("g", 1, num_tokens=2)
    partial.logprobs = None
    await buffer.put([labeled, partial], "math", model_step=3, current_train_step=6)
    assert labeled.response_model_steps.tolist() == [1, 3, 4]
    assert partial.response_model_steps.tolist() == [3, 3]
    assert np.isnan(partial.logprobs).all()
    assert partial.response_mask.tolist() == [1, 1]
    assert (labeled.seq_staleness, partial.seq_staleness) == (4, 2)
    (row,) = await buffer.storage.get({})
    assert (row.staleness, row.oldest_model_step) == (4, 1)


async def test_put_of_nothing_is_nothing(buffer):
    await buffer.put([], "math", model_step=1, current_train_step=3)
    assert len(buffer) == 0
    assert buffer.version == 0
    assert await buffer.storage.get_train_step("math") is None


@pytest.mark.parametrize(
    "options", [{"stale_threshold": 0}, {"stale_threshold": -1}, {"tags": {"a": None}}, {"priority": float("nan")}]
)
async def test_bad_options_store_nothing(buffer, options):
    with pytest.raises(ValueError, match=r"threshold|tag|priority"):
        await buffer.put(make_group(), "math", **options)
    assert len(buffer) == 0


async def test_ragged_token_fields_store_nothing(buffer):
    state = make_state(num_tokens=3)
    state.response_mask = [1]
    with pytest.raises(ValueError, match="response_mask"):
        await buffer.put([state], "math")
    assert len(buffer) == 0


@pytest.mark.parametrize(("threshold", "expected"), [(3, COMPLETED), (2, EXPIRED), (1, EXPIRED)])
async def test_put_expires_the_whole_group_at_the_threshold(buffer, threshold, expected):
    group = [make_state("g", 0, steps=[5]), make_state("g", 1, steps=[3])]
    await buffer.put(group, "math", current_train_step=6, stale_threshold=threshold)
    assert await buffer.count("math", expected) == len(buffer) == 1
    assert {state.status for state in group} == {expected}
    if expected is EXPIRED:
        assert all(len(state.response_ids) == 0 and state.reward is None for state in group)
        assert group[1].tokens.tolist() == [1, 2, 3]
        (row,) = await buffer.storage.get({})
        assert (row.staleness, row.oldest_model_step) == (2, None)


async def test_a_group_put_as_expired_is_wiped(buffer):
    group = [make_state("g", 0, steps=[5], status=EXPIRED), make_state("g", 1, steps=[3])]
    group[0].reward = {"score": 1.0}
    await buffer.put(group, "math", current_train_step=6)
    (read,) = await buffer.get(1, "math", EXPIRED)
    for state in [*group, *read]:
        assert (len(state.response_ids), state.response, state.reward, state.status) == (0, "", None, EXPIRED)
        assert state.tokens.tolist() == [1, 2, 3]
    assert max(state.seq_staleness for state in read) == 2


async def test_max_staleness_zero_is_exactly_on_policy(buffer):
    """Threshold 1: the weights of the step before are trained on, older ones are not."""
    await buffer.put(make_group("on"), "math", model_step=4, current_train_step=5, stale_threshold=1)
    await buffer.put(make_group("off", steps=[3]), "math", model_step=4, current_train_step=5, stale_threshold=1)
    assert names(await buffer.get(9, "math", COMPLETED)) == ["on"]
    assert names(await buffer.get(9, "math", EXPIRED)) == ["off"]


@pytest.mark.parametrize("status", [Status.FAILED, Status.FILTERED, Status.MAX_TRIES, Status.SKIPPED])
async def test_put_expires_only_completed_and_aborted(buffer, status):
    group = [make_state("g", 0, steps=[0]), make_state("g", 1, steps=[0], status=status)]
    await buffer.put(group, "math", current_train_step=9, stale_threshold=1)
    assert await buffer.count("math", status) == 1


async def test_without_a_known_train_step_the_given_staleness_stands(buffer):
    await buffer.put(make_group("g", steps=[0], seq_staleness=7), "math")
    (row,) = await buffer.storage.get({})
    assert row.staleness == 7
    (group,) = await buffer.get(1, "math", COMPLETED)
    assert [state.seq_staleness for state in group] == [7, 7]


async def test_without_labels_the_given_staleness_stands(buffer):
    await buffer.put(make_group("g", seq_staleness=7, status=ABORTED), "math")
    assert await buffer.refresh_staleness({"math": 9}, 20) == {"math": 0}
    assert await buffer.storage.count({"staleness": 7}) == 1
    (group,) = await buffer.get(1, "math", ABORTED)
    assert [state.seq_staleness for state in group] == [7, 7]


async def test_a_put_uses_the_train_step_seen_before(buffer):
    await put_named(buffer, "a", current_train_step=5)
    await buffer.put(make_group("b", steps=[1]), "math", stale_threshold=3)
    assert await buffer.count("math", EXPIRED) == 1


async def test_staleness_is_right_whenever_a_group_is_read(buffer):
    group = [make_state("g", 0, steps=[3]), make_state("g", 1, steps=[1, 5]), make_state("g", 2, num_tokens=0)]
    await buffer.put(group, "math", current_train_step=6)
    await buffer.put(make_group("other"), "math", current_train_step=9)
    assert await buffer.storage.count({"staleness": 7}) == 1
    taken, _ = await buffer.take_batch({"math": 1}, train_step=9)
    assert [state.seq_staleness for state in taken["math"][0]] == [5, 7, 0]
    await buffer.restore(0)
    (read, _) = await buffer.get(2, "math", COMPLETED)
    assert [state.seq_staleness for state in read] == [5, 7, 0]


async def test_get_removes_in_order_and_by_tags(buffer):
    await put_named(buffer, "ab", tags={"level": 1})
    await put_named(buffer, "c", tags={"level": 2})
    await put_named(buffer, "d", task="code", tags={"level": 2})
    assert await buffer.get(0, "math", COMPLETED) == await buffer.get(-3, "math", COMPLETED) == []
    assert await buffer.count("math", COMPLETED, tags={"level": 1}) == 2
    assert names(await buffer.get(5, "math", COMPLETED, tags={"level": 2})) == ["c"]
    assert names(await buffer.get(1, "math", COMPLETED)) == ["a"]
    assert names(await buffer.get(5, "math", COMPLETED)) == ["b"]
    assert await buffer.get(5, "math", COMPLETED) == []
    assert len(buffer) == 1


async def test_get_hands_out_the_objects_that_were_put(buffer):
    group = make_group()
    await buffer.put(group, "math")
    (got,) = await buffer.get(1, "math", COMPLETED)
    assert type(got) is list
    assert all(a is b for a, b in zip(got, group, strict=True))


async def test_counts_have_every_cell(buffer):
    await put_named(buffer, "ab")
    assert await buffer.count_statuses(["math", "none"], [COMPLETED, ABORTED]) == {
        "math": {COMPLETED: 2, ABORTED: 0},
        "none": {COMPLETED: 0, ABORTED: 0},
    }
    assert await buffer.count_statuses({"math": 9}, iter([COMPLETED])) == {"math": {COMPLETED: 2}}
    assert await buffer.count("none", COMPLETED) == 0


async def test_is_ready(buffer):
    await put_named(buffer, "ab")
    assert await buffer.is_ready({"math": 2, "code": 0})
    assert await buffer.is_ready({})
    assert not await buffer.is_ready({"math": 3})
    assert not await buffer.is_ready({"math": 1, "code": 1})
    assert not await buffer.is_ready({"math": 1}, ABORTED)


async def test_take_batch_without_a_train_step_deletes(buffer):
    await put_named(buffer, "abc")
    groups, counts = await buffer.take_batch({"math": 2, "code": 0, "none": 4})
    assert (names(groups["math"]), groups["code"], groups["none"]) == (["a", "b"], [], [])
    assert counts == {"math": 2, "code": 0, "none": 0}
    assert await buffer.count("math", ARCHIVED) == 0
    await buffer.restore(0)
    assert len(buffer) == 1


async def test_what_a_crashed_trainer_took_comes_back_as_it_was(buffer):
    """Taken is not gone: status, place in the order and content, whatever the trainer did to its copies."""
    for name in "abcd":
        fields = {"mm_info": {"pixels": [np.zeros(3)]}, "extra_fields": {"deep": {"list": [1]}}}
        await buffer.put(make_group(name, steps=[0], **fields), "math", tags={"x": 1}, priority=2.0)
    await buffer.get(1, "math", COMPLETED)
    before = await buffer.storage.get({})
    content = deepcopy([row.item for row in before])
    groups, _ = await buffer.take_batch({"math": 2}, train_step=5)
    assert names(groups["math"]) == ["b", "c"]
    assert same(groups["math"], [list(group) for group in content[:2]])
    assert (len(buffer), await buffer.count("math", ARCHIVED)) == (1, 2)
    for state in groups["math"][0]:
        state.response_ids = None
        state.status = Status.FAILED
        state.message[0]["content"] = "changed"
        state.mm_info["pixels"].clear()
        state.extra_fields["deep"]["list"].append(2)
    await buffer.restore(4)
    after = await buffer.storage.get({})
    assert after == before
    assert same([list(row.item) for row in after], [list(group) for group in content])


async def test_commit_forgets_and_restore_brings_back_only_what_came_after(buffer):
    await put_named(buffer, "abcdef")
    for step in (1, 2, 3):
        await buffer.take_batch({"math": 2}, train_step=step)
    await buffer.commit(1)
    assert await buffer.count("math", ARCHIVED) == 4
    await buffer.restore(2)
    assert names(await buffer.get(9, "math", COMPLETED)) == ["e", "f"]
    await buffer.restore(0)
    assert names(await buffer.get(9, "math", COMPLETED)) == ["c", "d"]
    await buffer.restore(0)
    assert len(buffer) == await buffer.count("math", ARCHIVED) == 0


async def test_restored_groups_go_before_later_arrivals(buffer):
    await put_named(buffer, "ab")
    await buffer.take_batch({"math": 2}, train_step=1)
    await put_named(buffer, "c")
    await buffer.restore(0)
    assert names(await buffer.get(9, "math", COMPLETED)) == ["a", "b", "c"]


async def test_groups_that_may_be_used_again_are_kept_and_handed_out(make_store):
    buffer = ReplayBuffer(FIFOReplayPolicy(), make_store(), reuse=Reuse(times=2, stale_threshold=3))
    await put_named(buffer, "d")
    for name, score in [("c", None), ("a", 0.0), ("b", 0.0)]:
        group = make_group(name, steps=[0])
        group[0].reward = {"score": score}
        await buffer.put(group, "math", current_train_step=1)
    await buffer.take_batch({"math": 4}, train_step=1)
    await buffer.commit(1)
    assert await buffer.count_usable(["math"], 2) == {"math": 2}
    used = await buffer.use_again({"math": 1}, 2)
    assert names(used["math"]) == ["b"]
    assert (used["math"][0][0].seq_staleness, used["math"][0][0].logprobs[0]) == (1, -0.5)
    assert await buffer.count_usable(["math"], 4) == {"math": 0}
    await buffer.restore(1)
    assert names((await buffer.use_again({"math": 9}, 3))["math"]) == ["b", "a"]
    assert len(buffer) == 0
    await buffer.restore(0)
    assert names(await buffer.get(9, "math", COMPLETED))[-2:] == ["a", "b"]


async def test_archived_groups_are_outside_len_limit_and_other_statuses(make_store):
    buffer = ReplayBuffer(FIFOReplayPolicy(), make_store(), limit=2)
    await put_named(buffer, "abc")
    await buffer.take_batch({"math": 2}, train_step=1)
    await put_named(buffer, "de")
    assert len(buffer) == 2
    assert await buffer.count("math", COMPLETED) == 2
    assert await buffer.count("math", ARCHIVED) == 2
    assert buffer.num_evicted == {"math": 1}
    assert names(await buffer.get(9, "math", ARCHIVED)) == ["b", "c"]
    assert await buffer.count("math", ARCHIVED) == 0


async def test_the_limit_evicts_what_arrived_first_and_counts_it(make_store):
    evicted = []
    buffer = ReplayBuffer(FIFOReplayPolicy(), make_store(), limit=3, on_evict=evicted.append)
    long_aborted = make_group("long", status=ABORTED, num_tokens=500)
    await buffer.put(long_aborted, "code")
    await put_named(buffer, "abcd")
    assert len(buffer) == 3
    assert [(item.item[0].group_id, item.task_name) for item in evicted] == [("long", "code"), ("a", "math")]
    assert buffer.num_evicted == {"code": 1, "math": 1}
    assert names(await buffer.get(9, "math", COMPLETED)) == ["b", "c", "d"]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_positive(make_store, limit):
    with pytest.raises(ValueError, match="limit"):
        ReplayBuffer(FIFOReplayPolicy(), make_store(), limit=limit)


async def test_refresh_expires_by_task_and_keeps_the_bound_everywhere(buffer):
    """Not only the oldest end: the stale group lies in the middle of the order of arrival."""
    for name, step in (("a", 5), ("b", 2), ("c", 6)):
        await buffer.put(make_group(name, steps=[step]), "math", current_train_step=6)
    await buffer.put(make_group("z", steps=[0]), "code", current_train_step=6)
    await buffer.put(make_group("f", steps=[0], status=Status.FAILED), "math")
    expired = await buffer.refresh_staleness(task_stale_thresholds={"math": 3, "none": 1}, current_train_step=7)
    assert expired == {"math": 1, "none": 0}
    (group,) = await buffer.get(9, "math", EXPIRED)
    assert [(s.group_id, s.seq_staleness, len(s.response_ids)) for s in group] == [("b", 4, 0), ("b", 4, 0)]
    assert await buffer.storage.count({"staleness": {"$gte": 3}, "status": COMPLETED}) == 1
    assert names(await buffer.get(9, "math", COMPLETED)) == ["a", "c"]
    assert names(await buffer.get(9, "code", COMPLETED)) == ["z"]


async def test_an_expired_group_keeps_its_place(buffer):
    await buffer.put(make_group("a", status=EXPIRED), "math")
    await buffer.put(make_group("b", steps=[0]), "math", current_train_step=1)
    await buffer.put(make_group("c", status=EXPIRED), "math")
    await buffer.refresh_staleness({"math": 2}, 5)
    assert names(await buffer.get(9, "math", EXPIRED)) == ["a", "b", "c"]


async def test_an_expired_group_keeps_the_staleness_it_reached(buffer):
    await buffer.put(make_group("a", steps=[2]), "math", current_train_step=3)
    await buffer.refresh_staleness({"math": 3}, 7)
    await buffer.refresh_staleness({"math": 3}, 9)
    assert await buffer.storage.count({"status": EXPIRED, "staleness": 4, "oldest_model_step": None}) == 1


async def test_refresh_expires_only_the_statuses_asked_for(buffer):
    await buffer.put(make_group("a", steps=[0], status=ABORTED), "math")
    await put_named(buffer, "b")
    assert await buffer.refresh_staleness({"math": 1}, 9, statuses=[ABORTED, Status.FAILED]) == {"math": 1}
    assert await buffer.count("math", COMPLETED) == 1


async def test_refresh_of_many_lets_the_loop_turn(buffer):
    for number in range(200):
        await buffer.put([make_state(number, steps=[0])], "math", current_train_step=1)
    turns = 0

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    assert await buffer.refresh_staleness({"math": 2}, 5) == {"math": 200}
    counting.cancel()
    assert turns > 2


@pytest.mark.parametrize("train_step", [None, 3])
async def test_a_large_batch_lets_the_loop_turn_and_can_be_cancelled(buffer, monkeypatch, train_step):
    monkeypatch.setattr(buffer_module, "COPY_AT_ONCE", 2)
    await put_named(buffer, "abcdef")
    handing_out = asyncio.Event()

    def noting(original):
        def note(*args, **options):
            handing_out.set()
            return original(*args, **options)

        return note

    # Here, and where the same test is run through a server.
    for module, name in ((buffer_module, "hand_out"), (server_handover, "pack_out")):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    taking = asyncio.create_task(buffer.take_batch({"math": 6}, train_step=train_step))
    await handing_out.wait()
    assert not taking.done()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert len(buffer) == 6
    groups, _ = await buffer.take_batch({"math": 6}, train_step=train_step)
    assert names(groups["math"]) == list("abcdef")


async def test_a_keyword_that_no_put_has_is_refused_by_name(buffer):
    with pytest.raises(TypeError, match="stale_treshold"):
        await buffer.put_groups([make_group("a")], "math", stale_treshold=2)
    assert len(buffer) == 0


async def test_a_bad_threshold_changes_nothing(buffer):
    await put_named(buffer, "a", current_train_step=1)
    with pytest.raises(ValueError, match="code"):
        await buffer.refresh_staleness({"math": 1, "code": 0}, 9)
    assert await buffer.storage.get_train_step("math") == 1


async def test_most_stale_first_ties_in_arrival_order(make_store):
    buffer = ReplayBuffer(StalenessReplayPolicy(), make_store())
    for name, step in (("a", 3), ("b", 1), ("c", 3), ("d", 1), ("e", 0)):
        await buffer.put(make_group(name, steps=[step]), "math", current_train_step=4)
    await buffer.put(make_group("given", seq_staleness=2), "math")
    assert names(await buffer.get(3, "math", COMPLETED)) == ["e", "b", "d"]
    await buffer.take_batch({"math": 1}, train_step=5)
    await buffer.refresh_staleness({"math": 99}, 7)
    await buffer.restore(4)
    assert names(await buffer.get(9, "math", COMPLETED)) == ["a", "c", "given"]


async def test_a_waiting_consumer_is_woken_by_a_put(buffer):
    async def consume():
        seen = buffer.version
        while not await buffer.is_ready({"math": 2}):
            seen = await buffer.wait_for_change(seen)
        return await buffer.get(2, "math", COMPLETED)

    consumers = [asyncio.create_task(consume()) for _ in range(2)]
    await asyncio.sleep(0)
    await put_named(buffer, "ab")
    done, waiting = await asyncio.wait(consumers, return_when=asyncio.FIRST_COMPLETED)
    (task,) = done
    assert names(task.result()) == ["a", "b"]
    await put_named(buffer, "cd")
    assert names(await waiting.pop()) == ["c", "d"]


async def test_reading_nothing_wakes_nobody(buffer):
    await put_named(buffer, "a", current_train_step=1)
    seen = buffer.version
    await buffer.get(5, "code", COMPLETED)
    await buffer.take_batch({"code": 5}, train_step=1)
    await buffer.refresh_staleness({"math": 5}, 2)
    await buffer.restore(0)
    await buffer.commit(9)
    await buffer.is_ready({"math": 1})
    assert buffer.version == seen
    for change in (buffer.get(1, "math", COMPLETED), buffer.put(make_group(), "math")):
        await change
        assert buffer.version > seen
        seen = buffer.version


async def test_competing_takers_get_each_group_once(buffer):
    await put_named(buffer, "abcdefghij")
    batches = await asyncio.gather(*(buffer.get(3, "math", COMPLETED) for _ in range(5)))
    assert sorted(name for batch in batches for name in names(batch)) == list("abcdefghij")


async def test_a_policy_written_by_a_user(make_store):
    """It may rank in Python and delete instead of take; its groups are archived all the same."""

    class Longest(FIFOReplayPolicy):
        async def get(self, count, query, storage_backend):
            rows = await storage_backend.get(query)
            rows.sort(key=lambda row: -len(row.item[0].response_ids))
            await storage_backend.delete([row.uid for row in rows[:count]])
            return [row.item for row in rows[:count]]

    buffer = ReplayBuffer(Longest(), make_store())
    for name, length in (("a", 1), ("b", 3), ("c", 2)):
        await buffer.put(make_group(name, num_tokens=length), "math")
    groups, _ = await buffer.take_batch({"math": 2}, train_step=1)
    assert names(groups["math"]) == ["b", "c"]
    assert len(buffer) == 1
    await buffer.restore(0)
    assert len(buffer) == 3


def test_groups_of_equal_scores_are_used_again_where_no_scores_are_compared():
    group = [make_state(member=member) for member in range(2)]
    rules = ReuseConfig(times=2)
    assert [rules.build(compares=compares).rank(group) for compares in (True, False)] == [0.0, 1.0]
    with pytest.raises(ConfigError, match="leave it at 'newest'"):
        ReuseConfig(times=2, order="priority").check("tis", "drop", compares=False)


def test_the_groups_of_a_batch_by_outcome():
    new, past, other = ([make_state(str(i))] for i in range(3))
    parts = {
        "a": TaskResult(rollout_states=[new, past], reuse=Counter(past_groups=1)),
        "b": TaskResult(rollout_states=[other]),
    }
    assert summarize(parts, {}).by_outcome() == {"trained": [new, other], "reused": [past]}


async def test_the_configs_build_what_they_say():
    sync = SyncReplayBufferConfig(limit=5, reuse={"times": 2, "max_staleness": 3}).build()
    assert (type(sync.policy), sync.limit, sync.reuse) == (FIFOReplayPolicy, 5, Reuse(times=2, stale_threshold=4))
    assert isinstance(AsyncReplayBufferConfig().build().policy, StalenessReplayPolicy)
    with pytest.raises(ConfigError, match="did you mean 'limit'"):
        parse_config(SyncReplayBufferConfig, {"limits": 3})
    with pytest.raises(ConfigError, match="limit"):
        parse_config(SyncReplayBufferConfig, {"limit": 0})
    for kind in (SyncReplayBufferConfig, AsyncReplayBufferConfig):
        for wrong in ({"limits": 3}, {"limit": 0}, {"limit": "many"}, {"reuse": {"times": 0}}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                kind(**wrong)
        assert isinstance(kind().build().storage, IndexedStorage)
    assert isinstance(ReplayBuffer(FIFOReplayPolicy()).storage, IndexedStorage)


async def test_queries_by_indices_on_the_buffers_store(buffer):
    await put_named(buffer, "ab", tags={"x": True})
    assert await buffer.storage.count(StorageIndices("math", COMPLETED, {"x": True})) == 2


@pytest.mark.parametrize("train_step", [None, 4])
async def test_a_batch_that_fails_half_way_is_given_back(make_store, train_step):
    class FailsOnCode(FIFOReplayPolicy):
        async def get(self, count, query, storage_backend):
            if query["task_name"] == "code":
                raise OSError("disk")
            return await super().get(count, query, storage_backend)

    buffer = ReplayBuffer(FailsOnCode(), make_store())
    await put_named(buffer, "ab")
    before = await buffer.storage.get({})
    with pytest.raises(OSError, match="disk"):
        await buffer.take_batch({"math": 2, "code": 1}, train_step=train_step)
    after = await buffer.storage.get({})
    assert [row.item for row in after] == [row.item for row in before]
    if train_step is not None:
        assert after == before
    assert await buffer.count("math", ARCHIVED) == 0


@pytest.mark.parametrize("train_step", [None, 4])
async def test_a_batch_that_is_cancelled_half_way_is_given_back(make_store, train_step):
    class Waits(FIFOReplayPolicy):
        async def get(self, count, query, storage_backend):
            groups = await super().get(count, query, storage_backend)
            waiting.set()
            await asyncio.Event().wait()
            return groups

    waiting = asyncio.Event()
    buffer = ReplayBuffer(Waits(), make_store())
    await put_named(buffer, "ab")
    taking = asyncio.create_task(buffer.take_batch({"math": 2}, train_step=train_step))
    await waiting.wait()
    assert len(buffer) == 0
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert names(row.item for row in await buffer.storage.get({})) == ["a", "b"]
    assert await buffer.count("math", ARCHIVED) == 0


@pytest.mark.parametrize("name", ["model_step", "current_train_step", "stale_threshold"])
@pytest.mark.parametrize("value", [1.5, float("nan"), "3"])
async def test_steps_and_thresholds_are_whole_numbers(buffer, name, value):
    words = name.replace("stale_threshold", "the stale threshold of task 'math'")
    with pytest.raises(ValueError, match=f"{words} must be a whole number, got {value!r}; give an int"):
        await buffer.put(make_group(), "math", **{name: value})
    # A server has its own words.
    with pytest.raises(ValueError, match=r"must be a whole number|Expected `int"):
        await buffer.refresh_staleness({"math": value}, 3)
    with pytest.raises(ValueError, match=r"must be a whole number|Expected `int"):
        await buffer.take_batch({"math": 1}, train_step=value)
    for back in (buffer.commit, buffer.restore):
        with pytest.raises(ValueError, match=r"must be a whole number|Expected `int"):
            await back(value)
    assert len(buffer) == 0


@pytest.mark.parametrize("size", [1.0, float("nan"), True, "1", [1], None], ids=repr)
async def test_a_batch_size_that_is_no_whole_number_is_the_same_error_everywhere(buffer, size):
    await put_named(buffer, "ab")
    for take in (lambda: buffer.get(size, "math", COMPLETED), lambda: buffer.take_batch({"math": size})):
        said = f"the batch size of task 'math' must be a whole number, got {size!r}; give an int"
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            await take()
    assert len(buffer) == 2


async def test_a_huge_batch_size_takes_all_and_a_negative_one_nothing(buffer):
    await put_named(buffer, "abcd")
    for size in (0, -1, -(2**70)):
        assert await buffer.get(size, "math", COMPLETED) == []
        assert await buffer.take_batch({"math": size}) == ({"math": []}, {"math": 0})
    assert len(buffer) == 4
    assert names(await buffer.get(np.int64(1), "math", COMPLETED)) == ["a"]
    assert names(await buffer.get(2**70, "math", COMPLETED)) == ["b", "c", "d"]
    await put_named(buffer, "ef")
    taken, counts = await buffer.take_batch({"math": 2**70}, train_step=3)
    assert (names(taken["math"]), counts) == (["e", "f"], {"math": 2})


async def test_no_group_at_all_is_no_empty_group(buffer):
    await buffer.put([], "math")
    with pytest.raises(TypeError, match="NoneType"):
        await buffer.put(None, "math")
    assert len(buffer) == 0
