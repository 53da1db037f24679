"""A buffer in another process behaves as one in this one: the buffer's own tests, through a socket."""

import asyncio
import inspect
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import test_replay_buffer as local
from replay_factory import make_group, make_state, names, same

from forebay.io.channel import MAX_HEADER_BYTES, Channel
from forebay.io.messages import Answer, encode_value
from forebay.replay import FIFOReplayPolicy, IndexedStorage, RemoteReplayBuffer, ReplayBuffer, SQLStorage, serve
from forebay.types import ROLLOUT_FIELDS, RolloutState, SampleParams, Status

COMPLETED, ABORTED, EXPIRED, ARCHIVED = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.ARCHIVED

OF_ONE_PROCESS = {
    # Between "ready" and "get" another client may be faster.
    "test_a_waiting_consumer_is_woken_by_a_put",
    # Objects do not travel.
    "test_get_hands_out_the_objects_that_were_put",
    "test_what_a_crashed_trainer_took_comes_back_as_it_was",
}
"""The local tests that hold only within one process."""

for _name, _test in inspect.getmembers(local, inspect.isfunction):
    _parameters = inspect.signature(_test).parameters
    if _name.startswith("test_") and "buffer" in _parameters and _name not in OF_ONE_PROCESS:
        globals()[_name] = _test


def test_the_local_tests_are_run_here_too():
    assert sum(name.startswith("test_") and hasattr(local, name) for name in globals()) > 20


HERE_ONLY = {"to_pandas", "moment", "count_usable", "use_again"}
"""Methods that need objects of the server's process or `reuse`, which a client lacks, or are blocks in it."""


def test_a_client_says_that_it_uses_no_group_again():
    assert RemoteReplayBuffer.reuse is None


@pytest.mark.parametrize("name", [name for name in vars(ReplayBuffer) if name[0] != "_"])
def test_every_method_is_there_with_the_same_signature(name):
    if name not in HERE_ONLY:
        local_one, remote_one = getattr(ReplayBuffer, name), getattr(RemoteReplayBuffer, name)
        assert isinstance(local_one, property) == isinstance(remote_one, property)
        if not isinstance(local_one, property):
            assert inspect.signature(remote_one) == inspect.signature(local_one)


@pytest.fixture(params=["memory", "sqlite"])
async def served(request, tmp_path):
    """The buffer on the server's side."""
    storage = IndexedStorage() if request.param == "memory" else SQLStorage(tmp_path / "buffer.db")
    buffer = ReplayBuffer(FIFOReplayPolicy(), storage)
    yield buffer
    await buffer.close()


@pytest.fixture
async def buffer(served, tmp_path):
    async with serve(served, tmp_path / "socket"), await RemoteReplayBuffer.connect(tmp_path / "socket") as remote:
        # The local tests look into the store.
        remote.storage = served.storage
        yield remote


RARE = {
    "nested": {"tuple": (1, (2.5, None)), "bytes": b"\x00\xff", 3: "integer key", "$array": "no array"},
    "floats": [float("nan"), float("inf"), -0.0, np.float32(1.5), np.int64(-7)],
    "arrays": [
        np.arange(12.0).reshape(3, 4)[:, ::2],
        np.array(["a", None], object),
        np.zeros((0, 2), ">i2"),
        np.zeros(2, [("Offset", "<i4")]),
    ],
    "large": [2**70, -(2**63), 2**64],
    "text": "\ud800 \x00 |O",
    "status": Status.FAILED,
}


