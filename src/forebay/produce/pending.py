"""The groups that are being generated right now.

::

    start(group) -> a task -> done callback -> finished queue -> next_finished() -> stored -> remove()
                       |
                       cancel(): every task ended, every group that was not removed handed back

A finished group stays pending until whoever took it has stored it, so that no interruption loses it. Taking
one costs the same however many are in flight: each task announces itself when it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from forebay.types import RolloutState, Status, reset_rollout_response

Group = list[RolloutState]
GenerateGroup = Callable[[Group], Awaitable[Group]]
Generation = asyncio.Task[Group]


class PendingGroups:
    """In-flight groups of one task; none is handed out twice and none is lost.

    consumes: groups to generate; waits for: any generation to end; woken by: task done callbacks;
    produces: finished groups, in the order in which they finished.
    """

    def __init__(self) -> None:
        self._groups: dict[Generation, Group] = {}
        self._finished: asyncio.Queue[Generation] = asyncio.Queue()

    def __len__(self) -> int:
        return len(self._groups)

    def start(self, group: Group, generate: GenerateGroup) -> None:
        """Generate `group` in the background."""

        async def run() -> Group:
            return await generate(group)

        task = asyncio.create_task(run(), name=f"generate {group[0].group_id}")
        self._groups[task] = group
        task.add_done_callback(self._finished.put_nowait)

    async def next_finished(self) -> tuple[Generation, Group]:
        """The next generation that ended, and its group; waits for one. It stays pending until `remove`.

        Raises:
            Whatever escaped from the generation.
        """
        assert self._groups, "nothing is in flight: waiting would never end"
        while (task := await self._finished.get()) not in self._groups:
            pass  # handed back by `cancel` meanwhile
        if task.cancelled():
            return task, _failed(self._groups[task], "the generation was cancelled from within")
        return task, task.result()

    def remove(self, generation: Generation) -> None:
        """The group of `generation` is stored: nothing here has to remember it."""
        del self._groups[generation]

    async def cancel(self) -> tuple[list[Group], list[Group]]:
        """End everything; (finished groups, interrupted groups) that were not removed.

        An interrupted group goes back to its prompt, ABORTED: it is generated again, not lost.
        """
        claimed, self._groups = self._groups, {}
        for task in claimed:
            task.cancel()
        results = await asyncio.gather(*claimed, return_exceptions=True)
        finished = [result for result in results if isinstance(result, list)]
        interrupted = [
            _aborted(group)
            for group, result in zip(claimed.values(), results, strict=True)
            if not isinstance(result, list)
        ]
        return finished, interrupted


def _aborted(group: Group) -> Group:
    for state in group:
        reset_rollout_response(state)
        state.status = Status.ABORTED
    return group


def _failed(group: Group, reason: str) -> Group:
    for state in group:
        reset_rollout_response(state)
        state.status = Status.FAILED
        state.error_msg = reason
    return group
