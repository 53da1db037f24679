"""From the packed form of a group (`encode`) back to its rollouts, or an error, whatever the bytes are.

::

    head --read_head--> Head --check_head--> sound --read_states--> rollouts
    data (one writable buffer) --------------------------'  arrays that were sent are views of it; prompts
                                                            are views of the head; the other arrays are new

A length, a count of members or a dtype is believed only if the bytes bear it out. A group is checked once,
when it comes; it may be read much later, and more than once.
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
    PROMPTS,
    VALUES,
    Head,
)
from forebay.replay.format.values import Decoder, damage_named
from forebay.replay.groups import build_states, copy_containers
from forebay.types import ROLLOUT_FIELDS, RolloutState

Arrays = list[NDArray[Any]]

_SHORTEST = dict.fromkeys((*CONSTANTS, "tokens"), NOT_SENT)
_SHORTEST |= {"response_ids": 0, "logprobs": 0, PROMPTS: EQUAL}
"""The smallest number that may stand as a length of each array field."""

_LIMITS = {name: (np.iinfo(ARRAYS[name]).min, np.iinfo(ARRAYS[name]).max) for name in CONSTANTS}

_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_any = msgspec.msgpack.Decoder(Any).decode


def unpack_group(head: Any, data: Any) -> list[RolloutState]:
    """The group of a head and one writable buffer with all its arrays, which become views of it.

    Raises:
        ValueError: they are not those of a group.
    """
    with damage_named("a group"):
        parsed = read_head(head)
        check_head(parsed, len(data))
        return read_states(parsed, data)


def read_head(data: Any) -> Head:
    """The head of a group of at least one rollout.

    Raises:
        ValueError: the bytes are not a head.
    """
    try:
        head = _decode_head(data)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    if not head.status:
        raise ValueError("a group has no rollouts")
    return head


def decode_value(text: msgspec.Raw) -> Any:
    """A value that stands in a head as text, for all members."""
    return _decode_any(bytes(text))


def check_head(head: Head, num_bytes: int) -> None:
    """Check that `read_states` can make rollouts of this head and so many bytes of arrays and blobs.

    The values in the trees are checked when they are read.

    Raises:
        ValueError, ArithmeticError, LookupError, TypeError, ...: it cannot.
    """
    size, lengths = len(head.status), head.lengths
    if len(head.steps) != size:
        raise ValueError(f"there are {len(head.steps)} oldest model steps of {size} rollouts")
    for name, shortest in _SHORTEST.items():
        of_all = lengths[name]
        if len(of_all) != size or min(of_all) < shortest:
            raise ValueError(f"{of_all[:8]} are not the lengths of {name} of {size} rollouts")
    sent = sum(sum(_without_marks(lengths[name])) * dtype.itemsize for name, dtype in ARRAYS.items())
    if min(head.blobs, default=0) < 0 or sent + sum(head.blobs) != num_bytes:
        raise ValueError(f"its arrays and blobs of {sent} and {head.blobs} bytes are not {num_bytes} as came")
    for name, (lowest, highest) in _LIMITS.items():
        if missing := lengths[name].count(NOT_SENT):
            constants = head.constants[name]
            if len(constants) != missing or min(constants) < lowest or max(constants) > highest:
                raise ValueError(f"{constants[:8]} are not the {name} of {missing} rollouts")
    _check_prompts(head)
    for name, column in head.values.items():
        if name not in _VALUE_NAMES or len(column) not in (1, size):
            _check_column(name, column, size)
    _check_column("sample_params", head.sample_params or (None,), size)
    if not head.trees:
        _check_column("seq_staleness", head.values.get("seq_staleness", (None,)), size)
    for name, text in head.copied.items():
        _check_column(name, (0,), size)
        if len(bytes(text)) * size > MAX_COPIED_BYTES:
            raise ValueError(f"{size} copies of {len(bytes(text))} bytes are too much")
    if "seq_staleness" in head.copied:
        raise ValueError("seq_staleness must be a whole number of each member")


def _check_prompts(head: Head) -> None:
    """Check the prompts, and the arrays that are made of them: few bytes could ask for much memory."""
    lengths, data = head.lengths[PROMPTS], head.prompts
    if sum(_without_marks(lengths)) * ARRAYS["tokens"].itemsize != len(data) or lengths[0] < 0:
        raise ValueError(f"its prompts are {len(data)} bytes, but should have lengths of {lengths[:8]}")
    if lengths[0] * len(lengths) > MAX_TOKENS:
        raise ValueError(f"{len(lengths)} prompts of {lengths[0]} tokens are too much")
    prompts = [lengths[0] if length < 0 else length for length in lengths]
    counts = head.lengths["response_ids"]
    joined = sum(prompts[member] + counts[member] for member in _missing(head.lengths["tokens"]))
    if joined > MAX_TOKENS:
        raise ValueError(f"{joined} tokens are too much for a group")


def _check_column(name: str, column: Sequence[Any], size: int) -> None:
    """Check the values of a field: one of each member, or one that all share."""
    if name not in _VALUE_NAMES:
        raise ValueError(f"a rollout has no {name}")
    if len(column) not in (1, size):
        raise ValueError(f"there are {len(column)} values of {name} for {size} rollouts")
    if name == "seq_staleness" and not all(isinstance(value, int | np.integer) for value in column):
        raise ValueError("seq_staleness must be a whole number")


_VALUE_NAMES = frozenset(VALUES)


def read_states(head: Head, data: Any) -> list[RolloutState]:
    """The rollouts of a group, whose head was checked.

    Raises:
        ValueError, ArithmeticError, LookupError, TypeError, ...: its trees are not those of a group.
    """
    size = len(head.status)
    arrays, blobs = _read_arrays(head, np.frombuffer(data, np.uint8))
    values = head.values
    if head.sample_params:
        values = values | {"sample_params": head.sample_params}
    if head.trees:
        decoder = Decoder(blobs)
        for name, trees in json.loads(head.trees).items():
            values = values | {name: list(map(decoder.decode, trees))}
            _check_column(name, values[name], size)
        _check_column("seq_staleness", values["seq_staleness"], size)
    columns: dict[str, Sequence[Any]] = dict.fromkeys(VALUES, (None,) * size) | {"status": head.status}
    for name, column in values.items():
        columns[name] = column if len(column) == size else column * size
    for name, text in head.copied.items():
        value = decode_value(text)
        columns[name] = [value, *(copy_containers(value) for _ in range(size - 1))]
    columns |= arrays
    return build_states([columns[name] for name in ROLLOUT_FIELDS])


def _read_arrays(head: Head, data: NDArray[np.uint8]) -> tuple[dict[str, Arrays], list[memoryview]]:
    """The arrays by field, and the blobs of the trees."""
    lengths = head.lengths
    prompts = _split(np.frombuffer(head.prompts, ARRAYS["tokens"]), _without_marks(lengths[PROMPTS]))
    first = prompts[0]
    for member, length in enumerate(lengths[PROMPTS]):
        if length < 0:
            prompts[member] = first if length == NOT_SENT else first.copy()
    arrays = {PROMPTS: prompts}
    end = 0
    for name, dtype in ARRAYS.items():
        sent = _without_marks(lengths[name])
        start, end = end, end + sum(sent) * dtype.itemsize
        arrays[name] = _split(data[start:end].view(dtype), sent)
    ids = arrays["response_ids"]
    for name in CONSTANTS:
        if missing := _missing(lengths[name]):
            counts = [len(ids[member]) for member in missing]
            constants = head.constants[name]
            # One piece of memory for all members; filling it with one value is much faster than `repeat`.
            made = np.empty(sum(counts), ARRAYS[name])
            is_one = constants.count(constants[0]) == len(constants)
            made[:] = constants[0] if is_one else np.repeat(constants, counts)
            _put(_split(made, counts), arrays[name], missing)
    if missing := _missing(lengths["tokens"]):
        counts = [len(prompts[member]) + len(ids[member]) for member in missing]
        joined = np.concatenate([part for member in missing for part in (prompts[member], ids[member])])
        _put(_split(joined, counts), arrays["tokens"], missing)
    ends = accumulate(head.blobs, initial=end)
    return arrays, [data[start:stop].data for start, stop in pairwise(ends)]


def _without_marks(lengths: Sequence[int]) -> Sequence[int]:
    """The lengths of the arrays that were sent; 0 for the others."""
    return lengths if min(lengths) >= 0 else [length if length > 0 else 0 for length in lengths]


def _missing(lengths: Sequence[int]) -> list[int]:
    """The members whose arrays were not sent."""
    return [member for member, length in enumerate(lengths) if length == NOT_SENT]


def _split(array: NDArray[Any], lengths: Sequence[int]) -> Arrays:
    if not len(array):
        return [array] * len(lengths)
    return [array[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _put(parts: Arrays, arrays: Arrays, members: Sequence[int]) -> None:
    if len(parts) == len(arrays):
        arrays[:] = parts
        return
    for member, part in zip(members, parts, strict=True):
        arrays[member] = part