async def test_every_value_arrives_as_it_was(buffer):
    plain = RolloutState([])
    rare = make_state(
        "r", steps=[3, 4], extra_fields=RARE, mm_info={"pixels": np.zeros((2, 2), np.uint8)}, routed_experts=(1,)
    )
    rare.sample_params, rare.response_mask, rare.tokens = SampleParams(stop=("a",), seed=3), [1, 0], [5]
    rare.message = [{"role": "user", "content": [{"type": "image", "data": b"x"}]}]
    ragged = make_state("s", steps=[1], status=ABORTED)
    ragged.prompt_ids = np.arange(300)
    groups = [[plain], [rare, make_state("r", 1, num_tokens=5)], [ragged]]
    for group in groups:
        await buffer.put(group, "math", model_step=7, current_train_step=9)
    arrived = [
        *await buffer.get(1, "math", Status.INIT),
        *await buffer.get(1, "math", COMPLETED),
        *await buffer.get(1, "math", ABORTED),
    ]
    assert same(arrived, groups)
    for group in arrived:
        for state in group:
            for name in ROLLOUT_FIELDS:
                if isinstance(value := getattr(state, name), np.ndarray):
                    assert value.flags.writeable
                    assert value.flags.aligned


async def test_what_a_client_cannot_send_stores_nothing(buffer):
    with pytest.raises(ValueError, match=r"extra_fields\['what'\]"):
        await buffer.put([make_state(extra_fields={"what": object()})], "math")
    with pytest.raises(ValueError, match="argument cannot be sent"):
        await buffer.put(make_group(), "math", current_train_step=2**70)
    assert await buffer.count("math", COMPLETED) == 0


async def test_arguments_of_another_kind_are_errors_of_the_call_alone(buffer):
    with pytest.raises(ValueError, match="train_step"):
        await buffer.commit(2.5)
    with pytest.raises(ValueError, match="group_status"):
        await buffer.count("math", "done")
    await buffer.put(make_group("a"), "math", current_train_step=np.int64(3))
    assert len(buffer) == 1


async def test_arguments_too_large_for_a_message_are_refused_before_they_are_sent(buffer):
    await buffer.put(make_group("a"), "math")
    assert await buffer.update_priorities(dict.fromkeys(range(20_000), 2.0)) == 1
    with pytest.raises(ValueError, match="make several calls"):
        await buffer.update_priorities(dict.fromkeys(range(200_000), 2.0))
    assert await buffer.count("math", COMPLETED) == 1


async def test_a_message_too_large_for_its_receiver_is_not_sent():
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        channel = Channel(here, max_frame_bytes=1)
        with pytest.raises(ValueError, match="ask for less at once"):
            await channel.send(Answer(1, encode_value("x" * MAX_HEADER_BYTES)))
        with pytest.raises(BlockingIOError):
            there.recv(1)


async def test_what_a_crashed_trainer_took_can_be_restored(buffer, served):
    await local.put_named(buffer, "abc")
    groups, counts = await buffer.take_batch({"math": 2, "code": 0, "none": 3}, train_step=5)
    assert (names(groups["math"]), groups["code"], groups["none"]) == (["a", "b"], [], [])
    assert counts == {"math": 2, "code": 0, "none": 0}
    assert len(buffer) == len(served) == 1
    await buffer.restore(4)
    assert len(buffer) == 3
    assert names(await buffer.get(9, "math", COMPLETED)) == ["a", "b", "c"]


async def test_a_batch_without_a_train_step_is_gone_once_it_arrived(buffer, served):
    await local.put_named(buffer, "abc")
    groups, counts = await buffer.take_batch({"math": 2})
    assert (names(groups["math"]), counts) == (["a", "b"], {"math": 2})
    assert await served.storage.count({"status": {"$in": list(Status)}}) == 1
    await buffer.restore(0)
    assert len(buffer) == 1


async def test_archived_groups_can_be_taken_out(buffer, served):
    await local.put_named(buffer, "ab")
    await buffer.take_batch({"math": 2}, train_step=3)
    assert names(await buffer.get(1, "math", ARCHIVED)) == ["a"]
    assert await served.count("math", ARCHIVED) == 1


async def test_every_waiting_consumer_gets_its_share(buffer):
    async def consume():
        groups = []
        seen = buffer.version
        while len(groups) < 2:
            groups += await buffer.get(2 - len(groups), "math", COMPLETED)
            if len(groups) < 2:
                seen = await buffer.wait_for_change(seen)
        return names(groups)

    consumers = [asyncio.create_task(consume()) for _ in range(2)]
    await local.put_named(buffer, "ab")
    await local.put_named(buffer, "cd")
    assert sorted(name for found in await asyncio.gather(*consumers) for name in found) == list("abcd")


