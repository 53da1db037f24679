"""Groups that stay packed: from a client or a database to the next reader, decoded only if looked at.

::

    client, database --head, arrays--> hold_packed: checked --> PackedPayload --> row of a store
    client <--head, arrays-- pack_out <---- its staleness written anew -------------'  '--> rollouts

Most groups pass through a server untouched, and so do their bytes. A group that needs more (values that are
trees, token fields of different lengths) is unpacked when it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.replay.format.decode import check_head, decode_value, read_head, read_states
from forebay.replay.format.encode import CONSTANTS, NOT_SENT, Head, PackedGroup, pack_group
from forebay.replay.format.values import damage_named
from forebay.replay.groups import StoredGroup, copy_group
from forebay.types import RolloutState, Status, calculate_seq_staleness, get_group_status

_encode = msgspec.msgpack.Encoder().encode


class PackedPayload(Sequence[RolloutState]):
    """A group of rollouts in its packed form, as a store holds it.

    Its rollouts are made when a caller looks at them: new ones each time, as stale as at the last `refresh`,
    that share their arrays. Invariant: it can be unpacked, because `hold_packed` has checked it.

    >>> packed = pack_group([RolloutState([], response_ids=[7, 8], logprobs=[0, 0])])
    >>> payload = hold_packed(packed.head, b"".join(packed.buffers))
    >>> payload[0].response_ids
    array([7, 8], dtype=int32)
    """

    __slots__ = ("_data", "_head", "_was_sent", "staleness", "status", "steps")

    def __init__(self, head: bytes, data: NDArray[np.uint8], parsed: Head) -> None:
        self._head = head
        self._data = data
        staleness: list[int] = parsed.values["seq_staleness"]
        self._was_sent = tuple(staleness * (len(parsed.status) // len(staleness)))
        self.staleness: Sequence[int] = self._was_sent
        """The `seq_staleness` of each member."""
        self.steps = tuple(parsed.steps)
        """The oldest model step of each member."""
        self.status = _status_of(parsed.status)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[RolloutState]:
        return iter(self.unpacked())

    @overload
    def __getitem__(self, index: int) -> RolloutState: ...
    @overload
    def __getitem__(self, index: slice) -> list[RolloutState]: ...
    def __getitem__(self, index: int | slice) -> RolloutState | list[RolloutState]:
        return self.unpacked()[index]

    def unpacked(self) -> StoredGroup:
        """The group as objects."""
        states = read_states(read_head(self._head), _writable(self._data))
        for state, staleness in zip(states, self.staleness, strict=True):
            state.seq_staleness = staleness
        return StoredGroup.with_steps(states, self.steps)

    def refresh(self, train_step: int, *, reset_unlabeled: bool = False) -> None:
        """See `StoredGroup.refresh`."""
        self.staleness = tuple(
            [
                calculate_seq_staleness(step, train_step)
                if step is not None
                else 0
                if reset_unlabeled
                else before
                for step, before in zip(self.steps, self.staleness, strict=True)
            ]
        )

    def packed(self) -> PackedGroup:
        """The group as it goes to a client or into a database."""
        head = self._head
        if self.staleness != self._was_sent:
            parsed = read_head(head)
            parsed.values["seq_staleness"] = list(self.staleness)
            head = _encode(parsed)
        return PackedGroup(head, [self._data.data], len(self._data))


HeldGroup = StoredGroup | PackedPayload
"""A group as a row of a store holds it."""


def hold_packed(head: Any, data: Any, *, keep_packed: bool = True, what: str = "a group") -> HeldGroup:
    """The group of this head and one buffer of arrays; as objects if it is an unusual one, or if asked for.

    Raises:
        ValueError: they are not those of a group; the message begins with `what`.
    """
    with damage_named(what):
        parsed, array = read_head(head), np.frombuffer(data, np.uint8)
        check_head(parsed, len(array))
        if keep_packed and not parsed.trees and _is_filled(parsed):
            for text in parsed.copied.values():
                # The rest was checked: reading it later must not fail.
                decode_value(text)
            return PackedPayload(bytes(head), array, parsed)
        return StoredGroup.with_steps(read_states(parsed, _writable(array)), parsed.steps)


def pack_out(group: Sequence[RolloutState], train_step: int | None, *, copy: bool) -> PackedGroup:
    """As `hand_out`, for a client: a group that is packed stays so."""
    if not isinstance(group, PackedPayload):
        return pack_group(_as_of(group, train_step, copy=copy))
    if train_step is not None:
        group.refresh(train_step)
    return group.packed()


def hand_out(group: Sequence[RolloutState], train_step: int | None, *, copy: bool) -> list[RolloutState]:
    """The members as a plain list, as stale as at `train_step`; copies if the store goes on holding them."""
    return list(_as_of(group, train_step, copy=copy))


def as_stored(group: Sequence[RolloutState]) -> StoredGroup:
    """The group as objects, which can be changed."""
    if isinstance(group, PackedPayload):
        return group.unpacked()
    return group if isinstance(group, StoredGroup) else StoredGroup(group)


def _as_of(group: Sequence[RolloutState], train_step: int | None, *, copy: bool) -> StoredGroup:
    stored = as_stored(group)
    # Members that were unpacked just now are new ones already.
    if copy and not isinstance(group, PackedPayload):
        stored = copy_group(stored)
    if train_step is not None:
        stored.refresh(train_step)
    return stored


def _writable(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The bytes where arrays can be written to; those of a database are copied once, for all arrays."""
    return data if data.flags.writeable else data.copy()


def _status_of(statuses: Sequence[Status]) -> Status:
    if statuses.count(Status.COMPLETED) == len(statuses):
        return Status.COMPLETED
    return get_group_status([RolloutState([], status=status) for status in statuses])


def _is_filled(head: Head) -> bool:
    """Whether the token fields have one length in each member."""
    counts = head.lengths["response_ids"]
    return all(
        of_all == counts
        or all(length in (NOT_SENT, count) for length, count in zip(of_all, counts, strict=True))
        for of_all in (head.lengths[name] for name in ("logprobs", *CONSTANTS))
    )
