"""Groups that a server holds as they came: unpacked only when somebody in its process looks at them.

::

    client --head, arrays--> receive_payload: checked --> PackedPayload --> row of a store
    client <--head, arrays-- pack_out <---- its staleness written anew ------'   '--> rollouts, if looked at

Most groups pass through a server untouched, and so do their bytes. What needs more (values that are trees,
token fields of different lengths) is unpacked when it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.replay.groups import HeldGroup, StoredGroup, hand_out
from forebay.replay.packing import CONSTANTS, NOT_SENT, Head, PackedGroup, pack_group
from forebay.replay.payload import damage_named
from forebay.replay.unpacking import check_head, read_head, read_states, unpack_group
from forebay.types import UNLABELLED, RolloutState, Status, get_group_status

_TOKEN_FIELDS = ("logprobs", *CONSTANTS)
_encode = msgspec.msgpack.Encoder().encode


class PackedPayload(HeldGroup):
    """A group of rollouts in its packed form, as a store holds it.

    Invariant: it can be unpacked; `receive_payload` has seen to it.

    >>> payload = receive_payload(head, data)
    >>> payload[0].response_ids
    array([7, 8], dtype=int32)
    """

    __slots__ = ("_data", "_head", "_was_sent", "staleness", "steps")

    def __init__(self, head: bytes, data: NDArray[np.uint8], parsed: Head) -> None:
        self._head = head
        self._data = data
        self._was_sent = tuple(_spread(parsed.values.get("seq_staleness", [0]), len(parsed.status)))
        self.staleness: Sequence[int] = self._was_sent
        steps = _constant_steps(parsed)
        self.steps = StoredGroup(read_states(parsed, data)).steps if steps is None else steps

    @property
    def status(self) -> Status:
        """The group's."""
        statuses = read_head(self._head).status
        if statuses.count(Status.COMPLETED) == len(statuses):
            return Status.COMPLETED
        return get_group_status([RolloutState([], status=status) for status in statuses])

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[RolloutState]:
        return iter(self._unpack())

    @overload
    def __getitem__(self, index: int) -> RolloutState: ...
    @overload
    def __getitem__(self, index: slice) -> list[RolloutState]: ...
    def __getitem__(self, index: int | slice) -> RolloutState | list[RolloutState]:
        return self._unpack()[index]

    def _unpack(self) -> list[RolloutState]:
        states = read_states(read_head(self._head), self._data)
        for state, staleness in zip(states, self.staleness, strict=True):
            state.seq_staleness = staleness
        return states

    def encoded(self) -> tuple[bytes, Any]:
        """See `HeldGroup.encoded`."""
        parsed = self._parsed()
        parsed.steps = list(self.steps)
        return _encode(parsed), self._data

    def packed(self) -> PackedGroup:
        """What goes to a client."""
        head = self._head if self.staleness == self._was_sent else _encode(self._parsed())
        return PackedGroup(head, [self._data.data], len(self._data))

    def _parsed(self) -> Head:
        parsed = read_head(self._head)
        parsed.values["seq_staleness"] = list(self.staleness)
        return parsed


def receive_payload(head: Any, data: Any) -> PackedPayload | list[RolloutState]:
    """The group that came as this head and one buffer of arrays; rollouts if it is an unusual one.

    Raises:
        ValueError: they are not those of a group.
    """
    with damage_named("a group"):
        parsed = read_head(head)
        if parsed.trees or not _is_filled(parsed):
            return unpack_group(head, data)
        array = np.frombuffer(data, np.uint8)
        check_head(parsed, len(array))
        return PackedPayload(bytes(head), array, parsed)


def pack_out(group: Sequence[RolloutState], train_step: int | None, *, copy: bool) -> PackedGroup:
    """As `hand_out`, for a client."""
    if not isinstance(group, PackedPayload):
        return pack_group(hand_out(group, train_step, copy=copy))
    if train_step is not None:
        group.refresh(train_step)
    return group.packed()


def _is_filled(head: Head) -> bool:
    """Whether the token fields have one length in each member."""
    counts = head.lengths.get("response_ids")
    return all(
        of_all is not None
        and counts is not None
        and len(of_all) == len(counts)
        and all(length in (NOT_SENT, count) for length, count in zip(of_all, counts, strict=True))
        for of_all in map(head.lengths.get, _TOKEN_FIELDS)
    )


def _constant_steps(head: Head) -> tuple[int | None, ...] | None:
    """The oldest model step of each member, if the head says it: masks and labels of one value throughout."""
    lengths = head.lengths
    masks, labels = (iter(head.constants[name]) for name in CONSTANTS)
    steps: list[int | None] = []
    columns = [lengths[name] for name in CONSTANTS]
    for count, mask, label in zip(lengths["response_ids"], *columns, strict=True):
        is_generated = next(masks) if mask == NOT_SENT else None
        step = next(labels) if label == NOT_SENT else None
        if count and (is_generated is None or step is None):
            return None
        steps.append(step if count and is_generated and step is not None and step > UNLABELLED else None)
    return tuple(steps)


def _spread(column: Sequence[Any], size: int) -> Sequence[Any]:
    return column if len(column) == size else [column[0]] * size
