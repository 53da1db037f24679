"""Copies of unfinished groups in a durable store, with which a killed run goes on.

::

    in flight --save_copies, at an interval--> a row, ARCHIVED of no train step: neither counted nor taken
    ABORTED --taken up again by the sampler------^   replaced by the next copy of the group
                                                 |   deleted once the group has ended
                                                 '--settle, after a kill--> live, ABORTED, with its tokens

A copy may outlive its group for an interval; `settle` deletes it then.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from forebay.aio.tasks import beside
from forebay.ledger import Ledger
from forebay.produce.background import TaskRunner
from forebay.produce.strategies.context import Group
from forebay.produce.strategies.rules import GROUP_TAG, book_tags, name_group
from forebay.replay import ReplayBuffer, StorageItem
from forebay.replay.arrival import Arrival, arrived_row, label_group
from forebay.replay.groups import StoredGroup, copy_group
from forebay.replay.stores.archiving import COPY_STEP
from forebay.replay.stores.contract import archive_row
from forebay.types import RolloutState, SampleParams, Status, reset_rollout_response

logger = logging.getLogger(__name__)

COPIES = {"status": Status.ARCHIVED, "train_step": COPY_STEP}
"""The query for the copies."""


def copy_unfinished(group: Sequence[RolloutState], params: SampleParams | None) -> Group:
    """The group as a pause at this moment would leave it.

    `params` are those of the task: an agent may have narrowed those of a rollout for one turn.
    """
    copied = list(copy_group(StoredGroup(group)))
    for state in copied:
        if state.status is Status.FAILED:
            reset_rollout_response(state)
        if not (state.status is Status.COMPLETED and len(state.response_ids)):
            state.status, state.sample_params = Status.ABORTED, params
    return copied


async def save_copies(buffer: ReplayBuffer, ledger: Ledger, copies: Mapping[str, Sequence[Group]]) -> None:
    """Keep these copies, by task, each in place of an earlier one of its group; delete those of ended groups.

    Others stay: their groups may be in flight, or wait ABORTED and be taken up just before a kill.
    """
    storage = buffer.storage
    rows = await storage.get(COPIES, rows_only=True)
    # Of a group that was taken up again the later copy, which the sampler has left.
    kept = {_name(row): row.uid for row in rows}
    copied: list[StorageItem] = []
    for task, groups in copies.items():
        step = await storage.get_train_step(task)
        for group in groups:
            arrival = Arrival.of(task, {"tags": book_tags(group)})
            row = arrived_row(label_group(group, None), task, step, arrival)
            row.uid, row.status = kept.get((task, name_group(group)), -1), Status.ABORTED
            copied.append(archive_row(row, COPY_STEP))
    await storage.update([row for row in copied if row.uid >= 0])
    await storage.put_many([row for row in copied if row.uid < 0])
    names = [name for _, name in kept]
    ended = {f"tags.{GROUP_TAG}": {"$in": names}, "status": {"$ne": Status.ABORTED}}
    over = {_name(row) for row in await storage.get(ended, rows_only=True)}
    lives = {name: ledger.life(name[1], name[0]) for name in kept}
    over |= {name for name, life in lives.items() if life is not None and life.place in ("trained", "dropped")}
    uids = {uid for name, uid in kept.items() if name not in over}
    await storage.delete([row.uid for row in rows if row.uid not in uids])


def _name(row: StorageItem) -> tuple[str, Any]:
    return row.task_name, row.tags[GROUP_TAG]


@contextlib.asynccontextmanager
async def copies_saved(
    buffer: ReplayBuffer, books: Callable[[], Ledger], runners: Mapping[str, TaskRunner], age_s: float | None
) -> AsyncIterator[None]:
    """A block in which no token of an unfinished group is unsaved for longer than `age_s`; None: nothing is.

    Half of it may pass until a rollout has the token, and half until it is copied.
    """
    if age_s is None:
        yield
        return
    for runner in runners.values():
        runner.sampler.leaves_copies = True

    async def save_again_and_again() -> None:
        while True:
            await asyncio.sleep(age_s / 2)
            copies: dict[str, list[Group]] = {}
            try:
                for name, runner in runners.items():
                    if getattr(runner.agent_loop, "is_whole_at_awaits", False):
                        # A sampler of the user's own need not have any.
                        params = getattr(runner.sampler, "sample_params", None)
                        groups = runner.produce_strategy.pending_groups()
                        # A group without a token loses nothing by being generated again.
                        begun = [group for group in groups if any(len(state.response_ids) for state in group)]
                        copies[name] = [copy_unfinished(group, params) for group in begun]
                await save_copies(buffer, books(), copies)
            # Whatever a store, a sampler or a strategy raises: the next put tells production of a lost store.
            except Exception:
                logger.exception("copies of unfinished groups could not be saved")

    async with beside(save_again_and_again()):
        yield
    # Deletes those of groups that have ended since. After an error they stay, for `settle`.
    await save_copies(buffer, books(), {})
