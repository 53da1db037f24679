"""The engines of a pool by how busy they are: which one gets the next request, and which one is far too slow.

::

    up, begun, ended --> load of one engine --> heap --> the least busy
                  '----> tokens by request-second, of each engine --every so often--> median --> stragglers

A choice costs the logarithm of the number of engines. A straggler makes less than a tenth of the median's
tokens by second of a request: it is named once, and counts as that much busier, so that it gets fewer.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import re
import statistics
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from forebay.engines.base import Engine
from forebay.watching.activity import loop_time

logger = logging.getLogger(__name__)

STRAGGLER = 10.0
"""An engine that is this many times slower than the median is a straggler."""
_LOOK_EVERY = 32
"""Requests of each engine on average between two looks for stragglers."""
_ENOUGH = 16
"""An engine is judged by this many ended requests, or once it has worked as long as so many usually take: the
speed of single requests differs too much."""
_MOST_SLOWNESS = 100.0


class Members:
    """All engines of a pool, by their numbers.

    Invariant: `least_busy` is the first of those that are up with the smallest load.
    """

    def __init__(self) -> None:
        self._by_number: dict[int, Member] = {}
        self._num_ever = 0
        self._loads: list[tuple[float, int]] = []
        """A heap; entries that are not of a member's load of now are passed over."""
        self._num_ended = 0

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_number.values())

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, engine: Engine) -> Member:
        """Add an engine; it gets a number that was never used before."""
        # Not by `isinstance`: an engine may be wrapped by one that lets all its names through.
        is_remote = hasattr(engine, "bring_up")
        member = Member(engine, self._num_ever, is_remote=is_remote, is_up=not is_remote)
        self._num_ever += 1
        self._by_number[member.number] = member
        self.note_load(member)
        return member

    def __contains__(self, member: Member) -> bool:
        return member.number in self._by_number

    def remove(self, engine: Engine) -> Member:
        """Take `engine` out; it gets no requests any more."""
        [number] = (member.number for member in self if member.engine is engine)
        self._by_number[number].is_up = False
        return self._by_number.pop(number)

    def get(self, number: int | None) -> Member | None:
        """The engine with this number, if it is a member and takes requests."""
        member = None if number is None else self._by_number.get(number)
        return member if member is not None and member.is_up else None

    def least_busy(self) -> Member | None:
        """The member with the least load; None if no engine is up."""
        while self._loads:
            load, number = self._loads[0]
            member = self.get(number)
            if member is not None and member.load == load:
                return member
            heapq.heappop(self._loads)
        return None

    def note_load(self, member: Member) -> None:
        """Record that `member` came up or changed its load."""
        # Every change of a load leaves an old entry behind, and `least_busy` drops only those at the top.
        if len(self._loads) > 4 * len(self._by_number) + 64:
            self._loads = [(other.load, other.number) for other in self if other.is_up]
            heapq.heapify(self._loads)
        heapq.heappush(self._loads, (member.load, member.number))

    def begin(self, member: Member, request_id: str) -> tuple[str, float]:
        """Count a request as in flight; pass the result to `end`."""
        member.in_flight.append(begun := (request_id, loop_time()))
        self.note_load(member)
        return begun

    def end(self, member: Member, begun: tuple[str, float], num_tokens: int) -> None:
        """Count the request `begun` as ended on `member`, with `num_tokens` tokens made."""
        member.num_ended += 1
        member.num_tokens += num_tokens
        member.in_flight.remove(begun)
        member.ended_s += loop_time() - begun[1]
        self.note_load(member)
        self._num_ended += 1
        if self._num_ended >= _LOOK_EVERY * len(self):
            self._num_ended = 0
            self._judge()

    def _judge(self) -> None:
        up, now_s = [member for member in self if member.is_up], loop_time()
        usual_s = sum(member.ended_s for member in up) / max(1, sum(member.num_ended for member in up))
        for member in up:
            time_s = member.ended_s + sum(now_s - begun_s for _, begun_s in member.in_flight)
            if time_s > 0 and (member.num_ended >= _ENOUGH or time_s > _ENOUGH * usual_s):
                # Those in flight count with their tokens as with their time: one of them may be very long.
                made = sum(member.engine.num_made(request_id) for request_id, _ in member.in_flight)
                member.speed = (member.num_tokens + made) / time_s
                member.num_ended, member.num_tokens, member.ended_s = 0, 0, 0.0
            elif not member.in_flight:
                # A straggler that the others leave nothing for: it may have recovered.
                member.speed = None
        speeds = [member.speed for member in up if member.speed is not None]
        # The higher of two in the middle: of two engines, the slow one is compared with the other alone.
        median = statistics.median_high(speeds) if speeds else 0.0
        for member in up:
            slowness = 1.0
            if member.speed is not None and member.speed * STRAGGLER < median:
                # Bounded: one that has made nothing (speed 0) must get requests to show that it is well.
                slowness = median / max(member.speed, median / _MOST_SLOWNESS)
            if slowness != member.slowness:
                member.slowness = slowness
                self.note_load(member)
            if slowness > 1 and not member.is_named:
                member.is_named = True
                logger.warning(
                    "%s is a straggler: %.3g tokens/s a request, while the median of %d engines is %.3g; it "
                    "gets fewer requests",
                    *(member, member.speed, len(speeds), median),
                )
            elif member.is_named and slowness == 1 and member.speed is not None:
                member.is_named = False
                logger.warning("%s is no straggler any more", member)


