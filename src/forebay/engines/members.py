"""The engines of a pool by how busy they are: which one gets the next request, and which one is far too slow.

::

    enter(call): queued, continued rollouts first, then in order of arrival --> the least busy that has room
                                                                                          ^
    up, begun, ended --> load of one engine --> heap -------------------------------------+
                  '----> tokens by request-second, of each engine --every so often--> median --> stragglers

A choice costs the logarithm of the number of engines. An engine has room for as many requests as it runs at
once (``max_running``) and as its cache holds on average (``cache_tokens``); what it does not say is no limit.
Prompts do not count there: the members of a group share theirs. Where the cache has blocks (of ``cache_block``
tokens), each request takes one more than its own tokens fill. Those of a session wait for its own engine,
whose cache has their earlier tokens, as long as it is up and no straggler. A straggler makes less than a
tenth of the median's tokens by second of a request: it is named once, and counts as that much busier, so that
it gets fewer, but always one. A pool that was told how to `rank` them looks for none, since the caller does.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import re
import statistics
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from forebay.aio.gate import Gate
from forebay.engines.base import Engine
from forebay.engines.call import Call
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

    Invariant: `least_busy` is the first of those that are up and have room with the smallest load.
    """

    def __init__(self) -> None:
        self._held = self._ended_s = 0.0
        """Of the requests that ended: tokens of their own that they held, times seconds; and seconds."""
        self._engine_of_session: dict[str, int] = {}
        self._continued, self._new = Gate(), Gate()
        """Requests that wait for an engine: of rollouts that have tokens already, and of others."""
        self._by_number: dict[int, Member] = {}
        self._num_ever = 0
        self._loads: list[tuple[float, int]] = []
        """A heap; entries that are not of a member's load of now are passed over."""
        self._num_ended = 0
        self._is_judge, self._ended = True, NOTHING
        """Whether stragglers are looked for here; what ended at all engines, for `measured`."""

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

    @property
    def left(self) -> list[Member]:
        """Those that are up, or may come back."""
        return [member for member in self if not member.gone]

    def __contains__(self, member: Member) -> bool:
        return member.number in self._by_number

    def remove(self, engine: Engine) -> Member:
        """Take `engine` out; it gets no requests any more."""
        [member] = (member for member in self if member.engine is engine)
        member.is_up = False
        member.line.wake()
        return self._by_number.pop(member.number)

    def least_busy(self) -> Member | None:
        """The member with the least load; None if no engine that is up has room."""
        while self._loads:
            load, number = self._loads[0]
            member = self._by_number.get(number)
            if member is not None and member.has_room and member.load == load:
                return member
            heapq.heappop(self._loads)
        return None

    def choose(self, session_id: str | None) -> Member | None:
        """`least_busy`, from now on the engine of the session."""
        if (member := self.least_busy()) is None or session_id is None:
            return member
        self._engine_of_session[session_id] = member.number
        if len(self._engine_of_session) > _MAX_SESSIONS:
            # The first is the one unused for longest.
            del self._engine_of_session[next(iter(self._engine_of_session))]
        return member

    def rank(self, slowness: Mapping[Engine, float]) -> None:
        """Choose the first of equally busy ones in this order, and take each to be so many times slower.

        From now on that is judged elsewhere.
        """
        self._is_judge, members = False, {member.engine: member for member in self}
        for number, (engine, times) in enumerate(slowness.items()):
            member = members[engine]
            # More than a straggler has: others use it, and this pool only where all of its own are full, or lost.
            member.place, member.slowness = times if times > _MOST_SLOWNESS else number / len(slowness), times
            self.note_load(member)

    def measured(self) -> tuple[Work, Work]:
        """Of all engines what ended since the last call, and what is in flight."""
        ended, self._ended = self._ended, NOTHING
        return ended, _running_at(self)

    def note_load(self, member: Member) -> None:
        """Record that `member` came up or changed its load."""
        member.most = getattr(member.engine, "max_running", None) or math.inf
        if self._held and (tokens := getattr(member.engine, "cache_tokens", None)):
            # Of that block, half is free at the request's end; half has the end of its prompt, shared with none.
            each = self._held / self._ended_s + getattr(member.engine, "cache_block", 0)
            member.most = min(member.most, tokens / each)
        # Where requests are queued, a load that counts for more keeps none away.
        member.most = max(1.0, member.most / member.slowness)
        # Every change of a load leaves an old entry behind, and `least_busy` drops only those at the top.
        if len(self._loads) > 4 * len(self._by_number) + 64:
            self._loads = [(other.load, other.number) for other in self if other.is_up]
            heapq.heapify(self._loads)
        heapq.heappush(self._loads, (member.load, member.number))

    async def enter(self, call: Call, ends: Callable[[], bool]) -> tuple[Member, Begun] | None:
        """The engine for a call, which has begun there; None: it `ends`, or all engines are gone.

        consumes: a place in line / waits for: an engine that is up and has room
        woken by: the end of a request, `wake` / produces: one request more at that engine
        """

        session_id, request_id = call.request.session_id, call.request.request_id
        own = self._by_number.get(self._engine_of_session.pop(session_id or "", -1))
        if own is not None and own.serves and own.slowness == 1 and session_id is not None:
            self._engine_of_session[session_id] = own.number
            if await self._enter_own(own, call, ends):
                return own, self.begin(own, request_id)
        # Those that have begun go first: what is half done grows stale, and holds up its group.
        line = self._continued if call.parts or call.request.num_earlier else self._new

        def is_decided() -> bool:
            if line is self._new and len(self._continued):
                return False
            return ends() or self.least_busy() is not None or all(member.gone for member in self)

        try:
            if len(line) or not is_decided():
                with call.queued:
                    await line.wait(is_decided)
            member = None if ends() else self.choose(session_id)
            return None if member is None else (member, self.begin(member, request_id))
        finally:
            # There may be room for the next as well; and an end is for all.
            self.wake()

    async def _enter_own(self, own: Member, call: Call, ends: Callable[[], bool]) -> bool:
        """Wait for room at the session's engine, whose cache has its earlier tokens; False: not there."""

        def stays() -> bool:
            return own.serves and own.slowness == 1 and not ends()

        def is_decided() -> bool:
            return not stays() or len(own.in_flight) < own.most

        if len(own.line) or not is_decided():
            try:
                with call.queued:
                    await own.line.wait(is_decided)
            finally:
                # Whether it takes the place or not: there may be room for others, and an end is for all.
                self.note_load(own)
                asyncio.get_running_loop().call_soon(self.wake, own)
        return stays()

    def wake(self, *those: Member) -> None:
        """Look at the first in line, also of `those`; when an engine may have got room, or none will."""
        for member in those:
            member.line.wake()
        (self._continued if len(self._continued) else self._new).wake()

    def begin(self, member: Member, request_id: str) -> Begun:
        """Count a request as in flight; pass the result to `end`."""
        member.in_flight.append(begun := (request_id, loop_time()))
        heapq.heappush(self._loads, (member.load, member.number))
        return begun

    def end(self, member: Member, begun: Begun, num_tokens: int, num_earlier: int = 0) -> None:
        """Count the request `begun` as ended, with `num_tokens` tokens made and `num_earlier` before."""
        member.in_flight.remove(begun)
        self._ended_s += (seconds := loop_time() - begun[1])
        ended = 1, num_tokens, seconds
        member.ended, self._ended = add(member.ended, ended), add(self._ended, ended)
        self._held += seconds * (num_earlier + num_tokens / 2)
        self.note_load(member)
        self._num_ended += 1
        if self._num_ended >= _LOOK_EVERY * len(self):
            self._num_ended = 0
            self._judge()
        self.wake(member)

    def _judge(self) -> None:
        # Lengths change in the course of a run: what is past counts less and less.
        self._held, self._ended_s = self._held / 2, self._ended_s / 2
        up = {member: member for member in self if member.is_up and self._is_judge}
        for member in up:
            # Not of an engine alone, which is no straggler: some engines look through all requests for each.
            member.running = _running_at([member] if len(up) > 1 else [])
        for member in judge(up):
            self.note_load(member)
            self.wake(member)


