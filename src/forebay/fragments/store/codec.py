"""A fragment as one run of bytes, and back without a copy.

::

    SampleFragment --split--> skeleton (nesting, dtypes, shapes) --> schema, stored once and named by its hash
                        '---> plain values --> msgpack ----------.
                        '---> arrays, raw, 16-byte aligned ------+--> payload

    payload:  schema id | lengths | plain values | body (the arrays)

Reading gives arrays that look into the payload's memory (`unpack`), or one batch for many payloads of the
same schema (`stack`): a leading axis on every array, with one copy in all. Nothing is pickled.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from forebay.fragments.records import SampleFragment

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""[num_bytes] uint8."""

_ALIGNMENT = 16
"""Bytes. The map gives a large payload 16-byte aligned memory, and no dtype needs more."""
_SMALL_BYTES = 4096
_HUGE_BYTES = 4 << 20
"""Arrays of this size get huge pages from numpy."""
_PADDING = bytes(_ALIGNMENT)
_FIELDS = tuple(field.name for field in fields(SampleFragment))
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_TEXT = frozenset((str,))
_VALUE = ("value",)
_NO_DICT = ("dict", (), ())


class _Leaf(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_scalar: bool
    offset: int


@dataclass(frozen=True)
class Schema:
    """The nesting, dtypes and shapes of a fragment, and where its arrays lie in the body."""

    text: bytes
    """The schema as JSON, as it is stored."""
    schema_id: bytes
    """8 bytes that name it: a hash of its text."""
    skeleton: Any
    leaves: tuple[_Leaf, ...]
    body_bytes: int

    @staticmethod
    def parse(text: bytes) -> "Schema":
        """The schema with this text."""
        skeleton = json.loads(text)
        leaves, offset = [], 0
        # Offsets follow from dtypes and shapes, so the text does without them.
        for dtype_text, shape, is_scalar in _leaves_of(skeleton):
            dtype = np.dtype(dtype_text)
            leaves.append(_Leaf(dtype, tuple(shape), is_scalar, offset))
            num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            offset += _aligned(num_bytes)
        schema_id = hashlib.blake2b(text, digest_size=8).digest()
        return Schema(text, schema_id, skeleton, tuple(leaves), offset)


@lru_cache(maxsize=1024)
def _schema_of(nodes: tuple[Any, ...]) -> Schema:
    """Of a fragment whose fields have these nodes: the same few come again and again."""
    return Schema.parse(json.dumps(("dict", _FIELDS, nodes), separators=(",", ":")).encode())


def _leaves_of(node: Any) -> Iterator[tuple[str, Sequence[int], bool]]:
    match node[0]:
        case "array":
            yield node[1], node[2], False
        case "scalar":
            yield node[1], (), True
        case "dict" | "list" | "tuple":
            for child in node[-1]:
                yield from _leaves_of(child)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# The id of the schema, bytes of the plain values, four that keep the next number aligned, bytes of the body.
_HEADER = struct.Struct("<8sI4xQ")
_HEADS = np.dtype([("schema_id", "<u8"), ("meta_bytes", "<u4"), ("rest", "V4"), ("body_bytes", "<u8")])
"""The header, as numpy reads many at once."""


class Packed(NamedTuple):
    """A payload in parts, and the schema it cannot be read without."""

    schema: Schema
    parts: list[Any]
    """Bytes and uint8 arrays that look into the fragment's own."""
    num_bytes: int
    """Bytes of all parts together."""


def pack(fragment: SampleFragment) -> Packed:
    """The bytes of `fragment`.

    Raises:
        ValueError: it holds something that is neither an array nor a plain value.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    values: list[Any] = []
    nodes: list[Any] = []
    for name in _FIELDS:
        value = getattr(fragment, name)
        # Most fields of a small fragment are plain: without a call they cost a fifth less.
        if type(value) in _PLAIN:
            values.append(value)
            nodes.append(_VALUE)
        else:
            nodes.append(_split(value, name, arrays, values))
    body: list[Any] = []
    for array in arrays:
        # A copy of a few bytes is cheaper than a view of them.
        is_small = array.nbytes < _SMALL_BYTES
        body.append(array.tobytes() if is_small else np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        if rest := array.nbytes % _ALIGNMENT:
            body.append(_PADDING[rest:])
    return _assemble(_schema_of(tuple(nodes)), values, body)


def _assemble(schema: Schema, values: list[Any], body: list[Any]) -> Packed:
    """A payload of plain values and the parts of a body."""
    try:
        meta = _encode(values)
    except OverflowError:
        raise ValueError("the fragment holds an integer of more than 64 bits; store it as text") from None
    head = _HEADER.pack(schema.schema_id, len(meta), schema.body_bytes) + meta
    head += _PADDING[: -len(head) % _ALIGNMENT]
    return Packed(schema, [head, *body], len(head) + schema.body_bytes)


def unstack(batch: SampleFragment) -> list[Packed]:
    """The payload of every fragment in `batch`: the reverse of `stack`.

    Looking at the nesting of each fragment costs more than all else that is done to a small one; here it is
    looked at once.

    Raises:
        ValueError: its arrays and lists differ in length, there are none, or it holds something else.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    values: list[Any] = []
    nodes = tuple([_split(getattr(batch, name), name, arrays, values, stacked=True) for name in _FIELDS])
    lengths = {len(column) for column in (*arrays, *values) if type(column) not in _PLAIN}
    if len(lengths) != 1:
        raise ValueError(
            f"the arrays and lists of a stacked batch have one length, that of its fragments; got {sorted(lengths)}"
        )
    (count,) = lengths
    schema = _schema_of(nodes)
    columns = [[column] * count if type(column) in _PLAIN else column for column in values]
    rows = zip(*columns, strict=True) if columns else [()] * count
    bodies = _rows_of_bytes(arrays, count)
    return [_assemble(schema, list(row), body) for row, body in zip(rows, bodies, strict=True)]


def _rows_of_bytes(arrays: list[np.ndarray[Any, Any]], count: int) -> list[list[Any]]:
    """The parts of the body of every fragment."""
    flat = [np.ascontiguousarray(array).reshape(count, -1).view(np.uint8) for array in arrays]
    padded = []
    for rows in flat:
        padded.append(rows)
        if rest := -rows.shape[1] % _ALIGNMENT:
            padded.append(np.zeros((count, rest), np.uint8))
    row_bytes = sum(rows.shape[1] for rows in padded)
    # As in `pack`: small bodies are copied, here all in one go; of large ones the parts are views.
    if row_bytes < _SMALL_BYTES:
        data = np.concatenate(padded, axis=1).tobytes() if padded else b""
        return [[data[start : start + row_bytes]] for start in range(0, count * row_bytes, row_bytes or 1)]
    return [[rows[i] for rows in padded] for i in range(count)]


def _split(
    value: Any, where: str, arrays: list[np.ndarray[Any, Any]], values: list[Any], stacked: bool = False
) -> tuple[Any, ...]:
    """The node of `value`; its arrays and plain values go to the end of `arrays` and `values`.

    Of a `stacked` batch it is the node in a single fragment: arrays lead with the fragments, and a list of
    plain values has one for each.
    """
    kind = type(value)
    if kind is np.ndarray and (value.ndim or not stacked):
        arrays.append(value)
        return ("array", _dtype_text(value.dtype, where), value.shape[1:] if stacked else value.shape)
    # By exact type: a float64 of numpy is a float as well, and has to come back as what it was.
    if kind in _PLAIN or (stacked and kind is list and value and _PLAIN.issuperset(map(type, value))):
        values.append(value)
        return _VALUE
    if kind is list or kind is tuple:
        if not value:
            return (kind.__name__, ())
        children = [_split(item, f"{where}[{i}]", arrays, values, stacked) for i, item in enumerate(value)]
        return (kind.__name__, tuple(children))
    if isinstance(value, dict):
        if not value:
            return _NO_DICT
        if not _TEXT.issuperset(map(type, value)):
            raise ValueError(f"{where} has keys that are not text: {list(value)[:5]!r}")
        children = [_split(item, f"{where}[{key!r}]", arrays, values, stacked) for key, item in value.items()]
        return ("dict", tuple(value), tuple(children))
    if stacked:
        raise ValueError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}; a stacked batch holds arrays with a "
            f"leading axis, lists of plain values, plain values, and dicts, lists or tuples of them"
        )
    return _split_foreign(value, where, arrays)


