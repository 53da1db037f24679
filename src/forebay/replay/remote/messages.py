"""What the buffer server and its clients say to each other: typed messages, their limits, their errors.

::

    server                                         client
      Greeting (what I am, a nonce) ----------------->
      <------------------------------------ Hello (proof of the token)
      Answer to call 0 (welcome) -------------------->
      <------------------------------------ Call 1 (method, arguments; a group with `put`)
      <------------------------------------ Piece 3, Piece 3, Call 3           of a put of many groups
      <------------------------------------ Call 2, Cancel 1, Done, ...       in any order, by number
      Part 2, Part 2, Answer 2 | Failure 2 ---------->                        groups come in parts
      Alive ----------------------------------------> <-------- Alive        while nothing else is said
      Goodbye (why) --------------------------------->

Messages are MessagePack, written and checked by msgspec; groups follow a message as raw bytes
(`packing`), of which it gives the sizes. A message that does not fit its type ends the connection; the
arguments of a call that do not fit theirs end only that call. There is no pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from forebay.aio.changed import BufferClosed
from forebay.io.heartbeat import SILENCE_LIMIT_S
from forebay.replay.arrival import Arrival
from forebay.replay.stores.contract import StorageItem
from forebay.replay.stores.errors import OwnerLost, StoreBusy
from forebay.types import ROLLOUT_FIELDS, RolloutState, Status

PROTOCOL = 5

MAX_FRAME_BYTES = 256 << 20
"""Of the groups of one call: 16 rollouts of 128k tokens take 40 MB as raw arrays, and images need room."""

MAX_HEADER_BYTES = 1 << 20
"""A message without its groups; the largest are counts of tens of thousands of tasks."""

MAX_ARGUMENT_BYTES = MAX_HEADER_BYTES - 1024
"""Of a call, what its other parts leave; reading it takes the server's event loop some 30 ms."""

PUT_WINDOW_BYTES = 64 << 20
"""Puts of one client that wait for their answers at most; one larger put goes alone."""

MAX_PUTS = 512
"""Puts of one client that wait for their answers at most, when they are small."""

MAX_CALLS = 1024
"""Other calls of one client that wait for their answers at most."""

KEY_BYTES = 16
"""Of the random key by which a put or a take is known again on another connection."""


class ConnectionLost(ConnectionError):
    """The connection broke before the answer came; the message says what is known of the call."""


class ServerClosed(ConnectionError):
    """The server is closing, and what was called has not happened."""


class FrameError(ValueError):
    """What came is not a message of this protocol."""


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    pass


class ServerFull(ConnectionError):
    """The server holds as many bytes of puts under way as it may; the put has not happened."""


class Greeting(_Message, tag="greeting"):
    """The server's first words."""

    protocol: int
    instance: bytes
    """Random; another one after a restart."""
    nonce: bytes
    """For the proof that the client knows the token."""
    needs_token: bool
    max_frame_bytes: int
    limit_s: float
    """How long the server waits for a sign of life of the client."""
    fields: tuple[str, ...] = ROLLOUT_FIELDS
    """Those of a rollout: both sides send values by their place."""


class Hello(_Message, tag="hello"):
    """The client's first words."""

    protocol: int
    proof: bytes
    limit_s: float = SILENCE_LIMIT_S
    """How long the client waits for a sign of life of the server."""


class Call(_Message, tag="call"):
    """A method to run; the answers come in any order and name the number."""

    number: int
    method: str
    arguments: msgspec.Raw
    sizes: list[tuple[int, int]] = []
    """Of each group that follows: bytes of its head and of its arrays."""


class Piece(_Message, tag="piece"):
    """Some of the groups of a put whose call follows; the server takes them in while the next are packed."""

    number: int
    sizes: list[tuple[int, int]]


class Cancel(_Message, tag="cancel"):
    """Nobody waits for the answer any more."""

    number: int


class Done(_Message, tag="done"):
    """The groups taken under this key are with whoever asked for them."""

    key: bytes


class Part(_Message, tag="part"):
    """Some of the groups that a call returns."""

    number: int
    sizes: list[tuple[int, int]]


class Answer(_Message, tag="answer"):
    """What a call returned, and how the buffer stands."""

    number: int
    result: Any
    num_live: int
    version: int
    num_evicted: dict[str, int] | None = None
    """Sent when it is news."""


class Failure(_Message, tag="failure"):
    """What a call raised."""

    number: int
    kind: str
    message: str


class Alive(_Message, tag="alive"):
    """A sign of life; see `forebay.io.heartbeat`."""


class Goodbye(_Message, tag="goodbye"):
    """The last words before the connection is closed."""

    message: str