_MAX_SESSIONS = 65_536
"""Sessions whose engine is remembered; more than run at once, so only finished ones are forgotten."""

Begun = tuple[str, float]
"""A request's id, which need not differ from others', and the moment in which it began."""
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


Work = tuple[int, int, float]
"""Requests: how many, their tokens, their seconds."""
NOTHING: Work = (0, 0, 0.0)


def add(some: Work, more: Work) -> Work:
    """The sums."""
    return some[0] + more[0], some[1] + more[1], some[2] + more[2]


@dataclass(eq=False, slots=True, kw_only=True)
class Judged:
    """The requests of an engine since it was judged last, and the verdict."""

    ended: Work = NOTHING
    running: Work = NOTHING
    """Those in flight."""
    speed: float | None = None
    """Tokens by second of a request."""
    slowness: float = 1.0
    """How much busier it counts than it is; above 1 for a straggler."""
    is_named: bool = False
    """Whether a warning has named it as a straggler."""


def judge(engines: Mapping[Any, Judged]) -> list[Any]:
    """Tell which of these engines are stragglers, and name them in a warning; those whose `slowness` changed."""
    num_ended, _, ended_s = reduce(add, (one.ended for one in engines.values()), NOTHING)
    for one in engines.values():
        # Those in flight count with their tokens as with their time: one of them may be very long.
        _, num_tokens, time_s = add(one.ended, one.running)
        if time_s > 0 and (one.ended[0] >= _ENOUGH or time_s * num_ended > _ENOUGH * ended_s > 0):
            one.speed, one.ended = num_tokens / time_s, NOTHING
        elif not one.running[0]:
            # A straggler that the others leave nothing for: it may have recovered.
            one.speed = None
    speeds = [one.speed for one in engines.values() if one.speed is not None]
    # The higher of two in the middle: of two engines, the slow one is compared with the other alone.
    median, changed = statistics.median_high(speeds) if speeds else 0.0, []
    for name, one in engines.items():
        before, one.slowness = one.slowness, 1.0
        if one.speed is not None and one.speed * STRAGGLER < median:
            # Bounded: one that has made nothing (speed 0) must get requests to show that it is well.
            one.slowness = median / max(one.speed, median / _MOST_SLOWNESS)
        if one.slowness != before:
            changed.append(name)
        if one.slowness > 1 and not one.is_named:
            one.is_named = True
            logger.warning(
                "%s is a straggler: %.3g tokens/s a request, the median of %d engines is %.3g; it gets fewer requests",
                *(name, one.speed, len(speeds), median),
            )
        elif one.is_named and one.slowness == 1 and one.speed is not None:
            one.is_named = False
            logger.warning("%s is no straggler any more", name)
    return changed


