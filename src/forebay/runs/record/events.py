"""The events of a record: noted while the buffer works, and repeated by a rerun.

::

    replay buffer  put (of each group), and the calls in `CALLS`, by their own names: arguments and result
    steps.fit      train        what the trainer was given
    steps.checkpoint            checkpoint

When rollouts were generated and judged, and how long it took, is in the run's history, not here.

A call of the buffer is noted when it has succeeded, before anything else can run. The stores in memory that
runs use never hand over to another task half-way through, so the order of events is the order in which they
took effect.
"""

import inspect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from forebay.config import errors_about
from forebay.replay import ReplayBuffer
from forebay.replay.arrival import PutKeywords
from forebay.replay.groups import StoredGroup, copy_group
from forebay.runs.record.journal import Event, Facts, Recorder
from forebay.types import RolloutState, Status, get_group_status

Groups = list[list[RolloutState]]

_NUM_NAMED = 4
"""Group ids that a message names."""


class BufferRerun:
    """A buffer to which happens what happened to the recorded one.

    Invariant: after every event its content, order and counters are those of the recorded buffer.
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
        facts = event.facts
        with errors_about(f"event {facts['number']} is damaged", TypeError):
            if facts["event"] == "put":
                assert event.group is not None
                await self.buffer.put(event.group, **_arguments(_PUT, facts))
            elif facts["event"] in CALLS:
                await self._repeat(getattr(self.buffer, facts["event"]), facts)

    def batch(self, train_step: int, group_ids: list[Any]) -> Groups:
        """The groups that the trainer was given, in its order, out of those taken for the step.

        Raises:
            ValueError: some of them were not taken.
        """
        taken: defaultdict[Any, deque[list[RolloutState]]] = defaultdict(deque)
        for group in self._taken.pop(train_step, []):
            taken[group[0].group_id].append(group)
        # Counted, because a group may be in a batch more than once.
        if missing := Counter(group_ids) - Counter({name: len(groups) for name, groups in taken.items()}):
            raise ValueError(
                f"train step {train_step} was trained on groups that were not taken for it: {_some(list(missing))}"
            )
        return [taken[name].popleft() for name in group_ids]

    async def _repeat(self, method: Callable[..., Any], facts: Facts) -> None:
        result = await method(**_arguments(inspect.signature(method).parameters, facts))
        _require_equal(facts, facts.get("result"), _summary(result))
        # What leaves with another status is dropped.
        if facts["event"] == "take_batch" and "train_step" in facts and "group_status" not in facts:
            self._taken = {facts["train_step"]: [group for part in result[0].values() for group in part]}
        if facts["event"] == "use_again":
            self._taken[facts["train_step"]] += [group for part in result.values() for group in part]


CALLS = ("get", "take_batch", "use_again", "commit", "restore", "refresh_staleness", "update_priorities")
"""The methods that change a buffer's content, besides `put`, whose groups are written apart."""
_PUT = ("task_name", *PutKeywords.__annotations__)
"""The other arguments of `put`."""


def observe_buffer(recorder: Recorder, buffer: ReplayBuffer) -> None:
    """Have `recorder` told of every call that changes `buffer` from now on."""
    put_groups = buffer.put_groups

    async def noted_put(groups: Iterable[Sequence[RolloutState]], task_name: str, **arrival: Any) -> None:
        # Before the put: a caller that is cancelled here has not stored anything.
        await recorder.room()
        groups = [group for group in groups if group]
        # The put labels and ages the rollouts; a rerun has to put them as they were given. A copy does not
        # need each member's oldest step, so none is looked for.
        given = [copy_group(StoredGroup.with_steps(group, ())) for group in groups]
        before = sum(buffer.num_evicted.values())
        await put_groups(groups, task_name, **arrival)
        num_evicted = sum(buffer.num_evicted.values()) - before
        facts = {name: _as_fact(name, value) for name, value in arrival.items()}
        for place, (copied, group) in enumerate(zip(given, groups, strict=True), start=1):
            recorder.note(
                "put",
                copied,
                task_name=task_name,
                group=copied[0].group_id,
                status=get_group_status(group).value,
                # By all of them together.
                evicted=num_evicted or None if place == len(given) else None,
                **facts,
            )

    # On the object itself, because `put` calls its own `put_groups`, which a wrapper would not see.
    vars(buffer)["put_groups"] = noted_put
    for name in CALLS:
        vars(buffer)[name] = _noted(recorder, name, getattr(buffer, name))


def _noted(recorder: Recorder, event: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The buffer's `method`, noted as `event` when it has succeeded."""
    signature = inspect.signature(method)

    async def noted(*args: Any, **kwargs: Any) -> Any:
        arguments = {
            name: list(value) if isinstance(value, Iterator) else value
            for name, value in signature.bind(*args, **kwargs).arguments.items()
        }
        # Before the call: its arguments may be changed while it runs.
        facts = {name: _as_fact(name, value) for name, value in arguments.items()}
        result = await method(**arguments)
        summary = _summary(result)
        # Samplers mostly ask for what is not there, which changes nothing.
        if event != "get" or summary:
            recorder.note(event, **facts, result=summary)
        return result

    return noted


def name_groups(groups: Iterable[Sequence[RolloutState]]) -> list[str | int | None]:
    """Their ids, in order."""
    return [group[0].group_id for group in groups]


def _arguments(names: Iterable[str], facts: Facts) -> dict[str, Any]:
    """The arguments of these names that the event holds; one that was None is not in it."""
    return {
        name: _DECODERS[name](facts[name]) if name in _DECODERS else facts[name] for name in names if name in facts
    }


def _as_fact(name: str, value: Any) -> Any:
    """An argument as JSON has it, copied: it is written later."""
    if isinstance(value, Status):
        return value.value
    if isinstance(value, Mapping):
        # Priorities have keys of any type, and those of a JSON object are all text.
        return [list(pair) for pair in value.items()] if name == "priorities" else dict(value)
    return [_as_fact(name, item) for item in value] if isinstance(value, list | tuple | set) else value


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "group_status": Status,
    "statuses": lambda names: [Status(name) for name in names],
    "priorities": dict,
}


def _summary(result: Any) -> Any:
    """A result as an event has it: ids in place of groups."""
    if isinstance(result, tuple):
        # Of `take_batch`: the counts follow from the groups.
        return _summary(result[0])
    if isinstance(result, dict):
        return {task: _summary(part) for task, part in result.items()}
    return name_groups(result) if isinstance(result, list) else result


def _require_equal(facts: Facts, recorded: Any, now: Any) -> None:
    if recorded == now:
        return
    where = f"event {facts['number']} ({facts['event']})"
    if "train_step" in facts:
        where = f"train step {facts['train_step']} ({where})"
    if isinstance(recorded, dict):
        task = next((task for task in now if now[task] != recorded.get(task)), "")
        where, recorded, now = f"{where}, task {task!r}", recorded.get(task), now.get(task)
    if isinstance(recorded, list):
        pairs = enumerate(zip(recorded, now, strict=False))
        place = next((i for i, (old, new) in pairs if old != new), min(len(recorded), len(now)))
        where = f"{where}, from place {place} of {len(recorded)} on"
        recorded, now = _some(recorded[place:]), _some(now[place:])
    raise ValueError(
        f"{where}: recorded {recorded}; now {now}; the record was changed, or this version of the buffer "
        f"works otherwise"
    )


def _some(group_ids: list[Any]) -> str:
    named = ", ".join(map(str, group_ids[:_NUM_NAMED])) or "none"
    return f"{named} and {len(group_ids) - _NUM_NAMED} more" if len(group_ids) > _NUM_NAMED else named
