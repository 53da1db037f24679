"""The packed form of a group: a small head, and its arrays as they lie in memory.

::

    group --pack_group--> PackedGroup: head      MessagePack, written and checked by msgspec: `Head`
                                       buffers   response ids of all members, then their logprobs, ...,
                                                 then masks, then the blobs of `trees`; nothing between them;
                                                 small ones in one copy, large ones where they lie

A group looks so between two processes and, in one piece, in a database (`GroupCodec`). Regular content is not
written out: a value that all members have, a prompt that is that of the first member, a
mask and model steps of one value throughout, ``tokens`` that are the prompt and the response. Prompts are in
the head, so that a group whose response is wiped later does not keep the buffer of its tokens in memory.

Values that MessagePack gives back as they are, type for type, are in `Head.values`, and what every run has
beside them in `Head.sample_params`. All others (arrays,
tuples, bytes, integers over 64 bits, ...) are the trees of `forebay.replay.format.values`, as in a snapshot.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.replay.format.values import MAX_DEPTH, Encoder
from forebay.replay.groups import StoredGroup
from forebay.types import FIELDS, ROLLOUT_SLOTS, TOKEN_FIELDS, RolloutState, SampleParams, Status

assert sys.byteorder == "little", "arrays are stored as they lie in memory, which must be little-endian"

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A group in its packed form.

    >>> from forebay.replay.format.packed import unpack_group
    >>> packed = pack_group([RolloutState([], response_ids=[7, 8])])
    >>> unpack_group(packed.head, bytearray(b"".join(packed.buffers)))[0].response_ids
    array([7, 8], dtype=int32)
    """

    head: bytes
    buffers: list[Buffer]
    """May be the arrays themselves: not to be written to while they are used."""
    num_bytes: int
    """Bytes of `buffers` together."""

    @property
    def size(self) -> tuple[int, int]:
        """Bytes of the head and of the arrays."""
        return len(self.head), self.num_bytes


def pack_group(group: Sequence[RolloutState], *, join_small: bool = True) -> PackedGroup:
    """The packed form of a group; a caller that joins all buffers itself gets the small ones as they lie.

    Raises:
        ValueError: a rollout holds a value that cannot be stored; the message says where.
    """
    stored = group if isinstance(group, StoredGroup) else StoredGroup(group)
    try:
        return _pack(stored, all_as_trees=False, join_small=join_small)
    except (OverflowError, UnicodeEncodeError):
        # MessagePack has no integers over 64 bits and no lone surrogates; the trees' JSON text has both.
        return _pack(stored, all_as_trees=True, join_small=join_small)


PROMPTS = "prompt_ids"
ARRAYS: dict[str, np.dtype[Any]] = {
    name: np.dtype(FIELDS[name].dtype)
    for name in sorted(
        (name for name, rule in FIELDS.items() if rule.kind == "array" and name != PROMPTS),
        key=lambda name: (-np.dtype(FIELDS[name].dtype).itemsize, name not in TOKEN_FIELDS),
    )
}
"""In the order of the buffers: the widest first, so that every array is aligned."""
CONSTANTS = ("response_mask", "response_model_steps")
"""Arrays that often have one value throughout."""
VALUES = tuple(name for name, rule in FIELDS.items() if rule.kind not in ("array", "status"))

NOT_SENT = -1
"""As a length: the array follows from the others. A prompt is then the same array as the first member's."""
EQUAL = -2
"""As the length of a prompt: an array of its own that equals the first member's."""

MAX_TOKENS = 1 << 28
"""The most tokens in the prompts and `tokens` of a group: they may be many times the group's bytes."""
MAX_COPIED_BYTES = 1 << 26
"""Of a value times the members that get a copy of it; likewise."""

MIN_APART_BYTES = 64 << 10
"""Arrays from this mean size up are sent from where they lie. To hand out many small ones one by one, to
Python and to the socket, takes longer than to copy them into one piece."""


