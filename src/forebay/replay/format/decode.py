"""From the packed form of a group (`packing`) back to its rollouts, or an error, whatever the bytes are.

::

    head --read_head--> Head --read_states--> rollouts: their arrays are views of the data, their prompts of
    data (one writable buffer) ----'                    the head; arrays that were not sent are new

Nothing is believed that bytes do not bear out: a length, a count of members, a dtype of Python objects.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.replay.format.encode import (
    ARRAYS,
    CONSTANTS,
    EQUAL,
    MAX_COPIED_BYTES,
    MAX_TOKENS,
    NOT_SENT,
    VALUES,
    Head,
)
from forebay.replay.format.values import Decoder, damage_named
from forebay.replay.groups import build_states, copy_containers
from forebay.types import ROLLOUT_FIELDS, RolloutState

Arrays = list[NDArray[Any]]

_IDS = ARRAYS["response_ids"]
_SHORTEST = {"response_ids": 0, "logprobs": 0, "prompt_ids": EQUAL}
"""Of the others it is `NOT_SENT`."""

_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_value = msgspec.msgpack.Decoder(Any).decode


def unpack_group(head: Any, data: Any) -> list[RolloutState]:
    """The group of a head and one writable buffer with all its arrays, which become views of it.

    Raises:
        ValueError: they are not those of a group.
    """
    with damage_named("a group"):
        return read_states(read_head(head), data)


def read_head(data: Any) -> Head:
    """The head of a group of at least one rollout.

    Raises:
        ValueError: it is none.
    """
    try:
        head = _decode_head(data)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    if not head.status:
        raise ValueError("a group has no rollouts")
    return head


def read_states(head: Head, data: Any) -> list[RolloutState]:
    """The rollouts of a group.

    Raises:
        ValueError, ArithmeticError, LookupError, TypeError, ...: head and data are not those of a group.
    """
    arrays, blobs = _read_arrays(head, np.frombuffer(data, np.uint8))
    columns = _read_values(head, Decoder(blobs)) | arrays
    columns["status"] = head.status
    return build_states([columns[name] for name in ROLLOUT_FIELDS])


def check_head(head: Head, num_bytes: int) -> None:
    """Whether `read_states` makes rollouts of this head, which has no trees, and so many bytes of arrays.

    Raises:
        ValueError, ArithmeticError, LookupError, TypeError, ...: it does not.
    """
    lengths, size = head.lengths, len(head.status)
    _check_lengths(lengths, size)
    sent = sum(sum(_without_marks(lengths[name])) * dtype.itemsize for name, dtype in ARRAYS.items())
    if head.blobs or sent != num_bytes:
        raise ValueError(f"its arrays are {sent} bytes, but {num_bytes} came")
    for name, (lowest, highest) in _CONSTANT_LIMITS.items():
        if missing := lengths[name].count(NOT_SENT):
            constants = head.constants[name]
            if len(constants) != missing or min(constants) < lowest or max(constants) > highest:
                raise ValueError(f"{constants[:8]} are not the {name} of {missing} rollouts")
    prompts = _check_prompts(head.prompts, lengths["prompt_ids"])
    counts = lengths["response_ids"]
    whole = sum(prompts[member] + counts[member] for member in _missing(lengths["tokens"]))
    if whole > MAX_TOKENS:
        raise ValueError(f"{whole} tokens are too much for a group")
    _check_values(head, size)


_CONSTANT_LIMITS = {name: (np.iinfo(ARRAYS[name]).min, np.iinfo(ARRAYS[name]).max) for name in CONSTANTS}
_VALUE_NAMES = frozenset(VALUES)


def _check_values(head: Head, size: int) -> None:
    if unknown := (head.values.keys() | head.copied.keys()) - _VALUE_NAMES:
        raise ValueError(f"a rollout has no {', '.join(sorted(unknown))}")
    for name, column in (*head.values.items(), ("sample_params", head.sample_params or [None])):
        if len(column) not in (1, size):
            raise ValueError(f"there are {len(column)} values of {name} for {size} rollouts")
    for text in head.copied.values():
        if len(bytes(text)) * size > MAX_COPIED_BYTES:
            raise ValueError(f"{size} copies of {len(bytes(text))} bytes are too much")
        _decode_value(bytes(text))
    if "seq_staleness" in head.copied or not all(map(_is_whole, head.values.get("seq_staleness", [None]))):
        raise ValueError("seq_staleness must be a whole number")


def _check_prompts(data: bytearray, lengths: Sequence[int]) -> Sequence[int]:
    """The length of each member's prompt."""
    if sum(_without_marks(lengths)) * _IDS.itemsize != len(data) or lengths[0] < 0:
        raise ValueError(f"its prompts are {len(data)} bytes, but should have lengths of {lengths[:8]}")
    if lengths[0] * len(lengths) > MAX_TOKENS:
        raise ValueError(f"{len(lengths)} prompts of {lengths[0]} tokens are too much")
    return [lengths[0] if length < 0 else length for length in lengths]


