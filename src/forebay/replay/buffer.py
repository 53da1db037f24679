"""The replay buffer: finished groups wait here, between the producer and the trainer.

::

    producer --put--> label tokens, age, expire --> store  <--refresh_staleness (expires what got too old)
                                                      |
    sampler  <--get (ABORTED, EXPIRED: removed)-------+
    trainer  <--take_batch(train_step=i)--------------+--> ARCHIVED --commit(S), i <= S--> gone
                                                      ^             |  '--use_again: trained once more
                                                      '---- restore(S), i > S

It composes a store (rows and payloads), a policy (which are next) and the snapshot format. It does not
generate, judge or train, and it starts no task: everything happens inside the calls.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

from forebay.aio.changed import Changes
from forebay.aio.gate import SharedLock
from forebay.aio.tasks import run_to_the_end
from forebay.replay import arrival as arriving
from forebay.replay import saving
from forebay.replay.arrival import PutKeywords
from forebay.replay.format.packed import GroupCodec, PlainCodec, hand_out
from forebay.replay.policies import ReplayPolicy
from forebay.replay.query import QueryLike, StorageIndices, check_sizes, check_whole
from forebay.replay.reuse import Reuse, superfluous
from forebay.replay.stores.archiving import PARKED_STEP, ArchivingStorage, taking
from forebay.replay.stores.contract import StorageBackend, StorageItem, TagValue
from forebay.replay.stores.errors import StepPassed
from forebay.replay.stores.indexed import IndexedStorage
from forebay.replay.stores.slices import check_priorities, forget, map_in_turns, revive, reweigh
from forebay.types import RolloutState, Status

if TYPE_CHECKING:
    from pandas import DataFrame

Group = list[RolloutState]
Presented = TypeVar("Presented")
Present = Callable[..., Presented]
"""As `hand_out`: what is made of a group that leaves the store."""


class ReplayBuffer:
    """Stores groups of rollouts by task and status and hands them out in the order of its policy.

    All methods are atomic with respect to each other. Group ids and order never rewind. With a `limit`, each
    `put` that exceeds it evicts the live groups that arrived first, whatever their task and status; they are
    counted in `num_evicted` and passed to `on_evict`. Without a `storage_backend` the groups are in an
    `IndexedStorage`, in memory.

    Waiting. `wait_for_change` consumes nothing, waits for the next change of the content, is woken by every
    method that changes it, and returns the new version number. A consumer needs no polling, and misses no
    change: it reads `version`, then looks whether the buffer is ready, then waits.

    Objects. A store in memory holds the `RolloutState` objects that were put; do not change them afterwards.
    `get` hands them out again; groups that `take_batch` hands out for a train step, or any take during a
    `save`, are copies, because the originals stay as they were (arrays are shared: replace them, do not write
    into them).

    Many groups. A full collection of Python's garbage stops everything for a quarter of a second for 100,000
    rollouts in memory. A process that keeps that many calls ``gc.collect()`` and ``gc.freeze()`` once its
    buffer is filled or resumed; frozen objects are still freed with their last reference.

    >>> async def example():
    ...     buffer = ReplayBuffer(ReplayPolicy())
    ...     state = RolloutState([], response_ids=[5, 6], status=Status.COMPLETED)
    ...     await buffer.put([state], "math", model_step=3, current_train_step=4, stale_threshold=2)
    ...     groups, counts = await buffer.take_batch({"math": 1}, train_step=4)
    ...     await buffer.commit(4)
    ...     return counts
    >>> asyncio.run(example())
    {'math': 1}
    """

    def __init__(
        self,
        policy: ReplayPolicy,
        storage_backend: StorageBackend | None = None,
        *,
        limit: int | None = None,
        reuse: Reuse | None = None,
        on_evict: Callable[[StorageItem], None] | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 group, or None for no limit, got {limit}")
        self.policy = policy
        self.storage: StorageBackend = IndexedStorage() if storage_backend is None else storage_backend
        self.limit = limit
        self.reuse = reuse
        self.on_evict = on_evict
        if isinstance(self.storage.codec, PlainCodec | None):
            self.storage.use_codec(GroupCodec())
        # Puts do not exclude each other: a store on disk writes those that wait at the same time together.
        self._lock = SharedLock()
        self._changes = Changes()
        self._save_lock = asyncio.Lock()
        self._num_saving = 0

    def __len__(self) -> int:
        return len(self.storage)

    @property
    def num_evicted(self) -> dict[str, int]:
        """Groups evicted so far, by task; the store counts them."""
        return self.storage.num_evicted

    @property
    def version(self) -> int:
        """Grows with every change of the content."""
        return self._changes.version

    async def wait_for_change(self, version: int) -> int:
        """Return the present version as soon as it is not `version` any more.

        Raises:
            BufferClosed: the buffer was closed before that.
        """
        return await self._changes.wait(version)

    async def put(self, items: Sequence[RolloutState], task_name: str, **arrival: Unpack[PutKeywords]) -> None:
        """Store one group under its group status; an empty group is ignored.

        Response tokens without a model step are labeled with `model_step`. Staleness is refreshed at
        `current_train_step`; without it, at the train step last seen for the task; without that, it is as
        given. A COMPLETED or ABORTED group at or over `stale_threshold` is stored EXPIRED, its responses
        wiped.

        Raises:
            ValueError: the threshold is not positive, a tag or the priority is not one, or token fields of a
                rollout have different lengths; nothing is stored.
        """
        await self.put_groups([items], task_name, **arrival)

    async def put_groups(
        self, groups: Iterable[Sequence[RolloutState]], task_name: str, **arrival: Unpack[PutKeywords]
    ) -> None:
        """Store many groups, each as `put` does and in this order: all of them or none.

        The keywords are those of `put`, for every group alike. A store on disk writes them in one commit.

        Raises:
            ValueError: as for `put`; nothing is stored.
        """
        _, evicted = await self._store(groups, task_name, arriving.Arrival.of(task_name, arrival))
        if self.on_evict is not None:
            for item in evicted:
                self.on_evict(item)

    async def _store(
        self,
        groups: Iterable[Sequence[RolloutState]],
        task_name: str,
        how: arriving.Arrival,
        receipt: bytes | None = None,
    ) -> tuple[list[StorageItem], list[StorageItem]]:
        """Put the groups; their rows, and those evicted for them."""
        given = (group for group in groups if group is None or len(group))
        label = partial(arriving.label_group, model_step=how.model_step)
        if not (listed := await map_in_turns(label, given, arriving.LABEL_AT_ONCE)):
            return [], []
        async with self._lock.shared():
            step, aged_at = await self._see_step(task_name, how.current_train_step)
            while True:
                row_of = partial(arriving.arrived_row, task_name=task_name, seen_step=step, how=how)
                rows = await map_in_turns(row_of, listed, STORE_AT_ONCE)
                if self.reuse is not None:
                    self.reuse.weigh(rows)
                try:
                    await self.policy.put_many(rows, self.storage, receipt=receipt, **aged_at)
                    evicted = [] if self.limit is None else await self.storage.evict(self.limit)
                    return rows, list(map(arriving.named_row, evicted))
                except StepPassed as passed:
                    # Another process saw a later step of the task: the groups are older than was thought.
                    step, aged_at = passed.train_step, {"aged_at": passed.train_step}
                finally:
                    # Also if cancelled: the groups may be stored.
                    self._changes.note()

    async def get(
        self, batch_size: int, task_name: str, group_status: Status, *, tags: Mapping[str, TagValue] | None = None
    ) -> list[Group]:
        """Remove and return up to `batch_size` groups in policy order."""
        size = check_sizes({task_name: batch_size})[task_name]
        # Samplers mostly find nothing. To look costs far less than to take, and puts need not wait for it.
        if not await self.count(task_name, group_status, tags=tags):
            return []
        async with self._lock.alone(), self._taking(None) as view:
            groups: list[Group] = await self._take(size, task_name, group_status, view, tags=tags)
            if groups:
                self._changes.note()
        return groups

    async def count(self, task_name: str, group_status: Status, *, tags: Mapping[str, TagValue] | None = None) -> int:
        """The number of groups of that task and status."""
        query = StorageIndices(task_name, group_status, tags).get_key()
        async with self._looking():
            return await self.policy.count(query, self.storage)

    async def count_statuses(
        self, task_names: Iterable[str], statuses: Iterable[Status]
    ) -> dict[str, dict[Status, int]]:
        """The number of groups for every task and status asked for."""
        tasks, statuses = tuple(task_names), tuple(statuses)
        cells = [(task, status) for task in tasks for status in statuses]
        queries = [StorageIndices(task, status).get_key() for task, status in cells]
        async with self._looking():
            if type(self.policy).count is ReplayPolicy.count:  # Else each is the policy's to answer.
                numbers = await self.storage.count_many(queries)
            else:
                numbers = [await self.policy.count(query, self.storage) for query in queries]
        counts: dict[str, dict[Status, int]] = {task: {} for task in tasks}
        for (task, status), number in zip(cells, numbers, strict=True):
            counts[task][status] = number
        return counts

    async def is_ready(self, task_batch_sizes: Mapping[str, int], group_status: Status = Status.COMPLETED) -> bool:
        """Whether every task with a size over 0 has that many groups."""
        counts = await self.count_statuses(task_batch_sizes, [group_status])
        return all(counts[task][group_status] >= size for task, size in task_batch_sizes.items() if size > 0)

    async def take_batch(
        self,
        task_batch_sizes: Mapping[str, int],
        *,
        group_status: Status = Status.COMPLETED,
        train_step: int | None = None,
    ) -> tuple[dict[str, list[Group]], dict[str, int]]:
        """Take up to so many groups of each task: ``(groups by task, numbers taken by task)``.

        Without `train_step` they are deleted. With it they become ARCHIVED with that step, until `commit`
        prunes them or `restore` brings them back.
        """
        train_step, sizes = check_whole("train_step", train_step), check_sizes(task_batch_sizes)
        async with self._lock.alone(), self._taking(train_step) as view:
            still_held = train_step is not None  # The store keeps what is ARCHIVED.
            groups: dict[str, list[Group]] = {
                task: await self._take(size, task, group_status, view, still_held=still_held)
                for task, size in sizes.items()
            }
            if any(groups.values()):
                self._changes.note()
        return groups, {task: len(taken) for task, taken in groups.items()}

    async def commit(self, train_step: int) -> None:
        """A checkpoint at `train_step` is safe: forget what was consumed up to it.

        With `reuse`, what a later step may use again stays.
        """
        train_step = check_whole("train_step", train_step)
        async with self._lock.alone():
            with self._changes.noted_if_cut_short():
                num_forgotten = await forget(self.storage, superfluous(self.reuse, train_step))
            if num_forgotten:
                self._changes.note()

    async def count_usable(self, task_names: Iterable[str], train_step: int) -> dict[str, int]:
        """The past groups of each task that `use_again` may hand out for `train_step`; {} without `reuse`."""
        reuse = self.reuse
        queries = {} if reuse is None else {task: reuse.usable(task, train_step) for task in task_names}
        async with self._looking():
            numbers = await self.storage.count_many(list(queries.values()))
        return dict(zip(queries, numbers, strict=True))

    async def use_again(self, task_sizes: Mapping[str, int], train_step: int) -> dict[str, list[Group]]:
        """Copies of up to so many groups of each task that earlier steps consumed, to be trained on again.

        The groups stay ARCHIVED. By the rules of `reuse` none is used by more steps than it says, by one step
        twice, or by one for which it is too stale; {} without `reuse`.
        """
        async with self._lock.alone():
            return {} if self.reuse is None else await self.reuse.use(self.storage, task_sizes, train_step)

    async def restore(self, train_step: int) -> None:
        """Go back to the checkpoint at `train_step`: what was consumed after it is live again.

        Uses of past groups after it are undone.

        The groups have the status, the place in the order and the content that they were taken with. They
        may exceed `limit`; nothing is evicted before the next `put`. The next train step that is named for a
        task stands, also an older one; nothing else makes the step of a task fall.
        """
        train_step = check_whole("train_step", train_step)
        query = {"status": Status.ARCHIVED, "train_step": {"$gt": train_step, "$lt": PARKED_STEP}}
        async with self._lock.alone():
            with self._changes.noted_if_cut_short():
                # First: what is live again was not used.
                if self.reuse is not None:
                    await self.reuse.undo(self.storage, train_step)
                num_revived = await revive(self.storage, query)
                await self.storage.let_train_steps_fall()
            if num_revived:
                self._changes.note()

    async def refresh_staleness(
        self,
        task_stale_thresholds: Mapping[str, int],
        current_train_step: int,
        statuses: Iterable[Status] | None = None,
    ) -> dict[str, int]:
        """Age the groups of these tasks to `current_train_step`; return how many expired, by task.

        COMPLETED and ABORTED groups (of them, those in `statuses`) at or over their task's threshold become
        EXPIRED, their responses wiped. The cost is that of the groups that expire.

        Raises:
            ValueError: a threshold is not positive; nothing is changed.
        """
        for task, threshold in task_stale_thresholds.items():
            arriving.check_threshold(task, threshold)
        current_train_step = check_whole("current_train_step", current_train_step)
        asked = arriving.CAN_EXPIRE if statuses is None else tuple(statuses)
        expiring = [status for status in arriving.CAN_EXPIRE if status in asked]
        async with self._lock.alone():
            expired = {}
            for task, threshold in task_stale_thresholds.items():
                rule = task, threshold, current_train_step, expiring
                expired[task] = await arriving.expire_old(
                    self.storage, *rule, self._changes, lambda: self._num_saving > 0
                )
            return expired

    async def update_priorities(
        self, priorities: Mapping[Any, float], *, by: str = "uid", task_name: str | None = None
    ) -> int:
        """Give live groups (of that task) other priorities; return to how many.

        `priorities` maps values of `by`, a field or ``tags.<name>``, to priorities: ``{17: 2.0}`` is the
        group of that uid, ``{"hard": 3.0}`` by ``tags.kind`` every group with that tag. A value that no live
        group has is ignored: the group may have been taken.

        Raises:
            ValueError: there is no such field, or a priority is not one; nothing is changed.
        """
        wanted = await check_priorities(priorities)
        of_task = {} if task_name is None else {"task_name": task_name}
        async with self._lock.alone():
            return await reweigh(self.storage, wanted, by, of_task)

    async def to_pandas(self, query: QueryLike | None = None, *, payloads: bool = False) -> "DataFrame":
        """The rows that match (all live ones), one line each; with `payloads` one line per rollout.

        A copy, with the ages of now: fields and tags of the rows, or the columns of
        `forebay.replay.format.tables.JOINED_SCHEMA`.

        Raises:
            ValueError: the query is not one, or a rollout holds a value that no column or JSON text holds.
        """
        from forebay.replay.format.tables import to_frame

        async with self._lock.alone():
            rows = await self.storage.get(query or {}, rows_only=not payloads)
            for row in rows if payloads else ():
                row.item = hand_out(row.item, await self.storage.get_train_step(row.task_name), copy=True)
        return await asyncio.to_thread(to_frame, rows, payloads=payloads)

    async def save(self, path: str | Path) -> None:
        """Write everything to the directory `path`: content, order, id counters, the policy's state.

        `path` may be missing, empty, or hold an earlier snapshot, which is replaced in one instant. The
        content is that of the moment of the call; other callers do not wait for the writing.

        Raises:
            ValueError: `path` holds something else, or a rollout holds a value that cannot be saved.
        """
        async with self.moment() as write:
            await write(Path(path))

    @asynccontextmanager
    async def moment(self, *, train_step: int | None = None) -> AsyncIterator[Callable[[Path], Awaitable[None]]]:
        """A block in which the content of its beginning can be written.

        With a `train_step` without what a `commit` of that step would forget.
        """
        opened = ExitStack()
        async with self._save_lock, AsyncExitStack() as stack:
            stack.push_async_callback(run_to_the_end, opened.close)
            async with self._lock.alone():
                over = None if train_step is None else superfluous(self.reuse, train_step)
                content = await run_to_the_end(saving.content_of, self.storage, self.policy, opened, over)
                self._num_saving += 1
            try:
                # A store on disk is read while this goes on, as it was under the lock, a few groups at once.
                yield lambda path: run_to_the_end(saving.write, path, content)
            finally:
                self._num_saving -= 1

    async def resume(self, path: str | Path) -> None:
        """Take over the snapshot at `path`; ARCHIVED groups held now are replaced by those of the snapshot.

        Raises:
            RuntimeError: the buffer holds live groups.
            FileNotFoundError, ValueError: there is no snapshot, or it is damaged, or of another policy.
        The buffer is then as it was.
        """
        await asyncio.to_thread(self._require_empty)  # Before a long read; once more below, under the lock.
        snapshot = await asyncio.to_thread(saving.read, Path(path), self.policy)
        async with self._lock.alone():
            await asyncio.to_thread(self._require_empty)
            policy_state = self.policy.state_dict()
            self.policy.load_state_dict(snapshot.policy_state)
            try:
                # In a thread, because a store indexes what it loads; the lock keeps every other call out.
                await run_to_the_end(saving.load, self.storage, snapshot)
            except Exception:
                self.policy.load_state_dict(policy_state)
                raise
            self._changes.note()

    async def close(self) -> None:
        """End waits with `BufferClosed`; after the calls under way, give back what the store holds."""
        self._changes.close()
        async with self._lock.alone():
            await run_to_the_end(self.storage.close)

    @asynccontextmanager
    async def _taking(self, train_step: int | None) -> AsyncIterator[ArchivingStorage]:
        """`taking`, and a return is noted: a caller may have seen that groups were gone (``len``)."""
        with self._changes.noted_if_cut_short():
            async with taking(self.storage, train_step) as view:
                yield view

    def _looking(self) -> AbstractAsyncContextManager[None]:
        """Around one question to the store, which need not wait for puts and which no put waits for."""
        # With a limit a put is two calls; a policy of its own may ask several questions.
        is_one = self.limit is None and type(self.policy).count is ReplayPolicy.count
        return self._lock.shared() if is_one else self._lock.alone()

    def _require_empty(self) -> None:
        if len(self):
            raise RuntimeError(f"resume needs an empty buffer; this one holds {len(self)} groups")

    async def _see_step(self, task_name: str, current_train_step: int | None) -> tuple[int | None, dict[str, int]]:
        """The latest train step of the task, this one if it is later; and keywords for `put_many`.

        A store that other processes share takes the step, and judges it, in the transaction of the put.
        """
        puts_itself = type(self.policy).put is not ReplayPolicy.put
        if current_train_step is not None and self.storage.is_shared and not puts_itself:
            return current_train_step, {"aged_at": current_train_step}
        if current_train_step is not None:
            await self.storage.set_train_step(task_name, current_train_step)
        return await self.storage.get_train_step(task_name), {}

    async def _take(
        self,
        count: int,
        task_name: str,
        group_status: Status,
        view: ArchivingStorage,
        *,
        tags: Mapping[str, TagValue] | None = None,
        still_held: bool = False,
        present: "Present[Presented] | None" = None,
    ) -> "list[Presented]":
        if count <= 0:
            return []
        query = StorageIndices(task_name, group_status, tags).get_key()
        groups = await self.policy.get(count, query, cast(StorageBackend, view))
        seen_step = await self.storage.get_train_step(task_name)
        # Those of a database were made for this caller.
        copy = (still_held or self._num_saving > 0) and not self.storage.is_shared
        show: Callable[..., Any] = present or hand_out
        # The lock is held, but other work than the buffer's may go on.
        return await map_in_turns(lambda group: show(group, seen_step, copy=copy), groups, COPY_AT_ONCE)


STORE_AT_ONCE = 256
"""Groups of one call that are aged between two turns of the event loop; it takes about 10 ms."""
COPY_AT_ONCE = 128
"""Groups handed out between two turns of the event loop: copying them takes about 15 ms."""
