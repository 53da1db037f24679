"""A short wait in which all tasks that are about to ask for something do so, so that it goes together.

::

    first item --> settle: turn, turn, turn ... --4 turns without another item, or `at_most`--> all of them
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

QUIET_TURNS = 4
"""Turns of the event loop without a new item after which those of one moment are all there: what lies between
a group and its requests (task start, gather, agent loop) takes one or two."""


async def settle(num_items: Callable[[], int], *, at_most: int) -> None:
    """Return after some turns of the event loop in which `num_items` did not change, or `at_most` turns.

    The limit is for a steady load, under which such a quiet moment may never come.
    """
    quiet = 0
    for _ in range(at_most):
        if quiet == QUIET_TURNS:
            return
        seen = num_items()
        # Not a wait: lets the other ready tasks run once.
        await asyncio.sleep(0)
        quiet = quiet + 1 if num_items() == seen else 0
