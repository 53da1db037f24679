"""Groups as bytes: exact, compact where groups are regular, refused where damaged."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_factory import make_group, make_state, same

from forebay.replay.format.encode import ARRAYS, MAX_COPIED_BYTES, MAX_TOKENS, pack_group
from forebay.replay.format.packed import GroupCodec, unpack_group
from forebay.replay.groups import StoredGroup, copy_group
from forebay.types import ROLLOUT_FIELDS, RolloutState, SampleParams, Status

CODEC = GroupCodec()
IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)


PROMPTS = [np.array(ids, np.int32) for ids in ([], [1, 2], [1, 2], [1, 3])]
"""Chosen from, so that members have the same array, an equal one, or another."""

PLAIN = st.none() | st.booleans() | st.integers(-1, 1) | st.sampled_from([0.0, -0.0, 1.0, float("nan"), ""])
SHARED = st.sampled_from([{"a": [1]}, [{"b": True}], (1, [2]), b"bytes", np.arange(3), np.float32(1), 2**70])
NESTED = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2) | SHARED,
    max_leaves=4,
)


@st.composite
def rollouts(draw):
    ids = draw(IDS)
    prompt = draw(st.sampled_from(PROMPTS))
    message = draw(NESTED | SHARED)
    state = RolloutState(message, response_ids=ids, status=draw(st.sampled_from(Status)))
    length = len(ids)
    state.prompt_ids = prompt
    state.tokens = draw(st.sampled_from([[*prompt, *ids], prompt, ids, [9]]))
    state.logprobs = draw(st.lists(st.floats(width=32), min_size=length, max_size=length))
    state.response_mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
    state.response_model_steps = draw(st.lists(st.integers(-1, 1), min_size=length, max_size=length))
    state.extra_fields = draw(st.dictionaries(st.text(max_size=2), st.none() | st.floats() | st.binary()))
    state.reward = draw(NESTED | SHARED)
    state.error_msg = draw(st.none() | st.text(st.characters(), max_size=3))
    return state


@given(st.lists(rollouts(), min_size=1, max_size=3))
def test_every_group_comes_back(states):
    group = StoredGroup(states)
    decoded = CODEC.decode(CODEC.encode(group))
    assert same(list(decoded), list(group))
    assert decoded.steps == group.steps
    for state in decoded:
        assert type(state) is RolloutState
        for name in (*ARRAYS, "prompt_ids"):
            array = getattr(state, name)
            assert array.flags.writeable
            assert array.flags.aligned
            assert array.flags.c_contiguous
        state.response_ids += 1


@given(st.lists(rollouts(), min_size=1, max_size=3))
def test_copies_are_equal_and_share_no_container(states):
    group = StoredGroup(states)
    copied = copy_group(group)
    assert same(list(copied), states)
    assert copied.steps == group.steps
    for one, other in zip(copied, states, strict=True):
        assert one.response_ids is other.response_ids
        own = {id(container) for name in ROLLOUT_FIELDS for container in containers(getattr(one, name))}
        assert own.isdisjoint(id(c) for name in ROLLOUT_FIELDS for c in containers(getattr(other, name)))


def containers(value):
    """The dicts and lists in it, however deep."""
    if type(value) in (dict, list):
        yield value
        for item in value.values() if type(value) is dict else value:
            yield from containers(item)


def ways():
    """To get a group again: by its bytes, by its packed form, as a copy."""

    def unpacked(group):
        packed = pack_group(group)
        return unpack_group(packed.head, bytearray(b"".join(packed.buffers)))

    return [lambda group: CODEC.decode(CODEC.encode(group)), unpacked, lambda g: copy_group(StoredGroup(g))]


@pytest.mark.parametrize("way", ways(), ids=["codec", "packed", "copy"])
def test_what_members_share_they_share_again(way):
    """And nothing else: what merely is equal is each member's own."""
    group = [make_state("g", member, steps=[3]) for member in range(3)]
    one, params = {"ground_truth": ["4"]}, SampleParams(seed=1)
    for state in group:
        state.reward_model, state.sample_params, state.prompt_ids = one, params, group[0].prompt_ids
    first, second, third = way(group)
    assert same([first, second, third], group)
    assert first.reward_model is second.reward_model is third.reward_model
    assert first.reward_model is not one
    assert first.sample_params is third.sample_params
    assert first.prompt_ids is third.prompt_ids
    first.message[0]["content"] = "other"
    first.extra_fields["new"] = 1
    first.reward["score"] = 0.0
    assert same(second.message, group[1].message)
    assert (second.extra_fields, third.reward) == ({}, {"score": 1.0})
    assert same(group[0].message, group[1].message)


