"""What the buffer knows of a group beyond the rollouts: each member's oldest model step, and how to copy it.

::

    put: rollouts --StoredGroup--> payload of a row --hand_out--> plain list, `seq_staleness` of now
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from forebay.types import (
    ROLLOUT_FIELDS,
    ROLLOUT_SLOTS,
    RolloutState,
    calculate_seq_staleness,
    oldest_step_of,
)


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

    @property
    def oldest_step(self) -> int | None:
        """The oldest labelled model step of the group; None without labels."""
        return min((step for step in self.steps if step is not None), default=None)

    def refresh(self, train_step: int, *, reset_unlabelled: bool = False) -> None:
        """Write the members' `seq_staleness` at `train_step`.

        A member without labels keeps the one it has, or gets 0 if `reset_unlabelled`.
        """
        for state, step in zip(self, self.steps, strict=True):
            if step is not None:
                state.seq_staleness = calculate_seq_staleness(step, train_step)
            elif reset_unlabelled:
                state.seq_staleness = 0


def hand_out(group: Sequence[RolloutState], train_step: int | None, *, copy: bool) -> list[RolloutState]:
    """The members as a plain list, as stale as at `train_step`; copies if the store goes on holding them."""
    stored = group if isinstance(group, StoredGroup) else StoredGroup(group)
    if copy:
        stored = copy_group(stored)
    if train_step is not None:
        stored.refresh(train_step)
    return list(stored)


def copy_group(group: StoredGroup) -> StoredGroup:
    """Copies of the rollouts; they share arrays and immutable values with the originals, no dict or list."""
    copied = StoredGroup(())
    copied.extend(_copy_rollout(state) for state in group)
    copied.steps = group.steps
    return copied


_read_fields = attrgetter(*ROLLOUT_FIELDS)
# The values need no second conversion, and a batch is copied while others wait.
_FIELD_WRITERS = tuple(slot.__set__ for slot in ROLLOUT_SLOTS.values())


def _copy_rollout(state: RolloutState) -> RolloutState:
    copied = RolloutState.__new__(RolloutState)
    for write, value in zip(_FIELD_WRITERS, _read_fields(state), strict=True):
        write(copied, _copy_containers(value) if type(value) in (dict, list) else value)
    return copied


def _copy_containers(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    if type(value) is list:
        return [_copy_containers(item) for item in value]
    return value
