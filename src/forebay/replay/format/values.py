"""Any value a rollout may hold, as JSON text plus raw bytes, and back; exactly, and without pickle.

::

    value --Encoder.encode--> JSON tree with tags --+--> text
                      '-----> blobs (raw bytes) ----+--> kept beside it       Decoder.decode: the way back

Plain JSON values stand for themselves. Every other value is an object with one key that starts with ``$``:

=================  ==================================================================================
``$float``         ``"nan"``, ``"inf"``, ``"-inf"``
``$tuple``         a list of its items
``$dict``          a list of ``[key, value]`` (keys that are not text, or text starting with ``$``)
``$bytes``         the position of its blob
``$array``         ``[dtype, shape, position of its blob]``: C order, the array's own byte order
``$objects``       ``[shape, items]`` of an array of Python objects
``$scalar``        ``[dtype, base64]`` of a numpy scalar
``$tensor``        ``[dtype, shape, position of its blob]`` of a torch tensor
``$ref``           ``[number, value]`` of a Ray object reference; ``[number]`` where it comes again
=================  ==================================================================================

Values of other known classes are taken apart first, and have tags of their own (`objects`). Types must match
exactly: a subclass would come back as something else, so it is refused. Arrays, tensors and references that
several members of a group share are stored once and shared again after decoding.
"""

from __future__ import annotations

import ast
import base64
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from forebay.replay.format.objects import (
    OBJECT_TAGS,
    check_tensor,
    is_tensor,
    put_tensor_together,
    put_together,
    take_apart,
    take_tensor_apart,
)

MAX_DEPTH = 100
"""Of nested containers: what is written is read again, and Python reads no JSON of some hundred levels."""
MAX_DTYPE_TEXT = 4096
"""Longer than any but a structured dtype of a hundred fields; what is parsed is bounded."""
_KINDS_OF_BYTES = "biufcmMSUV"


