"""How each end of a connection learns that the other one has stopped, is cut off, or hangs.

::

    this end --say()--------> every `limit_s` / 4 ----------> the other end
             <--bytes of any message: it lives--------------- does the same
             nothing for `limit_s`: `beat` returns, and its caller ends the connection

A closed socket says by itself that the other end is gone. A process that is stopped (SIGSTOP), that hangs, or
whose machine or network fell silent says nothing, and without this a call to it would wait forever.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

SILENCE_LIMIT_S = 30.0
"""Without a sign of life. A busy event loop is late by some milliseconds, a swapping machine by seconds."""

UNDO_S = 0.5
"""A cancelled caller waits so long for the other end to undo its call; one that is up needs milliseconds."""

BEATS = 4
"""Within the limit, so that a few may be late."""


async def beat(
    say: Callable[[], None],
    num_heard: Callable[[], int],
    *,
    limit_s: float,
    other_limit_s: float = SILENCE_LIMIT_S,
) -> float:
    """Call `say` often enough for the other end; return after it was silent for `limit_s`, with the seconds.

    `num_heard` grows with everything that comes. `other_limit_s` is how long the other end waits for a sign
    of life from here.

    consumes: nothing / waits for: the next beat / woken by: the event loop's clock / produces: calls of `say`
    """
    pause_s = min(limit_s, other_limit_s) / BEATS
    # Counted in beats of this loop: one that was blocked, or whose process was stopped, has not listened, and
    # must read what lies in its socket before it calls the other end silent.
    allowed = math.ceil(limit_s / pause_s)
    heard, silent = num_heard(), 0
    while silent < allowed:
        await asyncio.sleep(pause_s)
        say()
        before, heard = heard, num_heard()
        silent = 0 if heard != before else silent + 1
    return silent * pause_s


def check_limit(name: str, limit_s: float) -> None:
    """ValueError unless the limit is a positive number of seconds."""
    if not 0 < limit_s < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {limit_s}")
