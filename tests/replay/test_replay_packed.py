"""Groups that a server holds packed: the same as unpacked ones, whatever is asked of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_factory import make_group, make_state, same

from forebay.replay import FIFOReplayPolicy, IndexedStorage, RemoteReplayBuffer, ReplayBuffer, SQLStorage, serve
from forebay.replay.format import packed as packed_form
from forebay.replay.format.encode import pack_group
from forebay.replay.format.packed import GroupCodec, PackedPayload, hold_packed, pack_out, unpack_group
from forebay.replay.groups import StoredGroup
from forebay.replay.remote import link
from forebay.types import Status, fill_token_fields, get_group_status

STATUSES = st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.ABORTED, Status.FAILED])


@st.composite
def groups(draw):
    """Groups as clients send them, their token fields filled."""
    members = []
    for member in range(draw(st.integers(1, 4))):
        steps = draw(st.lists(st.integers(-1, 4), max_size=4) | st.just([3] * 5))
        mask = draw(st.sampled_from([[1] * len(steps), [0] * len(steps), [n % 2 for n in range(len(steps))]]))
        fields = {"response_mask": mask, "seq_staleness": draw(st.integers(0, 3))}
        state = make_state("g", member, steps=steps, status=draw(STATUSES), **fields)
        if draw(st.booleans()):
            state.extra_fields = {"n": draw(st.integers(0, 2))}
        fill_token_fields(state)
        members.append(state)
    return members


def received(group):
    packed = pack_group(group)
    return hold_packed(packed.head, np.frombuffer(b"".join(packed.buffers), np.uint8).copy())


@given(groups(), st.none() | st.integers(1, 9), st.booleans())
def test_it_is_what_was_sent(group, train_step, reset):
    payload, stored = received(group), StoredGroup(group)
    assert isinstance(payload, PackedPayload)
    assert (len(payload), payload.status, payload.steps) == (len(group), get_group_status(group), stored.steps)
    if train_step is not None:
        payload.refresh(train_step, reset_unlabeled=reset)
        stored.refresh(train_step, reset_unlabeled=reset)
    assert list(payload.staleness) == [state.seq_staleness for state in stored]
    assert same(list(payload), list(stored))
    assert same(payload[0], stored[0])
    assert same(payload[1:], list(stored[1:]))
    # On its way to a client, and to a database.
    packed = pack_out(payload, train_step, copy=False)
    if train_step is not None:
        stored.refresh(train_step)
    assert same(unpack_group(packed.head, np.frombuffer(b"".join(packed.buffers), np.uint8)), list(stored))
    decoded = GroupCodec().decode(GroupCodec().encode(payload))
    assert same(list(decoded), list(stored))
    assert decoded.steps == stored.steps


@given(groups(), st.data())
def test_what_is_accepted_can_be_unpacked(group, data):
    packed = pack_group(group)
    head, arrays = bytearray(packed.head), b"".join(packed.buffers)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(head) - 1))
        if data.draw(st.booleans()):
            head[at] = data.draw(st.integers(0, 255))
        else:
            del head[at]
    cut = data.draw(st.integers(0, 4))
    arrays = arrays[: len(arrays) - cut]
    try:
        payload = hold_packed(bytes(head), np.frombuffer(arrays, np.uint8).copy())
    except ValueError:
        # The one error that it may raise.
        return
    assert len(list(payload)) == len(payload)


def test_unusual_groups_are_unpacked_at_once():
    nested = make_state(steps=[1], extra_fields={"array": np.arange(3)})
    uneven = make_state(steps=[1])
    uneven.logprobs = []
    for state in (nested, uneven):
        payload = received([state])
        assert type(payload) is StoredGroup
        assert same(list(payload), [state])


@pytest.mark.parametrize("train_step", [None, 4])
async def test_in_a_buffer_it_is_a_group_like_others(train_step, tmp_path):
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    states = [[make_state(name, steps=[step])] for name, step in (("old", 0), ("new", 3), ("more", 3))]
    for state in states:
        fill_token_fields(state[0])
    await buffer.put_groups(map(received, states), "math", current_train_step=4, stale_threshold=9)
    assert await buffer.refresh_staleness({"math": 3}, 4) == {"math": 1}
    [expired] = await buffer.get(1, "math", Status.EXPIRED)
    assert (expired[0].group_id, len(expired[0].response_ids)) == ("old", 0)
    await buffer.save(tmp_path)
    groups, _ = await buffer.take_batch({"math": 2}, train_step=train_step)
    assert same(groups["math"], states[1:])
    other = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await other.resume(tmp_path)
    assert same(await other.get(2, "math", Status.COMPLETED), states[1:])


async def test_a_group_from_a_database_goes_to_a_client_without_being_decoded(tmp_path, monkeypatch):
    def decode(*_):
        raise AssertionError("decoded on the way")

    buffer = ReplayBuffer(FIFOReplayPolicy(), SQLStorage(tmp_path / "b.db"))
    path = tmp_path / "socket"
    async with serve(buffer, path), await RemoteReplayBuffer.connect(path) as client:
        groups = [make_group(name, 3, steps=[1, 2]) for name in "abc"]
        # The client, in this process, goes on unpacking.
        read_states = packed_form.read_states
        monkeypatch.setattr(packed_form, "read_states", decode)
        monkeypatch.setattr(link, "unpack_group", lambda head, data: read_states(packed_form.read_head(head), data))
        await client.put_groups(groups, "math", current_train_step=4)
        taken, _ = await client.take_batch({"math": 2}, train_step=5)
        assert same(taken["math"], groups[:2])
        assert same(await client.get(1, "math", Status.COMPLETED), groups[2:])
        await client.restore(4)
        assert len(buffer) == 2
    monkeypatch.undo()
    # Afterwards the buffer has its groups again as anyone in this process wants them.
    taken, _ = await buffer.take_batch({"math": 2}, train_step=6)
    assert [type(group) for group in taken["math"]] == [list, list]
    await buffer.close()