class Head(msgspec.Struct, forbid_unknown_fields=True):
    """All of a group but its arrays; a map, whose keys are these names."""

    status: list[Status]
    """The status of each member."""
    steps: list[int | None]
    """The oldest model step of each member."""
    values: dict[str, list[Any]]
    """Values by field: one for each member, or one that all share; None if it is missing."""
    copied: dict[str, msgspec.Raw]
    """By field: a value that each member gets a copy of."""
    trees: str
    """As `values`, in JSON text, each value a tree (`forebay.replay.format.values`); or empty."""
    prompts: bytearray
    """The prompts, int32, without those that are `NOT_SENT` or `EQUAL`."""
    lengths: dict[str, list[int]]
    """By array field: the length of the array of each member."""
    constants: dict[str, list[int]]
    """The one value of each mask and each model steps array; of those that are `NOT_SENT`, in order."""
    blobs: list[int]
    """Bytes of each blob of the trees."""
    sample_params: list[SampleParams] = []
    """One of each member, or one that all share; empty if they are elsewhere."""


_encode = msgspec.msgpack.Encoder().encode
_read_values = attrgetter(*VALUES)
_READ_ARRAYS = {name: ROLLOUT_SLOTS[name].__get__ for name in (*ARRAYS, PROMPTS)}
_NONE = {type(None)}
_SCALARS = frozenset({str, int, bool, float, type(None)})
_SAME_IF_EQUAL = frozenset({str, int, bool})
"""Of one of these kinds, equal values are the same; floats have -0.0 and NaN."""
_TEXT, _INTS, _FLOATS = frozenset({str}), frozenset({int}), frozenset({float})
_EMPTY: dict[type[Any], msgspec.Raw] = {kind: msgspec.Raw(_encode(kind())) for kind in (dict, list)}
"""The empty containers, which most fields that may hold a container hold."""


def _pack(group: StoredGroup, *, all_as_trees: bool, join_small: bool) -> PackedGroup:
    head = Head([state.status for state in group], list(group.steps), {}, {}, "", bytearray(), {}, {}, [])
    encoder = Encoder()
    trees: dict[str, list[Any]] = {}
    for name, column in zip(VALUES, zip(*map(_read_values, group), strict=True), strict=True):
        kinds = set(map(type, column))
        # A field that is None in every member is left out.
        if kinds != _NONE and (all_as_trees or not _pack_values(head, name, column, kinds)):
            where = (f"rollout {state.rollout_id!r}: {name}" for state in group)
            trees[name] = list(map(encoder.encode, _once(column), where))
    head.trees = json.dumps(trees) if trees else ""
    head.blobs = list(map(len, encoder.blobs))
    arrays = _pack_arrays(group, head)
    num_bytes = sum([array.nbytes for array in arrays])
    buffers: list[Buffer] = [array.data for array in arrays]
    if join_small and 0 < num_bytes < MIN_APART_BYTES * len(arrays):
        buffers = [b"".join(buffers)]
    return PackedGroup(_encode(head), [*buffers, *encoder.blobs], num_bytes + sum(head.blobs))


def _pack_values(head: Head, name: str, column: Sequence[Any], kinds: set[type[Any]]) -> bool:
    """Put a field's values, one of each member, into the head; False if MessagePack cannot hold them."""
    first = column[0]
    if kinds <= _SCALARS:
        is_one = len(kinds) == 1 and kinds <= _SAME_IF_EQUAL and column.count(first) == len(column)
        head.values[name] = [first] if is_one else list(column)
        return True
    shown = _once(column)
    if kinds == {SampleParams} and name == "sample_params" and all(map(_is_exact, shown)):
        head.sample_params = list(shown)
    elif len(kinds) == 1 and type(first) in _EMPTY and len(shown) > 1 and not any(column):
        # Most fields that may hold a container hold an empty one: what follows would come to the same.
        head.copied[name] = _EMPTY[type(first)]
    elif not all(map(_is_plain, shown)):
        return False
    elif len(shown) > 1 and (text := _text_of_all(shown)) is not None:
        head.copied[name] = msgspec.Raw(text)
    else:
        head.values[name] = list(shown)
    return True


