"""Groups on their way into a buffer: labeled, aged, and expired if they are too old.

::

    put, here or in a client: check, label_group --> arrived_row (where the store is) --> policy --> store

Checking and labeling are done where the rollouts were made; ageing where the train step is known.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np

from forebay.aio.changed import Changes
from forebay.replay.format.packed import HeldGroup, PackedPayload, as_stored
from forebay.replay.format.values import MAX_DEPTH, Checker
from forebay.replay.groups import StoredGroup, copy_group
from forebay.replay.query import check_whole, show_value
from forebay.replay.stores.contract import STALEST, StorageBackend, StorageItem, TagValue, check_priority, check_tags
from forebay.types import FIELDS, RolloutState, SampleParams, Status, expire_group, label_and_fill

GROUP_TAG = "group"
"""The tag of a row that has the group's id."""


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the groups of one put arrive: one value from the caller to the store, also through a server.

    >>> Arrival.of("math", {"model_step": 3, "priority": 2})
    Arrival(model_step=3, current_train_step=None, stale_threshold=None, tags={}, priority=2.0)
    """

    model_step: int | None = None
    """The weights that made the tokens which have no label yet."""
    current_train_step: int | None = None
    """The train step at which the groups are aged; None: the one last seen for the task."""
    stale_threshold: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """A COMPLETED or ABORTED group of this staleness or more is stored EXPIRED; None: none is."""
    tags: dict[str, TagValue] = {}
    priority: float = 1.0
    """Weight of a proportional draw."""

    @classmethod
    def of(cls, task_name: str, keywords: "PutKeywords") -> "Arrival":
        """The arrival that these keywords of a put describe.

        Raises:
            TypeError: there is no such keyword.
            ValueError: a step is no whole number, the threshold is not positive, or a tag or the priority cannot
                be stored.
        """
        steps = {name: check_whole(name, keywords.get(name)) for name in ("model_step", "current_train_step")}
        threshold = check_threshold(task_name, keywords.get("stale_threshold"))
        tags, priority = check_tags(keywords.get("tags")), check_priority(keywords.get("priority"))
        given: dict[str, Any] = {**keywords, **steps, "stale_threshold": threshold, "tags": tags, "priority": priority}
        return cls(**given)


class PutKeywords(TypedDict, total=False):
    """The keywords of `ReplayBuffer.put`; their meaning is that of the fields of `Arrival`."""

    model_step: int | None
    current_train_step: int | None
    stale_threshold: int | None
    tags: Mapping[str, TagValue] | None
    priority: float | None


CAN_EXPIRE = (Status.COMPLETED, Status.ABORTED)
NEVER_STALE = 2**31 - 1
"""A threshold that nothing reaches: groups are aged, and none is looked for."""
EXPIRE_AT_ONCE = 64
"""Groups expired between two turns of the event loop: wiping them takes about 10 ms."""
LABEL_AT_ONCE = 256
"""Groups labeled between two turns of the event loop; with arrays to make it takes about 10 ms."""


def check_threshold(task_name: str, threshold: int | None) -> int | None:
    """The stale threshold; ValueError if it is no positive whole number. None stands for no threshold."""
    whole: int | None = check_whole(f"the stale threshold of task {task_name!r}", threshold)
    if whole is not None and whole <= 0:
        raise ValueError(f"the stale threshold of task {task_name!r} must be positive, got {whole}")
    return whole


def label_group(group: Sequence[RolloutState], model_step: int | None) -> HeldGroup:
    """The group, its tokens labeled and its token fields filled.

    Raises:
        ValueError: token fields of a rollout have different lengths, or a value cannot be stored.
        TypeError: it is no group of rollouts, or a field is of a type that it never has.
    """
    if isinstance(group, PackedPayload):
        # It came from a client, which has done so.
        return group
    check_group(group)
    return StoredGroup.with_steps(group, [label_and_fill(state, model_step) for state in group])


_SMALL = [name for name, rule in FIELDS.items() if rule.kind in ("text", "whole", "value") and not rule.large]
_read_small = attrgetter(*_SMALL)
MOST_AT_ONCE = 1_000_000
"""Values of one level that are listed. Of values that hold each other there would be more at every level."""
_PLAIN = {type(None), bool, int, float, str, bytes, tuple, list, dict, set, frozenset, np.float32, np.float64}


def check_group(group: Sequence[RolloutState]) -> None:
    """Look at every value of the rollouts that a store or a snapshot has to hold.

    Here, when they are put, and not when the first snapshot is written. Every put pays for it, so the types are
    looked at level by level: the garbage collector lists in C what containers hold, and nothing is copied. A
    `Checker` looks at each value only of a group that has one of another type, or that nests deep.

    Raises:
        TypeError: a member is no `RolloutState`, or a field is of a type that it never has.
        ValueError: a value cannot be stored; the message says where it is.
    """
    try:
        for state in group:
            if (
                type(state.status) is not Status
                or type(state.message) is not list
                or type(state.response) is not str
                or ((params := state.sample_params) is not None and type(params) is not SampleParams)
            ):
                _refuse_type(state)
            experts = state.routed_experts
            if experts is not None and (type(experts) is not np.ndarray or experts.dtype.hasobject):
                _check_each(state, ["routed_experts"])
            if state.mm_info is not None:
                _check_each(state, ["mm_info"])
        small = list(map(_read_small, group))
    except AttributeError:
        # Only on this path: to check the class of every member would cost every put.
        if others := [state for state in group if not isinstance(state, RolloutState)]:
            raise TypeError(f"a group holds RolloutState objects, got {show_value(others[0])}") from None
        raise
    for _ in range(MAX_DEPTH):
        if not 0 < len(small) <= MOST_AT_ONCE or not _PLAIN.issuperset(map(type, small)):
            break
        small = gc.get_referents(*small)
    for state in group if small else ():
        _check_each(state, _SMALL)


def _check_each(state: RolloutState, names: Sequence[str]) -> None:
    checker = Checker()
    for name in names:
        checker.encode(getattr(state, name), f"rollout {state.rollout_id!r}: {name}")


def _refuse_type(state: RolloutState) -> None:
    """Say which field of the rollout is of a type that it never has."""
    expected = {
        "status": (Status, "a Status such as Status.COMPLETED"),
        "message": (list, 'a chat: a list of messages such as {"role": "user", "content": "1+1="}'),
        "response": (str, "text"),
        "sample_params": (SampleParams | None, "a SampleParams, or None"),
    }
    for name, (kind, said) in expected.items():
        value = getattr(state, name)
        if not isinstance(value, kind) or (name != "sample_params" and type(value) is not kind):
            raise TypeError(f"rollout {state.rollout_id!r}: {name} must be {said}, got {show_value(value)}")


def named_row(row: StorageItem) -> StorageItem:
    """The row; if its payload is damaged, with a rollout that has the group's name and status."""
    if row.item is None:
        name: Any = row.tags.get(GROUP_TAG)
        row.item = [RolloutState([], group_id=name, task_name=row.task_name, status=Status(row.status))]
    return row


