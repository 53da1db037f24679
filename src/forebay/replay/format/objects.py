"""Values of some well-known classes, taken apart into plain ones for a payload, and put together again.

::

    value --take_apart--> (tag, plain content)    stored by `forebay.replay.format.values`    put_together -->
    value

================  =====================================================================================
``$set``          a list; likewise ``$frozenset``
``$datetime``     ISO text, fold, and the key of its `ZoneInfo` or None; likewise ``$time``, without a key
``$date``         ISO text
``$timedelta``    days, seconds, microseconds
``$status``       the value of a `Status`
``$sample_params``  the fields of a `SampleParams`
``$dataclass``    ``package.module:Class`` and its fields
``$model``        likewise of a pydantic model, with what pydantic keeps beside the fields
================  =====================================================================================

Reading never imports a module because a file names it: that would run whatever the file chose. A dataclass or
a model is put together again if the program has imported its module itself, and if the class still has these
fields. No constructor, validator or ``__post_init__`` runs. Otherwise the value comes back as `SavedFields`,
which holds the same, and which is stored as what it stands for.

Tensors are stored by their bytes and come back on the CPU, without gradients.
"""

from __future__ import annotations

import datetime as dt
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any
from zoneinfo import ZoneInfo

from pydantic import BaseModel

from forebay.types import SampleParams, Status


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
    """Of a dataclass: its fields. Of a model: what pydantic keeps, the fields as ``__dict__``."""


def take_apart(value: Any) -> tuple[str, Any] | None:
    """The tag and the plain content of a value of one of these classes; None if it is of none.

    Raises:
        ValueError: it is, but would not come back as it is; the message goes on from its name.
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
    return None


def put_together(tag: str, content: Any) -> Any:
    """The value that `take_apart` took apart, or its `SavedFields`."""
    if tag in _JOIN:
        return _JOIN[tag](content)
    path, state = content
    kind = _find(path)
    if tag == "$model" and _is_model_with(kind, state):
        model = object.__new__(kind)
        BaseModel.__setstate__(model, state)
        return model
    if tag == "$dataclass" and _is_dataclass_with(kind, state):
        made = object.__new__(kind)
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

_JOIN = {tag: join for tag, _, join in _CLASSES.values()}
OBJECT_TAGS = frozenset({*_JOIN, "$dataclass", "$model"})


def is_tensor(value: Any) -> bool:
    """Whether `value` is a tensor of torch; if torch was never imported there are none."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Tensor


def take_tensor_apart(tensor: Any) -> tuple[str, list[int], bytes]:
    """The name of the dtype, the shape, and the bytes, in C order.

    Raises:
        ValueError: it is not a plain tensor: sparse, quantized, or without memory.
    """
    torch: Any = sys.modules["torch"]
    check_tensor(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw


def check_tensor(tensor: Any) -> None:
    """ValueError if the tensor is not made of plain memory; the message goes on from its name."""
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.device.type == "meta":
        raise ValueError("is a tensor that is sparse, quantized or without memory; store a dense one")


def put_tensor_together(dtype_name: str, shape: list[int], data: Any) -> Any:
    """The tensor, in memory of its own.

    Raises:
        ValueError: there is no such dtype, or torch is not installed.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ValueError(f"it holds tensors, and torch cannot be imported: {error}") from None
    dtype = getattr(torch, dtype_name, None) if dtype_name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype_name[:40]!r}")
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _path_of(kind: type[Any]) -> str:
    """Where the class is found again."""
    path = f"{kind.__module__}:{kind.__qualname__}"
    if _find(path) is not kind:
        raise ValueError(f"is a {path}, which is not found there again; define the class in a module")
    if kind.__new__ is not object.__new__:
        raise ValueError(f"is a {path}, which is made in a way of its own; store its values in a dict")
    return path


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
    if more := sorted(set(getattr(value, "__dict__", ())).difference(names)):
        raise ValueError(f"has the attribute {more[0]!r}, which is none of its fields")
    try:
        return {name: getattr(value, name) for name in names}
    except AttributeError as error:
        raise ValueError(f"has a field without a value: {error}") from None


def _is_dataclass_with(kind: Any, state: dict[str, Any]) -> bool:
    return (
        isinstance(kind, type)
        and is_dataclass(kind)
        and kind.__new__ is object.__new__
        and {field.name for field in fields(kind)} == set(state)
    )


def _is_model_with(kind: Any, state: dict[str, Any]) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, BaseModel)
        and kind.__new__ is object.__new__
        and set(kind.model_fields) <= set(state["__dict__"])
    )
