"""One buffer made of several: for more producers than one process can serve.

::

    put(group) ----- hash of its group id -----> one shard         (ReplayBuffer or RemoteReplayBuffer)
    take_batch(n) -> first n rows of every shard -> the first n of all -> take so many from each -> merge
    counts --------> sums          commit, restore, refresh_staleness, save --------------------> every shard

A group lies whole in one shard, always the same for its id. It holds no groups itself, and any number of
processes may have one of these over the same shards (in the same order).

Order. With one of these, batches have exactly the order of a single buffer: it numbers arrivals by the clock
(microseconds, never backwards), tells every shard the train step before the first put of it, and merges by
the rows. With several, arrivals in different shards are as exact as the clocks of their machines; a group
that another one takes or puts between the look at the rows and the taking is missed or comes early, as it is
the first one of its shard; and where puts with different train steps have left the shards with different
ones, a take tells all of them the newest first. No group is taken twice.

What is atomic. Whatever concerns one group, which is in one shard. `put_groups` is all or none for each
shard. `commit`, `restore` and `refresh_staleness` do the same when called again.

A shard that is gone. Every error says which shard. A put of a group that belongs there fails (it is not sent
elsewhere, or it could be there twice); groups of other shards can be put as before, unless they bring a train
step that is new, of which every shard must hear. Counts and takes need all shards and fail. A take that
fails, or is cancelled, half way gives back what it has, each group with all that its row had
(`shard_takes`); a shard that cannot take its groups back is named in a note to the error.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from forebay.cancelling import finish, outlast
from forebay.replay.arrivals import check_threshold, label_groups
from forebay.replay.policies import ReplayPolicy
from forebay.replay.query import StorageIndices
from forebay.replay.resharding import restore_shards, save_shards
from forebay.replay.server_messages import ConnectionLost
from forebay.replay.shard_rows import Rows, Shard, ShardedRows, merge_rows, split_uids
from forebay.replay.shard_takes import ShardTake, merge_taken, release_all, take_from
from forebay.replay.storage import StorageItem, TagValue, check_priority, check_tags, parse_order
from forebay.types import RolloutState, Status

Result = TypeVar("Result")
Group = list[RolloutState]
TrainSteps = Mapping[str, int | None]
"""By task."""

NO_THRESHOLD = 2**31 - 1
"""Nothing is so stale: a refresh with it only says what the train step is."""


class ShardedReplayBuffer:
    """Several buffers with the methods of one; the module docstring says what it promises.

    The shards have the policy `policy`, whose `order` must say all of it. Limits are theirs: each evicts what
    is oldest there.

    >>> shards = [await RemoteReplayBuffer.connect(address) for address in addresses]
    >>> buffer = ShardedReplayBuffer(shards, StalenessReplayPolicy())
    >>> await buffer.put(group, "math", model_step=3, current_train_step=4)
    >>> groups, counts = await buffer.take_batch({"math": 64}, train_step=4)
    """

    def __init__(self, shards: Sequence[Shard], policy: ReplayPolicy) -> None:
        if not shards:
            raise ValueError("a sharded buffer needs at least one shard")
        if policy.order is None:
            raise ValueError(
                f"{type(policy).__name__} has no order by which groups of several shards can be merged; "
                f"use FIFOReplayPolicy or StalenessReplayPolicy"
            )
        for number, shard in enumerate(shards):
            own = getattr(shard, "policy", policy)
            if own.order != policy.order:
                raise ValueError(f"shard {number} has {type(own).__name__}, and not {type(policy).__name__}")
        self.shards = tuple(shards)
        self.policy = policy
        self.storage = ShardedRows(shards)
        """The rows of all shards, to be looked at."""
        self._steps: dict[str, int] = {}
        self._last_arrival = 0
        self._step_turn = asyncio.Lock()
        self._taking = asyncio.Lock()

    async def __aenter__(self) -> ShardedReplayBuffer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    @property
    def version(self) -> int:
        """Changes with every change of the content."""
        return sum(shard.version for shard in self.shards)

    @property
    def num_evicted(self) -> dict[str, int]:
        """Groups evicted so far, by task."""
        total: Counter[str] = Counter()
        for shard in self.shards:
            total.update(shard.num_evicted)
        return dict(total)

    @property
    def on_evict(self) -> Callable[[StorageItem], None] | None:
        """Called with each group that a put through this buffer evicts."""
        return self.shards[0].on_evict

    @on_evict.setter
    def on_evict(self, callback: Callable[[StorageItem], None] | None) -> None:
        for shard in self.shards:
            shard.on_evict = callback

    async def wait_for_change(self, version: int) -> int:
        """See `ReplayBuffer.wait_for_change`."""
        while self.version == version:
            waits = [asyncio.ensure_future(shard.wait_for_change(shard.version)) for shard in self.shards]
            try:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in done:
                    wait.result()
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
        return self.version

    def shard_of(self, group: Sequence[RolloutState]) -> int:
        """The number of the shard that the group belongs to: of its group id, or of its first rollout's."""
        first = group[0]
        name = first.rollout_id if first.group_id is None else first.group_id
        return zlib.crc32(str(name).encode("utf-8", "surrogatepass")) % len(self.shards)

    async def put(
        self,
        items: Sequence[RolloutState],
        task_name: str,
        *,
        model_step: int | None = None,
        current_train_step: int | None = None,
        stale_threshold: int | None = None,
        tags: Mapping[str, TagValue] | None = None,
        priority: float | None = None,
    ) -> None:
        """See `ReplayBuffer.put`; into the shard that the group belongs to."""
        await self.put_groups(
            [items],
            task_name,
            model_step=model_step,
            current_train_step=current_train_step,
            stale_threshold=stale_threshold,
            tags=tags,
            priority=priority,
        )

    async def put_groups(
        self,
        groups: Iterable[Sequence[RolloutState]],
        task_name: str,
        *,
        model_step: int | None = None,
        current_train_step: int | None = None,
        stale_threshold: int | None = None,
        tags: Mapping[str, TagValue] | None = None,
        priority: float | None = None,
    ) -> None:
        """See `ReplayBuffer.put_groups`; all or none of each shard's groups."""
        check_threshold(task_name, stale_threshold)
        check_tags(tags)
        check_priority(priority)
        listed = await label_groups(groups, model_step)
        if current_train_step is not None and listed:
            await self._see_step(task_name, current_train_step)
        batches: dict[int, list[Sequence[RolloutState]]] = {}
        arrivals: dict[int, list[int]] = {}
        for group in listed:
            number = self.shard_of(group)
            arrivals.setdefault(number, []).append(self._next_arrival())
            batches.setdefault(number, []).append(group)
        await self._on_shards(
            {
                number: self.shards[number].put_groups(
                    batch,
                    task_name,
                    current_train_step=current_train_step,
                    stale_threshold=stale_threshold,
                    tags=tags,
                    priority=priority,
                    arrivals=arrivals[number],
                )
                for number, batch in batches.items()
            }
        )

    def _next_arrival(self) -> int:
        self._last_arrival = max(self._last_arrival + 1, time.time_ns() // 1000)
        return self._last_arrival

    async def _see_step(self, task_name: str, train_step: int) -> None:
        """Tell every shard the train step of the task, so that all rank by the same ages."""
        async with self._step_turn:
            if self._steps.get(task_name) == train_step:
                return
            await self._tell(range(len(self.shards)), task_name, train_step)
            self._steps[task_name] = train_step

    async def get(
        self,
        batch_size: int,
        task_name: str,
        group_status: Status,
        *,
        tags: Mapping[str, TagValue] | None = None,
    ) -> list[Group]:
        """See `ReplayBuffer.get`."""
        if batch_size <= 0:
            return []
        taken = await self._take({task_name: batch_size}, group_status, tags, None)
        return taken[task_name]

    async def take_batch(
        self,
        task_batch_sizes: Mapping[str, int],
        *,
        group_status: Status = Status.COMPLETED,
        train_step: int | None = None,
    ) -> tuple[dict[str, list[Group]], dict[str, int]]:
        """See `ReplayBuffer.take_batch`."""
        groups = await self._take(task_batch_sizes, group_status, None, train_step)
        return groups, {task: len(taken) for task, taken in groups.items()}

    async def _take(
        self,
        sizes: Mapping[str, int],
        status: Status,
        tags: Mapping[str, TagValue] | None,
        train_step: int | None,
    ) -> dict[str, list[Group]]:
        groups: dict[str, list[Group]] = {task: [] for task in sizes}
        given: list[tuple[int, ShardTake]] = []
        async with self._taking:
            try:
                is_done = False
                while not is_done:
                    missing = {task: size - len(groups[task]) for task, size in sizes.items()}
                    plan = await self._plan(missing, status, tags)
                    round_ = await self._take_planned(plan, status, tags, train_step, given)
                    if round_ is not None:
                        num_taken = merge_taken(plan, round_, groups)
                        # Else others were faster, and the next ones are to be found; unless they hold the
                        # rest.
                        is_done = num_taken in (0, sum(map(len, plan.values())))
            except BaseException as error:
                await finish(release_all(given, error))
                raise
        for _, take in given:
            take.done()
        return groups

    async def _plan(
        self, missing: Mapping[str, int], status: Status, tags: Mapping[str, TagValue] | None
    ) -> dict[str, list[int]]:
        """For each task: the shards of the groups that are next, in order."""
        sizes = {task: size for task, size in missing.items() if size > 0}
        order = self.policy.order
        ask = partial(_first_rows, sizes=sizes, status=status, tags=tags, order=order)
        ranked = await self._on_all(lambda shard: ask(shard.storage))
        if await self._align(sizes, [steps for _, steps in ranked]):
            ranked = await self._on_all(lambda shard: ask(shard.storage))
        of_shards = [rows for rows, _ in ranked]
        return {
            task: [
                number for number, _ in merge_rows(enumerate(rows[task] for rows in of_shards), order)[:size]
            ]
            for task, size in sizes.items()
        }

    async def _align(self, tasks: Iterable[str], steps: Sequence[TrainSteps]) -> bool:
        """Whether shards knew different train steps of a task; then all are told the newest.

        So it is after another one over these shards has put with an older step than this one, or a newer.
        """
        if not (differing := [task for task in tasks if len({known.get(task) for known in steps}) > 1]):
            return False
        # While a step is being told, it is not known everywhere.
        async with self._step_turn:
            for task in differing:
                known = await self._on_all(partial(_train_step, task=task))
                newest = max((step for step in known if step is not None), default=None)
                if newest is not None:
                    behind = [number for number, step in enumerate(known) if step != newest]
                    await self._tell(behind, task, newest)
        return True

    async def _tell(self, numbers: Iterable[int], task_name: str, train_step: int) -> None:
        await self._on_shards(
            {
                number: self.shards[number].refresh_staleness({task_name: NO_THRESHOLD}, train_step, [])
                for number in numbers
            }
        )

    async def _take_planned(
        self,
        plan: Mapping[str, Sequence[int]],
        status: Status,
        tags: Mapping[str, TagValue] | None,
        train_step: int | None,
        given: list[tuple[int, ShardTake]],
    ) -> dict[int, ShardTake] | None:
        """Take so many groups of each task from each shard; what came is added to `given`, also on errors.

        None if a connection broke before its shard knew that the groups had come: nothing is taken then.
        """
        sizes: dict[int, Counter[str]] = {}
        for task, numbers in plan.items():
            for number in numbers:
                sizes.setdefault(number, Counter())[task] += 1
        round_: dict[int, ShardTake] = {}

        async def take(number: int, counts: Mapping[str, int]) -> None:
            round_[number] = await take_from(self.shards[number], counts, status, tags, train_step)
            given.append((number, round_[number]))

        await self._on_shards({number: take(number, counts) for number, counts in sizes.items()})
        try:
            await self._on_shards({number: taken.keep() for number, taken in round_.items()})
        except ConnectionLost:
            given[:] = [pair for pair in given if pair[1] not in round_.values()]
            await finish(release_all(round_.items()))
            return None
        return round_

    async def count(
        self, task_name: str, group_status: Status, *, tags: Mapping[str, TagValue] | None = None
    ) -> int:
        """See `ReplayBuffer.count`."""
        counts = await self._on_all(lambda shard: shard.count(task_name, group_status, tags=tags))
        return sum(counts)

    async def count_statuses(
        self, task_names: Iterable[str], statuses: Iterable[Status]
    ) -> dict[str, dict[Status, int]]:
        """See `ReplayBuffer.count_statuses`."""
        tasks, statuses = list(task_names), list(statuses)
        of_shards = await self._on_all(lambda shard: shard.count_statuses(tasks, statuses))
        return {
            task: {status: sum(cells[task][status] for cells in of_shards) for status in statuses}
            for task in tasks
        }

    async def is_ready(
        self, task_batch_sizes: Mapping[str, int], group_status: Status = Status.COMPLETED
    ) -> bool:
        """See `ReplayBuffer.is_ready`."""
        counts = await self.count_statuses(task_batch_sizes, [group_status])
        return all(counts[task][group_status] >= size for task, size in task_batch_sizes.items() if size > 0)

    async def commit(self, train_step: int) -> None:
        """See `ReplayBuffer.commit`."""
        await self._on_all(lambda shard: shard.commit(train_step))

    async def restore(self, train_step: int) -> None:
        """See `ReplayBuffer.restore`."""
        await self._on_all(lambda shard: shard.restore(train_step))

    async def refresh_staleness(
        self,
        task_stale_thresholds: Mapping[str, int],
        current_train_step: int,
        statuses: Iterable[Status] | None = None,
    ) -> dict[str, int]:
        """See `ReplayBuffer.refresh_staleness`."""
        asked = None if statuses is None else list(statuses)
        async with self._step_turn:
            expired = await self._on_all(
                lambda shard: shard.refresh_staleness(task_stale_thresholds, current_train_step, asked)
            )
            self._steps |= dict.fromkeys(task_stale_thresholds, current_train_step)
        return {task: sum(of_shard[task] for of_shard in expired) for task in task_stale_thresholds}

    async def update_priorities(
        self, priorities: Mapping[Any, float], *, by: str = "uid", task_name: str | None = None
    ) -> int:
        """See `ReplayBuffer.update_priorities`; uids are those of the rows that `storage` shows."""
        for_shards: Sequence[Mapping[Any, float]] = [priorities] * len(self.shards)
        if by == "uid":
            for_shards = split_uids(priorities, len(self.shards))
        numbers = await self._on_shards(
            {
                number: shard.update_priorities(for_shards[number], by=by, task_name=task_name)
                for number, shard in enumerate(self.shards)
            }
        )
        return sum(numbers.values())

    async def save(self, path: str | Path) -> None:
        """See `ReplayBuffer.save`; a folder for each shard in `path`, which all shards can write to.

        While groups are put or taken meanwhile, each shard is as of a moment of its own.
        """
        await save_shards(Path(path), [shard.save for shard in self.shards], self._on_shards)

    async def resume(self, path: str | Path) -> None:
        """See `ReplayBuffer.resume`; also of another number of shards, and of a single buffer.

        Raises:
            RuntimeError, FileNotFoundError, ValueError: as there. Some shards may hold their part then.
        """
        await restore_shards(
            Path(path),
            [shard.resume for shard in self.shards],
            self._on_shards,
            policy=type(self.policy).__name__,
            shard_of=self.shard_of,
        )
        self._steps.clear()

    async def close(self) -> None:
        """Close every shard."""
        await self._on_all(lambda shard: shard.close())

    async def _on_all(self, call: Callable[[Shard], Awaitable[Result]]) -> list[Result]:
        results = await self._on_shards({number: call(shard) for number, shard in enumerate(self.shards)})
        return list(results.values())

    async def _on_shards(self, calls: Mapping[int, Awaitable[Result]]) -> dict[int, Result]:
        """What each of these shards answered; all come to their end before the first error is raised.

        Raises:
            ConnectionLost: a shard cannot be reached; the message says which.
        """
        tasks = {number: asyncio.ensure_future(call) for number, call in calls.items()}
        try:
            if tasks:
                await asyncio.wait(tasks.values())
        except asyncio.CancelledError:
            for task in tasks.values():
                task.cancel()
                await outlast(task)
            raise
        for number, task in tasks.items():
            if (error := task.exception()) is not None:
                for other in tasks.values():
                    # Retrieved, so that nobody warns of it.
                    other.exception()
                raise _named(error, number, self.shards[number])
        return {number: task.result() for number, task in tasks.items()}


async def _first_rows(
    rows: Rows,
    *,
    sizes: Mapping[str, int],
    status: Status,
    tags: Mapping[str, TagValue] | None,
    order: str | None,
) -> tuple[dict[str, list[StorageItem]], TrainSteps]:
    """By task: the rows that are first, and, where the order depends on it, the train step."""
    reading = [
        rows.get(StorageIndices(task, status, tags).get_key(), order=order, limit=size, rows_only=True)
        for task, size in sizes.items()
    ]
    asked = sizes if parse_order(order)[0] == "staleness" else ()
    # All at once: a shard may be far away.
    found, steps = await asyncio.gather(
        asyncio.gather(*reading), asyncio.gather(*map(rows.get_train_step, asked))
    )
    return dict(zip(sizes, found, strict=True)), dict(zip(asked, steps, strict=True))


async def _train_step(shard: Shard, task: str) -> int | None:
    return await shard.storage.get_train_step(task)


def _named(error: BaseException, number: int, shard: Shard) -> BaseException:
    """The error, saying of which shard it is."""
    where = f"shard {number} ({getattr(shard, 'address', 'in this process')})"
    if isinstance(error, ConnectionError):
        named = type(error)(f"{where}: {error}")
        named.__cause__ = error
        return named
    error.add_note(f"in {where}")
    return error