def _split_foreign(value: Any, where: str, arrays: list[np.ndarray[Any, Any]]) -> tuple[Any, ...]:
    if not hasattr(value, "__array__"):
        raise ValueError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a fragment cannot "
            f"hold; use arrays, plain values, and dicts, lists or tuples of them"
        )
    array = np.asarray(value)
    arrays.append(array)
    dtype = _dtype_text(array.dtype, where)
    return ("scalar", dtype) if isinstance(value, np.generic) else ("array", dtype, array.shape)


@lru_cache(maxsize=1024)
def _dtype_text(dtype: np.dtype[Any], where: str) -> str:
    """How a schema names `dtype`.

    Raises:
        ValueError: its values are more than their bytes, or its text does not say all of it.
    """
    if dtype.hasobject or np.dtype(dtype.str) != dtype:
        raise ValueError(f"{where} has the dtype {dtype}, which raw bytes cannot hold; use a plain number type")
    return dtype.str


def schema_id_of(payload: Any) -> bytes:
    """The id of the schema that `payload` is read with: its first 8 bytes."""
    return bytes(payload[:8])


def _parts(payload: Bytes, schema: Schema) -> tuple[list[Any], Bytes]:
    """The plain values, and the body."""
    _, meta_bytes, body_bytes = _HEADER.unpack_from(payload.data)
    values = _decode(payload.data[_HEADER.size : _HEADER.size + meta_bytes])
    assert body_bytes == schema.body_bytes
    return values, payload[_aligned(_HEADER.size + meta_bytes) :]


