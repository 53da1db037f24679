"""The ledger of a real manager over a real buffer: balanced after every step, whatever happened in it."""

import asyncio
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sync_production import ScriptedLoop, make_manager

from forebay.ledger import Ledger
from forebay.produce import ProductionError, has_reward_variance
from forebay.replay import SyncReplayBufferConfig
from forebay.types import Status


async def balance_of(manager):
    live = {}
    for name in manager.task_names:
        live[name] = await manager.replay_buffer.storage.count({"task_name": name})
    return manager.ledger.balance(live)


@given(
    seed=st.integers(0, 2**32),
    limit=st.none() | st.integers(4, 9),
    share_bad=st.floats(0, 0.6),
    interruptions=st.lists(st.none() | st.integers(0, 60), min_size=2, max_size=5),
)
@settings(deadline=None)
def test_generated_is_trained_plus_dropped_plus_live(tmp_path_factory, seed, limit, share_bad, interruptions):
    """Groups fail, are filtered, evicted, cancelled half-way and retried, over two tasks."""
    rng = random.Random(seed)

    def outcome(index):
        if rng.random() < share_bad:
            return rng.choice([OSError("no disk"), [1.0, 1.0], Status.ABORTED, Status.FAILED])
        return [0.0, 1.0]

    folder = tmp_path_factory.mktemp("run")

    async def produce():
        loops = {name: ScriptedLoop(outcome, lambda index: rng.randrange(4)) for name in ("a", "b")}
        buffer = SyncReplayBufferConfig(limit=limit).build()
        manager = make_manager(loops, filter_fn=has_reward_variance, buffer=buffer)
        manager.ledger = Ledger(folder / "ledger.jsonl")
        for step, turns in enumerate(interruptions, start=1):
            task = asyncio.create_task(manager.produce_batch(4, step, step - 1))
            for _ in range(10**6 if turns is None else turns):
                if task.done():
                    break
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), ProductionError)
            balance = await balance_of(manager)
            assert balance.ok, balance
        manager.ledger.close()
        return manager.ledger.state_dict()

    state = asyncio.run(produce())
    assert Ledger.read(folder / "ledger.jsonl").state_dict() == state


async def test_lengths_times_and_first_scores_outlive_the_wiped_rollouts():
    loop = ScriptedLoop(lambda index: [1.0, 1.0] if index == 0 else [0.0, 1.0])
    manager = make_manager({"t": loop}, filter_fn=has_reward_variance)
    await manager.produce_batch(1, 1, 0)
    dropped, trained = (manager.ledger.life(f"t/{index}", "t") for index in (0, 1))
    assert (dropped.place, dropped.reason, dropped.score, dropped.num_tokens) == ("dropped", "filtered", 1.0, 6)
    assert (trained.place, trained.train_step, trained.score, trained.num_tokens) == ("trained", 1, 0.5, 6)
    assert trained.latency_s is not None


async def test_a_group_that_is_taken_up_again_is_retried_not_admitted_twice(tmp_path):
    loop = ScriptedLoop(delay=lambda index: 10**9)
    manager = make_manager({"t": loop})
    manager.ledger = Ledger(tmp_path / "ledger.jsonl")
    step = asyncio.create_task(manager.produce_batch(2, 1, 0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert manager.ledger.count_live() == {"t": 2}
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    loop.delay = lambda index: 0
    await manager.produce_batch(2, 1, 0)
    manager.ledger.close()
    events = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event["group"] == "t/1"] == [
        "admitted",
        "retried",
        "produced",
        "trained",
    ]