class EvictedGroup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What the ledger of whoever put the next group has to know of one that had to go."""

    uid: int
    task_name: str
    status: Status
    staleness: int
    names: list[tuple[str | int | None, str | int | None]]
    """The rollout id and the group id of each member."""

    @classmethod
    def of(cls, row: StorageItem) -> EvictedGroup:
        """The evicted row."""
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


ROW_FIELDS = tuple(field.name for field in fields(StorageItem) if field.name != "item")
row_values = attrgetter(*ROW_FIELDS)
"""The fields of a `StorageItem`, in this order, without the payload."""


FromServer = Greeting | Part | Answer | Failure | Alive | Goodbye
FromClient = Hello | Call | Piece | Cancel | Done | Alive


class _Arguments(msgspec.Struct, forbid_unknown_fields=True):
    pass


class PutArguments(_Arguments):
    """Of `ReplayBuffer.put` and `ReplayBuffer.put_groups`; the client has labeled the tokens."""

    key: bytes
    task_name: str
    arrival: Arrival
    asked_first: bytes = b""
    """The instance of the server that was asked before, if this is not the first time."""


class GetArguments(_Arguments):
    """Of `ReplayBuffer.get`."""

    key: bytes
    batch_size: int
    task_name: str
    group_status: Status
    tags: dict[str, str | int | float | bool] | None


class TakeArguments(_Arguments):
    """Of `ReplayBuffer.take_batch`."""

    key: bytes
    task_batch_sizes: dict[str, int]
    group_status: Status
    train_step: int | None


class KeyArguments(_Arguments):
    """Of what is said of an earlier take: ``keep`` and ``release``."""

    key: bytes


class CountArguments(_Arguments):
    """Of `ReplayBuffer.count`."""

    task_name: str
    group_status: Status
    tags: dict[str, str | int | float | bool] | None


class CountStatusesArguments(_Arguments):
    """Of `ReplayBuffer.count_statuses`."""

    task_names: list[str]
    statuses: list[Status]


class RowsArguments(_Arguments):
    """Of `StorageBackend.count` and, without payloads, `StorageBackend.get`."""

    query: dict[str, Any]
    order: str | None = None
    limit: int | None = None


class StepArguments(_Arguments):
    """Of `ReplayBuffer.commit` and `ReplayBuffer.restore`."""

    train_step: int


class RefreshArguments(_Arguments):
    """Of `ReplayBuffer.refresh_staleness`."""

    task_stale_thresholds: dict[str, int]
    current_train_step: int
    statuses: list[Status] | None


class PrioritiesArguments(_Arguments):
    """Of `ReplayBuffer.update_priorities`; pairs, because keys may be of any plain kind."""

    priorities: list[tuple[str | int | float | bool | None, float]]
    by: str
    task_name: str | None


class PathArguments(_Arguments):
    """Of `ReplayBuffer.save` and `ReplayBuffer.resume`."""

    path: str


class VersionArguments(_Arguments):
    """Of `ReplayBuffer.wait_for_change`."""

    version: int


def _plain(value: Any) -> Any:
    """What msgspec does not know, as something it knows."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__qualname__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_from_server = msgspec.msgpack.Decoder(FromServer)
_from_client = msgspec.msgpack.Decoder(FromClient)


def encode(message: msgspec.Struct) -> bytes:
    """The message as bytes.

    Raises:
        ValueError: it holds a number or a text that cannot be sent.
    """
    try:
        return _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise ValueError(f"an argument cannot be sent to the server: {error}") from None


def decode_from_server(data: Any) -> FromServer:
    """The message; FrameError if it is none."""
    try:
        message: FromServer = _from_server.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"this is not a message of a buffer server: {error}") from None
    return message


def decode_from_client(data: Any) -> FromClient:
    """The message; FrameError if it is none."""
    try:
        message: FromClient = _from_client.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"this is not a message of a buffer client: {error}") from None
    return message


_ERRORS = {
    kind.__name__: kind
    for kind in (
        *(ValueError, RuntimeError, TypeError, KeyError, IndexError, NotImplementedError, MemoryError),
        *(OSError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError),
        *(PermissionError, ConnectionLost, ServerClosed, ServerFull, BufferClosed),
        *(OwnerLost, StoreBusy),
    )
}


def failure_of(number: int, error: BaseException) -> Failure:
    """The message for what a call raised: its nearest kind that the other side knows."""
    kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), "RuntimeError")
    message = str(error.args[0]) if type(error) is KeyError and error.args else str(error)
    if kind == "RuntimeError" and not isinstance(error, RuntimeError):
        message = f"{type(error).__qualname__}: {message}"
    return Failure(number, kind, message.encode("utf-8", "backslashreplace").decode())


def error_of(failure: Failure) -> Exception:
    """The error to raise for it."""
    return _ERRORS.get(failure.kind, RuntimeError)(failure.message)
