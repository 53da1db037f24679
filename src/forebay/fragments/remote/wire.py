"""What a served fragment buffer and its clients say to each other: frames of MessagePack, nothing pickled.

::

    client -- length | Call 1 (method, arguments) ---> server
           -- length | Call 2 ----------------------->
           <---------- length | Answer 2 (value) -----          in any order, by number
           -- length | Call 1 (no method: cancel) --->
           -- length | Call 3 (alive) --------------->           answered at once
           <---------- length | Answer 1 (error) -----          every call has exactly one answer

Ids and metadata only: payloads are in the store, which both sides map into memory.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec

from forebay.aio.changed import BufferClosed
from forebay.fragments.leases import FragmentBatch, Lease
from forebay.fragments.records import FragmentIndex, FragmentMetadata
from forebay.fragments.store.mapped import StoreFullError
from forebay.io.framing import MAX_BYTES, framed

CANCEL = ""
"""In place of a method."""
ALIVE = "alive"
"""In place of a method: a sign of life, which is answered by one (`forebay.io.heartbeat`)."""
CLIENT_LIMIT_S = 60.0
"""Without a sign of life a client is given up; twice what it allows a server."""
CANCELLED = "cancelled"
"""In place of an error's kind."""
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, TimeoutError, FileExistsError, OSError, BufferClosed, StoreFullError)
}


class Call(msgspec.Struct, array_like=True):
    """A method to run."""

    number: int
    method: str
    arguments: msgspec.Raw = msgspec.Raw(b"\x90")


class Answer(msgspec.Struct, array_like=True):
    """What a call returned or raised."""

    number: int
    value: msgspec.Raw
    error: str | None = None
    """Kind of what was raised; `value` is its message."""


class Batch(msgspec.Struct, array_like=True):
    """A `FragmentBatch`."""

    entries: list[tuple[FragmentIndex, str]]
    staleness: list[int]
    lease_id: str | None
    term_s: float

    @staticmethod
    def of(batch: FragmentBatch) -> Batch:
        """`batch` as a message."""
        lease = batch.lease or Lease("", 0.0)
        return Batch(batch, batch.staleness, lease.lease_id or None, lease.term_s)

    def batch(self) -> FragmentBatch:
        """The batch itself."""
        lease = None if self.lease_id is None else Lease(self.lease_id, self.term_s)
        return FragmentBatch(self.entries, lease, self.staleness)


class Method(NamedTuple):
    """Types of the arguments, in order, and of what is returned."""

    arguments: msgspec.msgpack.Decoder[tuple[Any, ...]]
    result: msgspec.msgpack.Decoder[Any]


def _method(result: Any, *arguments: Any) -> Method:
    kinds: Any = tuple.__class_getitem__(arguments)
    return Method(msgspec.msgpack.Decoder(kinds), msgspec.msgpack.Decoder(result))


METHODS = {
    "add_fragments": _method(None, list[tuple[str, FragmentMetadata]]),
    "wait_for_room": _method(None),
    "remove_worker": _method(None, str),
    "fetch_fragments": _method(Batch, int, float | None, float | None),
    "prepared_fragments": _method(Batch),
    "release": _method(bool, str),
    "renew": _method(bool, str),
    "update_model_version": _method(None, str, int),
    "update_priorities": _method(None, dict[str, float]),
    "get_database_config": _method(dict[str, Any]),
    "metrics": _method(dict[str, float]),
    "save": _method(None, str),
    "close": _method(None),
}
"""Of the buffer, that others may call."""

_encoder = msgspec.msgpack.Encoder(enc_hook=str)
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def encode(value: Any) -> msgspec.Raw:
    """`value` as a part of a message; paths become texts."""
    return msgspec.Raw(_encoder.encode(value))


def failure(number: int, error: Exception) -> Answer:
    """The answer for what a call raised: its nearest kind that the other side knows."""
    kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), "RuntimeError")
    return Answer(number, encode(str(error)), kind)


def error_of(answer: Answer) -> Exception:
    """The error to raise for it."""
    assert answer.error is not None
    return _ERRORS.get(answer.error, RuntimeError)(msgspec.msgpack.decode(answer.value, type=str))


def write_frame(writer: asyncio.StreamWriter, message: Call | Answer) -> None:
    """Send `message`; ``drain`` waits until there is room for more.

    Raises:
        ValueError: it is too long.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_BYTES:
        raise ValueError(f"a message has at most {MAX_BYTES} bytes, got {len(data)}: make several calls")
    writer.write(framed(data))