def test_equal_prompts_of_their_own_stay_their_own():
    group = make_group("g", 3, steps=[1])
    decoded = CODEC.decode(CODEC.encode(group))
    decoded[0].prompt_ids[0] = 7
    assert decoded[1].prompt_ids[0] == decoded[2].prompt_ids[0] == 1


def test_odd_values_come_back():
    shared = np.zeros((2, 2), np.float16)
    fields = {"mm_info": {"pixels": shared, "again": [shared, (1, None)]}, "session_id": 2**70}
    group = [make_state("g", i, error_msg="\ud800", **fields) for i in range(2)]
    decoded = CODEC.decode(CODEC.encode(group))
    assert same(list(decoded), group)
    assert decoded[0].mm_info["pixels"] is decoded[1].mm_info["again"][0]


def test_what_is_regular_is_not_written_out():
    """Of a plain rollout only response ids and logprobs are: 8 bytes per token."""
    group = make_group("g", 4, steps=[3] * 5000)
    assert len(CODEC.encode(group)) < 4 * 5000 * 9.5


def test_a_value_that_cannot_be_stored_is_named():
    with pytest.raises(ValueError, match=r"rollout 'g/0': extra_fields\['x'\]"):
        CODEC.encode([make_state("g", extra_fields={"x": object()})])


def test_the_page_says_how_to_read_the_bytes():
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def response_ids" in text]
    scope = {}
    exec(block, scope)
    group = [make_state("g", member, steps=[3] * (member + 1)) for member in range(3)]
    found = scope["response_ids"](CODEC.encode(group))
    assert [ids.tolist() for ids in found] == [state.response_ids.tolist() for state in group]


def test_a_prompt_and_a_chat_of_all_are_written_once():
    group = make_group("g", 8)
    for state in group:
        state.prompt_ids = np.arange(5000)
        state.message[0]["content"] = "long " * 4000
    assert len(CODEC.encode(group)) < 5000 * 4 + 20_000 + 2000


def test_other_and_damaged_bytes_are_refused():
    data = CODEC.encode(make_group("g", steps=[1, 2]))
    for wrong in (b"", b'{"json": 1}', data[:-1], data + b"\0", data[:8]):
        with pytest.raises(ValueError, match="payload"):
            CODEC.decode(wrong)
    with pytest.raises(ValueError, match="another version"):
        CODEC.decode(b"FBG1" + data[4:])


FORGERIES = {
    "values of seq_staleness for 2": {"values": {"seq_staleness": [0] * 3}},
    "has no color": {"values": {"seq_staleness": [0], "color": ["red"]}},
    "no rollouts": {"status": []},
    "whole number": {"values": {"seq_staleness": ["0"]}},
    "not the lengths of tokens": {"lengths": {"tokens": [-1]}},
    "not the lengths of logprobs": {"lengths": {"logprobs": [-1, 2]}},
    "not the lengths of response_ids": {"lengths": {"response_ids": [2, -2]}},
    "prompts are": {"lengths": {"prompt_ids": [-1, -1]}},
    "as came": {"lengths": {"response_ids": [2, 2**40]}},
    "bytes": {"blobs": [-8, 8]},
    "prompts of": {},
    "copies of": {"copied": {"message": "x" * (MAX_COPIED_BYTES // 2)}},
}
"""What is refused, and by which word; most of it would cost more memory than it has bytes."""


@pytest.mark.parametrize("reason", FORGERIES)
def test_a_head_that_its_bytes_do_not_bear_out_is_refused(reason):
    changes = FORGERIES[reason]
    group = make_group("g", 2, steps=[1, 2])
    group[1].prompt_ids = group[0].prompt_ids
    packed = pack_group(group)
    head = msgspec.msgpack.decode(packed.head)
    for name, value in changes.items():
        head[name] = head[name] | value if name == "lengths" else value
    if reason == "prompts of":
        # A prompt that is long enough, for fewer members.
        head["status"], head["steps"] = ["init"] * 1000, [None] * 1000
        head["prompts"] = bytes(4 * (MAX_TOKENS // 1000 + 1))
        head["lengths"] = {name: [0] * 1000 for name in ARRAYS}
        head["lengths"]["prompt_ids"] = [MAX_TOKENS // 1000 + 1] + [-2] * 999
        packed.buffers.clear()
    with pytest.raises(ValueError, match=reason):
        unpack_group(msgspec.msgpack.encode(head), bytearray(b"".join(packed.buffers)))