async def test_a_waiting_call_holds_up_no_other(buffer):
    waiting = asyncio.create_task(buffer.wait_for_change(buffer.version))
    assert await buffer.count("math", COMPLETED) == 0
    assert not waiting.done()
    await local.put_named(buffer, "a")
    assert await waiting > 0


async def test_many_large_batches_at_once(buffer):
    """Some megabytes in parts, calls of the same client interleaved."""
    for number in range(40):
        await buffer.put(make_group(number, num_tokens=4000, extra_fields={"text": "x" * 50_000}), "math")
    batches = await asyncio.gather(*(buffer.get(10, "math", COMPLETED) for _ in range(4)))
    assert sorted(name for batch in batches for name in names(batch)) == list(range(40))
    assert all(len(state.response_ids) == 4000 for batch in batches for group in batch for state in group)


async def test_snapshots_are_written_and_read_by_the_server(buffer, served, tmp_path):
    await local.put_named(buffer, "ab")
    await buffer.save(tmp_path / "snapshot")
    with pytest.raises(RuntimeError, match="empty buffer"):
        await buffer.resume(tmp_path / "snapshot")
    await buffer.get(2, "math", COMPLETED)
    with pytest.raises(FileNotFoundError, match="no replay snapshot"):
        await buffer.resume(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file"):
        await buffer.save(tmp_path / "file")
    await buffer.resume(tmp_path / "snapshot")
    assert len(buffer) == len(served) == 2


async def test_clients_hear_of_evictions(tmp_path):
    evicted = []
    local_buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage(), limit=2, on_evict=evicted.append)
    async with (
        serve(local_buffer, tmp_path / "socket"),
        await RemoteReplayBuffer.connect(tmp_path / "socket") as buffer,
    ):
        assert buffer.num_evicted == {}
        await local.put_named(buffer, "abc")
        assert (buffer.num_evicted, len(buffer)) == ({"math": 1}, 2)
        async with await RemoteReplayBuffer.connect(tmp_path / "socket") as other:
            assert (other.num_evicted, len(other)) == ({"math": 1}, 2)
    assert [item.item[0].group_id for item in evicted] == ["a"]
    assert local_buffer.on_evict == evicted.append
    await local.put_named(local_buffer, "d")
    assert len(evicted) == 2


async def test_what_happens_here_counts_for_clients(buffer, served):
    seen = buffer.version
    await local.put_named(served, "a")
    assert await buffer.wait_for_change(seen) > seen
    assert await buffer.count("math", COMPLETED) == 1


async def test_a_group_larger_than_a_frame_is_refused_by_name(tmp_path):
    local_buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    async with (
        serve(local_buffer, tmp_path / "socket", max_frame_bytes=100_000),
        await RemoteReplayBuffer.connect(tmp_path / "socket") as buffer,
    ):
        large = make_group("large", num_tokens=20_000)
        with pytest.raises(ValueError, match="max_frame_bytes"):
            await buffer.put(large, "math")
        await buffer.put(make_group("small"), "math")
        await local_buffer.put(large, "math")
        with pytest.raises(ValueError, match="max_frame_bytes"):
            await buffer.get(2, "math", COMPLETED)
        # What could not be sent is where it was.
        assert names(await buffer.get(1, "math", COMPLETED)) == ["small"]
        assert len(local_buffer) == 1


async def test_the_example_of_the_page(buffer, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scope = {}
    exec(next(block for block in blocks if "RemoteReplayBuffer" in block), scope)
    training = asyncio.create_task(scope["train"](tmp_path / "socket", 4))
    await scope["produce"](tmp_path / "socket", [make_group("a"), make_group("b")])
    groups, _ = await training
    assert names(groups["math"]) == ["a", "b"]
