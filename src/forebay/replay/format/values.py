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
``$tensor``        ``[dtype, shape, position of its blob]`` of a torch tensor; it comes back on the CPU
``$ref``           ``[number, value]`` of a Ray object reference; ``[number]`` where it comes again
``$set``           a list of its items; likewise ``$frozenset``
``$datetime``      ISO text, fold, and the key of its `ZoneInfo` or None; likewise ``$time``, without a key
``$date``          ISO text; ``$timedelta``: days, seconds, microseconds
``$status``        the value of a `Status`
``$sample_params`` the fields of a `SampleParams`
``$dataclass``     ``package.module:Class`` and its fields
``$model``         likewise of a pydantic model, with what pydantic keeps beside the fields
=================  ==================================================================================

Types must match exactly: a subclass would come back as something else, so it is refused. Arrays, tensors,
bytes and references that several members of a group share are stored once and shared again after decoding.
Reading never imports a module because a file names it: that would run whatever the file chose. A dataclass or
a model is put together again if the program has imported its module itself, and if the class still has these
fields. No constructor, validator or ``__post_init__`` runs. Otherwise the value comes back as `SavedFields`,
which holds the same, and which is stored as what it stands for.
"""

import ast
import base64
import datetime as dt
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from pydantic import BaseModel

from forebay.types import SampleParams, Status


class Encoder:
    """Turns the values of one group into trees; the raw bytes go to `blobs`.

    >>> encoder = Encoder()
    >>> encoder.encode({"pixels": np.zeros((2, 2), np.uint8)}, "mm_info"), encoder.blobs
    ({'pixels': {'$array': ["'|u1'", [2, 2], 0]}}, [b'\\x00\\x00\\x00\\x00'])
    """

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self._arrays: dict[int, dict[str, Any]] = {}
        """The entries by `id`, so every value in them must live as long as this."""
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
            raise ValueError(f"{where[:200]} nests deeper than {MAX_DEPTH}, or holds itself; store it flatter")
        tree = self._encode_object(value, where)
        self._depth -= 1
        return tree

    def _encode_object(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind is dict:
            items = {key: self.encode(item, f"{where}[{key!r}]") for key, item in value.items()}
            # JSON has text as keys and nothing else, and a key like a tag could be read back as that tag.
            if all(type(key) is str and not key.startswith("$") for key in value):
                return items
            return {"$dict": [[self.encode(key, f"a key of {where}"), item] for key, item in items.items()]}
        if kind is list or kind is tuple:
            listed = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return listed if kind is list else {"$tuple": listed}
        if kind is np.ndarray:
            return self._encode_array(value, where)
        if kind is bytes:
            if id(value) not in self._arrays:
                self._arrays[id(value)] = {"$bytes": self._add_blob(lambda: value)}
            return self._arrays[id(value)]
        if isinstance(value, np.generic) and not isinstance(value, np.void):
            text = base64.b64encode(value.tobytes()).decode("ascii")
            return {"$scalar": [_dtype_text(value.dtype, where), text]}
        # A program that never imported Ray or torch has no references or tensors.
        if (ray := sys.modules.get("ray")) is not None and isinstance(value, ray.ObjectRef):
            return self._encode_ref(value, where)
        try:
            if (torch := sys.modules.get("torch")) is not None and kind is torch.Tensor:
                return self._encode_tensor(value)
            tag, content = _take_apart(value)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None
        return {tag: self.encode(content, where)}

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

    def _encode_tensor(self, tensor: Any) -> dict[str, Any]:
        """A tensor by its bytes, in C order, without gradients."""
        if id(tensor) not in self._arrays:
            _check_tensor(tensor)
            plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            # As bytes, because numpy has no bfloat16.
            uint8 = sys.modules["torch"].uint8
            raw = plain.reshape(-1).view(uint8).numpy().tobytes() if plain.numel() else b""
            place = self._add_blob(lambda: raw)
            self._arrays[id(tensor)] = {"$tensor": [dtype, list(tensor.shape), place]}
        return self._arrays[id(tensor)]

    def _encode_ref(self, ref: Any, where: str) -> dict[str, Any]:
        if ref in self._refs:
            return {"$ref": [self._refs[ref]]}
        number = self._refs[ref] = len(self._refs)
        self._fetched.append(sys.modules["ray"].get(ref))
        return {"$ref": [number, self.encode(self._fetched[-1], where)]}

    def _add_blob(self, make: Callable[[], bytes]) -> int:
        self.blobs.append(make())
        return len(self.blobs) - 1


MAX_DEPTH = 100
"""The deepest nesting of containers: Python reads no JSON of some hundred levels."""
MAX_DTYPE_TEXT = 4096
"""Longer than any but a structured dtype of a hundred fields; what is parsed is bounded."""
_KINDS_OF_BYTES = "biufcmMSUV"


class Checker(Encoder):
    """Refuses the values that an `Encoder` would, without copying arrays or fetching references.

    >>> Checker().encode({"is": len}, "extra_fields")
    Traceback (most recent call last):
    ValueError: extra_fields['is'] is a builtins.builtin_function_or_method, which a snapshot cannot hold; ...
    """

    def _add_blob(self, make: Callable[[], bytes]) -> int:
        return 0

    def _encode_tensor(self, tensor: Any) -> dict[str, Any]:
        _check_tensor(tensor)
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
            case "$bytes":
                if content not in self._arrays:
                    self._arrays[content] = bytes(self._blobs[content])
                return self._arrays[content]
            case "$array":
                return self._once(_array_of, *content)
            case "$objects":
                shape, items = content
                # One by one: of items that are lists numpy would make further dimensions.
                flat = np.empty(len(items), object)
                for i, item in enumerate(items):
                    flat[i] = self.decode(item)
                return flat.reshape(shape)
            case "$scalar":
                return _array_of(content[0], (), base64.b64decode(content[1]))[()]
            case "$tensor":
                return self._once(_tensor_of, *content)
            case "$ref":
                return self._decode_ref(*content)
            case "$dataclass" | "$model":
                return _put_together(tag, *self.decode(content))
            case _ if tag in _JOIN:
                return _JOIN[tag](self.decode(content))
        raise ValueError(f"unknown tag {tag!r} in a stored value")

    def _once(self, make: Callable[[str, list[int], Any], Any], dtype: str, shape: Any, place: int) -> Any:
        """The array or tensor of a blob, the same for all that share it."""
        if place not in self._arrays:
            self._arrays[place] = make(dtype, shape, self._blobs[place])
        return self._arrays[place]

    def _decode_ref(self, number: int, *stored: Any) -> Any:
        if stored:
            ray = sys.modules.get("ray")
            if ray is None:
                raise ValueError("the snapshot holds Ray object references: import ray and call ray.init() first")
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


_OF_DAMAGE = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, NotImplementedError),
    *(OSError, RecursionError, SyntaxError, TypeError, ValueError),
)


@contextmanager
def damage_named(what: str) -> Iterator[None]:
    """Turn whatever foreign content does to the code within into one ValueError that begins with `what`."""
    try:
        yield
    except _OF_DAMAGE as error:
        reason = str(error)[:200] or type(error).__name__
        raise ValueError(f"{what} is damaged, or was made by another program: {reason}") from error


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


@dataclass(frozen=True)
class SavedFields:
    """A dataclass or a pydantic model whose class was not there when it was read.

    >>> SavedFields("$dataclass", "puzzles.grid:Cell", {"row": 1, "column": 2}).fields["row"]
    1
    """

    tag: str
    """``$dataclass`` or ``$model``."""
    class_path: str
    """``package.module:Class``. Import that module before reading, and the object itself comes back."""
    fields: dict[str, Any]
    """The fields of a dataclass; of a pydantic model what it keeps, its fields as ``__dict__``."""


def _take_apart(value: Any) -> tuple[str, Any]:
    """The tag and the plain content of a value of a known class.

    Raises:
        ValueError: it is of none, or would not come back as it is; the message goes on from its name.
    """
    kind = type(value)
    if kind in _CLASSES:
        tag, split, _ = _CLASSES[kind]
        return tag, split(value)
    if kind is SavedFields:
        return value.tag, [value.class_path, value.fields]
    if isinstance(value, BaseModel):
        return "$model", [_path_of(kind), BaseModel.__getstate__(value)]
    if is_dataclass(kind):
        return "$dataclass", [_path_of(kind), _fields_of(value)]
    raise ValueError(
        f"is a {kind.__module__}.{kind.__qualname__}, which a snapshot cannot hold; use dicts, lists, sets, "
        f"plain values, bytes, times, arrays, tensors, dataclasses or pydantic models"
    )


def _put_together(tag: str, path: str, state: dict[str, Any]) -> Any:
    """The dataclass or the model that was taken apart, or its `SavedFields`."""
    kind = _find(path)
    if not isinstance(kind, type) or _makes_its_own(kind):
        return SavedFields(tag, path, state)
    if tag == "$model" and issubclass(kind, BaseModel) and set(kind.model_fields) <= set(state["__dict__"]):
        # By pydantic's own method and not the class's: reading runs no code of the program.
        model = object.__new__(kind)
        BaseModel.__setstate__(model, state)
        return model
    if tag == "$dataclass" and is_dataclass(kind) and {field.name for field in fields(kind)} == set(state):
        made: Any = object.__new__(kind)
        for name, value in state.items():
            # Past a frozen class, and past any constructor.
            object.__setattr__(made, name, value)
        return made
    return SavedFields(tag, path, state)


def _split_datetime(value: dt.datetime) -> list[Any]:
    zone = value.tzinfo
    if zone is None or type(zone) is dt.timezone:
        return [value.isoformat(), value.fold, None]
    if type(zone) is ZoneInfo and zone.key:
        return [value.replace(tzinfo=None).isoformat(), value.fold, zone.key]
    raise ValueError(f"has the time zone {zone!r}; use datetime.timezone or a zoneinfo.ZoneInfo with a key")


def _join_datetime(content: list[Any]) -> dt.datetime:
    text, fold, zone = content
    moment = dt.datetime.fromisoformat(text).replace(fold=fold)
    return moment if zone is None else moment.replace(tzinfo=ZoneInfo(zone))


def _split_time(value: dt.time) -> list[Any]:
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        raise ValueError("is a time of day in a named zone, which says no offset; store its parts")
    return [value.isoformat(), value.fold]


_CLASSES: dict[type[Any], tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    set: ("$set", list, set),
    frozenset: ("$frozenset", list, frozenset),
    dt.datetime: ("$datetime", _split_datetime, _join_datetime),
    dt.time: ("$time", _split_time, lambda parts: dt.time.fromisoformat(parts[0]).replace(fold=parts[1])),
    dt.date: ("$date", dt.date.isoformat, dt.date.fromisoformat),
    dt.timedelta: ("$timedelta", lambda d: [d.days, d.seconds, d.microseconds], lambda c: dt.timedelta(*c)),
    Status: ("$status", attrgetter("value"), Status),
    SampleParams: ("$sample_params", lambda params: _fields_of(params), lambda c: SampleParams(**c)),
}
"""By class: its tag, how it is taken apart, and how it is put together."""

_JOIN: dict[str, Callable[[Any], Any]] = {"$float": float, "$tuple": tuple, "$dict": dict}
_JOIN |= {tag: join for tag, _, join in _CLASSES.values()}


def _check_tensor(tensor: Any) -> None:
    """ValueError if the tensor is not made of plain memory; the message goes on from its name."""
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.device.type == "meta":
        raise ValueError("is a tensor that is sparse, quantized or without memory; store a dense one")


def _tensor_of(dtype_name: str, shape: list[int], data: Any) -> Any:
    """The tensor, in memory of its own.

    Raises:
        ValueError: there is no such dtype, or torch is not installed.
    """
    # Not a module that the file names: to import torch is safe.
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ValueError(f"it holds tensors, and torch cannot be imported: {error}") from None
    dtype = getattr(torch, dtype_name, None) if dtype_name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype_name[:40]!r}")
    # `torch.frombuffer` takes no empty buffer.
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _path_of(kind: type[Any]) -> str:
    """The path by which the class is found again."""
    path = f"{kind.__module__}:{kind.__qualname__}"
    if _find(path) is not kind:
        raise ValueError(f"is a {path}, which is not found there again; define the class in a module")
    if _makes_its_own(kind):
        raise ValueError(f"is a {path}, which is made in a way of its own; store its values in a dict")
    return path


def _makes_its_own(kind: Any) -> bool:
    """Whether objects of the class are made in a way of its own."""
    return bool(kind.__new__ is not object.__new__)


def _find(path: str) -> Any:
    """The class at `path` in what is imported already; None if there is none."""
    module, _, qualname = path.partition(":")
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        # Not `getattr`: a module may import something when it is asked for a name.
        found = getattr(found, "__dict__", {}).get(name)
    return found


def _fields_of(value: Any) -> dict[str, Any]:
    names = [field.name for field in fields(value)]
    # These would be missing in the value that is read back.
    if more := sorted(set(getattr(value, "__dict__", ())).difference(names)):
        raise ValueError(f"has the attribute {more[0]!r}, which is none of its fields")
    try:
        return {name: getattr(value, name) for name in names}
    except AttributeError as error:
        raise ValueError(f"has a field without a value: {error}") from None
