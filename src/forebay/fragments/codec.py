"""A fragment as one run of bytes, and back without a copy.

::

    SampleFragment --split--> skeleton (nesting, dtypes, shapes) --> schema, stored once and named by its hash
                        '---> plain values --> msgpack ----------.
                        '---> arrays, raw, 16-byte aligned ------+--> payload

    payload:  schema id | lengths | plain values | body (the arrays)        the body may be compressed

Reading gives arrays that look into the payload's own memory (`unpack`), or one batch for many payloads of the
same schema (`stack`): a leading axis on every array, with one copy in all. Nothing is pickled.
"""

from __future__ import annotations

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

ALIGNMENT = 16
"""Bytes. The map gives a large payload 16-byte aligned memory, and no dtype needs more."""
COMPRESSIONS = (None, "lz4", "zstd")
"""A payload names its compression by the position here, so entries are only added."""
SMALL_BYTES = 4096
_PADDING = bytes(ALIGNMENT)
_HEADER = struct.Struct("<8sIB3xQ")
_FIELDS = tuple(field.name for field in fields(SampleFragment))


class _Leaf(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_scalar: bool
    offset: int


@dataclass(frozen=True)
class Schema:
    """The nesting, dtypes and shapes of a fragment, and where its arrays lie in the body.

    >>> Schema.parse(schema.text) == schema
    True
    """

    text: bytes
    """JSON; what is stored."""
    skeleton: Any
    leaves: tuple[_Leaf, ...]
    body_bytes: int

    @property
    def schema_id(self) -> bytes:
        """8 bytes that name it: a hash of its text."""
        return hashlib.blake2b(self.text, digest_size=8).digest()

    @staticmethod
    def parse(text: bytes) -> Schema:
        """The schema with this text."""
        skeleton = json.loads(text)
        leaves, offset = [], 0
        for dtype_text, shape, is_scalar in _leaves_of(skeleton):
            dtype = np.dtype(dtype_text)
            leaves.append(_Leaf(dtype, tuple(shape), is_scalar, offset))
            num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            offset += _aligned(num_bytes)
        return Schema(text, skeleton, tuple(leaves), offset)


@lru_cache(maxsize=1024)
def _schema_of(skeleton: Any) -> tuple[Schema, bytes]:
    """With its id: the same few skeletons come again and again."""
    schema = Schema.parse(json.dumps(skeleton, separators=(",", ":")).encode())
    return schema, schema.schema_id


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
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Packed(NamedTuple):
    """A payload, and the schema it cannot be read without."""

    schema_id: bytes
    schema: Schema
    payload: bytes


def pack(fragment: SampleFragment, compression: str | None = None) -> Packed:
    """The bytes of `fragment`.

    Raises:
        ValueError: it holds something that is neither an array nor a plain value.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    values: list[Any] = []
    nodes = tuple(_split(getattr(fragment, name), name, arrays, values) for name in _FIELDS)
    schema, schema_id = _schema_of(("dict", _FIELDS, nodes))
    body = _body(arrays)
    if compression is not None:
        body = [_codec(compression).compress(b"".join(body), asbytes=True)]
    try:
        meta = msgspec.msgpack.encode(values)
    except OverflowError:
        raise ValueError("the fragment holds an integer of more than 64 bits; store it as text") from None
    head = _HEADER.pack(schema_id, len(meta), COMPRESSIONS.index(compression), schema.body_bytes)
    padding = bytes(_aligned(len(head) + len(meta)) - len(head) - len(meta))
    return Packed(schema_id, schema, b"".join((head, meta, padding, *body)))


def _body(arrays: list[np.ndarray[Any, Any]]) -> list[Any]:
    parts: list[Any] = []
    for array in arrays:
        num_bytes = array.nbytes
        # A copy of a few bytes is cheaper than a view of them.
        parts.append(array.tobytes() if num_bytes < SMALL_BYTES else _flat_bytes(array))
        if rest := num_bytes % ALIGNMENT:
            parts.append(_PADDING[rest:])
    return parts


def _flat_bytes(array: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _split(value: Any, where: str, arrays: list[np.ndarray[Any, Any]], values: list[Any]) -> tuple[Any, ...]:
    """The node of `value`; what it stands for goes to the end of `arrays` and `values`."""
    kind = type(value)
    if kind is np.ndarray:
        arrays.append(value)
        return ("array", _dtype_text(value.dtype, where), value.shape)
    if value is None or kind in (bool, int, float, str, bytes):
        values.append(value)
        return ("value",)
    if isinstance(value, dict):
        if not all(type(key) is str for key in value):
            raise ValueError(f"{where} has keys that are not text: {list(value)[:5]!r}")
        children = [_split(item, f"{where}[{key!r}]", arrays, values) for key, item in value.items()]
        return ("dict", tuple(value), tuple(children))
    if kind is list or kind is tuple:
        children = [_split(item, f"{where}[{i}]", arrays, values) for i, item in enumerate(value)]
        return (kind.__name__, tuple(children))
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


def _dtype_text(dtype: np.dtype[Any], where: str) -> str:
    text = _raw_dtype_text(dtype)
    if text is None:
        raise ValueError(
            f"{where} has the dtype {dtype}, which raw bytes cannot hold; use a plain number type"
        )
    return text


@lru_cache(maxsize=256)
def _raw_dtype_text(dtype: np.dtype[Any]) -> str | None:
    """None: values of `dtype` are more than their bytes, or its text does not say all of it."""
    return None if dtype.hasobject or np.dtype(dtype.str) != dtype else dtype.str


def schema_id_of(payload: Any) -> bytes:
    """Which schema reads it."""
    return bytes(payload[:8])


def _parts(payload: Bytes, schema: Schema) -> tuple[list[Any], Bytes]:
    """The plain values, and the body as it was before compression."""
    _, meta_bytes, compression, body_bytes = _HEADER.unpack_from(payload.data)
    values = msgspec.msgpack.decode(payload.data[_HEADER.size : _HEADER.size + meta_bytes])
    body = payload[_aligned(_HEADER.size + meta_bytes) :]
    assert body_bytes == schema.body_bytes
    if compression:
        text = _codec(COMPRESSIONS[compression]).decompress(body, body_bytes, asbytes=True)
        body = np.frombuffer(text, np.uint8)
    return values, body


def unpack(payload: Bytes, schema: Schema) -> SampleFragment:
    """The fragment; its arrays look into `payload`, unless that was compressed, and cannot be written to."""
    values, body = _parts(payload, schema)
    arrays = [_view(leaf, body) for leaf in schema.leaves]
    return SampleFragment(**_build(schema.skeleton, iter(arrays), iter(values)))


def _view(leaf: _Leaf, body: Bytes) -> Any:
    array: np.ndarray[Any, Any] = np.ndarray(leaf.shape, leaf.dtype, body, leaf.offset)
    return array[()] if leaf.is_scalar else array


def stack(payloads: Sequence[Bytes], schema: Schema) -> SampleFragment:
    """All fragments as one: a leading axis on every array, and lists where one has a plain value.

    The arrays may be written to, and look into one block that nothing else holds.
    """
    parts = [_parts(payload, schema) for payload in payloads]
    block = np.frombuffer(bytearray().join(body.data for _, body in parts), np.uint8)
    arrays = [_stacked_view(leaf, block, len(parts), schema.body_bytes) for leaf in schema.leaves]
    columns = [list(column) for column in zip(*(values for values, _ in parts), strict=True)]
    return SampleFragment(**_build(schema.skeleton, iter(arrays), iter(columns)))


def _stacked_view(leaf: _Leaf, block: Bytes, count: int, stride: int) -> np.ndarray[Any, Any]:
    inner = np.ndarray(leaf.shape, leaf.dtype, block, leaf.offset).strides if leaf.shape else ()
    return np.ndarray((count, *leaf.shape), leaf.dtype, block, leaf.offset, (stride, *inner))


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


@lru_cache(maxsize=4)
def _codec(name: str | None) -> Any:
    import pyarrow

    return pyarrow.Codec(name)