class Encoder:
    """Turns the values of one group into trees; the raw bytes go to `blobs`.

    >>> encoder = Encoder()
    >>> encoder.encode({"pixels": np.zeros((2, 2), np.uint8)}, "mm_info"), encoder.blobs
    ({'pixels': {'$array': ["'|u1'", [2, 2], 0]}}, [b'\\x00\\x00\\x00\\x00'])
    """

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self._arrays: dict[int, dict[str, Any]] = {}
        """By `id`, so every value in it must live as long as this."""
        self._fetched: list[Any] = []
        """Values of references: nothing else keeps them alive."""
        self._refs: dict[Any, int] = {}
        self._depth = 0

    def encode(self, value: Any, where: str) -> Any:
        """The tree of `value`; `where` names it in error messages.

        Raises:
            ValueError: it holds something that cannot be stored; the message says where.
        """
        kind = type(value)
        if value is None or kind is bool or kind is int or kind is str:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(
                f"{where[:200]} nests deeper than {MAX_DEPTH}, or holds itself; store it flatter"
            )
        tree = self._encode_object(value, where)
        self._depth -= 1
        return tree

    def _encode_object(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind is dict:
            return self._encode_dict(value, where)
        if kind is list or kind is tuple:
            items = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind is np.ndarray:
            return self._encode_array(value, where)
        return self._encode_rare(value, where)

    def _encode_rare(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind is bytes:
            return {"$bytes": self._add_blob(lambda: value)}
        if isinstance(value, np.generic) and not isinstance(value, np.void):
            text = base64.b64encode(value.tobytes()).decode("ascii")
            return {"$scalar": [_dtype_text(value.dtype, where), text]}
        if _is_ref(value):
            return self._encode_ref(value, where)
        try:
            if is_tensor(value):
                return self._encode_tensor(value)
            taken = take_apart(value)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None
        if taken is not None:
            tag, content = taken
            return {tag: self.encode(content, where)}
        raise ValueError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which a snapshot cannot hold; use dicts, "
            f"lists, sets, plain values, bytes, times, arrays, tensors, dataclasses or pydantic models"
        )

    def _encode_dict(self, value: dict[Any, Any], where: str) -> Any:
        items = {key: self.encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in value):
            return items
        return {"$dict": [[self.encode(key, f"a key of {where}"), item] for key, item in items.items()]}

    def _encode_array(self, value: np.ndarray[Any, Any], where: str) -> dict[str, Any]:
        if id(value) not in self._arrays:
            shape = list(value.shape)
            if value.dtype.kind == "O":
                flat = enumerate(value.ravel().tolist())
                items = [self.encode(item, f"{where}.flat[{i}]") for i, item in flat]
                return {"$objects": [shape, items]}
            dtype = _dtype_text(value.dtype, where)
            self._arrays[id(value)] = {"$array": [dtype, shape, self._add_blob(value.tobytes)]}
        return self._arrays[id(value)]

    def _encode_tensor(self, value: Any) -> dict[str, Any]:
        if id(value) not in self._arrays:
            dtype, shape, raw = take_tensor_apart(value)
            self._arrays[id(value)] = {"$tensor": [dtype, shape, self._add_blob(lambda: raw)]}
        return self._arrays[id(value)]

    def _encode_ref(self, ref: Any, where: str) -> dict[str, Any]:
        if ref in self._refs:
            return {"$ref": [self._refs[ref]]}
        number = self._refs[ref] = len(self._refs)
        self._fetched.append(sys.modules["ray"].get(ref))
        return {"$ref": [number, self.encode(self._fetched[-1], where)]}

    def _add_blob(self, make: Callable[[], bytes]) -> int:
        self.blobs.append(make())
        return len(self.blobs) - 1


class Checker(Encoder):
    """Refuses the values that an `Encoder` would, without copying arrays or fetching references.

    >>> Checker().encode({"is": print}, "extra_fields")
    Traceback (most recent call last):
    ValueError: extra_fields['is'] is a builtins.builtin_function_or_method, which a snapshot cannot hold; ...
    """

    def _add_blob(self, make: Callable[[], bytes]) -> int:
        return 0

    def _encode_tensor(self, value: Any) -> dict[str, Any]:
        check_tensor(value)
        return {}

    def _encode_ref(self, ref: Any, where: str) -> dict[str, Any]:
        return {}


class Decoder:
    """Turns the trees of one group back into values; `blobs` are those of its encoder.

    >>> Decoder([]).decode({"$tuple": [1, {"$float": "nan"}]})
    (1, nan)
    """

    def __init__(self, blobs: Sequence[Any]) -> None:
        self._blobs = blobs
        self._arrays: dict[int, Any] = {}
        self._refs: dict[int, Any] = {}

    def decode(self, tree: Any) -> Any:
        """The value of `tree`.

        Raises:
            ValueError: a tag is unknown, or there are Ray references and Ray is not in use.
        """
        if type(tree) is list:
            return [self.decode(item) for item in tree]
        if type(tree) is not dict:
            return tree
        if len(tree) == 1:
            tag, content = next(iter(tree.items()))
            if tag.startswith("$"):
                return self._decode_tag(tag, content)
        return {key: self.decode(item) for key, item in tree.items()}

    def _decode_tag(self, tag: str, content: Any) -> Any:
        match tag:
            case "$float":
                return float(content)
            case "$tuple":
                return tuple(self.decode(content))
            case "$dict":
                return {self.decode(key): self.decode(item) for key, item in content}
            case "$bytes":
                return bytes(self._blobs[content])
            case "$array":
                return self._once(_array_of, *content)
            case "$objects":
                return self._decode_objects(*content)
            case "$scalar":
                return _array_of(content[0], (), base64.b64decode(content[1]))[()]
            case "$tensor":
                return self._once(put_tensor_together, *content)
            case "$ref":
                return self._decode_ref(*content)
            case _ if tag in OBJECT_TAGS:
                return put_together(tag, self.decode(content))
        raise ValueError(f"unknown tag {tag!r} in a stored value")

    def _once(self, make: Callable[[str, list[int], Any], Any], dtype: str, shape: Any, place: int) -> Any:
        """The array or tensor of a blob, the same for all that share it."""
        if place not in self._arrays:
            self._arrays[place] = make(dtype, shape, self._blobs[place])
        return self._arrays[place]

    def _decode_objects(self, shape: list[int], items: list[Any]) -> np.ndarray[Any, Any]:
        flat = np.empty(len(items), object)
        for i, item in enumerate(items):
            flat[i] = self.decode(item)
        return flat.reshape(shape)

    def _decode_ref(self, number: int, *stored: Any) -> Any:
        if stored:
            ray = sys.modules.get("ray")
            if ray is None:
                raise ValueError(
                    "the snapshot holds Ray object references: import ray and call ray.init() first"
                )
            self._refs[number] = ray.put(self.decode(stored[0]))
        return self._refs[number]


def _array_of(dtype: str, shape: Sequence[int], data: Any) -> np.ndarray[Any, Any]:
    """A copy of the bytes as an array: it can be written to, and does not keep a whole file in memory."""
    if any(length < 0 for length in shape):
        raise ValueError(f"an array cannot have the shape {shape}")
    view: np.ndarray[Any, Any] = np.ndarray(tuple(shape), _dtype(dtype), data)
    _check_text(view)
    return view.copy()


def _check_text(array: np.ndarray[Any, Any]) -> None:
    """Refuse characters that Python does not have: numpy breaks when a caller looks at them."""
    if array.dtype.kind == "U" and array.nbytes:
        codes = np.ascontiguousarray(array).reshape(-1).view(f"{array.dtype.str[0]}u4")
        if codes.max() > sys.maxunicode:
            raise ValueError(f"there is no character {codes.max():#x}")
    for name in array.dtype.names or ():
        _check_text(array[name])


@contextmanager
def damage_named(what: str) -> Iterator[None]:
    """Turn whatever foreign content does to the code within into one ValueError that begins with `what`."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        NotImplementedError,
        OSError,
        RecursionError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as error:
        reason = str(error)[:200] or type(error).__name__
        raise ValueError(f"{what} is damaged, or was made by another program: {reason}") from error


def _is_ref(value: Any) -> bool:
    """Whether `value` is a Ray object reference; if Ray was never imported there are none."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and isinstance(value, ray.ObjectRef)


def _dtype_text(dtype: np.dtype[Any], where: str) -> str:
    try:
        text = repr(dtype_to_descr(dtype))
        is_exact = _dtype(text) == dtype
    except (TypeError, ValueError):
        is_exact = False
    if not is_exact:
        raise ValueError(
            f"{where} has the dtype {str(dtype)[:80]}, which a snapshot cannot hold; use one of numpy's own"
        )
    return text


@lru_cache(maxsize=256)
def _dtype(text: str) -> np.dtype[Any]:
    """The dtype of raw bytes: in others, bytes would be taken for addresses of objects."""
    if len(text) > MAX_DTYPE_TEXT:
        raise ValueError(f"a dtype has at most {MAX_DTYPE_TEXT} characters, not {len(text)}: {text[:40]} ...")
    dtype = descr_to_dtype(ast.literal_eval(text))
    # An array's dtype is never an array itself: it has more dimensions instead.
    if dtype.hasobject or dtype.kind not in _KINDS_OF_BYTES or dtype.subdtype is not None:
        raise ValueError(f"an array of dtype {text[:80]} cannot be made of bytes")
    return dtype
