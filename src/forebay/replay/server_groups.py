"""A group on its way between two processes: a small head, and its token arrays as they lie in memory.

::

    group --pack_group--> head   MessagePack: a line per rollout, with its plain values and its prompt
                          arrays one after another, never copied by this side: the socket reads them in place

    head, one buffer --unpack_group--> group, its token arrays views of the buffer

What most rollouts have is not sent: a mask and model steps of one value throughout, and ``tokens`` that are
the prompt and the response. Values that are not plain (nested, arrays, tuples, NaN, ...) are the trees of
`forebay.replay.payload`, as in a snapshot. The prompts are in the head, so that a group whose response is
wiped later does not keep the buffer of its tokens in memory.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.lib.format import descr_to_dtype
from numpy.typing import NDArray

from forebay.replay.payload import Decoder, Encoder
from forebay.replay.server_messages import FrameError
from forebay.types import ROLLOUT_FIELDS, ROLLOUT_SLOTS, RolloutState, Status

ARRAYS: dict[str, np.dtype[Any]] = {
    "response_ids": np.dtype("<i4"),
    "logprobs": np.dtype("<f4"),
    "response_model_steps": np.dtype("<i4"),
    "tokens": np.dtype("<i4"),
    "response_mask": np.dtype("u1"),
}
_WIDE, _MASK = list(ARRAYS.values())[:4], ARRAYS["response_mask"]
_PROMPT = _STEPS = np.dtype("<i4")
_VALUES = tuple(
    name for name in ROLLOUT_FIELDS if name not in ARRAYS and name not in ("prompt_ids", "status")
)
_read_values = attrgetter(*_VALUES)
_read_arrays = tuple(ROLLOUT_SLOTS[name].__get__ for name in (*ARRAYS, "prompt_ids"))
# The slots themselves: what was checked here needs no second conversion.
_write_values = tuple(ROLLOUT_SLOTS[name].__set__ for name in _VALUES)
_write_arrays = tuple(ROLLOUT_SLOTS[name].__set__ for name in (*ARRAYS, "prompt_ids"))
_STALENESS = _VALUES.index("seq_staleness")
_write_status = ROLLOUT_SLOTS["status"].__set__

MAX_DTYPE_TEXT = 4096
"""Longer than any dtype of numpy's own; what is parsed is bounded."""

Buffer = bytes | memoryview


class _Member(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One rollout; a length of -1 is an array that is not sent."""

    status: Status
    values: list[Any]
    prompt: bytearray
    lengths: tuple[int, int, int, int, int]
    """Of `ARRAYS`."""
    step: int
    """The one model step of all tokens, if that is so."""
    mask: int
    """The one mask of all tokens, if that is so."""
    trees: dict[int, Any]
    """The values that are not plain, by their place."""


class _Head(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    members: list[_Member]
    blobs: list[int]
    """Bytes of each blob of the trees; they follow the arrays."""


_encode_head = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(_Head).decode


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A group as it is sent.

    >>> packed = pack_group([state])
    >>> unpack_group(packed.head, b"".join(packed.buffers))[0].response_ids
    array([7, 8], dtype=int32)
    """

    head: bytes
    buffers: list[Buffer]
    num_bytes: int
    """Of `buffers` together."""

    @property
    def size(self) -> tuple[int, int]:
        """Bytes of the head and of the arrays."""
        return len(self.head), self.num_bytes


def pack_group(group: Sequence[RolloutState]) -> PackedGroup:
    """The group as it is sent; its arrays must not be written to before they are.

    Raises:
        ValueError: a rollout holds a value that cannot be sent; the message says where.
    """
    encoder = Encoder()
    wide: list[Buffer] = []
    masks: list[Buffer] = []
    members = [_pack_member(state, encoder, wide, masks) for state in group]
    head = _Head(members, [len(blob) for blob in encoder.blobs])
    try:
        text = _encode_head(head)
    except (OverflowError, UnicodeEncodeError):
        # MessagePack has no integers over 64 bits and no lone surrogates; JSON text has both.
        text = json.dumps(msgspec.to_builtins(head)).encode()
    buffers = [*wide, *masks, *encoder.blobs]
    return PackedGroup(text, buffers, sum(map(_num_bytes, buffers)))


def unpack_group(head: Any, data: Any) -> list[RolloutState]:
    """The group of a head and one writable buffer with all its arrays, which become views of it.

    Raises:
        FrameError: they are not those of a group.
    """
    try:
        return _unpack(_read_head(head), data)
    except FrameError:
        raise
    except Exception as error:  # a tree that no `Encoder` wrote makes its decoder raise almost anything
        raise FrameError(f"a group is damaged: {type(error).__name__}: {error}") from None


def _pack_member(state: RolloutState, encoder: Encoder, wide: list[Buffer], masks: list[Buffer]) -> _Member:
    values = list(_read_values(state))
    trees = {}
    for place, value in enumerate(values):
        if value is not None and type(value) is not str and not _is_plain(value):
            where = f"rollout {state.rollout_id!r}: {_VALUES[place]}"
            trees[place], values[place] = encoder.encode(value, where), None
    ids, logprobs, steps, tokens, mask, prompt = (_little(read(state)) for read in _read_arrays)
    is_one_step, is_one_mask = _is_constant(steps, len(ids)), _is_constant(mask, len(ids))
    prompt_data = prompt.tobytes()
    is_whole = len(tokens) == len(prompt) + len(ids) and tokens.tobytes() == prompt_data + ids.tobytes()
    wide += (ids.data, logprobs.data)
    if not is_one_step:
        wide.append(steps.data)
    if not is_whole:
        wide.append(tokens.data)
    if not is_one_mask:
        masks.append(mask.data)
    lengths = (
        len(ids),
        len(logprobs),
        -1 if is_one_step else len(steps),
        -1 if is_whole else len(tokens),
        -1 if is_one_mask else len(mask),
    )
    step, mask_value = (int(steps[0]) if is_one_step else 0), (int(mask[0]) if is_one_mask else 0)
    return _Member(state.status, values, bytearray(prompt_data), lengths, step, mask_value, trees)


def _is_plain(value: Any) -> bool:
    """Whether MessagePack gives the value back as it is, type for type."""
    kind = type(value)
    if kind is str or kind is int or value is None or kind is bool:
        return True
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(_is_plain, value.values()))
    if kind is list:
        return all(map(_is_plain, value))
    return kind is float


