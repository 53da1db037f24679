"""The groups that are being generated right now, and the number of them that may fail.

::

    start() -> one task: take a group -> generate it -> store it -> gone from here, waiters woken
                             |               |             |
    cancel():          not generated     cut short     left to end
                                             |
                             again and again, then given up: its prompt is stored, its task is left alone

Every group's own task stores it, so a caller that is cancelled loses nothing, no group is stored twice, and a
finished group costs the same however many others are in flight. When a group is given up, a new task stores a
copy of it; the old task may go on changing the original, which nothing refers to any more.
"""

import asyncio
import contextlib
import enum
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from forebay.aio.changed import Changes
from forebay.aio.tasks import others_first
from forebay.aio.time_limits import timeout
from forebay.produce.strategies.context import Group, ProduceContext
from forebay.replay import ConnectionLost
from forebay.replay.groups import StoredGroup, copy_group
from forebay.types import FAILED_AT_KEY, Status
from forebay.watching.activity import loop_time

logger = logging.getLogger(__name__)

CANCEL_REPEAT_S = 5.0
"""Code that swallows a cancellation often does so once, to clean up; then the next one ends it."""
GIVE_UP_AFTER_S = 30.0
"""A generation that has swallowed cancellations for this long will go on doing so."""
STORE_LIMIT_S = 600.0
"""Taking and storing are waited for longer: a buffer elsewhere may be starting again."""


class PendingGroups:
    """In-flight groups of one task; each is stored exactly once, by its own task.

    Invariant: a group that was taken is in here until it is stored.

    consumes: groups from `take`; waits for: each step of each group; woken by: the steps themselves;
    produces: stored groups, and `changes`.

    >>> from forebay.types import RolloutState
    >>> async def example():
    ...     async def take():
    ...         return [RolloutState([], group_id="math/0")]
    ...     async def generate(group):
    ...         return group
    ...     async def store(group, ended):
    ...         print(group[0].group_id, ended)
    ...     pending = PendingGroups()
    ...     pending.start(Work(take, generate, store, is_stopped=lambda: False))
    ...     await pending.changes.wait(pending.changes.version)           # until one more has ended
    >>> asyncio.run(example())
    math/0 Ended.RETURNED
    """

    def __init__(self) -> None:
        self.changes = Changes()
        """Noted whenever a group has ended."""
        self._works: dict[Work, None] = {}
        self._error: BaseException | None = None
        self._given_up: set[asyncio.Task[None]] = set()
        """Held, because the event loop alone would let a task that waits be collected."""

    def __len__(self) -> int:
        return len(self._works)

    @property
    def groups(self) -> list[Group]:
        """The groups that were taken and are not stored yet."""
        return [work.group for work in self._works if work.group is not None]

    def raise_error(self) -> None:
        """Raise what escaped from taking or storing a group; once.

        Raises:
            ConnectionLost: the buffer is lost; the run, which may bring it back, has to know.
            ProductionError: with the error as its cause.
        """
        error, self._error = self._error, None
        if isinstance(error, Exception) and not isinstance(error, ProductionError | ConnectionLost):
            raise ProductionError(f"a group could not be taken or stored: {type(error).__name__}: {error}") from error
        if error is not None:
            raise error

    def start(self, work: "Work") -> None:
        """Take, generate and store one group in the background."""
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
                work.interrupt()
            with contextlib.suppress(TimeoutError):
                async with timeout(CANCEL_REPEAT_S):
                    while self._works:
                        await self.changes.wait(self.changes.version)
            if not self._works:
                return
            names = "; ".join(map(str, self._works))
            waited_s = loop_time() - started_s
            logger.warning("not ended %.0f s after it was cancelled: %s", waited_s, names)
            deaf = [work for work in self._works if work.is_generating]
            if deaf and waited_s >= GIVE_UP_AFTER_S:
                self._give_up(deaf)
            elif waited_s >= STORE_LIMIT_S:
                raise ProductionError(f"not ended {waited_s:.0f} s after it was cancelled: {names}")

    def _give_up(self, deaf: "Sequence[Work]") -> None:
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
            # Its place is the copy's from now on: a group is stored once.
            del self._works[work]
            # A copy: the task may write into the original at any time.
            group = list(copy_group(StoredGroup(work.group)))
            self.start(replace(work, group=group, is_generating=False, ended=Ended.INTERRUPTED, is_given_up=False))

    async def _run(self, work: "Work") -> None:
        try:
            if work.group is None and not work.must_stop():
                work.group = await work.take()
                # A trainer that has just got its batch begins with it before this takes the interpreter.
                await others_first()
                if work.must_stop():
                    work.ended = Ended.NOT_STARTED
                else:
                    work.group = await self._generate(work, work.group)
            if work.group is not None and not work.is_given_up:
                await work.store(work.group, work.ended)
        # Not only errors: a waiter has to see anything that ends this task early.
        except BaseException as error:
            # A lost buffer is reported before the failures that it causes.
            if not work.is_given_up and (self._error is None or isinstance(error, ConnectionLost)):
                self._error = error
            # This task is not awaited: other errors reach a waiter by `raise_error`.
            if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._works.pop(work, None)
            self.changes.note()

    async def _generate(self, work: "Work", group: Group) -> Group:
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
            # The cancellation was for the generation alone: this task still has to store the group.
            while task.cancelling():
                task.uncancel()
            return group
        finally:
            work.is_generating = False


