"""The messages of a channel between two processes: calls by number, answers, signs of life.

::

    caller                                              answerer
      Call 3 (method, arguments) ----------------------->          any number of calls at a time
      Call 4, Cancel 3 --------------------------------->
      <------------- Part 4, Part 4, Answer 4 | Failure 4          in any order, by number
      Note --------------> <-------------------- Note              outside all calls
      Alive -------------> <------------------- Alive              while nothing else is said
      <------------------------------ Goodbye (reason)             the last words

Each end says `Alive` every `limit_s` / 4. A closed socket says by itself that the other end is gone; a
process that is stopped (SIGSTOP), that hangs, or whose machine or network fell silent says nothing, and a
call to it would wait forever.

A message with `sizes` is followed by as many raw buffers. A `Part` brings buffers that belong to an answer,
ahead of it. A message that does not fit its type ends the connection.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

SILENCE_LIMIT_S = 30.0
"""Without a sign of life. A busy event loop is late by some milliseconds, a swapping machine by seconds."""

UNDO_S = 0.5
"""A cancelled caller waits so long for the other end to undo its call; one that is up needs milliseconds."""

BEATS = 4
"""Within the limit, so that a few may be late."""

Size = Annotated[int, msgspec.Meta(ge=0)]
"""Bytes of a buffer."""


class FrameError(ValueError):
    """The bytes that came are not a message."""


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A message of a channel."""


class Call(Message, tag="call"):
    """A method to run."""

    number: int
    method: str
    arguments: msgspec.Raw
    sizes: list[Size] = []


class Cancel(Message, tag="cancel"):
    """The caller does not wait for the answer any more."""

    number: int


class Part(Message, tag="part"):
    """Some of the buffers of an answer that follows."""

    number: int
    sizes: list[Size]


class Answer(Message, tag="answer"):
    """The result of a call."""

    number: int
    value: msgspec.Raw
    sizes: list[Size] = []


class Failure(Message, tag="failure"):
    """The error of a call: the names of its class and of those above it, and its text."""

    number: int
    kinds: list[str]
    message: str


class Note(Message, tag="note"):
    """A value outside all calls."""

    value: msgspec.Raw
    sizes: list[Size] = []


class Alive(Message, tag="alive"):
    """A sign of life."""


class Goodbye(Message, tag="goodbye"):
    """The last words before the connection is closed."""

    message: str


def _plain(value: Any) -> Any:
    """A value of a kind that MessagePack lacks, as one that it has."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a {type(value).__qualname__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(Call | Cancel | Part | Answer | Failure | Note | Alive | Goodbye)


def encode(value: Any) -> bytes:
    """A message, or a value, as bytes; paths become texts.

    Raises:
        ValueError: it holds a number, a text or an object that cannot be sent.
    """
    try:
        return _encoder.encode(value)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise ValueError(f"an argument cannot be sent: {error}") from None


def encode_value(value: Any) -> msgspec.Raw:
    """A value as part of a message."""
    return msgspec.Raw(encode(value))


def decode(header: Any) -> Message:
    """The message of these bytes; FrameError if they are not one."""
    try:
        message: Message = _decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"this is not a message: {error}") from None
    return message


ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(ValueError, RuntimeError, TypeError, KeyError, IndexError, NotImplementedError, MemoryError),
        *(OSError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError),
        *(PermissionError, TimeoutError),
    )
}
"""Errors of a call that are raised here with their own type; a caller adds its own."""


def failure_of(number: int, error: BaseException) -> Failure:
    """The message for what a call raised."""
    # The text of a KeyError is the repr of its key: raised again, it would be quoted twice.
    message = str(error.args[0]) if type(error) is KeyError and error.args else str(error)
    kinds = [kind.__name__ for kind in type(error).__mro__]
    # The text may hold lone surrogates, which cannot be sent.
    return Failure(number, kinds, message.encode("utf-8", "backslashreplace").decode())


def error_of(failure: Failure, errors: Mapping[str, type[Exception]] = ERRORS) -> Exception:
    """The error to raise for it: of the nearest class that is in `errors`."""
    for kind in failure.kinds:
        if kind in errors:
            return errors[kind](failure.message)
    return RuntimeError(f"{failure.kinds[0]}: {failure.message}")


def sizes_of(buffers: Sequence[Any]) -> list[int]:
    """The `sizes` of a message with these buffers."""
    return [buffer.nbytes if hasattr(buffer, "nbytes") else len(buffer) for buffer in buffers]


def check_limit(name: str, limit_s: float) -> None:
    """ValueError unless the limit is a positive number of seconds."""
    # Written so that NaN is refused, too.
    if not 0 < limit_s < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {limit_s}")
