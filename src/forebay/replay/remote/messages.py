"""The calls that a buffer server takes, by name and arguments; its other messages, limits and errors.

::

    server                                          client
      Note Greeting (what I am, a nonce) ------------->
      <------------------------------- Note Hello (proof of the token)
      Note Reply (welcome) --------------------------->
      <------------------------------- Call 3                        a put, with its groups
      Part 2, Part 2, Answer 2 (Reply) --------------->              groups come in parts
      <------------------------------- Note Key                      the take of this key has arrived

Messages and their buffers are those of `forebay.io.messages`; each group is two buffers, its head and its
arrays (`forebay.replay.format.encode`). The arguments of a call that do not fit their types end that call
only.
"""

from typing import Any, Self

import msgspec

from forebay.aio.changed import BufferClosed
from forebay.io.messages import ERRORS as PLAIN_ERRORS
from forebay.io.messages import SILENCE_LIMIT_S, FrameError, Message, Note
from forebay.io.methods import Method
from forebay.replay.arrival import Arrival
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.stores.contract import StorageItem, TagValue
from forebay.replay.stores.errors import OwnerLost, StoreBusy
from forebay.types import ROLLOUT_FIELDS, RolloutState, Status

PROTOCOL = 9

MAX_FRAME_BYTES = 256 << 20
"""Of the groups of one call: 16 rollouts of 128k tokens take 40 MB as raw arrays, and images need room."""

PUT_WINDOW_BYTES = 64 << 20
"""Puts of one client that wait for their answers at most; one larger put goes alone."""

MAX_PUTS = 512
"""Puts of one client that wait for their answers at most, when they are small."""

MAX_CALLS = 1024
"""Other calls of one client that wait for their answers at most."""

KEY_BYTES = 16
"""The bytes of the random key by which a put or a take is known again on another connection."""


class ConnectionLost(ConnectionError):
    """The connection broke before the answer came; the message says what is known of the call."""


class ServerClosed(ConnectionError):
    """The server is closing, and the call has not happened."""


class ServerFull(ConnectionError):
    """The server holds as many bytes of puts under way as it may; the put has not happened."""


ERRORS: dict[str, type[Exception]] = PLAIN_ERRORS | {
    kind.__name__: kind for kind in (ConnectionLost, ServerClosed, ServerFull, BufferClosed, OwnerLost, StoreBusy)
}
"""Errors of a call that are raised as what they are."""


class Greeting(Message, tag="greeting"):
    """The server's first words."""

    protocol: int
    instance: bytes
    """Random; another one after a restart."""
    nonce: bytes
    """A number for the proof that the client knows the token."""
    needs_token: bool
    max_frame_bytes: int
    limit_s: float
    """How long the server waits for a sign of life of the client."""
    fields: tuple[str, ...] = ROLLOUT_FIELDS
    """The fields of a rollout: both sides send values by their place."""


class Hello(Message, tag="hello"):
    """The client's first words."""

    protocol: int
    proof: bytes
    limit_s: float = SILENCE_LIMIT_S
    """How long the client waits for a sign of life of the server."""


class Key(Message, tag="key"):
    """The groups taken under this key are with the caller that asked for them."""

    key: bytes


class Reply(Message, tag="reply"):
    """The value of every answer: what the method returned, and how the buffer stands."""

    result: Any
    num_live: int
    version: int
    num_evicted: dict[str, int]


class EvictedGroup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An evicted group, as far as the ledger of the client whose put evicted it has to know it."""

    uid: int
    task_name: str
    status: Status
    staleness: int
    names: list[tuple[str | int | None, str | int | None]]
    """The rollout id and the group id of each member."""

    @classmethod
    def of(cls, row: StorageItem) -> Self:
        """The evicted row, without its payload."""
        names = [(_id(state.rollout_id), _id(state.group_id)) for state in row.item]
        return cls(row.uid, row.task_name, Status(row.status), row.staleness, names)

    def to_row(self) -> StorageItem:
        """A row whose rollouts have their ids and nothing else."""
        states = [
            RolloutState([], rollout_id=rollout, group_id=group, task_name=self.task_name, status=self.status)
            for rollout, group in self.names
        ]
        return StorageItem(states, self.uid, -1, self.task_name, self.status, self.staleness)


def _id(value: Any) -> str | int | None:
    return value if isinstance(value, str | int) else None


class PutArguments(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of `ReplayBuffer.put_groups`; the client has labeled the tokens."""

    key: bytes
    task_name: str
    arrival: Arrival
    asked_first: bytes = b""
    """The instance of the server that was asked before, if this is not the first time."""


class TakeArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Of `ReplayBuffer.take_batch`, and of `ReplayBuffer.get`, which takes of one task."""

    key: bytes
    task_batch_sizes: dict[str, int]
    group_status: Status
    train_step: int | None = None
    tags: dict[str, TagValue] | None = None


_NARROWER: dict[str, dict[str, Any]] = {
    # Of an `Iterable` msgspec takes any items.
    "count_statuses": {"task_names": list[str], "statuses": list[Status]},
    "refresh_staleness": {"statuses": list[Status] | None},
    # On the server's machine.
    "save": {"path": str},
    "resume": {"path": str},
}
"""By method: the types of arguments that are narrower here than in its annotations."""
METHODS = {
    name: Method.of(getattr(ReplayBuffer, name), **_NARROWER.get(name, {}))
    for name in ("count", "is_ready", "commit", "restore", "update_priorities", "wait_for_change", *_NARROWER)
}
"""Methods of the buffer that are called as they are."""
_Settled = msgspec.defstruct("Settled", [("key", bytes)], forbid_unknown_fields=True)

ARGUMENTS: dict[str, Any] = {
    "put_groups": PutArguments,
    "take_batch": TakeArguments,
    # These settle an earlier take.
    "keep": _Settled,
    "release": _Settled,
    **{name: method.arguments for name, method in METHODS.items()},
}
"""By method: what a client may call, and the types of its arguments."""


def read_note(note: Note) -> Greeting | Hello | Key | Reply:
    """The value of a note; FrameError if it is of another kind."""
    try:
        value: Greeting | Hello | Key | Reply = _notes.decode(note.value)
    except msgspec.MsgspecError as error:
        raise FrameError(f"this is not a message of a buffer: {error}") from None
    return value


_notes = msgspec.msgpack.Decoder(Greeting | Hello | Key | Reply)
