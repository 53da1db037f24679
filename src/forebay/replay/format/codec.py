"""A stored group as bytes, for stores that cannot hold Python objects; exact, and without pickle.

::

    "FBG2" | length of the head (4 bytes, little-endian) | head (MessagePack) | arrays (raw, little-endian)

Head and arrays are the packed form of a group (`packing`), in which groups also go from process to process.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from forebay.replay.format.values import damage_named
from forebay.replay.groups import HeldGroup, StoredGroup
from forebay.types import Status

MAGIC = b"FBG2"
"""With the version of the format."""
_PRELUDE = struct.Struct("<4sI")


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
        # Here, because a program may import the buffer and never store a group in a database.
        from forebay.replay.format.encode import pack_group

        if isinstance(payload, HeldGroup):
            head, data = payload.encoded()
            return b"".join((_PRELUDE.pack(MAGIC, len(head)), head, data))
        packed = pack_group(payload if isinstance(payload, StoredGroup) else StoredGroup(payload))
        return b"".join((_PRELUDE.pack(MAGIC, len(packed.head)), packed.head, *packed.buffers))

    def decode(self, data: bytes) -> StoredGroup:
        """The group of `data`, with arrays that can be written to.

        Raises:
            ValueError: the bytes are not those of a group.
        """
        if data[:4] != MAGIC or len(data) < _PRELUDE.size:
            is_other = data[:3] == MAGIC[:3]
            raise ValueError(
                f"the payload is not that of a group of rollouts: it starts with {data[:8]!r}"
                + (", as those of another version of forebay do" if is_other else "")
            )
        with damage_named("the payload"):
            return _decode(data)

    def status(self, value: str) -> Status:
        """The status that rows carry."""
        return Status(value)


def _decode(data: bytes) -> StoredGroup:
    from forebay.replay.format.decode import read_head, read_states

    start = _PRELUDE.size + _PRELUDE.unpack_from(data)[1]
    head = read_head(memoryview(data)[_PRELUDE.size : start])
    # One copy for all: the arrays must be writable and aligned.
    states = read_states(head, np.frombuffer(data, np.uint8)[start:].copy())
    if head.steps is None or len(head.steps) != len(states):
        raise ValueError(f"it has {head.steps} as the oldest model steps of {len(states)} rollouts")
    return StoredGroup.with_steps(states, head.steps)
