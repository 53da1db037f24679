"""Groups as bytes: exact, compact where groups are regular, refused where damaged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_factory import make_group, make_state, same

from forebay.replay.codec import GroupCodec
from forebay.replay.groups import StoredGroup
from forebay.types import RolloutState, Status

CODEC = GroupCodec()
IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)


@st.composite
def rollouts(draw):
    ids = draw(IDS)
    prompt = draw(st.sampled_from([[], [1, 2], [1, 3]]))
    state = RolloutState([], prompt_ids=prompt, response_ids=ids, status=draw(st.sampled_from(Status)))
    length = len(ids)
    state.tokens = draw(st.sampled_from([[*prompt, *ids], prompt, ids, [9]]))
    state.logprobs = draw(st.lists(st.floats(width=32), min_size=length, max_size=length))
    state.response_mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
    state.response_model_steps = draw(st.lists(st.integers(-1, 1), min_size=length, max_size=length))
    state.extra_fields = draw(st.dictionaries(st.text(max_size=2), st.none() | st.floats() | st.binary()))
    state.error_msg = draw(st.none() | st.text(st.characters(), max_size=3))
    return state


@given(st.lists(rollouts(), min_size=1, max_size=3))
def test_every_group_comes_back(states):
    group = StoredGroup(states)
    decoded = CODEC.decode(CODEC.encode(group))
    assert same(list(decoded), list(group))
    assert decoded.steps == group.steps
    for state in decoded:
        state.response_ids += 1


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


def test_other_and_damaged_bytes_are_refused():
    data = CODEC.encode(make_group("g", steps=[1, 2]))
    for wrong in (b"", b'{"json": 1}', data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match="payload"):
            CODEC.decode(wrong)
