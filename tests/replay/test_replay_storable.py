"""What a snapshot cannot hold is refused when it is put, on every store, and nothing is stored."""

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_factory import make_group, make_state

from forebay.replay import FIFOReplayPolicy, ReplayBuffer
from forebay.replay.arrival import check_group
from forebay.types import (
    RolloutState,
    SampleParams,
    Status,
    fill_token_fields,
    label_and_fill,
    oldest_step_of,
    update_sample_version,
)


class Strange:
    def __repr__(self):
        return "<strange>"


class Text(str):
    __slots__ = ()


async def refused(buffer, group, *, task="math", kind=(TypeError, ValueError)):
    with pytest.raises(kind) as caught:
        await buffer.put(group, task)
    assert len(buffer) == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"status": "done"}, "status must be a Status such as Status.COMPLETED, got 'done'"),
        ({"message": "1+1="}, "message must be a chat: a list of messages .* got '1\\+1='"),
        ({"message": [{"role": "user", "content": Strange()}]}, r"message\[0\]\['content'\] is a .*Strange"),
        ({"response": None}, "response must be text, got None"),
        ({"sample_params": {"max_tokens": 5}}, "sample_params must be a SampleParams, or None, got"),
        ({"reward": {"score": 1.0, "judge": Strange()}}, r"reward\['judge'\] is a .*Strange"),
        ({"extra_fields": {"path": [Path("a")]}}, r"extra_fields\['path'\]\[0\] is a pathlib"),
        ({"extra_fields": {"number": 1 + 2j}}, r"extra_fields\['number'\] is a .*complex"),
        ({"extra_fields": {"image": bytearray(b"a")}}, r"extra_fields\['image'\] is a .*bytearray"),
        # Named, for its text has an address.
        pytest.param(
            {"extra_fields": {"image": memoryview(b"a")}}, r"extra_fields\['image'\] is a .*memoryview", id="memory"
        ),
        ({"extra_fields": {"text": Text("a")}}, r"extra_fields\['text'\] is a .*Text"),
        ({"mm_info": {"pixels": Strange()}}, r"mm_info\['pixels'\] is a .*Strange"),
        ({"mm_info": {"all": np.array([Strange()])}}, r"mm_info\['all'\]\.flat\[0\] is a .*Strange"),
        ({"routed_experts": Strange()}, "routed_experts is a .*Strange"),
        ({"finish_reason": Strange()}, "finish_reason is a .*Strange"),
        ({"group_id": Strange()}, "group_id is a .*Strange"),
    ],
    ids=str,
)
async def test_a_value_that_cannot_be_saved_is_refused_at_put(buffer, fields, said):
    group = make_group()
    for name, value in fields.items():
        setattr(group[1], name, value)
    message = await refused(buffer, group)
    assert re.search(said, message), message
    assert repr(group[1].rollout_id) in message


@pytest.mark.parametrize("depth", [101, 1500])
async def test_what_nests_too_deep_to_be_saved_is_refused(buffer, depth):
    value = 0
    for _ in range(depth):
        value = [value]
    message = await refused(buffer, [make_state(extra_fields={"value": value})])
    assert "nests deeper than 100" in message


async def test_values_that_hold_each_other_are_refused_before_they_fill_the_memory(buffer):
    """A tree whose nodes know their parent has three times as many values at every third level."""
    parent = {"children": []}
    parent["children"] += [{"parent": parent} for _ in range(3)]
    message = await refused(buffer, [make_state(extra_fields={"tree": parent})])
    assert "nests deeper than 100" in message


@pytest.mark.parametrize("member", [{"message": []}, None, "rollout", 5], ids=str)
async def test_a_member_that_is_no_rollout_is_refused(buffer, member):
    message = await refused(buffer, [make_state(), member], kind=TypeError)
    assert f"RolloutState objects, got {member!r}" in message


@pytest.mark.parametrize("task", [5, None, Status.COMPLETED], ids=str)
async def test_a_task_name_that_is_no_text_is_refused(buffer, task):
    assert repr(task)[:5] in await refused(buffer, make_group(), task=task)


VALUES = st.recursive(
    st.none()
    | st.integers()
    | st.text(max_size=2)
    | st.binary(max_size=2)
    | st.floats()
    | st.sampled_from([Strange(), Path("a"), Text("a"), np.float32(1), np.zeros(2), np.array([Strange()])])
    | st.sampled_from([1 + 2j, ..., bytearray(b"a"), memoryview(b"a"), frozenset([1])]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=2)
        | st.tuples(inner)
    ),
    max_leaves=6,
)


@given(value=VALUES, field=st.sampled_from(["extra_fields", "mm_info", "routed_experts", "reward"]))
async def test_what_can_be_put_can_be_saved_and_nothing_else(tmp_path_factory, value, field):
    buffer = ReplayBuffer(FIFOReplayPolicy())
    group = make_group(**{field: value}) if field != "reward" else make_group()
    group[0].reward = value if field == "reward" else group[0].reward
    try:
        await buffer.put(group, "math")
    except ValueError:
        # Past the check, the save says the same.
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("forebay.replay.arrival.check_group", lambda group: None)
            await buffer.put(group, "math")
        with pytest.raises(ValueError, match="cannot hold"):
            await buffer.save(tmp_path_factory.mktemp("snapshot"))
    else:
        await buffer.save(tmp_path_factory.mktemp("snapshot"))


def test_large_values_are_not_copied_by_the_check():
    pixels = np.zeros(1 << 24, np.uint8)
    group = [make_state(mm_info={"pixels": pixels}, routed_experts=pixels, sample_params=SampleParams())] * 8
    tracemalloc.start()
    check_group(group)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@given(
    labels=st.lists(st.integers(-1, 3), max_size=4),
    masks=st.lists(st.integers(0, 1), max_size=4),
    length=st.integers(0, 4),
    model_step=st.none() | st.integers(-1, 3),
)
def test_labeling_at_once_is_the_three_steps_one_by_one(labels, masks, length, model_step):
    def rollout():
        return RolloutState(
            [],
            response_ids=range(length),
            response_model_steps=labels[:length] if len(labels) >= length else [],
            response_mask=masks[:length] if len(masks) >= length else None,
        )

    one, other = rollout(), rollout()
    found = label_and_fill(one, model_step)
    if model_step is not None:
        update_sample_version(other, model_step)
    fill_token_fields(other)
    assert found == oldest_step_of(other)
    for name in ("response_model_steps", "response_mask", "logprobs"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes()


def test_a_response_with_fewer_labels_than_tokens_is_not_labeled_by_those_it_has():
    state = RolloutState([], response_ids=[1, 2, 3], response_model_steps=[5, 5])
    other = RolloutState([], response_ids=[1, 2, 3], response_model_steps=[5, 5])
    update_sample_version(other, 2)
    assert label_and_fill(state, 2) == oldest_step_of(other)
    assert state.response_model_steps.tolist() == other.response_model_steps.tolist()
