"""A group that came in a message, or the error that ends the connection it came on."""

from __future__ import annotations

from typing import Any

from forebay.replay.format.decode import unpack_group
from forebay.replay.format.encoded import PackedPayload, hold_packed
from forebay.replay.groups import StoredGroup
from forebay.replay.remote.messages import FrameError
from forebay.types import RolloutState


def hold_group(head: Any, data: Any) -> PackedPayload | StoredGroup:
    """What a server holds of a group that came; see `hold_packed`.

    Raises:
        FrameError: it is none.
    """
    try:
        return hold_packed(head, data)
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
