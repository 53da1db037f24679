"""The packed form of a group (`encode`) checked, kept, and read back to rollouts.

::

    client, database --head, arrays--> hold_packed: checked --> PackedPayload --> row of a store
    client <--head, arrays-- pack_out <---- its staleness written anew -------------'  '--> rollouts

    head --read_head--> Head --check_head--> sound --read_states--> rollouts
    data (one writable buffer) --------------------------'  arrays that were sent are views of it; prompts
                                                            are views of the head; the other arrays are new

Most groups pass through a server untouched, and so do their bytes. A group that needs more (values that are
trees, token fields of different lengths) is unpacked when it comes. A length, a count of members or a dtype
is believed only if the bytes bear it out. A group is checked once, when it comes; it may be read much later,
and more than once.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.replay.format import encode as encoding
from forebay.replay.format.values import Decoder, damage_named
from forebay.replay.groups import StoredGroup, aged_staleness, build_states, copy_containers, copy_group
from forebay.replay.stores.contract import StorageBackend
from forebay.types import ROLLOUT_FIELDS, RolloutState, Status, get_group_status


class PackedPayload(Sequence[RolloutState]):
    """A group of rollouts in its packed form, as a store holds it.

    Its rollouts are made when a caller looks at them: new ones each time, as stale as at the last `refresh`,
    that share their arrays. Invariant: it can be unpacked, because `hold_packed` has checked it.

    >>> packed = encoding.pack_group([RolloutState([], response_ids=[7, 8], logprobs=[0, 0])])
    >>> payload = hold_packed(packed.head, b"".join(packed.buffers))
    >>> payload[0].response_ids
    array([7, 8], dtype=int32)
    """

    __slots__ = ("_data", "_head", "_was_sent", "staleness", "status", "steps")

    def __init__(self, head: bytes, data: NDArray[np.uint8], parsed: encoding.Head) -> None:
        self._head = head
        self._data = data
        staleness: list[int] = parsed.values["seq_staleness"]
        # One value stands for all members if they have the same.
        self._was_sent = tuple(staleness * (len(parsed.status) // len(staleness)))
        self.staleness: Sequence[int] = self._was_sent
        """The `seq_staleness` of each member."""
        self.steps = tuple(parsed.steps)
        """The oldest model step of each member."""
        self.status = Status.COMPLETED
        # Nearly all groups are COMPLETED throughout; only the others cost some empty rollouts.
        if parsed.status.count(Status.COMPLETED) < len(parsed.status):
            self.status = get_group_status([RolloutState([], status=status) for status in parsed.status])

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
        """Set every member's staleness as of `train_step`, without decoding the group."""
        aged = aged_staleness(self.steps, self.staleness, train_step, reset_unlabeled=reset_unlabeled)
        self.staleness = tuple(aged)

    def packed(self) -> encoding.PackedGroup:
        """The group as it goes to a client or into a database."""
        head = self._head
        # A head whose staleness has not changed goes on as it came.
        if self.staleness != self._was_sent:
            parsed = read_head(head)
            parsed.values["seq_staleness"] = list(self.staleness)
            head = _encode(parsed)
        return encoding.PackedGroup(head, [self._data.data], len(self._data))


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
                _decode_any(bytes(text))
            return PackedPayload(bytes(head), array, parsed)
        return StoredGroup.with_steps(read_states(parsed, _writable(array)), parsed.steps)


def _is_filled(head: encoding.Head) -> bool:
    """Whether the token fields have one length in each member."""
    counts = head.lengths["response_ids"]
    return all(
        of_all == counts
        or all(length in (encoding.NOT_SENT, count) for length, count in zip(of_all, counts, strict=True))
        for of_all in (head.lengths[name] for name in ("logprobs", *encoding.CONSTANTS))
    )


