"""Copies of unfinished groups: never older than they may be, no live rows, and gone on with after a kill."""

import asyncio
import copy
import random
from types import SimpleNamespace

import pytest
from production_world import PromptLoop, World

from forebay.aio import virtual_time
from forebay.ledger import Ledger
from forebay.produce import AsyncProduceStrategyConfig
from forebay.produce.recovery import settle
from forebay.produce.unfinished import COPIES, copies_saved, copy_unfinished, save_copies
from forebay.replay import AsyncReplayBufferConfig, IndexedStorage, SQLStorage
from forebay.types import RolloutState, SampleParams, Status

AGE_S, TOKEN_S, BATCH_SIZE = 10.0, 0.1, 3
STRATEGY = AsyncProduceStrategyConfig(
    max_staleness=8, over_sample_threshold=1.0, enable_partial_rollout=True, staleness_rule="correct"
)
KEPT = {"$or": [{"status": {"$ne": "archived"}}, {"status": "archived", "train_step": {"$lt": 9999}}]}
"""Live and consumed groups."""


def make_world(storage=None, limit_s=AGE_S / 2):
    return World(
        strategy=STRATEGY,
        longest=900,
        token_s=TOKEN_S,
        slots=9,
        judge_s=3.0,
        buffer=AsyncReplayBufferConfig().build(storage),
        manager_options={"save_partial_every_s": AGE_S},
        controller_options={"time_limit_s": limit_s, "goes_on": True},
    ).build()


def generating(world):
    return world.manager.task_runners[0].produce_strategy.pending_groups()


def tokens_of(world, groups):
    """Tokens by rollout of the `groups` that are being generated, those at the engine included."""
    at_engine = {
        name: world.engine.num_made(request.request_id) for name, request in world.controller._running.items()
    }
    states = [state for group in groups for state in group]
    return {state.rollout_id: len(state.response_ids) + at_engine.get(state.rollout_id, 0) for state in states}


async def produce(world, rng, look):
    """Take a batch now and then, sometimes pause for a sync, until `look`, at random instants, says stop."""
    manager = world.manager

    async def consume():
        step = 1
        while True:
            result = await manager.get_batch(BATCH_SIZE, step)
            step += bool(result.rollout_states)
            await asyncio.sleep(rng.uniform(0, 20))
            if rng.random() < 0.5:
                await manager.pause_produce()
            await world.controller.update_weights([], step - 1)
            await manager.continue_produce(step - 1)

    tasks = [asyncio.create_task(manager.produce_loop(BATCH_SIZE)), asyncio.create_task(consume())]
    while not await look():
        await asyncio.sleep(rng.uniform(0.01, 4))
        assert not any(task.done() for task in tasks)
    await world.check_balance()
    tasks[1].cancel()
    await manager.shutdown()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("seed", range(3))
def test_no_token_is_unsaved_for_longer_and_a_killed_run_goes_on_from_the_copies(seed, monkeypatch):
    monkeypatch.setattr(PromptLoop, "is_whole_at_awaits", True)
    check_copies(seed, make_world, generating)


def check_copies(seed, make_world, generating):
    """Kill a run of such a world; `generating` gives the groups as they are where they are generated."""
    rng, most_lost, content = random.Random(seed), [], {}

    async def main():
        world, loop = make_world(), asyncio.get_running_loop()
        storage, kill_s = world.buffer.storage, rng.uniform(200, 400)

        async def look():
            # Nothing waits in between: the store is in memory.
            rows, live = await storage.get(COPIES), await storage.get({}, rows_only=True)
            made = tokens_of(world, generating(world))
            saved = {state.rollout_id: state for row in rows for state in row.item}
            # Two for a moment, if a group was taken up again; the first is the older one.
            assert len({row.tags["group"] for row in rows}) * 2 >= len(rows)
            lost = {n: made[n] - (len(saved[n].response_ids) if n in saved else 0) for n in made}
            assert max(lost.values(), default=0) <= AGE_S / TOKEN_S
            most_lost.append(max(lost.values(), default=0))
            for state in (state for group in generating(world) for state in group):
                if (earlier := saved.get(state.rollout_id)) is not None:
                    end = len(earlier.response_ids)
                    assert earlier.response_ids.tolist() == list(range(100, 100 + end))
                    assert (earlier.response_model_steps == state.response_model_steps[:end]).all()
            assert len(world.buffer) == len(live)
            assert not any(row.train_step for row in live)
            if loop.time() < kill_s or not saved.keys() & made.keys():
                return False
            # The process is killed in this instant: the store is all that is left.
            content.update(copy.deepcopy(storage.state_dict()))
            return True

        await produce(world, rng, look)
        # The bound is not met because rollouts are short.
        assert max(most_lost) > 0.6 * AGE_S / TOKEN_S
        left = IndexedStorage()
        left.load_state_dict(content)
        copies = {row.tags["group"]: row.item for row in await left.get(COPIES)}
        held = {row.tags["group"] for row in await left.get(KEPT, rows_only=True)}
        again = make_world(left)
        await again.manager.settle(0)
        rows = await left.get({}, rows_only=True)
        assert sorted(row.tags["group"] for row in rows) == sorted(held | copies.keys())
        continued = copies.keys() - held
        assert continued
        assert {row.status for row in rows if row.tags["group"] in continued} == {Status.ABORTED}
        assert not await left.get(COPIES)
        end_s, requested = loop.time() + 100, {}

        async def later():
            return loop.time() > end_s

        await produce(again, rng, later)
        for request in again.engine.requests:
            requested.setdefault(request.request_id.rsplit(":", 2)[0], len(request.input_ids))
        states = [state for name in continued for state in copies[name] if state.status is Status.ABORTED]
        asked = [state for state in states if state.rollout_id in requested]
        assert asked
        assert all(requested[state.rollout_id] == 1 + len(state.response_ids) for state in asked)
        ended = {state.rollout_id: state for row in await left.get(KEPT) for state in row.item}
        steps = [(ended[state.rollout_id].response_model_steps, state.response_model_steps) for state in asked]
        assert all((later[: len(earlier)] == earlier).all() for later, earlier in steps)

    virtual_time.run(main())


