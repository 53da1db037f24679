"""What the buffer knows of a group beyond the rollouts: each member's oldest model step, and how to copy it.

::

    put: rollouts --StoredGroup--> payload of a row --hand_out--> plain list, `seq_staleness` of now
    columns (a value per member and field) --build_states--> rollouts
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import make_dataclass
from operator import attrgetter
from typing import Any

from forebay.types import ROLLOUT_FIELDS, RolloutState, Status, calculate_seq_staleness, oldest_step_of


class StoredGroup(list[RolloutState]):
    """The rollouts of one group as a store holds them, with the oldest model step of each.

    The steps are found once, when the group is stored, so that reading it need not scan its tokens.

    >>> StoredGroup([state]).steps
    (3,)
    """

    __slots__ = ("steps",)

    def __init__(self, states: Iterable[RolloutState]) -> None:
        super().__init__(states)
        # A tuple of numbers, because the garbage collector does not visit those.
        self.steps: tuple[int | None, ...] = tuple([oldest_step_of(state) for state in self])

    @classmethod
    def with_steps(cls, states: Iterable[RolloutState], steps: Iterable[int | None]) -> StoredGroup:
        """A group whose oldest model steps are known."""
        group = cls(())
        group.extend(states)
        group.steps = tuple(steps)
        return group

    def refresh(self, train_step: int, *, reset_unlabeled: bool = False) -> None:
        """Write the members' `seq_staleness` at `train_step`.

        A member without labels keeps the one it has, or gets 0 if `reset_unlabeled`.
        """
        for state, step in zip(self, self.steps, strict=True):
            if step is not None:
                state.seq_staleness = calculate_seq_staleness(step, train_step)
            elif reset_unlabeled:
                state.seq_staleness = 0


class HeldGroup(Sequence[RolloutState], ABC):
    """A group that a store holds in another form, and whose rollouts are made when somebody looks at them.

    They are new ones each time, as stale as at the last `refresh`, and share their arrays.
    """

    steps: tuple[int | None, ...]
    """The oldest model step of each member."""
    staleness: Sequence[int]
    """The `seq_staleness` of each member."""

    @property
    @abstractmethod
    def status(self) -> Status:
        """The group's."""

    def refresh(self, train_step: int, *, reset_unlabeled: bool = False) -> None:
        """See `StoredGroup.refresh`."""
        self.staleness = tuple(
            [
                calculate_seq_staleness(step, train_step)
                if step is not None
                else 0
                if reset_unlabeled
                else before
                for step, before in zip(self.steps, self.staleness, strict=True)
            ]
        )

    @abstractmethod
    def encoded(self) -> tuple[bytes, Any]:
        """Head and arrays in the packed form (`packing`), the oldest model steps in the head."""


def as_stored(group: Sequence[RolloutState]) -> StoredGroup:
    """The group as objects, which can be changed."""
    return group if isinstance(group, StoredGroup) else StoredGroup(group)


def hand_out(group: Sequence[RolloutState], train_step: int | None, *, copy: bool) -> list[RolloutState]:
    """The members as a plain list, as stale as at `train_step`; copies if the store goes on holding them."""
    stored = as_stored(group)
    if copy and not isinstance(group, HeldGroup):
        stored = copy_group(stored)
    if train_step is not None:
        stored.refresh(train_step)
    return list(stored)


_CONTAINERS = frozenset({dict, list})
_MAY_BE_CONTAINER = frozenset(
    {
        *("message", "tools", "tool_choice", "data_source", "reward_model", "mm_info"),
        *("routed_experts", "tool_calls", "reward", "extra_fields"),
    }
)
"""The fields whose types allow a dict or a list."""

_read_fields = attrgetter(*ROLLOUT_FIELDS)


def copy_group(group: StoredGroup) -> StoredGroup:
    """Copies of the rollouts; they share arrays and immutable values with the originals, no dict or list.

    A dict or list that is a field of several members is one for their copies, too.
    """
    columns = [
        _copy_column(column) if name in _MAY_BE_CONTAINER else column
        for name, column in zip(ROLLOUT_FIELDS, zip(*map(_read_fields, group), strict=True), strict=True)
    ]
    return StoredGroup.with_steps(build_states(columns), group.steps)


def _copy_column(column: Sequence[Any]) -> Sequence[Any]:
    if _CONTAINERS.isdisjoint(map(type, column)):
        return column
    different = {id(value): value for value in column}
    if len(different) == len(column):
        return list(map(copy_containers, column))
    copies = {key: copy_containers(value) for key, value in different.items()}
    return [copies[id(value)] for value in column]


def copy_containers(value: Any) -> Any:
    """`value` with dicts and lists of its own, all the way down; everything else is shared."""
    if type(value) is dict:
        copied = value.copy()
        for key, item in value.items():
            if type(item) in _CONTAINERS:
                copied[key] = copy_containers(item)
        return copied
    if type(value) is list:
        return [copy_containers(item) if type(item) in _CONTAINERS else item for item in value]
    return value


_Fields: Any = make_dataclass("_Fields", ROLLOUT_FIELDS, slots=True, eq=False, repr=False)
"""The slots of a `RolloutState`, filled as they are: for values that are right by origin."""


def build_states(columns: Iterable[Sequence[Any]]) -> list[RolloutState]:
    """Rollouts of these values, a column for each of `ROLLOUT_FIELDS`, which nobody checks or converts.

    >>> [copied] = build_states([[getattr(state, name)] for name in ROLLOUT_FIELDS])
    """
    # A fifth of the time of writing slot by slot: a batch has hundreds of rollouts, and others wait for it.
    states: list[Any] = list(map(_Fields, *columns))
    for state in states:
        # Python allows it for classes of the same slots.
        state.__class__ = RolloutState
    return states
