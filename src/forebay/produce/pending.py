"""The groups that are being generated right now.

::

    start() -> one task: take a group -> generate it -> store it -> gone from here, waiters woken
                             |               |             |
    cancel():          not generated     cut short     left to end
                                             |
                             again and again, then given up: its prompt is stored, its task is left alone

Every group's own task stores it, so a caller that is cancelled loses nothing, nobody can store a group twice,
and a finished group costs the same however many others are in flight. Of a group that is given up a copy is
stored, by a new task; what the old one makes of the original is nobody's any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from forebay.aio.changed import Changes
from forebay.produce.strategies.budget import ProductionError
from forebay.replay import ConnectionLost
from forebay.replay.groups import StoredGroup, copy_group
from forebay.types import RolloutState, Status
from forebay.watching.activity import loop_time

logger = logging.getLogger(__name__)

CANCEL_REPEAT_S = 5.0
"""Code that swallows a cancellation often does so once, to clean up; then the next one ends it."""
GIVE_UP_AFTER_S = 30.0
"""A generation that has swallowed cancellations for this long will go on doing so."""
STORE_LIMIT_S = 600.0
"""Taking and storing are waited for longer: a buffer elsewhere may be starting again."""

Group = list[RolloutState]


class Ended(enum.Enum):
    """How the generation of a group ended."""

    RETURNED = enum.auto()
    """Of itself: the statuses of its rollouts say how."""
    INTERRUPTED = enum.auto()
    """Cancelled half-way; its rollouts are in no defined state."""
    OUT_OF_TIME = enum.auto()
    """Cancelled by its time limit."""
    NOT_STARTED = enum.auto()
    """Taken, but not generated: production stopped first."""


TakeGroup = Callable[[], Awaitable[Group]]
GenerateGroup = Callable[[Group], Awaitable[Group]]
StoreGroup = Callable[[Group, Ended], Awaitable[None]]


@dataclass(eq=False, slots=True)
class _Work:
    """One group on its way."""

    take: TakeGroup
    generate: GenerateGroup
    store: StoreGroup
    is_stopped: Callable[[], bool]
    time_limit_s: float | None
    started_s: float
    task: asyncio.Task[None] | None = None
    group: Group | None = None
    is_generating: bool = False
    ended: Ended = Ended.RETURNED
    is_given_up: bool = False

    def interrupt(self, ended: Ended) -> None:
        """End the generation; taking and storing are left to end, for they would lose the group."""
        self.ended = ended
        if self.is_generating and self.task is not None:
            self.task.cancel()

    def __str__(self) -> str:
        name = "a group that is being taken" if self.group is None else f"group {self.group[0].group_id}"
        stage = ", being generated" if self.is_generating else "" if self.group is None else ", being stored"
        return f"{name}{stage}, {loop_time() - self.started_s:.0f} s old"


class PendingGroups:
    """In-flight groups of one task; each is stored exactly once, by its own task.

    Invariant: a group that was taken is in here until it is stored.

    consumes: groups from `take`; waits for: each step of each group; woken by: the steps themselves;
    produces: stored groups, and a new `version` for everyone who waits.

    >>> pending = PendingGroups()
    >>> pending.start(sampler.sample_one, loop.generate_group, store)
    >>> await pending.wait(pending.version)           # one more has ended
    """

    def __init__(self) -> None:
        self._works: dict[_Work, None] = {}
        self._changes = Changes()
        self._error: BaseException | None = None
        self._given_up: set[asyncio.Task[None]] = set()
        """Held, because the event loop alone would let a task that waits be collected."""

    def __len__(self) -> int:
        return len(self._works)

    @property
    def groups(self) -> list[Group]:
        """Those that were taken and are not stored yet."""
        return [work.group for work in self._works if work.group is not None]

    @property
    def version(self) -> int:
        """Grows whenever a group has ended, and with every `wake`."""
        return self._changes.version

    async def wait(self, version: int) -> None:
        """Until `version` is not the version any more."""
        await self._changes.wait(version)

    def wake(self, *_: object) -> None:
        """Let everyone who waits look again."""
        self._changes.note()

    def raise_error(self) -> None:
        """Raise what escaped from taking or storing a group; once.

        Raises:
            ConnectionLost: the buffer is lost; whoever can bring it back has to know.
            ProductionError: with the error as its cause.
        """
        error, self._error = self._error, None
        if isinstance(error, Exception) and not isinstance(error, ProductionError | ConnectionLost):
            raise ProductionError(
                f"a group could not be taken or stored: {type(error).__name__}: {error}"
            ) from error
        if error is not None:
            raise error

    def start(
        self,
        take: TakeGroup,
        generate: GenerateGroup,
        store: StoreGroup,
        *,
        is_stopped: Callable[[], bool],
        time_limit_s: float | None = None,
    ) -> None:
        """Take, generate and store one group in the background.

        Once `is_stopped`, nothing is taken any more, and what was taken is not generated.
        """
        work = _Work(take, generate, store, is_stopped, time_limit_s, loop_time())
        self._works[work] = None
        work.task = asyncio.create_task(self._run(work))

    async def cancel(self) -> None:
        """Cut every generation short and wait until all groups are stored.

        Of generations that swallow every cancellation the prompts are stored, and `raise_error` names them.

        Raises:
            ProductionError: groups could not be taken or stored in time; it names them.
        """
        started_s = loop_time()
        while self._works:
            for work in list(self._works):
                work.interrupt(Ended.INTERRUPTED)
            if await self._all_end(CANCEL_REPEAT_S):
                return
            names = "; ".join(map(str, self._works))
            waited_s = loop_time() - started_s
            logger.warning("not ended %.0f s after it was cancelled: %s", waited_s, names)
            deaf = [work for work in self._works if work.is_generating]
            if deaf and waited_s >= GIVE_UP_AFTER_S:
                self._give_up(deaf)
            elif waited_s >= STORE_LIMIT_S:
                raise ProductionError(f"not ended {waited_s:.0f} s after it was cancelled: {names}")

    async def _all_end(self, limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._works:
                    await self._changes.wait(self._changes.version)
        return not self._works

    def _give_up(self, deaf: Sequence[_Work]) -> None:
        """Store the prompts of these groups, and leave their tasks to themselves."""
        error = ProductionError(
            f"agents or judges swallow every cancellation and were given up after {GIVE_UP_AFTER_S:g} s; "
            f"a coroutine must let asyncio.CancelledError pass: {'; '.join(map(str, deaf))}"
        )
        logger.error("%s", error)
        self._error = self._error or error
        for work in deaf:
            assert work.group is not None
            assert work.task is not None
            work.is_given_up = True
            self._given_up.add(work.task)
            work.task.add_done_callback(self._given_up.discard)
            # A copy: the task may write into the original whenever it likes.
            group = list(copy_group(StoredGroup(work.group)))
            heir = replace(work, group=group, is_generating=False, ended=Ended.INTERRUPTED, is_given_up=False)
            del self._works[work]
            self._works[heir] = None
            heir.task = asyncio.create_task(self._run(heir))

    async def _run(self, work: _Work) -> None:
        try:
            group = await self._make(work) if work.group is None else work.group
            if group is not None and not work.is_given_up:
                await work.store(group, work.ended)
        # Not only errors: whatever ends this task early has to be seen by who waits for the group.
        except BaseException as error:
            # A lost buffer is told before what it has led to.
            if not work.is_given_up and (self._error is None or isinstance(error, ConnectionLost)):
                self._error = error
            if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._works.pop(work, None)
            self._changes.note()

    async def _make(self, work: _Work) -> Group | None:
        """The group, generated if nothing stopped it before; None if it was not even taken."""
        if work.is_stopped() or work.ended is not Ended.RETURNED:
            return None
        group = work.group = await work.take()
        if work.is_stopped() or work.ended is not Ended.RETURNED:
            work.ended = Ended.NOT_STARTED
            return group
        return await self._generate(work, group)

    async def _generate(self, work: _Work, group: Group) -> Group:
        loop = asyncio.get_running_loop()
        limit_s = work.time_limit_s
        timer = None if limit_s is None else loop.call_later(limit_s, work.interrupt, Ended.OUT_OF_TIME)
        work.is_generating = True
        try:
            return await work.generate(group)
        except asyncio.CancelledError:
            task = work.task
            assert task is not None
            if work.ended is Ended.RETURNED and not task.cancelling():
                # User code let a cancellation of its own escape.
                for state in group:
                    state.status = Status.FAILED
                    state.error_msg = "the generation was cancelled from within"
                return group
            if work.ended is Ended.RETURNED:
                work.ended = Ended.INTERRUPTED
            while task.cancelling():
                task.uncancel()
            return group
        finally:
            work.is_generating = False
            if timer is not None:
                timer.cancel()
