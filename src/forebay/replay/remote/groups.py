"""A group that came in a message, or the error that ends the connection it came on."""

from __future__ import annotations

from typing import Any

from forebay.replay.format.decode import unpack_group
from forebay.replay.format.encoded import PackedPayload, receive_payload
from forebay.replay.remote.messages import FrameError
from forebay.types import RolloutState


def hold_group(head: Any, data: Any) -> PackedPayload | list[RolloutState]:
    """What a server holds of a group that came; see `receive_payload`.

    Raises:
        FrameError: it is none.
    """
    try:
        return receive_payload(head, data)
    except ValueError as error:
        raise FrameError(str(error)) from None


def receive_group(head: Any, data: Any) -> list[RolloutState]:
    """The group of a head and one writable buffer with its arrays (`packing`).

    Raises:
        FrameError: they are not those of a group.
    """
    try:
        return unpack_group(head, data)
    except ValueError as error:
        raise FrameError(str(error)) from None