def unpack(payload: Bytes, schema: Schema) -> SampleFragment:
    """The fragment; its arrays look into `payload`."""
    values, body = _parts(payload, schema)
    arrays = [_view(leaf, body) for leaf in schema.leaves]
    return SampleFragment(**_build(schema.skeleton, iter(arrays), iter(values)))


def _view(leaf: _Leaf, body: Bytes) -> Any:
    array: np.ndarray[Any, Any] = np.ndarray(leaf.shape, leaf.dtype, body, leaf.offset)
    return array[()] if leaf.is_scalar else array


def stack(payloads: Sequence[Any], schema: Schema) -> SampleFragment:
    """All fragments as one: a leading axis on every array, and lists where one has a plain value.

    The arrays may be written to, and look into one block that nothing else holds. `schema` is that of the
    first.

    Raises:
        ValueError: they are of several schemas.
    """
    rows = _alike(payloads, schema) or _bodies(payloads, schema)
    arrays = [rows.column(leaf) for leaf in schema.leaves]
    columns = [list(column) for column in zip(*rows.values, strict=True)]
    return SampleFragment(**_build(schema.skeleton, iter(arrays), iter(columns)))


class _Rows(NamedTuple):
    """Bodies of one schema at equal distances."""

    block: Bytes
    stride: int
    start: int
    """Offset in bytes of the first body in `block`."""
    values: list[list[Any]]

    def column(self, leaf: _Leaf) -> np.ndarray[Any, Any]:
        """[num_rows, *leaf.shape]: the arrays of all rows."""
        offset = self.start + leaf.offset
        inner = np.ndarray(leaf.shape, leaf.dtype, self.block, offset).strides if leaf.shape else ()
        shape = (len(self.values), *leaf.shape)
        return np.ndarray(shape, leaf.dtype, self.block, offset, (self.stride, *inner))


def _alike(payloads: Sequence[Any], schema: Schema) -> _Rows | None:
    """Payloads that lie alike, joined as they are; None: they do not.

    With small fragments, looking at each on its own takes many times as long as copying them.
    """
    stride, count = len(payloads[0]), len(payloads)
    if set(map(len, payloads)) != {stride}:
        return None
    joined = _joined(payloads, stride)
    block = np.frombuffer(joined, np.uint8)
    heads = block.reshape(count, stride)[:, : _HEADER.size].copy().view(_HEADS)[:, 0]
    if (heads["schema_id"] != heads["schema_id"][0]).any():
        return None
    # Bodies of one schema are of one size, so here they begin at one place.
    start = stride - schema.body_bytes
    data = memoryview(joined)
    ends = (heads["meta_bytes"] + np.arange(_HEADER.size, count * stride, stride)).tolist()
    metas = zip(range(_HEADER.size, len(data), stride), ends, strict=True)
    return _Rows(block, stride, start, [_decode(data[at:end]) for at, end in metas])


def _bodies(payloads: Sequence[Any], schema: Schema) -> _Rows:
    # Payloads of one schema differ in length where their plain values do, such as texts.
    num_schemas = len({schema_id_of(payload) for payload in payloads})
    if num_schemas != 1:
        raise ValueError(
            f"only fragments of one nesting, with equal dtypes and shapes, can be stacked; "
            f"these {len(payloads)} have {num_schemas}"
        )
    parts = [_parts(np.frombuffer(payload, np.uint8), schema) for payload in payloads]
    joined = _joined([body.data for _, body in parts], schema.body_bytes)
    return _Rows(np.frombuffer(joined, np.uint8), schema.body_bytes, 0, [values for values, _ in parts])


def _joined(rows: Sequence[Any], stride: int) -> Any:
    """All bytes of `rows`, which have `stride` each, one after the other."""
    if len(rows) * stride < _HUGE_BYTES:
        return bytearray().join(rows)
    # numpy asks for huge pages: at this size, getting memory page by page takes as long as filling it.
    block: Bytes = np.empty(len(rows) * stride, np.uint8)
    memory = block.data
    for number, row in enumerate(rows):
        memory[number * stride : (number + 1) * stride] = row
    return block


def _build(node: Any, arrays: Iterator[Any], values: Iterator[Any]) -> Any:
    match node[0]:
        case "array" | "scalar":
            return next(arrays)
        case "value":
            return next(values)
        case "dict":
            return {key: _build(child, arrays, values) for key, child in zip(node[1], node[2], strict=True)}
    items = [_build(child, arrays, values) for child in node[1]]
    return tuple(items) if node[0] == "tuple" else items