def _read_values(head: Head, decoder: Decoder) -> dict[str, Sequence[Any]]:
    size = len(head.status)
    columns: dict[str, Sequence[Any]] = dict.fromkeys(VALUES, (None,) * size)
    for name, column in head.values.items():
        columns[name] = _spread(name, column, size)
    for name, text in head.copied.items():
        columns[name] = _copies(bytes(text), size)
    if head.sample_params:
        columns["sample_params"] = _spread("sample_params", head.sample_params, size)
    if head.trees:
        for name, trees in json.loads(head.trees).items():
            columns[name] = _spread(name, list(map(decoder.decode, trees)), size)
    if len(columns) != len(VALUES):
        raise ValueError(f"a rollout has no {', '.join(sorted(set(columns).difference(VALUES)))}")
    if not all(map(_is_whole, columns["seq_staleness"])):
        raise ValueError("seq_staleness must be a whole number")
    return columns


def _spread(name: str, column: list[Any], size: int) -> list[Any]:
    """The values of all members, of which all may share one."""
    if len(column) == size:
        return column
    if len(column) != 1:
        raise ValueError(f"there are {len(column)} values of {name} for {size} rollouts")
    return column * size


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer)


def _copies(text: bytes, number: int) -> list[Any]:
    if len(text) * number > MAX_COPIED_BYTES:
        raise ValueError(f"{number} copies of {len(text)} bytes are too much")
    value = _decode_value(text)
    return [value, *(copy_containers(value) for _ in range(number - 1))]


def _read_arrays(head: Head, data: NDArray[np.uint8]) -> tuple[dict[str, Arrays], list[memoryview]]:
    """The arrays by field, and the blobs."""
    lengths = head.lengths
    _check_lengths(lengths, len(head.status))
    arrays = {"prompt_ids": _read_prompts(head.prompts, lengths["prompt_ids"])}
    end = 0
    for name, dtype in ARRAYS.items():
        sent = _without_marks(lengths[name])
        start, end = end, end + sum(sent) * dtype.itemsize
        arrays[name] = _split(_between(data, start, end).view(dtype), sent)
    for name in CONSTANTS:
        if NOT_SENT in lengths[name]:
            _fill_constants(arrays[name], head.constants[name], lengths[name], lengths["response_ids"])
    if NOT_SENT in lengths["tokens"]:
        _join_tokens(arrays, lengths["tokens"])
    if min(head.blobs, default=0) < 0 or end + sum(head.blobs) != len(data):
        raise ValueError(f"its arrays and blobs are {end} and {head.blobs} bytes, but {len(data)} came")
    return arrays, [_between(data, *ends).data for ends in pairwise(accumulate(head.blobs, initial=end))]


def _without_marks(lengths: Sequence[int]) -> Sequence[int]:
    """0 for what is not sent."""
    return lengths if min(lengths) >= 0 else [length if length > 0 else 0 for length in lengths]


def _check_lengths(lengths: dict[str, list[int]], size: int) -> None:
    for name in (*ARRAYS, "prompt_ids"):
        of_all = lengths[name]
        if len(of_all) != size or min(of_all) < _SHORTEST.get(name, NOT_SENT):
            raise ValueError(f"{of_all[:8]} are not the lengths of {name} of {size} rollouts")


def _between(data: NDArray[np.uint8], start: int, end: int) -> NDArray[np.uint8]:
    if end > len(data):
        raise ValueError(f"its arrays need more than the {len(data)} bytes that came")
    return data[start:end]


def _split(array: NDArray[Any], lengths: Sequence[int]) -> Arrays:
    if not len(array):
        return [array] * len(lengths)
    return [array[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _read_prompts(data: bytearray, lengths: Sequence[int]) -> Arrays:
    _check_prompts(data, lengths)
    prompts = _split(np.frombuffer(data, _IDS), _without_marks(lengths))
    first = prompts[0]
    return [
        first if length == NOT_SENT else first.copy() if length == EQUAL else prompt
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def _fill_constants(
    arrays: Arrays, constants: Sequence[int], lengths: Sequence[int], counts: Sequence[int]
) -> None:
    """Make the arrays that were not sent: a constant each, as long as the response."""
    missing = _missing(lengths)
    wanted = [counts[member] for member in missing]
    # One piece of memory for all members.
    filled = np.empty(sum(wanted), arrays[0].dtype)
    parts = _split(filled, wanted)
    if constants.count(constants[0]) == len(parts) == len(constants):
        filled.fill(constants[0])
    else:
        for part, value in zip(parts, constants, strict=True):
            part.fill(value)
    _put(parts, arrays, missing)


def _join_tokens(arrays: dict[str, Arrays], lengths: Sequence[int]) -> None:
    """Make the `tokens` that were not sent, from prompt and response."""
    prompts, ids, missing = arrays["prompt_ids"], arrays["response_ids"], _missing(lengths)
    wanted = [len(prompts[member]) + len(ids[member]) for member in missing]
    if sum(wanted) > MAX_TOKENS:
        raise ValueError(f"{sum(wanted)} tokens are too much for a group")
    joined = np.concatenate([part for member in missing for part in (prompts[member], ids[member])])
    _put(_split(joined, wanted), arrays["tokens"], missing)


def _missing(lengths: Sequence[int]) -> list[int]:
    """The members whose arrays were not sent."""
    return [member for member, length in enumerate(lengths) if length == NOT_SENT]


def _put(parts: Arrays, arrays: Arrays, members: Sequence[int]) -> None:
    if len(parts) == len(arrays):
        arrays[:] = parts
        return
    for member, part in zip(members, parts, strict=True):
        arrays[member] = part
