"""A stored group as bytes, for stores that cannot hold Python objects; exact, and without pickle.

::

    magic | length of the header | header (JSON) | raw arrays, one after another

    header: {"steps": oldest model step of each member, "blobs": [length, ...],
             "members": [[{field: tree (`payload`)}, {array field: where it is}], ...]}

The arrays are numpy's own bytes, little-endian. Three that most groups have are not written out: one value
throughout (a mask of ones, labels of one model step), ``tokens`` that are the prompt and the response, and a
prompt that is that of the first member. They cost a comparison, and halve what is written.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.replay.groups import StoredGroup
from forebay.replay.payload import Decoder, Encoder, damage_named
from forebay.types import ROLLOUT_FIELDS, RolloutState, Status

MAGIC = b"FBG1"
_LENGTH = struct.Struct("<I")

_ARRAYS: dict[str, np.dtype[Any]] = {
    "prompt_ids": np.dtype("<i4"),
    "response_ids": np.dtype("<i4"),
    "logprobs": np.dtype("<f4"),
    "response_mask": np.dtype("u1"),
    "response_model_steps": np.dtype("<i4"),
    "tokens": np.dtype("<i4"),
}
_FIELDS = tuple(name for name in ROLLOUT_FIELDS if name not in _ARRAYS and name != "status")
_read_fields = attrgetter(*_FIELDS)
_read_arrays = attrgetter(*_ARRAYS)

_SAME = "="
"""In place of an array's place: ``tokens`` are prompt and response; ``prompt_ids`` are the first member's."""


class GroupCodec:
    """Groups of rollouts as bytes and back; the `Codec` that a replay buffer hands its store.

    >>> codec = GroupCodec()
    >>> codec.decode(codec.encode(StoredGroup([state])))[0].response_ids
    array([7, 8], dtype=int32)
    """

    def encode(self, payload: Any) -> bytes:
        """The bytes of a group.

        Raises:
            ValueError: a rollout holds a value that cannot be stored; the message says where.
        """
        group = payload if isinstance(payload, StoredGroup) else StoredGroup(payload)
        encoder = Encoder()
        chunks: list[bytes] = []
        members = [_encode_member(state, encoder, chunks, group[0]) for state in group]
        header = {
            "steps": group.steps,
            "members": members,
            "blobs": [len(blob) for blob in (*chunks, *encoder.blobs)],
            "num_arrays": len(chunks),
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        return b"".join((MAGIC, _LENGTH.pack(len(text)), text, *chunks, *encoder.blobs))

    def decode(self, data: bytes) -> StoredGroup:
        """The group of `data`, with arrays that can be written to.

        Raises:
            ValueError: the bytes are not those of a group.
        """
        if data[:4] != MAGIC or len(data) < 8:
            raise ValueError(f"the payload is not that of a group of rollouts: it starts with {data[:8]!r}")
        with damage_named("the payload"):
            return self._decode(data)

    def _decode(self, data: bytes) -> StoredGroup:
        start = 8 + _LENGTH.unpack_from(data, 4)[0]
        header = json.loads(data[8:start])
        ends = list(accumulate(header["blobs"], initial=start))
        if ends[-1] != len(data):
            raise ValueError(f"it has {len(data)} bytes, its header says {ends[-1]}")
        view = memoryview(data)
        blobs = [view[low:high] for low, high in pairwise(ends)]
        decoder = Decoder(blobs[header["num_arrays"] :])
        group = StoredGroup(())
        for values, places in header["members"]:
            group.append(_decode_member(values, places, decoder, blobs, group))
        group.steps = tuple(header["steps"])
        return group

    def status(self, value: str) -> Status:
        """The status that rows carry."""
        return Status(value)


def _encode_member(
    state: RolloutState, encoder: Encoder, chunks: list[bytes], first: RolloutState
) -> list[dict[str, Any]]:
    values = {"status": state.status.value}
    for name, value in zip(_FIELDS, _read_fields(state), strict=True):
        if value is None:
            continue
        # Most values are plain text or numbers; the encoder would return them as they are.
        kind = type(value)
        plain = kind is str or kind is int
        values[name] = value if plain else encoder.encode(value, f"rollout {state.rollout_id!r}: {name}")
    return [values, _place_arrays(state, first, chunks)]


def _place_arrays(state: RolloutState, first: RolloutState, chunks: list[bytes]) -> dict[str, Any]:
    """Where the decoder finds the arrays: a position, `_SAME`, or ``[length, value]`` of a constant."""
    data = {
        name: _as_bytes(array, dtype)
        for (name, dtype), array in zip(_ARRAYS.items(), _read_arrays(state), strict=True)
        if len(array)
    }
    places: dict[str, Any] = {}
    # Compared as bytes: exact for NaN too, and for short arrays far cheaper than with numpy.
    if data.get("tokens") == data.get("prompt_ids", b"") + data.get("response_ids", b"") != b"":
        places["tokens"] = _SAME
    if state is not first and data.get("prompt_ids") == _as_bytes(first.prompt_ids, _ARRAYS["prompt_ids"]):
        places["prompt_ids"] = _SAME
    for name in ("response_mask", "response_model_steps"):
        array = getattr(state, name)
        # As long as the response only: no reader should believe a length that no bytes bear out.
        if 0 < len(array) == len(state.response_ids) and _is_constant(data[name], _ARRAYS[name].itemsize):
            places[name] = [len(array), int(array[0])]
    for name, part in data.items():
        if name not in places:
            places[name] = len(chunks)
            chunks.append(part)
    # In the order of the fields: tokens are joined from what comes before them.
    return {name: places[name] for name in data}


def _as_bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return array.tobytes() if sys.byteorder == "little" else array.astype(dtype).tobytes()


def _is_constant(data: bytes, num_bytes: int) -> bool:
    return data == data[:num_bytes] * (len(data) // num_bytes)


def _decode_member(
    values: dict[str, Any],
    places: dict[str, Any],
    decoder: Decoder,
    blobs: Sequence[Any],
    before: Sequence[RolloutState],
) -> RolloutState:
    fields: dict[str, Any] = dict.fromkeys(_FIELDS)
    fields |= {name: tree if type(tree) is str else decoder.decode(tree) for name, tree in values.items()}
    fields["status"] = Status(values["status"])
    for name, place in places.items():
        dtype = _ARRAYS[name]
        if isinstance(place, int):
            fields[name] = np.frombuffer(blobs[place], dtype).copy()
        elif isinstance(place, list):
            if place[0] != len(fields["response_ids"]):
                raise ValueError(f"{name} has another length than the response")
            fields[name] = np.full(place[0], place[1], dtype)
        elif name == "prompt_ids":
            fields[name] = before[0].prompt_ids.copy()
        else:
            parts = [fields[part] for part in ("prompt_ids", "response_ids") if part in fields]
            fields[name] = np.concatenate(parts)
    return RolloutState(**fields)