Join = Callable[[str], Awaitable[None]]
Leave = Callable[[Any], Awaitable[None]]


async def scale(there: Any, change: str, join: Join, leave: Leave) -> str:
    """Add parts to those that are `there`, or remove some; the result says how many there are now.

    `change` is ``+2``, ``-1``, ``4`` (this many in all), ``+http://...`` or ``-http://...``. `join` is called
    with the address, or an empty one; `leave` with the part at that address, or with the newest part (one
    that is not up before all others).

    Raises:
        ValueError: `change` has another form, or would leave no part that is up.
    """
    found = re.fullmatch(r"([+-]?)(\d{1,6})|([+-])(https?://\S+)", change)
    if found is None:
        raise ValueError(f"write +2, -1, =4, +http://HOST:PORT or -http://HOST:PORT, got {change!r}")
    sign, number, url = found[1] or found[3], int(found[2] or 1), (found[4] or "").rstrip("/")
    difference = {"+": number, "-": -number}.get(sign, number - len(there))
    if len(there) + difference < 1:
        raise ValueError(f"{change} would leave none of {len(there)}: one has to stay")
    for _ in range(difference):
        await join(url)
    for _ in range(-difference):
        at_url = [part for part in there if not url or str(part.engine) == url]
        # `max` takes the first of equals, and so, reversed, the newest.
        leaving = max(reversed(at_url), key=lambda part: not part.is_up, default=None)
        if leaving is None or not any(part.is_up for part in there if part is not leaving):
            raise ValueError("no other is up" if leaving else f"no engine is at {url}")
        await leave(leaving)
    return f"{len(there)} now, {sum(part.is_up for part in there)} of them up"


@dataclass(eq=False, slots=True)
class Member:
    """An engine of a pool."""

    engine: Engine
    number: int
    is_remote: bool
    is_up: bool
    paused: bool = False
    in_flight: list[tuple[str, float]] = field(default_factory=list)
    """The id of each of its requests, which need not differ, and the moment in which it began."""
    bringing_up: asyncio.Task[None] | None = None
    loading: asyncio.Future[tuple[BaseException | None]] | None = None
    """The load of weights that came while it was brought up; the result has the error, or None."""
    is_starting: bool = False
    """Whether it is being brought up, and does not wait for that."""
    lost_because: str = "not started yet"
    gone: bool = False
    """Whether it could not be brought up: it gets nothing any more."""
    slowness: float = 1.0
    """How much busier it counts than it is; above 1 for a straggler."""
    is_named: bool = False
    """Whether a warning has named it as a straggler."""
    speed: float | None = None
    """Tokens by second of a request, when it was judged last."""
    num_ended: int = 0
    num_tokens: int = 0
    ended_s: float = 0.0
    """Requests that ended since then, their tokens and their time."""

    @property
    def load(self) -> float:
        """Its requests, one more included, by its speed."""
        return (len(self.in_flight) + 1) * self.slowness

    async def loaded(self) -> None:
        """Wait for `loading`, also for one that is begun meanwhile; raise the error of one that failed."""
        while (loading := self.loading) is not None:
            [error] = await loading
            if self.loading is loading:
                self.loading = None
            if error is not None:
                raise error

    def __str__(self) -> str:
        return f"engine {self.number} ({type(self.engine).__name__})"