def _is_exact(params: SampleParams) -> bool:
    """Whether the head gives `params` back as they are, type for type: it makes floats of integers."""
    return (
        _FLOATS.issuperset((type(params.temperature), type(params.top_p)))
        and _INTS.issuperset(map(type, (params.max_tokens, params.top_k, params.seed or 0)))
        and _TEXT.issuperset(map(type, params.stop))
        and _INTS.issuperset(map(type, params.stop_token_ids))
    )


def _once(column: Sequence[Any]) -> Sequence[Any]:
    """One value if it is the same object in all members, so that they share it again."""
    return column[:1] if all(map(is_, column, repeat(column[0]))) else column


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether MessagePack gives the value back as it is, type for type."""
    kind = type(value)
    if kind is dict:
        items = value.values()
        if not _TEXT.issuperset(map(type, value)):
            return False
    elif kind is list:
        items = value
    else:
        return kind in _SCALARS
    if _SCALARS.issuperset(map(type, items)):
        return True
    return depth < MAX_DEPTH and all(_is_plain(item, depth + 1) for item in items)


def _text_of_all(column: Sequence[Any]) -> bytes | None:
    """The MessagePack text of all these plain values if it is the same, and not too long to be copied."""
    if column.count(column[0]) < len(column):
        return None
    # Equal values may still differ: 1 and True, 0.0 and -0.0, the order of keys.
    text = _encode(column[0])
    if len(text) * len(column) > MAX_COPIED_BYTES or any(_encode(value) != text for value in column):
        return None
    return text


def _pack_arrays(group: Sequence[RolloutState], head: Head) -> list[NDArray[Any]]:
    """The arrays that are sent, in order; `head` gets the rest, and all lengths."""
    arrays = {name: list(map(read, group)) for name, read in _READ_ARRAYS.items()}
    prompts, ids = arrays.pop(PROMPTS), arrays["response_ids"]
    if (number := sum(map(len, prompts)) + sum(map(len, arrays["tokens"]))) > MAX_TOKENS:
        raise ValueError(f"a group has at most {MAX_TOKENS} tokens in its prompts and tokens, got {number}")
    head.lengths = {name: list(map(len, column)) for name, column in arrays.items()}
    counts = head.lengths["response_ids"]
    for name in CONSTANTS:
        head.constants[name] = _find_constants(arrays[name], head.lengths[name], counts)
    head.lengths["tokens"] = [
        NOT_SENT if len(whole) == len(parts[0]) + len(parts[1]) and whole.tobytes() == b"".join(parts) else len(whole)
        for whole, parts in zip(arrays["tokens"], zip(prompts, ids, strict=True), strict=True)
    ]
    head.lengths["prompt_ids"], head.prompts = _pack_prompts(prompts)
    return [
        array for name in ARRAYS for array, length in zip(arrays[name], head.lengths[name], strict=True) if length > 0
    ]


def _find_constants(arrays: Sequence[NDArray[Any]], lengths: list[int], counts: Sequence[int]) -> list[int]:
    """The value of each array that has one throughout, a response long; its length becomes `NOT_SENT`."""
    constants = []
    for member, (array, count) in enumerate(zip(arrays, counts, strict=True)):
        # Compared as bytes: for the lengths of responses far cheaper than with numpy.
        # Most that differ do so at the ends.
        if (
            count
            and len(array) == count
            and array[0] == array[-1]
            and (data := array.tobytes()) == data[: array.itemsize] * count
        ):
            lengths[member] = NOT_SENT
            constants.append(int(array[0]))
    return constants


def _pack_prompts(prompts: Sequence[NDArray[Any]]) -> tuple[list[int], bytearray]:
    first, *others = prompts
    lengths = [len(first)]
    parts = [text := first.tobytes()]
    for prompt in others:
        if prompt is first:
            lengths.append(NOT_SENT)
        elif (data := prompt.tobytes()) == text:
            lengths.append(EQUAL)
        else:
            lengths.append(len(prompt))
            parts.append(data)
    return lengths, bytearray().join(parts)
