"""The replay buffer as a Ray actor: what it is for, and what becomes of it when its process is killed."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
from production_world import World, train
from replay_factory import make_group, names

from forebay.cluster.buffer import connect_buffer, start_buffer, stop_buffer
from forebay.produce import AsyncProduceStrategyConfig
from forebay.replay import ConnectionLost
from forebay.types import Status

COMPLETED, ARCHIVED = Status.COMPLETED, Status.ARCHIVED


@pytest.fixture
async def started(ray, tmp_path):
    """A buffer on a database."""
    actor = start_buffer(name="buffer", store=str(tmp_path / "buffer.db"), policy="fifo")
    yield actor
    await stop_buffer("buffer")


async def kill(actor):
    pid = await actor.__ray_call__.remote(lambda _: os.getpid())
    os.kill(pid, signal.SIGKILL)


async def test_producers_and_trainer_find_it_by_name(started):
    async with await connect_buffer("buffer") as producer, await connect_buffer("buffer") as trainer:
        assert producer.address.startswith("tcp://127.0.0.1:")
        await producer.put_groups([make_group("a", steps=[0]), make_group("b", steps=[1])], "math")
        await producer.put(make_group("c", steps=[2]), "math", tags={"level": 3})
        groups, _ = await trainer.take_batch({"math": 2}, train_step=3)
        assert names(groups["math"]) == ["a", "b"]
        assert len(trainer) == 1
        assert await trainer.count("math", COMPLETED, tags={"level": 3}) == 1
        assert await trainer.count("math", ARCHIVED) == 2


async def test_after_a_kill_it_is_back_with_all_it_had(started):
    async with await connect_buffer("buffer") as client:
        await client.put_groups([make_group(name, steps=[0]) for name in "abc"], "math")
        await client.take_batch({"math": 1}, train_step=3)
        address = client.address
        await kill(started)
        assert await client.count("math", COMPLETED) == 2
        assert client.address != address
        await client.restore(2)
        assert names(await client.get(9, "math", COMPLETED)) == ["a", "b", "c"]


async def test_wrong_options_are_refused(ray):
    with pytest.raises(ValueError, match="not both"):
        start_buffer(name="never", limit=3, max_live=3)
    with pytest.raises(ValueError, match="never"):
        await connect_buffer("never")
    with pytest.raises(ValueError, match="unknown policy"):
        start_buffer(name="never", policy="fifth")
    actor = start_buffer(name="wrong", store="mysql://host/data")
    with pytest.raises(ValueError, match="SQL store"):
        await connect_buffer("wrong")
    ray.kill(actor)


async def test_a_run_may_have_its_groups_there(ray, tmp_path):
    """The manager's own buffer is replaced by a client; the ledger adds up, evictions included."""
    actor = start_buffer(name="run", store=str(tmp_path / "run.db"), limit=9)
    async with await connect_buffer("run") as buffer:
        strategy = AsyncProduceStrategyConfig(over_sample_threshold=0.5, max_staleness=2, enable_partial_rollout=True)
        world = World(buffer=buffer, strategy=strategy, token_s=0.001, longest=20).build()
        batches = await train(world, 4, 5)
        assert [len(groups) for groups in batches.values()] == [4] * 5
        await world.check_balance()
        assert await buffer.count("t", ARCHIVED) == 0
        # More than fit: whoever puts is told what had to go.
        groups = [make_group(f"late/{number}", steps=[9]) for number in range(12)]
        evicted = []
        enter, buffer.on_evict = buffer.on_evict, evicted.append
        # A slow machine may have evicted some while it trained.
        held, before = len(buffer), buffer.num_evicted.get("t", 0)
        await buffer.put_groups(groups, "t", current_train_step=6)
        assert len(evicted) == held + 12 - 9 == buffer.num_evicted["t"] - before
        assert all(row.item[0].group_id for row in evicted)
        buffer.on_evict = enter
    del actor


async def test_a_kill_while_groups_come_and_go_loses_and_doubles_nothing(ray, tmp_path):
    actor = start_buffer(name="chaos", store=str(tmp_path / "chaos.db"), policy="fifo")
    number, batches = 120, []
    async with await connect_buffer("chaos") as producer, await connect_buffer("chaos") as trainer:

        async def produce(first):
            for n in range(first, number, 4):
                await producer.put(make_group(str(n), steps=[0]), "math")

        async def train():
            step = 0
            while sum(map(len, batches)) < number:
                seen = trainer.version
                groups, _ = await trainer.take_batch({"math": 8}, train_step=(step := step + 1))
                batches.append(names(groups["math"]))
                if not groups["math"]:
                    await trainer.wait_for_change(seen)

        async with asyncio.TaskGroup() as tasks:
            for first in range(4):
                tasks.create_task(produce(first))
            training = tasks.create_task(train())
            while len(batches) < 3:
                await producer.wait_for_change(producer.version)
            await kill(actor)
        assert training.done()
        assert sorted(int(name) for batch in batches for name in batch) == list(range(number))
        # What was consumed is archived under its step, and comes back from there.
        await trainer.restore(1)
        assert len(trainer) == await trainer.count("math", COMPLETED) == number - len(batches[0])
    await stop_buffer("chaos")


async def test_the_example_of_the_page(ray, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "start_buffer" in text]
    scope = {}
    exec(block, scope)
    groups, counts = await scope["run"](tmp_path, [make_group(name, num_tokens=2) for name in "ab"])
    assert (names(groups["math"]), counts) == (["a", "b"], {"math": 2})
    # Ray may know its name for a moment longer than there is a process.
    with pytest.raises((ValueError, ConnectionLost), match=r"groups|died"):
        await connect_buffer("groups")
