"""The groups that are being generated right now.

::

    start() -> one task: take a group -> generate it -> store it -> gone from here, waiters woken
                             |               |             |
    cancel():          not generated     cut short     left to end

Every group's own task stores it, so a caller that is cancelled loses nothing, nobody can store a group twice,
and a finished group costs the same however many others are in flight.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from forebay.replay.changes import Changes
from forebay.types import RolloutState, Status

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
    task: asyncio.Task[None] | None = None
    group: Group | None = None
    is_generating: bool = False
    ended: Ended = Ended.RETURNED

    def interrupt(self, ended: Ended) -> None:
        """End the generation; taking and storing are left to end, for they would lose the group."""
        self.ended = ended
        if self.is_generating and self.task is not None:
            self.task.cancel()


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
        """Raise what escaped from taking or storing a group; once."""
        error, self._error = self._error, None
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
        work = _Work(take, generate, store, is_stopped, time_limit_s)
        self._works[work] = None
        work.task = asyncio.create_task(self._run(work))

    async def cancel(self) -> None:
        """Cut every generation short and wait until all groups are stored."""
        for work in list(self._works):
            work.interrupt(Ended.INTERRUPTED)
        while self._works:
            await self._changes.wait(self._changes.version)

    async def _run(self, work: _Work) -> None:
        try:
            if work.is_stopped() or work.ended is not Ended.RETURNED:
                return
            group = work.group = await work.take()
            if work.is_stopped() or work.ended is not Ended.RETURNED:
                work.ended = Ended.NOT_STARTED
            else:
                group = await self._generate(work, group)
            await work.store(group, work.ended)
        # Not only errors: whatever ends this task early has to be seen by who waits for the group.
        except BaseException as error:
            self._error = self._error or error
            if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
                raise
        finally:
            del self._works[work]
            self._changes.note()

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
