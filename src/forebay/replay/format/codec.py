"""A stored group as bytes, for stores that cannot hold Python objects; exact, and without pickle.

::

    "FBG2" | length of the head (4 bytes, little-endian) | head (MessagePack) | arrays (raw, little-endian)

Head and arrays are the packed form of a group (`encode`), in which groups also go from process to process.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from forebay.replay.format.encode import pack_group
from forebay.replay.format.encoded import HeldGroup, PackedPayload, hold_packed
from forebay.types import Status

MAGIC = b"FBG2"
"""With the version of the format."""
_PRELUDE = struct.Struct("<4sI")


class GroupCodec:
    """Groups of rollouts as bytes and back; the `Codec` that a replay buffer hands its store.

    >>> from forebay.types import RolloutState
    >>> codec = GroupCodec()
    >>> codec.decode(codec.encode([RolloutState([], response_ids=[7, 8])]))[0].response_ids
    array([7, 8], dtype=int32)
    """

    def __init__(self, *, keep_packed: bool = False) -> None:
        """With `keep_packed` a group is not decoded before it is looked at: for a server that sends it on."""
        self._keep_packed = keep_packed

    def encode(self, payload: Any) -> bytes:
        """The bytes of a group.

        Raises:
            ValueError: a rollout holds a value that cannot be stored; the message says where.
        """
        packed = (
            payload.packed() if isinstance(payload, PackedPayload) else pack_group(payload, join_small=False)
        )
        return b"".join((_PRELUDE.pack(MAGIC, len(packed.head)), packed.head, *packed.buffers))

    def decode(self, data: bytes) -> HeldGroup:
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
        start = _PRELUDE.size + _PRELUDE.unpack_from(data)[1]
        head, arrays = memoryview(data)[_PRELUDE.size : start], np.frombuffer(data, np.uint8)[start:]
        return hold_packed(head, arrays, keep_packed=self._keep_packed, what="the payload")

    def status(self, value: str) -> Status:
        """The status that rows carry."""
        return Status(value)
