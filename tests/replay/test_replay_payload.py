"""The encoding of values: exact, pickle-free, shared where they were shared."""

import base64
import contextlib
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from replay_factory import same

from forebay.replay.format.values import MAX_DTYPE_TEXT, Decoder, Encoder, damage_named
from forebay.types import SampleParams, Status


def round_trip(value):
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "value"), allow_nan=False)
    return Decoder(encoder.blobs).decode(json.loads(text))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.text(alphabet=st.characters())
    | st.binary(max_size=20)
    | st.sampled_from(Status)
)
ARRAYS = hnp.arrays(
    dtype=hnp.scalar_dtypes() | hnp.byte_string_dtypes() | hnp.unicode_string_dtypes(),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
HASHABLE = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["$array", "$dict", "$", ""]), inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_as_they_were(value):
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.str_("text"),
        np.str_(""),
        np.datetime64("2024-01-02T03:04:05", "ns"),
        np.complex64(1 + 2j),
        np.zeros((0, 3), np.float16),
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.arange(6)[::2],
        np.array([1, 2], ">i4"),
        np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
        np.array([[None, "a"], [{"b": np.arange(2)}, [1]]], object),
        np.full((), None, object),
        SampleParams(stop=("a", "b"), stop_token_ids=(7,), seed=3),
        {1: "int", "1": "text", (1, 2): "tuple", None: "none", False: "bool"},
        -0.0,
        2**80,
        "lone surrogate \ud800",
    ],
    ids=repr,
)
def test_odd_values_come_back_as_they_were(value):
    assert same(round_trip({"x": [value]}), {"x": [value]})


def test_arrays_come_back_writable_and_shared():
    image = np.zeros((2, 2), np.uint8)
    encoder = Encoder()
    trees = [encoder.encode({"image": image, "n": n}, "mm_info") for n in range(3)]
    assert len(encoder.blobs) == 1
    decoder = Decoder(encoder.blobs)
    first, second, _ = (decoder.decode(tree)["image"] for tree in trees)
    assert first is second
    first[0, 0] = 1


class Strange:
    pass


class Renamed(dict):
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Strange(), "Strange"),
        (Renamed(), "Renamed"),
        (Path("a"), "PosixPath"),
        (np.zeros(1, [("a", "i4")])[0], "void"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (np.zeros(1, [("a", "i4"), ("b", "O")]), "dtype"),
        (np.zeros(1, [("field " * 800, "i4")]), "dtype"),
        (print, "builtin_function_or_method"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_what_cannot_be_stored_is_named_with_its_place(value, kind):
    with pytest.raises(ValueError, match=rf"extra_fields\['deep'\]\[1\].*{kind}"):
        Encoder().encode({"deep": [0, value]}, "extra_fields")


def test_an_unknown_tag_is_an_error():
    with pytest.raises(ValueError, match=r"\$later"):
        Decoder([]).decode({"$later": 1})


DTYPES = st.recursive(
    st.sampled_from(["|O", "O", "object", "<i4", ">f8", "|S3", "<U1", "<M8[s]", "|V0", "?", "<c8", "T", "<f16", "|V8"])
    | st.text("|<>=OSUVTimfbc?0123456789[],()s", max_size=6),
    lambda inner: (
        st.lists(
            st.tuples(st.sampled_from(["a", "b", ""]), inner) | st.tuples(st.just("c"), inner, st.just((2,))),
            min_size=1,
            max_size=3,
        )
        | st.tuples(inner, st.tuples(st.integers(0, 3)))
    ),
    max_leaves=4,
)


# Python and numpy warn of odd texts of dtypes before they refuse them.
@pytest.mark.filterwarnings("ignore")
@given(
    DTYPES.map(repr) | st.text(max_size=8) | st.integers(),
    st.lists(st.integers(-2, 4), max_size=3),
    st.binary(max_size=64),
    st.booleans(),
)
@example("('<f16', (0,))", [-1], b"", False)
@example("'<U1'", [], b"\0\0\0\1", False)
@example("[('a', [('b', '>U1')])]", [1], b"\1\0\0\0", True)
def test_bytes_are_never_taken_for_objects(dtype, shape, data, is_scalar):
    """Whatever the dtype and the bytes: a value that can be looked at and stored again, or an error."""
    text = base64.b64encode(data).decode()
    tree = {"$scalar": [dtype, text]} if is_scalar else {"$array": [dtype, shape, 0]}
    with contextlib.suppress(ValueError), damage_named("a value"):
        value = Decoder([data]).decode({"x": [tree]})["x"][0]
        assert not getattr(value, "dtype", np.dtype("V")).hasobject
        repr(value)
        if not isinstance(value, np.void):
            assert same(round_trip(value), value)


@pytest.mark.parametrize("tag", ["$array", "$scalar"])
@pytest.mark.parametrize(
    "dtype",
    ["'|O'", "[('a', '|O')]", "[('a', [('b', '<i4'), ('c', '|O')])]", "('|O', (1,))", " " * MAX_DTYPE_TEXT + "'<i4'"],
    ids=lambda dtype: dtype[-20:],
)
def test_a_dtype_of_objects_is_refused(tag, dtype):
    content = [dtype, [1], 0] if tag == "$array" else [dtype, "MTIzNDU2Nzg="]
    with pytest.raises(ValueError, match="dtype"):
        Decoder([b"12345678" * 2]).decode({tag: content})


@pytest.fixture
def fake_ray(monkeypatch):
    """The three names of Ray that the encoding uses, over a dict."""
    ray = types.ModuleType("ray")
    ray.objects = {}

    class ObjectRef:
        pass

    def put(value):
        ref = ObjectRef()
        ray.objects[ref] = value
        return ref

    ray.ObjectRef, ray.put, ray.get = ObjectRef, put, ray.objects.__getitem__
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def check_references(ray):
    image = np.arange(4)
    inner = ray.put({"pixels": image})
    value = {"images": [inner, (inner,)], "other": ray.put([1])}
    restored = round_trip(value)
    first, (second,) = restored["images"]
    assert isinstance(first, ray.ObjectRef)
    assert first is second
    assert first != inner
    assert same(ray.get(first), {"pixels": image})
    assert ray.get(restored["other"]) == [1]


def test_references_are_stored_by_value_and_restored_as_new_ones(fake_ray):
    check_references(fake_ray)


def test_references_are_not_restored_without_ray(fake_ray, monkeypatch):
    encoder = Encoder()
    tree = encoder.encode([fake_ray.put(1)], "x")
    monkeypatch.delitem(sys.modules, "ray")
    with pytest.raises(ValueError, match=r"ray\.init"):
        Decoder(encoder.blobs).decode(tree)


@pytest.mark.soak
def test_real_references():
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    try:
        check_references(ray)
    finally:
        ray.shutdown()
