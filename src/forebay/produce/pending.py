"""The groups that are being generated right now.

::

    start(group) -> a task -> done callback -> finished queue -> next_finished() claims it, once
                       |
                       cancel(): every task ended, every group that was not claimed handed back

Claiming costs the same however many are in flight: each task announces itself when it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from forebay.types import RolloutState, Status, reset_rollout_response

Group = list[RolloutState]
GenerateGroup = Callable[[Group], Awaitable[Group]]


class PendingGroups:
    """In-flight groups of one task; none is handed out twice and none is lost.

    consumes: groups to generate; waits for: any generation to end; woken by: task done callbacks;
    produces: finished groups, in the order in which they finished.
    """

    def __init__(self) -> None:
        self._groups: dict[asyncio.Task[Group], Group] = {}
        self._finished: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[Group]:
        """The groups in flight, oldest first."""
        return list(self._groups.values())

    def start(self, group: Group, generate: GenerateGroup) -> None:
        """Generate `group` in the background."""

        async def run() -> Group:
            return await generate(group)

        task = asyncio.create_task(run(), name=f"generate {group[0].group_id}")
        self._groups[task] = group
        task.add_done_callback(self._finished.put_nowait)

    async def next_finished(self) -> Group:
        """The next group whose generation ended; waits for one.

        Raises:
            Whatever escaped from the generation; the group is then no longer pending.
        """
        assert self._groups, "nothing is in flight: waiting would never end"
        while (task := await self._finished.get()) not in self._groups:
            pass  # cancelled meanwhile, its group handed back already
        del self._groups[task]
        return task.result()

    async def cancel(self) -> list[Group]:
        """End everything; return the unclaimed groups, finished ones as they are, the others ABORTED.

        An interrupted group goes back to its prompt: it is generated again, not lost.
        """
        claimed = self._groups
        self._groups = {}
        for task in claimed:
            task.cancel()
        results = await asyncio.gather(*claimed, return_exceptions=True)
        groups = []
        for group, result in zip(claimed.values(), results, strict=True):
            if isinstance(result, list):
                groups.append(result)
                continue
            for state in group:
                reset_rollout_response(state)
                state.status = Status.ABORTED
            groups.append(group)
        return groups
