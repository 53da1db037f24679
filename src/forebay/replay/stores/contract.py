"""The contract of a replay store: `StorageBackend`.

A store keeps *rows* (light: ids, task, status, age, priority, tags) with one opaque *payload* each, which it
never looks into. It decides nothing: labeling, expiry, limits and policies are above it.

::

    put -> live row --take(uids)--------------> gone, returned
              |  ^ \\--take(uids, train_step=i)--> ARCHIVED (train_step=i, status_before kept), returned
       update |  |                                  |
              v  '------------- update -------------'        delete: gone, not returned
"""

from __future__ import annotations

import math
import numbers
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, ClassVar, Protocol

from forebay.replay.query import (
    ARCHIVED,
    All,
    Condition,
    QueryLike,
    is_storable_text,
    parse_query,
    plain_value,
    show_value,
    to_float,
)
from forebay.replay.stores.sum_tree import SumTree


class StorageBackend(ABC):
    """Keeps groups. Beyond the signatures of its methods:

    * **Ids.** `put` gives each row a `uid` and a `timestamp_id` above every one given before; they never
      rewind, also after the store was drained, saved and loaded. Arrival order is the order of
      `timestamp_id`.
    * **Age.** A row with an `oldest_model_step` has, once a train step of its task is known, the staleness
      ``train_step - 1 - oldest_model_step`` as of the latest train step set for the task (step 3 at train step 5:
      staleness 1); any other row has the staleness it was given. Queries, orders and returned rows all use this
      value. An older step changes nothing: a task's step falls only after `let_train_steps_fall`.
    * **Isolation.** `get` and `take` return copies of the rows (the payload by reference, for stores that
      hold it in memory); changing one changes nothing in the store until `update`.
    * **Atomicity.** Each method happens wholly or not at all, and no other call sees half of it.
    * **Order.** Rows come in the order asked for, ties in arrival order. Where several processes put into
      one store, arrival order is that in which the ids were given.
    * **Competing takers.** A row is returned by at most one `take`, `take_first` or `take_drawn` of all processes.
      `take` returns only the rows that are still there and still match. `take_first` ranks and takes in one step
      and passes over rows that another process is taking; no call waits longer than one call of another takes.
    * **Durability**, for stores that outlive the process: a method that returned stays done. One that a
      death or a cancellation interrupts happened wholly or not at all; a cancelled `take` not at all.
    * **Limits.** Every store can hold the rows that `check_row` lets through in a put or an update.
    * **Statuses** may be put as `Enum` members or as their values; a store may return values.
    * **Unknown uids** are ignored by `take`, `delete` and `update`.
    * ``len(store)`` counts live rows. ARCHIVED rows are seen only by queries that ask for them (`query`).

    >>> import asyncio
    >>> from forebay.replay import IndexedStorage
    >>> async def example(store):
    ...     await store.put(StorageItem(["payload"], -1, -1, "math", "completed", staleness=0))
    ...     rows = await store.get({"task_name": "math"}, order="-staleness", limit=64, rows_only=True)
    ...     return await store.take([row.uid for row in rows])
    >>> len(asyncio.run(example(IndexedStorage())))
    1
    """

    @abstractmethod
    async def put(self, item: StorageItem) -> int:
        """Store a copy of the row under new ids and return its uid.

        An id that `item` brings is used if it is above every id given before, so that rows can be moved
        between stores one by one.
        """

    rows_at_once: ClassVar[int | None] = None
    """The most rows of one call that do not hold up the event loop; None: any number."""

    is_shared: ClassVar[bool] = False
    """Whether other processes may change the content."""
    is_durable = False
    """Whether the content outlives the process."""
    holder: str | None = None
    """The name of the run whose groups these are; a durable store keeps it."""

    async def put_many(
        self, items: Sequence[StorageItem], *, receipt: bytes | None = None, aged_at: int | None = None
    ) -> list[int]:
        """`put` the rows in this order, all of them or none (in memory no `put` fails); return their uids.

        A `receipt` is given only to a store that `keeps_receipts`, to `update_if` and `delete_where` too.
        `aged_at` is given only to one that `is_shared`: the train step at which the rows, all of one task,
        were judged to be fresh enough. It becomes the task's, in the same transaction.

        Raises:
            StepPassed: the task has a later train step than `aged_at`; nothing is stored.
        """
        return [await self.put(item) for item in items]

    async def claim(self) -> None:  # noqa: B027
        """Own the content from now on, in place of any earlier owner, whose changes are an `OwnerLost`.

        Stores that never claimed it may change it as before. Where no process shares it, nothing happens.
        """

    keeps_receipts: ClassVar[bool] = False
    """Whether a call can be asked for after the process died."""

    async def has_receipt(self, receipt: bytes) -> bool:
        """Whether a call with this receipt has happened, in the last hour or longer."""
        raise NotImplementedError(f"{type(self).__name__} keeps no receipts")

    @abstractmethod
    async def get(
        self, query: QueryLike, *, order: str | None = None, limit: int | None = None, rows_only: bool = False
    ) -> list[StorageItem]:
        """The first `limit` rows that match, in `order`; nothing is removed.

        `order` is ``timestamp_id``, ``staleness`` or ``priority``, descending with a ``-`` in front; ties
        come in arrival order. With `rows_only` the payloads are left out (``item`` is None).

        Raises:
            ValueError: the query or the order is not one.
        """

    @abstractmethod
    async def count(self, query: QueryLike) -> int:
        """How many rows match."""

    async def count_many(self, queries: Sequence[QueryLike]) -> list[int]:
        """How many rows match each of the queries."""
        return [await self.count(query) for query in queries]

    @abstractmethod
    async def take(
        self, uids: Iterable[int], *, query: QueryLike | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        """Remove these rows and return them as they were, in the order of `uids`.

        With `query`, those that do not match it any more are left alone. With `train_step` the rows are not
        removed but become ARCHIVED, with that train step and their present status as `status_before`.
        """

    async def take_first(
        self, count: int, query: QueryLike, *, order: str | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        """Rank and `take` the first `count` rows that match; fewer only if there are fewer."""
        taken: list[StorageItem] = []
        while len(taken) < count:
            rows = await self.get(query, order=order, limit=count - len(taken), rows_only=True)
            if not rows:
                break
            # A rival may have been faster between the two; then the next ones are ranked.
            taken += await self.take([row.uid for row in rows], query=query, train_step=train_step)
        return taken

    async def take_drawn(
        self, count: int, query: QueryLike, random: Callable[[], float], *, train_step: int | None = None
    ) -> list[StorageItem]:
        """`take` `count` matching rows drawn in proportion to priority; fewer only if there are fewer.

        They are drawn one after another, without replacement: of the rows that are left, in order of
        arrival, the first at which the running sum of priorities exceeds ``random() * sum``. Rows of
        priority 0 follow when no other is left, in order of arrival and without a number. So the same
        numbers draw the same rows from every store, as exactly as `SumTree` says; where another taker was
        faster, the next numbers draw instead. `random` gives numbers of [0, 1) and is called by one thread
        at a time, not necessarily that of the event loop.

        A database overrides this: it reads ids and priorities alone into a `SumTree`, locks what that draws,
        and draws again for what a rival has.
        """
        taken: list[StorageItem] = []
        while len(taken) < count:
            drawn = (await self._priorities(query)).draw(count - len(taken), random)
            if not drawn:
                break
            taken += await self.take(drawn, query=query, train_step=train_step)
        return taken

    async def _priorities(self, query: QueryLike) -> SumTree:
        rows = await self.get(query, rows_only=True)
        ids, priorities = [row.timestamp_id for row in rows], [row.priority for row in rows]
        return SumTree(ids, [row.uid for row in rows], priorities)

    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        """Give the live rows with these uids these priorities; return how many there are.

        A store that several processes share changes the one field.
        """
        rows = await self.get({"uid": {"$in": list(priorities)}}, rows_only=True)
        for row in rows:
            row.priority = priorities[row.uid]
        await self.update(rows)
        return len(rows)

    async def update_if(
        self,
        items: Iterable[StorageItem],
        query: QueryLike,
        *,
        receipt: bytes | None = None,
        expected: int | None = None,
    ) -> int:
        """`update` the items whose rows still match `query`, in one step; return how many did.

        If the number differs from `expected`, nothing is changed.
        """
        by_uid = {item.uid: item for item in items}
        still = All((Condition("uid", "$in", tuple(by_uid)), parse_query(query)))
        matching = [by_uid[row.uid] for row in await self.get(still, rows_only=True)]
        if expected in (None, len(matching)):
            await self.update(matching)
        return len(matching)

    async def evict(self, limit: int) -> list[StorageItem]:
        """Remove the live rows that arrived first until `limit` are left; count and return them.

        One whose payload is damaged has none; a warning names it.
        """
        if (excess := len(self) - limit) <= 0:
            return []
        evicted = await self.take_first(excess, {})
        for row in evicted:
            self.num_evicted[row.task_name] = self.num_evicted.get(row.task_name, 0) + 1
        return evicted

    # Made at the first look: a store need not call an `__init__` of this class.
    @cached_property
    def num_evicted(self) -> dict[str, int]:
        """Rows that `evict` has removed so far, by task."""
        return {}

    @abstractmethod
    async def delete(self, uids: Iterable[int]) -> None:
        """Remove these rows."""

    async def delete_where(
        self, query: QueryLike, *, receipt: bytes | None = None, expected: int | None = None
    ) -> int:
        """Remove the rows that match, and return how many there were; none if not as many as `expected`."""
        rows = await self.get(query, rows_only=True)
        if expected in (None, len(rows)):
            await self.delete([row.uid for row in rows])
        return len(rows)

    @abstractmethod
    async def update(self, items: Iterable[StorageItem]) -> None:
        """Replace the rows with the uids of `items`; uid and timestamp_id stay.

        An item without payload leaves the stored payload in its place.
        """

    async def get_train_step(self, task_name: str) -> int | None:
        """The latest train step set for the task."""
        return self._steps_set.get(task_name)

    async def set_train_step(self, task_name: str, train_step: int) -> None:
        """Rows of the task that have an `oldest_model_step` are from now on as stale as at `train_step`.

        A step that is not later changes nothing. A store that only remembers it, as here, keeps the staleness
        its rows were given.
        """
        self._steps_set[task_name] = train_step

    async def let_train_steps_fall(self) -> None:  # noqa: B027
        """Take the next step set for each task, however old: the trainer went back to a checkpoint."""

    @cached_property
    def _steps_set(self) -> dict[str, int]:
        return {}

    @abstractmethod
    def __len__(self) -> int:
        """The number of live rows."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything, in a form that any store loads.

        ``{"version", "items": [StorageItem, ...], "next_uid", "next_timestamp_id", "train_steps"}``; the
        items may be the store's own and must not be changed. Cheap: no payload is copied.
        """

    @contextmanager
    def reading_state(self) -> Iterator[dict[str, Any]]:
        """`state_dict` of this moment for the time of a block, in which the items are walked once."""
        yield self.state_dict()

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the content by `state`; id counters only move forward.

        Raises:
            ValueError: `state` is of another version or contradicts itself; the store is as it was.
        """

    plain_codec: ClassVar[type[Codec]]
    """Makes the codec of a store that is handed none. `forebay.replay.format.packed`, which knows groups, sets it."""
    codec: Codec | None = None
    """Of a store that makes bytes: a buffer hands it one of groups in place of none, and of `plain_codec`'s."""

    def use_codec(self, codec: Codec) -> None:
        """Make bytes of payloads by `codec` from now on. Stores in memory keep the objects and need none."""
        self.codec = codec

    def close(self) -> None:  # noqa: B027
        """Give back threads, files and connections; the store is not used afterwards."""


ARRIVAL = "timestamp_id"
"""First come, first; the default order."""
STALEST = "-staleness"
"""Most stale first."""

_ORDERS = ("timestamp_id", "staleness", "priority")

TagValue = str | int | float | bool

STATE_VERSION = 1

MAX_PRIORITY = 1e300
"""Larger than any priority in use; the sum of a hundred million of them is still finite."""


@dataclass(slots=True)
class StorageItem:
    """One stored group: its row, and with it or not its payload.

    >>> StorageItem(["payload"], -1, -1, "math", "archived", staleness=0).is_archived
    True
    """

    item: Any
    """The payload, opaque to stores and policies; None in rows fetched without it."""
    uid: int
    """Given by `put` (-1 asks for any)."""
    timestamp_id: int
    """Place in the order of arrival; given by `put` (-1 asks for any)."""
    task_name: str
    status: Enum | str
    """A `forebay.types.Status` or its value; queries compare the value."""
    staleness: int
    """As given, or as of the latest train step: see `StorageBackend`."""
    tags: dict[str, TagValue] = field(default_factory=dict)
    priority: float = 1.0
    """Weight of a proportional draw, from 0 to `MAX_PRIORITY`."""
    oldest_model_step: int | None = None
    """The oldest weights that made a token of the group; None if no token is labeled."""
    train_step: int | None = None
    """The train step that consumed the group; None while it is live."""
    status_before: Enum | str | None = None
    """The status of an ARCHIVED row before it was consumed."""

    @property
    def is_archived(self) -> bool:
        """Whether a train step consumed the row."""
        return bool(plain_value(self.status) == ARCHIVED)


class Codec(Protocol):
    """How a store that cannot hold Python objects turns payloads into bytes and back."""

    def encode(self, payload: Any) -> bytes:
        """The payload as bytes; ValueError if it holds something that cannot be stored."""

    def decode(self, data: bytes) -> Any:
        """The payload of these bytes; ValueError if they are damaged or of another codec."""

    def status(self, value: str) -> Enum | str:
        """The status that rows with this value carry."""


def staleness_at(row: StorageItem, train_step: int | None) -> int:
    """The row's staleness at `train_step`; as given if it has no label or no train step is known."""
    if train_step is None or row.oldest_model_step is None:
        return row.staleness
    return train_step - 1 - row.oldest_model_step


def copy_row(row: StorageItem, **changes: Any) -> StorageItem:
    """A copy of `row` with its own tags and with `changes`."""
    # Every row that enters or leaves a store passes here, and `dataclasses.replace` takes five times as long.
    copied = StorageItem(*_read_values(row))
    copied.tags = dict(row.tags)
    for name, value in changes.items():
        setattr(copied, name, value)
    return copied


def archive_row(row: StorageItem, train_step: int) -> StorageItem:
    """`row` as consumed by `train_step`."""
    status = type(row.status)(ARCHIVED) if isinstance(row.status, Enum) else ARCHIVED
    before = row.status_before if row.is_archived else row.status  # As it was when it was live.
    return copy_row(row, status=status, status_before=before, train_step=train_step)


def revive_row(row: StorageItem) -> StorageItem:
    """An ARCHIVED row as it was before it was consumed."""
    assert row.status_before is not None, f"archived row {row.uid} does not say what it was before"
    return copy_row(row, status=row.status_before, status_before=None, train_step=None)


def check_row(row: StorageItem) -> None:
    """Refuse what some store could not hold, so that every store gives the same answer.

    Raises:
        ValueError: the task's name or a status is not text, or holds NUL or a lone surrogate; a number does
            not fit into 64 bits; `check_tags` or `check_priority` refuses.
    """
    _check_text("task_name", row.task_name)
    _check_text("status", plain_value(row.status))
    if row.status_before is not None:
        _check_text("status_before", plain_value(row.status_before))
    for name in ("staleness", "oldest_model_step", "train_step"):
        number = getattr(row, name)
        if number is not None and not -(2**63) <= number < 2**63:
            raise ValueError(f"{name} must be a 64-bit int, got {show_value(number)}")
    # Most rows have neither, and the buffer has checked what it was given.
    if row.tags:
        check_tags(row.tags)
    if row.priority != 1.0:
        check_priority(row.priority)


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not _is_storable(text):
        raise ValueError(f"{name} must be text without NUL and without lone surrogates, got {show_value(text)}")


_is_storable = lru_cache(maxsize=1024)(is_storable_text)
"""The same few names come with every row."""
_read_values = attrgetter(*StorageItem.__slots__)


def parse_order(order: str | None) -> tuple[str, bool]:
    """``(field, descending)``; None is arrival order.

    Raises:
        ValueError: not one of the orders that `StorageBackend.get` lists.
    """
    name = ARRIVAL if order is None else order
    if name.removeprefix("-") not in _ORDERS:
        raise ValueError(
            f"unknown order {show_value(order)}; known: {', '.join(_ORDERS)}, with - in front: descending"
        )
    return name.removeprefix("-"), name.startswith("-")


def check_tags(tags: Mapping[str, TagValue] | None) -> dict[str, TagValue]:
    """A copy of `tags`.

    Raises:
        ValueError: a name is not text, or a value is not text, a bool, a finite float or a 64-bit int.
    """
    for name, value in (tags or {}).items():
        if not isinstance(name, str) or not name or not _is_whole(name):
            raise ValueError(f"a tag's name is text that is not empty, got {show_value(name)}")
        ok = (
            type(value) is bool
            or (type(value) is str and _is_whole(value))
            or (type(value) is int and -(2**63) <= value < 2**63)
            or (type(value) is float and math.isfinite(value))
        )
        if not ok:
            raise ValueError(
                f"tag {show_value(name)} takes text, a bool, a finite float or a 64-bit int, got {show_value(value)}"
            )
    return dict(tags or {})


def _is_whole(text: str) -> bool:
    """Whether no character lies in two halves, which JSON, and so a store, would join."""
    return text.isascii() or _TWO_HALVES.search(text) is None


_TWO_HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def check_priority(priority: float | None) -> float:
    """`priority` as a float; None is 1.

    Raises:
        ValueError: it is not a number from 0 to `MAX_PRIORITY`.
    """
    if priority is None:
        return 1.0
    is_number = not isinstance(priority, bool) and isinstance(priority, numbers.Real | float)
    number = to_float(priority) if is_number else math.nan
    if not 0 <= number <= MAX_PRIORITY:
        raise ValueError(f"priority must be a number from 0 to {MAX_PRIORITY:g}, got {show_value(priority)}")
    return number