def member(name, status, tokens, **fields):
    state = RolloutState([], rollout_id=name, group_id="t/0", task_name="t", status=status, **fields)
    state.append(tokens, logprobs=[-1.0] * len(tokens), model_step=4)
    return state


def test_a_copy_is_as_a_pause_would_leave_the_group():
    narrowed, whole = SampleParams(max_tokens=5), SampleParams(max_tokens=50)
    group = [
        member("done", Status.COMPLETED, [1, 2], reward={"score": 1.0}, sample_params=whole),
        member("broken", Status.FAILED, [3], error_msg="it broke"),
        member("at work", Status.INIT, [4, 5, 6], sample_params=narrowed, extra_fields={"turns": [1]}),
        member("waits", Status.INIT, []),
    ]
    copied = copy_unfinished(group, whole)
    group[2].append([7], logprobs=[-1.0], model_step=5)
    group[2].extra_fields["turns"].append(2)
    aborted = Status.ABORTED
    assert [state.status for state in copied] == [Status.COMPLETED, aborted, aborted, aborted]
    assert [state.response_ids.tolist() for state in copied] == [[1, 2], [], [4, 5, 6], []]
    assert copied[2].extra_fields == {"turns": [1]}
    assert {state.sample_params for state in copied} == {whole}
    assert copied[0].reward == {"score": 1.0}
    assert copied[1].error_msg is None


@pytest.mark.parametrize("make", [lambda file: IndexedStorage(), SQLStorage], ids=["memory", "sqlite"])
async def test_a_copy_is_replaced_and_is_neither_counted_nor_taken(make, tmp_path):
    buffer, books = AsyncReplayBufferConfig().build(make(tmp_path / "b.db")), Ledger()
    books.record("t/0", "t", "admitted")
    for length in (1, 2, 3):
        group = [member("r", Status.INIT, [*range(length)])]
        await save_copies(buffer, books, {"t": [copy_unfinished(group, None)]})
        (row,) = await buffer.storage.get(COPIES)
        assert row.item[0].response_ids.tolist() == [*range(length)]
        await buffer.restore(0)
        await buffer.commit(99)
        assert await buffer.refresh_staleness({"t": 1}, 99) == {"t": 0}
        assert len(buffer) == 0
        assert not any((await buffer.count_statuses(["t"], set(Status) - {Status.ARCHIVED}))["t"].values())
        assert not await buffer.get(9, "t", Status.ABORTED)
        assert await buffer.take_batch({"t": 9}, train_step=1) == ({"t": []}, {"t": 0})
    # Finished, it is superfluous; and so it would be if the process had been killed before.
    await buffer.put([member("r", Status.COMPLETED, [1, 2, 3, 4])], "t", tags={"group": "t/0"})
    left = copy.deepcopy(await buffer.storage.get(COPIES))
    await save_copies(buffer, books, {})
    assert not await buffer.storage.get(COPIES)
    await buffer.storage.put_many(left)
    await settle(buffer, books, {}, 0)
    assert not await buffer.storage.get(COPIES)
    assert [row.status for row in await buffer.storage.get({})] == [Status.COMPLETED]
    await buffer.close()


def test_a_failed_copy_is_told_and_the_next_is_made_also_with_a_sampler_of_ones_own(caplog):
    class Own:
        """As a user may write one."""

    looks = []

    def pending_groups():
        looks.append(len(looks))
        if len(looks) == 1:
            raise RuntimeError("not now")
        return [[RolloutState([], rollout_id=1, group_id="g", response_ids=[5], status=Status.ABORTED)]]

    async def main():
        runner = SimpleNamespace(
            sampler=Own(),
            agent_loop=SimpleNamespace(is_whole_at_awaits=True),
            produce_strategy=SimpleNamespace(pending_groups=pending_groups),
        )
        buffer, ledger = AsyncReplayBufferConfig().build(IndexedStorage()), Ledger()
        async with copies_saved(buffer, lambda: ledger, {"t": runner}, 2.0):
            await asyncio.sleep(1.5)
            assert "not now" in caplog.text
            await asyncio.sleep(2.0)
            assert len(await buffer.storage.get(COPIES)) == 1
        assert len(looks) == 3

    virtual_time.run(main())
