"""Groups that a server holds as they came: unpacked only when somebody in its process looks at them.

::

    client --head, arrays--> receive_payload: checked --> PackedPayload --> row of a store
    client <--head, arrays-- pack_out <---- its staleness written anew ------'   '--> rollouts, if looked at

Most groups pass through a server untouched, and so do their bytes. What needs more (values that are trees,
token fields of different lengths) is unpacked when it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.replay.format.decode import check_head, read_head, read_states, unpack_group
from forebay.replay.format.encode import ARRAYS, CONSTANTS, NOT_SENT, Head, PackedGroup, pack_group
from forebay.replay.format.values import damage_named
from forebay.replay.groups import HeldGroup, hand_out
from forebay.types import UNLABELED, RolloutState, Status, get_group_status

_LABELS, _MASKS = "response_model_steps", "response_mask"
_LABEL = ARRAYS[_LABELS]
_TOKEN_FIELDS = ("logprobs", *CONSTANTS)
_encode = msgspec.msgpack.Encoder().encode


class PackedPayload(HeldGroup):
    """A group of rollouts in its packed form, as a store holds it.

    Invariant: it can be unpacked; `receive_payload` has seen to it.

    >>> payload = receive_payload(head, data)
    >>> payload[0].response_ids
    array([7, 8], dtype=int32)
    """

    __slots__ = ("_data", "_head", "_status", "_was_sent", "staleness", "steps")

    def __init__(self, head: bytes, data: NDArray[np.uint8], parsed: Head) -> None:
        self._head = head
        self._data = data
        self._was_sent = tuple(_spread(parsed.values.get("seq_staleness", [0]), len(parsed.status)))
        self.staleness: Sequence[int] = self._was_sent
        self.steps = _oldest_steps(parsed, data)
        self._status = _status_of_all(parsed.status)

    @property
    def status(self) -> Status:
        """The group's."""
        return self._status

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


def _status_of_all(statuses: Sequence[Status]) -> Status:
    if statuses.count(Status.COMPLETED) == len(statuses):
        return Status.COMPLETED
    return get_group_status([RolloutState([], status=status) for status in statuses])


def _is_filled(head: Head) -> bool:
    """Whether the token fields have one length in each member."""
    counts = head.lengths.get("response_ids")
    return counts is not None and all(
        of_all == counts
        or (
            of_all is not None
            and len(of_all) == len(counts)
            and all(length in (NOT_SENT, count) for length, count in zip(of_all, counts, strict=True))
        )
        for of_all in map(head.lengths.get, _TOKEN_FIELDS)
    )


def _oldest_steps(head: Head, data: NDArray[np.uint8]) -> tuple[int | None, ...]:
    """The oldest model step of each member; arrays are looked at where the head does not say it."""
    lengths, size = head.lengths[_LABELS], len(head.status)
    if head.lengths[_MASKS].count(NOT_SENT) == size and min(head.constants[_MASKS]) > 0:
        # Every token is generated, and so the labels of all members are looked at together.
        if lengths.count(NOT_SENT) == size and min(head.lengths["response_ids"]) > 0:
            oldest = list(head.constants[_LABELS])
        elif min(lengths) > 0:
            start = _start_of(_LABELS, head)
            joined = data[start : start + sum(lengths) * _LABEL.itemsize].view(_LABEL)
            oldest = np.minimum.reduceat(joined, [0, *accumulate(lengths[:-1])]).tolist()
        else:
            oldest = [UNLABELED]
        if min(oldest) > UNLABELED:
            return tuple(oldest)
    each = (_constants_or_arrays(head, data, name) for name in CONSTANTS)
    return tuple(map(_oldest_step, head.lengths["response_ids"], *each))


def _start_of(name: str, head: Head) -> int:
    """Where the arrays of a field begin."""
    start = 0
    for before, dtype in ARRAYS.items():
        if before == name:
            break
        lengths = head.lengths[before]
        start += (sum(lengths) + lengths.count(NOT_SENT)) * dtype.itemsize
    return start


def _constants_or_arrays(head: Head, data: NDArray[np.uint8], name: str) -> list[int | NDArray[Any]]:
    """For each member the one value that the array has throughout, or the array."""
    if head.lengths[name].count(NOT_SENT) == len(head.status):
        return list(head.constants[name])
    start = _start_of(name, head)
    constants = iter(head.constants.get(name, ()))
    found: list[int | NDArray[Any]] = []
    for length in head.lengths[name]:
        if length == NOT_SENT:
            found.append(next(constants))
            continue
        end = start + length * ARRAYS[name].itemsize
        found.append(data[start:end].view(ARRAYS[name]))
        start = end
    return found


def _oldest_step(count: int, mask: int | NDArray[Any], labels: int | NDArray[Any]) -> int | None:
    """See `forebay.types.oldest_step_of`."""
    if not count:
        return None
    if isinstance(labels, int):
        is_generated = mask if isinstance(mask, int) else mask.any()
        return labels if is_generated and labels > UNLABELED else None
    if isinstance(mask, int):
        if not mask:
            return None
        if (smallest := labels[labels.argmin()]) > UNLABELED:
            return int(smallest)
    labeled = labels[(labels != UNLABELED) & (mask != 0)]
    return int(labeled.min()) if len(labeled) else None


def _spread(column: Sequence[Any], size: int) -> Sequence[Any]:
    return column if len(column) == size else [column[0]] * size
