"""Does the recorded operations of a replay buffer again, on another, and checks that the same comes out.

::

    put           the group as it was given      commit, restore, priorities
    get, take     the same groups come out, refresh: as many expire -- else ValueError
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from forebay.replay import ReplayBuffer
from forebay.runs.record.observers import Groups, name_groups
from forebay.runs.record.reader import Event
from forebay.types import RolloutState, Status

_EXPLANATION = "the record was changed, or this version of the buffer works otherwise"

_NUM_NAMED = 4
"""Group ids that a message names."""


class Operations:
    """A buffer to which happens what happened to the recorded one.

    Invariant: after every event its content, order and counters are what those of the recorded buffer were.

    >>> operations = Operations(build_buffer(config))
    >>> for event in read_events(segment):
    ...     await operations.execute(event)
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self._taken: dict[int, Groups] = {}
        """The batch taken last, by its train step."""

    async def execute(self, event: Event) -> None:
        """Do again what the event says, if it is one of the buffer's; the others are there to be read.

        Raises:
            ValueError: the buffer does not do what it did.
        """
        execute = self._operations.get(event.facts["event"])
        if execute is None:
            return
        try:
            await execute(self, event)
        except KeyError as error:
            raise ValueError(f"event {event.facts['number']} is damaged: it lacks {error}") from error

    def batch(self, train_step: int, group_ids: list[Any]) -> Groups:
        """The groups that the trainer was given, in its order, out of those taken for the step.

        Raises:
            ValueError: some of them were not taken.
        """
        taken: defaultdict[Any, deque[list[RolloutState]]] = defaultdict(deque)
        for group in self._taken.pop(train_step, []):
            taken[group[0].group_id].append(group)
        groups = [taken[name].popleft() if taken[name] else None for name in group_ids]
        if missing := [name for name, group in zip(group_ids, groups, strict=True) if group is None]:
            raise ValueError(
                f"train step {train_step} was trained on groups that were not taken for it: {_some(missing)}"
            )
        return [group for group in groups if group is not None]

    async def _put(self, event: Event) -> None:
        facts, group = event
        assert group is not None
        await self.buffer.put(
            group,
            facts["task"],
            model_step=facts.get("model_step"),
            current_train_step=facts.get("train_step"),
            stale_threshold=facts.get("threshold"),
            tags=facts.get("tags"),
            priority=facts.get("priority"),
        )

    async def _get(self, event: Event) -> None:
        facts = event.facts
        groups = await self.buffer.get(
            facts["count"], facts["task"], Status(facts["status"]), tags=facts.get("tags")
        )
        what = f"event {facts['number']}: {facts['count']} {facts['status']} groups of task {facts['task']!r}"
        _require_equal(what, facts["groups"], name_groups(groups))

    async def _take(self, event: Event) -> None:
        facts = event.facts
        train_step = facts.get("train_step")
        groups, _ = await self.buffer.take_batch(
            facts["sizes"], group_status=Status(facts["status"]), train_step=train_step
        )
        for task, part in groups.items():
            what = f"train step {train_step} (event {facts['number']}), task {task!r}"
            _require_equal(what, facts["taken"][task], name_groups(part))
        if train_step is not None:
            self._taken = {train_step: [group for part in groups.values() for group in part]}

    async def _commit(self, event: Event) -> None:
        await self.buffer.commit(event.facts["train_step"])

    async def _restore(self, event: Event) -> None:
        await self.buffer.restore(event.facts["train_step"])

    async def _refresh(self, event: Event) -> None:
        facts = event.facts
        statuses = facts.get("statuses")
        expired = await self.buffer.refresh_staleness(
            facts["thresholds"],
            facts["train_step"],
            None if statuses is None else [Status(status) for status in statuses],
        )
        if expired != facts["expired"]:
            raise ValueError(
                f"event {facts['number']}, refresh at train step {facts['train_step']}: recorded as expired "
                f"{facts['expired']}, now {expired}; {_EXPLANATION}"
            )

    async def _priorities(self, event: Event) -> None:
        facts = event.facts
        await self.buffer.update_priorities(
            dict(facts["priorities"]), by=facts["by"], task_name=facts.get("task")
        )

    _operations: Mapping[str, Callable[[Operations, Event], Any]] = {
        "put": _put,
        "get": _get,
        "take": _take,
        "commit": _commit,
        "restore": _restore,
        "refresh": _refresh,
        "priorities": _priorities,
    }


def _require_equal(what: str, recorded: list[Any], replayed: list[Any]) -> None:
    if recorded == replayed:
        return
    place = next(
        (i for i, pair in enumerate(zip(recorded, replayed, strict=False)) if pair[0] != pair[1]),
        min(len(recorded), len(replayed)),
    )
    raise ValueError(
        f"{what}: the buffer hands out other groups than recorded, from place {place} of {len(recorded)} on: "
        f"recorded {_some(recorded[place:])}; now {_some(replayed[place:])}; {_EXPLANATION}"
    )


def _some(group_ids: list[Any]) -> str:
    named = ", ".join(str(name) for name in group_ids[:_NUM_NAMED]) or "none"
    return f"{named} and {len(group_ids) - _NUM_NAMED} more" if len(group_ids) > _NUM_NAMED else named
