"""Fragments as bytes and back."""

import numpy as np
import pytest
from fragment_factory import make_fragment
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forebay.fragments.store.codec import pack, stack, unpack

ARRAYS = hnp.arrays(
    st.sampled_from([np.uint8, np.float32, np.float64, np.int64, np.bool_, ">i4", "M8[ns]", "U3", np.complex64]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary(max_size=9)
)
TREES = st.recursive(
    PLAIN | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=6,
)


def same(left, right):
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and (left == right or left != left)


def round_trip(fragment):
    packed = pack(fragment)
    return unpack(np.frombuffer(b"".join(packed.parts), np.uint8), packed.schema)


@given(TREES)
def test_a_fragment_comes_back_as_it_was(tree):
    fragment = make_fragment(obs=tree, extras={"more": tree})
    back = round_trip(fragment)
    assert same(vars(fragment) | {"episode_uuids": list(fragment.episode_uuids)}, vars(back))


def test_arrays_look_into_the_payload():
    packed = pack(make_fragment())
    memory = np.frombuffer(b"".join(packed.parts), np.uint8)
    obs = unpack(memory, packed.schema).obs
    assert np.shares_memory(obs, memory)
    assert obs.ctypes.data % 16 == 0
    assert not obs.flags.writeable


def test_layouts_and_scalars_of_every_kind_are_stored():
    back = round_trip(make_fragment(obs=np.arange(6).reshape(2, 3).T, action=np.float32(2.5), in_state=[np.int8(3)]))
    assert back.obs.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (type(back.action), back.action, back.in_state) == (np.float32, 2.5, [3])


def test_tensors_come_back_as_arrays():
    torch = pytest.importorskip("torch")
    back = round_trip(make_fragment(obs=torch.arange(4.0)))
    assert back.obs.tolist() == [0, 1, 2, 3]


@given(st.integers(1, 5), ARRAYS)
def test_a_stack_has_a_leading_axis(count, array):
    fragments = [make_fragment(fid=i, obs={"a": array}, action=np.full((2, 3), i)) for i in range(count)]
    packed = [pack(fragment) for fragment in fragments]
    batch = stack([np.frombuffer(b"".join(one.parts), np.uint8) for one in packed], packed[0].schema)
    expected = np.empty((count, *array.shape), array.dtype)
    expected[:] = array
    assert same(batch.obs["a"], expected)
    assert batch.action.tolist() == [[[i] * 3] * 2 for i in range(count)]
    assert batch.fid_in_worker == list(range(count))
    batch.action[:] = 0  # it is the caller's own


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"obs\['x'\] is a builtins.object, which a fragment cannot hold"),
        ({1: 2}, "has keys that are not text"),
        (np.array([None]), "has the dtype object"),
        (np.zeros(2, [("a", int)]), "which raw bytes cannot hold"),
        (2**70, "more than 64 bits"),
    ],
)
def test_what_cannot_be_stored_is_named(value, message):
    with pytest.raises(ValueError, match=message):
        pack(make_fragment(obs={"x": value}))