class Ended(enum.Enum):
    """How the generation of a group ended."""

    RETURNED = enum.auto()
    """By itself: the statuses of its rollouts say how."""
    INTERRUPTED = enum.auto()
    """Cancelled half-way; its rollouts are in no defined state."""
    NOT_STARTED = enum.auto()
    """Taken, but not generated: production stopped first."""


@dataclass(eq=False, slots=True)
class Work:
    """One group on its way: how it is taken, generated and stored, and how far it is."""

    take: Callable[[], Awaitable[Group]]
    generate: Callable[[Group], Awaitable[Group]]
    store: Callable[[Group, Ended], Awaitable[None]]
    is_stopped: Callable[[], bool]
    """Once true, nothing is taken any more, and a group that was taken is not generated."""
    started_s: float = field(default_factory=loop_time)
    task: asyncio.Task[None] | None = None
    group: Group | None = None
    is_generating: bool = False
    ended: Ended = Ended.RETURNED
    is_given_up: bool = False

    def must_stop(self) -> bool:
        """Whether no further step of its way may begin."""
        return self.is_stopped() or self.ended is not Ended.RETURNED

    def interrupt(self) -> None:
        """End the generation; taking and storing are left to end, for they would lose the group."""
        self.ended = Ended.INTERRUPTED
        if self.is_generating and self.task is not None:
            self.task.cancel()

    def __str__(self) -> str:
        name = "a group that is being taken" if self.group is None else f"group {self.group[0].group_id}"
        stage = ", being generated" if self.is_generating else "" if self.group is None else ", being stored"
        return f"{name}{stage}, {loop_time() - self.started_s:.0f} s old"


MAX_FAILED_PER_GROUP = 2
"""Failed groups allowed per group asked for, before production gives up: more is a fault, not bad luck. A run
file may set the number itself."""
MIN_FAILED = 8
"""Small batches may have a few failures in a row before that says anything."""
MAX_STARTED_PER_GROUP = 64
"""Groups started per group asked for. With fewer than 1 in 64 accepted, the task is far too hard, far too
easy, or the validity function is wrong; waiting longer would look like a hang."""


class ProductionError(RuntimeError):
    """Production cannot go on; the message states the counters and the last reason."""


class ProductionBudget:
    """Counts how groups ended while a batch was produced, and says when going on makes no sense."""

    def __init__(self) -> None:
        self._outcomes: Counter[Status] = Counter()
        self._first_error: str | None = None

    def count(self, status: Status, group: Group) -> None:
        """Enter that a group ended with `status`."""
        self._outcomes[status] += 1
        # The first failure is kept: the later ones may be its consequences.
        if status is Status.FAILED and self._first_error is None:
            failed = next((state for state in group if state.error_msg), None)
            if failed is not None:
                place = failed.extra_fields.get(FAILED_AT_KEY)
                self._first_error = f"{failed.error_msg}{f' ({place})' if place else ''}"

    def reset(self) -> None:
        """The batch is there; the next one has a budget of its own."""
        self._outcomes.clear()
        self._first_error = None

    def check(self, ctx: ProduceContext) -> None:
        """Raise if going on makes no sense; a run's rules may say how many groups may fail.

        Raises:
            ProductionError: too many groups failed or were aborted, or almost none was accepted.
        """
        size, outcomes, rules = max(1, ctx.task_batch_size), self._outcomes, ctx.rules
        # A call may produce far more than its batch; that allows for more failures.
        yardstick = max(size, outcomes[Status.COMPLETED])
        allowed = max(MIN_FAILED, MAX_FAILED_PER_GROUP * yardstick)
        limit = None if rules is None else rules.max_failed_groups
        if outcomes[Status.FAILED] >= (allowed if limit is None else limit + 1):
            problem = f"; the first failure: {self._first_error or 'no reason given'}"
            if rules is not None:
                problem += (
                    f". Either mend what fails, or let more groups be replaced: set "
                    f"produce.max_failed_groups, now {allowed - 1 if limit is None else limit}. A group goes "
                    f"on without its failed rollouts if {rules.min_members} remain "
                    f"(produce.min_members = {rules.min_members})"
                )
        elif outcomes[Status.ABORTED] >= allowed and not outcomes[Status.COMPLETED]:
            problem = "; the engine aborts everything: is it paused or closed?"
        elif outcomes.total() >= MAX_STARTED_PER_GROUP * yardstick:
            problem = (
                "; if they were filtered, nearly all prompts are too hard or too easy for the model: use "
                "other prompts, more rollouts per prompt, or no filter"
            )
        else:
            return
        counts = ", ".join(f"{count} {status.value}" for status, count in outcomes.items() if count)
        raise ProductionError(
            f"task {ctx.task_name!r}, train step {ctx.train_step}: {counts} groups, {size} are needed{problem}"
        )