@dataclass(eq=False, slots=True)
class Member(Judged):
    """An engine of a pool."""

    engine: Engine
    number: int
    is_remote: bool
    is_up: bool
    is_asleep: bool = False
    """Whether it gave its memory to a trainer, and has not been woken since; it may be up all the same."""
    num_sleeps: int = 0
    """How often it fell asleep, by which a request knows that it was interrupted for that."""
    paused: bool = False
    in_flight: list[Begun] = field(default_factory=list)
    most: float = math.inf
    """How many of them it has room for."""
    line: Gate = field(default_factory=Gate)
    """Requests of its sessions that wait for room."""
    bringing_up: asyncio.Task[None] | None = None
    loading: asyncio.Future[tuple[BaseException | None]] | None = None
    """The load of weights that came while it was brought up; the result has the error, or None."""
    is_starting: bool = False
    """Whether it is being brought up, and does not wait for that."""
    lost_because: str = "not started yet"
    gone: bool = False
    """Whether it could not be brought up: it gets nothing any more."""
    place: float = 0.0
    """Of equally busy ones the lowest is first: below 1, or for one that is to be the last of all above."""

    @property
    def sleeps(self) -> bool:
        """Whether a trainer has its memory now and then."""
        return getattr(self.engine, "sleeps", False)

    @property
    def serves(self) -> bool:
        """Whether it takes requests."""
        return self.is_up and not self.is_asleep

    @property
    def has_room(self) -> bool:
        """Whether it takes one more request beside those of its sessions that wait for it."""
        return self.serves and len(self.in_flight) + len(self.line) < self.most

    @property
    def load(self) -> float:
        """Its requests by its speed, one more, and its place: a straggler has one to show that it is well."""
        return len(self.in_flight) * self.slowness + 1 + self.place

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


def _running_at(members: Iterable[Member]) -> Work:
    """`Judged.running` of these together."""
    begun, now_s = [(member.engine, *one) for member in members for one in member.in_flight], loop_time()
    made = sum(engine.num_made(request_id) for engine, request_id, _ in begun)
    return len(begun), made, sum(now_s - begun_s for *_, begun_s in begun)


def said_by_all(name: str) -> Any:
    """The property of a pool whose engines all have this one."""
    return property(lambda pool: all(getattr(engine, name, False) for engine in pool.engines))