def arrived_row(group: HeldGroup, task_name: str, seen_step: int | None, how: Arrival) -> StorageItem:
    """The row of a group that arrives when `seen_step` is the train step last seen for its task.

    At or over the threshold the group is expired, its responses wiped; so is one that came EXPIRED.
    """
    if seen_step is not None:
        group.refresh(seen_step, reset_unlabeled=how.current_train_step is not None)
    status, staleness = group.status, max(group.staleness)
    is_old = how.stale_threshold is not None and staleness >= how.stale_threshold
    if status is Status.EXPIRED or (is_old and status in CAN_EXPIRE):
        states = as_stored(group)
        expire_group(states)
        group, status = StoredGroup(states), Status.EXPIRED
    steps = [step for step in group.steps if step is not None]
    return StorageItem(
        group,
        uid=-1,
        timestamp_id=-1,
        task_name=task_name,
        status=status,
        staleness=staleness,
        oldest_model_step=min(steps, default=None),
        tags=how.tags,
        priority=how.priority,
    )


async def expire_old(
    storage: StorageBackend,
    task_name: str,
    threshold: int,
    train_step: int,
    statuses: Sequence[Status],
    changes: Changes,
    is_saving: Callable[[], bool],
) -> int:
    """Wipe and store as EXPIRED what is at or over the threshold at `train_step`; return how many groups."""
    await storage.set_train_step(task_name, train_step)
    if threshold == NEVER_STALE:
        return 0
    # Another caller may have named a later one.
    train_step = await storage.get_train_step(task_name) or train_step
    query = {"task_name": task_name, "status": {"$in": statuses}, "staleness": {"$gte": threshold}}
    num_expired = 0
    # Mostly there is none, and a look for one without its payload costs less.
    while await storage.get(query, limit=1, rows_only=True):
        rows = await storage.get(query, order=STALEST, limit=EXPIRE_AT_ONCE)
        for row in rows:
            # A snapshot being written still reads the rollouts as they were.
            group = as_stored(row.item)
            if is_saving() and group is row.item:
                group = copy_group(group)
            group.refresh(train_step)
            expire_group(group)
            # A wiped group has no labels; its row keeps the staleness that it has reached.
            row.item, row.status, row.oldest_model_step = StoredGroup(group), Status.EXPIRED, None
        # Another process may have taken some since.
        with changes.noted_if_cut_short():
            num_expired += await storage.update_if(rows, query)
        changes.note()
        # The lock is held, but other work than the buffer's may go on.
        await asyncio.sleep(0)
    return num_expired