def _writable(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The bytes where arrays can be written to; those of a database are copied once, for all arrays."""
    return data if data.flags.writeable else data.copy()


def pack_out(group: Sequence[RolloutState], train_step: int | None, *, copy: bool) -> encoding.PackedGroup:
    """As `hand_out`, for a client: a packed group stays packed."""
    if not isinstance(group, PackedPayload):
        return encoding.pack_group(_as_of(group, train_step, copy=copy))
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


MAGIC = b"FBG2"
"""First bytes of an encoded group; they name the format and its version."""
_PRELUDE = struct.Struct("<4sI")


class GroupCodec:
    """Groups as bytes, for stores that cannot hold Python objects: the `Codec` that a buffer hands its store.

    ::

        "FBG2" | length of the head (4 bytes, little-endian) | head (MessagePack) | arrays (little-endian)

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
        # Small arrays are left as they lie: everything is joined below.
        packed = (
            payload.packed() if isinstance(payload, PackedPayload) else encoding.pack_group(payload, join_small=False)
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


class PlainCodec(GroupCodec):
    """The codec of a store that was handed none: for groups, and for payloads that are JSON values.

    >>> codec = PlainCodec()
    >>> codec.decode(codec.encode({"prompt": [1, 2]})), codec.decode(codec.encode([RolloutState([])]))[0].status
    ({'prompt': [1, 2]}, <Status.INIT: 'init'>)
    """

    _has_groups = False

    def encode(self, payload: Any) -> bytes:
        """The bytes of a group or a JSON value; ValueError if it is neither."""
        if isinstance(payload, list | PackedPayload) and payload and isinstance(payload[0], RolloutState):
            self._has_groups = True
            return super().encode(payload)
        return json.dumps(payload, default=_refuse).encode()

    def decode(self, data: bytes) -> Any:
        """The payload; ValueError if the bytes are neither a group nor JSON."""
        return super().decode(data) if data[:1] == MAGIC[:1] else json.loads(data)

    def status(self, value: str) -> Any:
        """The status as the payloads show it: text beside JSON values."""
        return super().status(value) if self._has_groups else value


def _refuse(value: object) -> None:
    raise ValueError(f"a payload with {type(value).__name__} is no JSON value; hand the store a codec: `use_codec`")


# Stores do not know rollouts, so they are told here.
StorageBackend.plain_codec = PlainCodec

Arrays = list[NDArray[Any]]

_SHORTEST = {
    name: (0 if name in ("response_ids", "logprobs") else encoding.NOT_SENT, dtype.itemsize)
    for name, dtype in encoding.ARRAYS.items()
}
"""The smallest number that may stand as a length of each array, and the bytes of an entry."""

_LIMITS = {n: (np.iinfo(encoding.ARRAYS[n]).min, np.iinfo(encoding.ARRAYS[n]).max) for n in encoding.CONSTANTS}
_VALUE_NAMES = frozenset(encoding.VALUES)

_decode_head = msgspec.msgpack.Decoder(encoding.Head).decode
_decode_any = msgspec.msgpack.Decoder(Any).decode
_encode = msgspec.msgpack.Encoder().encode


def unpack_group(head: Any, data: Any) -> list[RolloutState]:
    """The group of a head and one writable buffer with all its arrays, which become views of it.

    Raises:
        ValueError: they are not those of a group.
    """
    return list(hold_packed(head, data, keep_packed=False))


def read_head(data: Any) -> encoding.Head:
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


def check_head(head: encoding.Head, num_bytes: int) -> None:
    """Check that `read_states` can make rollouts of this head and so many bytes of arrays and blobs.

    The values in the trees are checked when they are read.

    Raises:
        ValueError, ArithmeticError, LookupError, TypeError, ...: it cannot.
    """
    size, lengths = len(head.status), head.lengths
    if len(head.steps) != size:
        raise ValueError(f"there are {len(head.steps)} oldest model steps of {size} rollouts")
    sent = 0
    for name, (shortest, itemsize) in _SHORTEST.items():
        of_all = lengths[name]
        lowest = min(of_all)
        if len(of_all) != size or lowest < shortest:
            raise ValueError(f"{of_all[:8]} are not the lengths of {name} of {size} rollouts")
        sent += sum(of_all if lowest >= 0 else _without_marks(of_all)) * itemsize
    if min(head.blobs, default=0) < 0 or sent + sum(head.blobs) != num_bytes:
        raise ValueError(f"its arrays and blobs of {sent} and {head.blobs} bytes are not {num_bytes} as came")
    for name, (lowest, highest) in _LIMITS.items():
        if missing := lengths[name].count(encoding.NOT_SENT):
            constants = head.constants[name]
            if len(constants) != missing or min(constants) < lowest or max(constants) > highest:
                raise ValueError(f"{constants[:8]} are not the {name} of {missing} rollouts")
    _check_prompts(head)
    for name, column in head.values.items():
        _check_column(name, column, size)
    _check_column("sample_params", head.sample_params or (None,), size)
    # With trees it may be one of them, and is checked in `read_states`.
    if not head.trees:
        _check_column("seq_staleness", head.values.get("seq_staleness", (None,)), size)
    for name, text in head.copied.items():
        _check_column(name, (0,), size)
        # A head of a megabyte could ask for gigabytes of copies.
        if len(bytes(text)) * size > encoding.MAX_COPIED_BYTES:
            raise ValueError(f"{size} copies of {len(bytes(text))} bytes are too much")
    if "seq_staleness" in head.copied:
        raise ValueError("seq_staleness must be a whole number of each member")


def _check_prompts(head: encoding.Head) -> None:
    """Check the prompts, and the arrays that are made of them: few bytes could ask for much memory."""
    lengths, data = head.lengths[encoding.PROMPTS], head.prompts
    if len(lengths) != len(head.status) or min(lengths) < encoding.EQUAL:
        raise ValueError(f"{lengths[:8]} are not the lengths of {encoding.PROMPTS} of {len(head.status)} rollouts")
    # Others may refer to the first prompt, which must be there itself.
    if sum(_without_marks(lengths)) * encoding.ARRAYS["tokens"].itemsize != len(data) or lengths[0] < 0:
        raise ValueError(f"its prompts are {len(data)} bytes, but should have lengths of {lengths[:8]}")
    if lengths[0] * len(lengths) > encoding.MAX_TOKENS:
        raise ValueError(f"{len(lengths)} prompts of {lengths[0]} tokens are too much")
    prompts = [lengths[0] if length < 0 else length for length in lengths]
    counts = head.lengths["response_ids"]
    joined = sum(prompts[member] + counts[member] for member in _missing(head.lengths["tokens"]))
    if joined > encoding.MAX_TOKENS:
        raise ValueError(f"{joined} tokens are too much for a group")


def _check_column(name: str, column: Sequence[Any], size: int) -> None:
    """Check the values of a field: one of each member, or one that all share."""
    if name not in _VALUE_NAMES:
        raise ValueError(f"a rollout has no {name}")
    if len(column) not in (1, size):
        raise ValueError(f"there are {len(column)} values of {name} for {size} rollouts")
    if name == "seq_staleness" and not all(isinstance(value, int | np.integer) for value in column):
        raise ValueError("seq_staleness must be a whole number")


def read_states(head: encoding.Head, data: Any) -> list[RolloutState]:
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
    # A field that the head leaves out is None in every member.
    columns: dict[str, Sequence[Any]] = dict.fromkeys(encoding.VALUES, (None,) * size) | {"status": head.status}
    for name, column in values.items():
        columns[name] = column if len(column) == size else column * size
    for name, text in head.copied.items():
        value = _decode_any(bytes(text))
        columns[name] = [value, *(copy_containers(value) for _ in range(size - 1))]
    columns |= arrays
    return build_states([columns[name] for name in ROLLOUT_FIELDS])


def _read_arrays(head: encoding.Head, data: NDArray[np.uint8]) -> tuple[dict[str, Arrays], list[memoryview]]:
    """The arrays by field, and the blobs of the trees."""
    lengths = head.lengths
    prompts = split(np.frombuffer(head.prompts, encoding.ARRAYS["tokens"]), _without_marks(lengths[encoding.PROMPTS]))
    for member, length in enumerate(lengths[encoding.PROMPTS]):
        if length < 0:
            prompts[member] = prompts[0] if length == encoding.NOT_SENT else prompts[0].copy()
    arrays = {encoding.PROMPTS: prompts}
    end = 0
    for name, dtype in encoding.ARRAYS.items():
        sent = _without_marks(lengths[name])
        start, end = end, end + sum(sent) * dtype.itemsize
        arrays[name] = split(data[start:end].view(dtype), sent)
    ids = arrays["response_ids"]
    for name in encoding.CONSTANTS:
        if missing := _missing(lengths[name]):
            counts = [len(ids[member]) for member in missing]
            constants = head.constants[name]
            # One piece of memory for all members; filling it with one value is much faster than `repeat`.
            made = np.empty(sum(counts), encoding.ARRAYS[name])
            made[:] = constants[0] if len(set(constants)) == 1 else np.repeat(constants, counts)
            for member, part in zip(missing, split(made, counts), strict=True):
                arrays[name][member] = part
    if missing := _missing(lengths["tokens"]):
        counts = [len(prompts[member]) + len(ids[member]) for member in missing]
        joined = np.concatenate([part for member in missing for part in (prompts[member], ids[member])])
        for member, part in zip(missing, split(joined, counts), strict=True):
            arrays["tokens"][member] = part
    ends = accumulate(head.blobs, initial=end)
    return arrays, [data[start:stop].data for start, stop in pairwise(ends)]


def _without_marks(lengths: Sequence[int]) -> Sequence[int]:
    """The lengths of the arrays that were sent; 0 for the others."""
    return lengths if min(lengths) >= 0 else [length if length > 0 else 0 for length in lengths]


def _missing(lengths: Sequence[int]) -> list[int]:
    """The members whose arrays were not sent."""
    return [member for member, length in enumerate(lengths) if length == encoding.NOT_SENT]


def split(array: NDArray[Any], lengths: Sequence[int]) -> Arrays:
    """Views of its parts, which have these lengths together."""
    if not len(array):
        return [array] * len(lengths)
    return [array[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