def _is_constant(array: NDArray[Any], length: int) -> bool:
    """Whether it is one value, as often as there are tokens."""
    if len(array) != length or not length:
        return False
    # As bytes: for the lengths of responses far cheaper than with numpy.
    data = array.tobytes()
    return data == data[: array.itemsize] * length


def _little(array: NDArray[Any]) -> NDArray[Any]:
    return array if sys.byteorder == "little" else array.astype(array.dtype.newbyteorder("<"))


def _num_bytes(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def _read_head(data: bytes | bytearray) -> _Head:
    # A MessagePack array never starts with the byte of "[".
    head = msgspec.convert(json.loads(data), _Head, str_keys=True) if data[:1] == b"[" else _decode_head(data)
    if not head.members:
        raise FrameError("a group has no rollouts")
    for member in head.members:
        _check_dtypes(member.trees)
    return head


def _check_dtypes(tree: Any) -> None:
    """Refuse dtypes with Python objects, whose bytes would be taken for addresses."""
    if type(tree) is list:
        for item in tree:
            _check_dtypes(item)
    elif type(tree) is dict:
        for name in ("$array", "$scalar"):
            if name in tree and not _is_safe(tree[name][0]):
                raise FrameError(f"a group holds an array of dtype {tree[name][0][:80]}, which is not sent")
        for item in tree.values():
            _check_dtypes(item)


def _is_safe(dtype: str) -> bool:
    if len(dtype) > MAX_DTYPE_TEXT:
        return False
    return "O" not in dtype or not descr_to_dtype(ast.literal_eval(dtype)).hasobject


def _unpack(head: _Head, data: Any) -> list[RolloutState]:
    cut = _Cutter(data)
    # All arrays of four bytes first, so that every array is aligned.
    found = [list(map(cut.array, member.lengths[:4], _WIDE)) for member in head.members]
    for member, arrays in zip(head.members, found, strict=True):
        arrays.append(cut.array(member.lengths[4], _MASK))
    decoder = Decoder([cut.blob(length) for length in head.blobs])
    cut.check_end()
    return [_unpack_member(*both, decoder) for both in zip(head.members, found, strict=True)]


def _unpack_member(member: _Member, arrays: list[NDArray[Any] | None], decoder: Decoder) -> RolloutState:
    values = member.values
    for place, tree in member.trees.items():
        values[place] = decoder.decode(tree)
    if len(values) != len(_VALUES) or type(values[_STALENESS]) is not int:
        raise FrameError(f"a rollout's values are not {', '.join(_VALUES)}")
    prompt = np.frombuffer(member.prompt, _PROMPT)
    ids, logprobs, steps, tokens, mask = arrays
    if ids is None or logprobs is None:
        raise FrameError("a rollout comes without response_ids or logprobs")
    if steps is None:
        steps = _filled(len(ids), member.step, _STEPS)
    if mask is None:
        mask = _filled(len(ids), member.mask, _MASK)
    if tokens is None:
        tokens = np.concatenate([prompt, ids])
    state = RolloutState.__new__(RolloutState)
    for write, value in zip(_write_values, values, strict=True):
        write(state, value)
    for write, array in zip(_write_arrays, (ids, logprobs, steps, tokens, mask, prompt), strict=True):
        write(state, array)
    _write_status(state, member.status)
    return state


def _filled(length: int, value: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    # `np.full` takes three times as long for arrays of this size.
    array = np.empty(length, dtype)
    array.fill(value)
    return array


class _Cutter:
    """Cuts a buffer into arrays, from front to back."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._num_bytes = len(data)
        self._at = 0

    def array(self, length: int, dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """The next array; None for one that was not sent."""
        if length == -1:
            return None
        start = self._advance(length * dtype.itemsize)
        return np.frombuffer(self._data, dtype, length, start) if length else np.empty(0, dtype)

    def blob(self, num_bytes: int) -> memoryview:
        start = self._advance(num_bytes)
        return memoryview(self._data)[start : self._at]

    def _advance(self, num_bytes: int) -> int:
        start, self._at = self._at, self._at + num_bytes
        if num_bytes < 0 or self._at > self._num_bytes:
            raise FrameError(f"a group's arrays need more than the {self._num_bytes} bytes that came")
        return start

    def check_end(self) -> None:
        if self._at != self._num_bytes:
            raise FrameError(f"a group's arrays are {self._at} bytes, but {self._num_bytes} came")
