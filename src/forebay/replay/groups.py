"""Groups as a store in memory holds them: with each member's oldest model step; and how to copy them.

::

    put: rollouts --StoredGroup--> payload of a row --hand_out--> plain list, `seq_staleness` of now
    columns (a value per member and field) --build_states--> rollouts
"""

from collections.abc import Iterable, Sequence
from dataclasses import make_dataclass
from operator import attrgetter
from typing import Any, Self

from forebay.types import (
    FIELDS,
    ROLLOUT_FIELDS,
    RolloutState,
    Status,
    calculate_seq_staleness,
    get_group_status,
    oldest_step_of,
)


class StoredGroup(list[RolloutState]):
    """The rollouts of one group as a store holds them, with the oldest model step of each.

    The steps are found once, when the group is stored, so that reading it need not scan its tokens.

    >>> StoredGroup([RolloutState([], response_ids=[5], response_model_steps=[3])]).steps
    (3,)
    """

    __slots__ = ("steps",)

    def __init__(self, states: Iterable[RolloutState]) -> None:
        super().__init__(states)
        # A tuple of numbers, because the garbage collector does not visit those.
        self.steps: tuple[int | None, ...] = tuple([oldest_step_of(state) for state in self])

    @classmethod
    def with_steps(cls, states: Iterable[RolloutState], steps: Iterable[int | None]) -> Self:
        """A group whose oldest model steps are known."""
        group = cls(())
        group.extend(states)
        group.steps = tuple(steps)
        return group

    @property
    def status(self) -> Status:
        """The group's status, from its members' (`get_group_status`)."""
        return get_group_status(self)

    @property
    def staleness(self) -> Sequence[int]:
        """The `seq_staleness` of each member."""
        return [state.seq_staleness for state in self]

    def refresh(self, train_step: int, *, reset_unlabeled: bool = False) -> None:
        """Write the members' `seq_staleness` at `train_step`.

        A member without labels keeps the one it has, or gets 0 if `reset_unlabeled`.
        """
        aged = aged_staleness(self.steps, self.staleness, train_step, reset_unlabeled=reset_unlabeled)
        for state, staleness in zip(self, aged, strict=True):
            state.seq_staleness = staleness


def aged_staleness(
    steps: Sequence[int | None], before: Sequence[int], train_step: int, *, reset_unlabeled: bool
) -> list[int]:
    """The staleness of members with these oldest model steps; one without keeps its own, or gets 0."""
    return [
        calculate_seq_staleness(step, train_step) if step is not None else 0 if reset_unlabeled else own
        for step, own in zip(steps, before, strict=True)
    ]


_CONTAINERS = frozenset({dict, list})
_MAY_BE_CONTAINER = frozenset(name for name, rule in FIELDS.items() if rule.kind == "value")
"""The fields whose types allow a dict or a list."""

_read_fields = attrgetter(*ROLLOUT_FIELDS)


def copy_group(group: StoredGroup) -> StoredGroup:
    """Copies of the rollouts; they share arrays and immutable values with the originals, no dict or list.

    A dict or list that is a field of several members is one for their copies, too.
    """
    columns = columns_of(group)
    columns |= {name: _copy_column(columns[name]) for name in _MAY_BE_CONTAINER}
    return StoredGroup.with_steps(build_states(columns.values()), group.steps)


def _copy_column(column: Sequence[Any]) -> Sequence[Any]:
    # Most columns hold neither dicts nor lists; their values are shared as they are.
    if _CONTAINERS.isdisjoint(map(type, column)):
        return column
    different = {id(value): value for value in column}
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


def columns_of(states: Iterable[RolloutState]) -> dict[str, Sequence[Any]]:
    """The values of each of `ROLLOUT_FIELDS`, in this order."""
    return dict(zip(ROLLOUT_FIELDS, zip(*map(_read_fields, states), strict=True), strict=True))


def build_states(columns: Iterable[Sequence[Any]]) -> list[RolloutState]:
    """Rollouts of these values, a column for each of `ROLLOUT_FIELDS`, not checked and not converted."""
    # A fifth of the time of writing slot by slot: a batch has hundreds of rollouts, and others wait for it.
    states: list[Any] = list(map(_Fields, *columns))
    for state in states:
        # Python allows it for classes of the same slots.
        state.__class__ = RolloutState
    return states
