"""Training again on groups that were consumed: which may be used, how often, and how a use is undone.

::

    put ----------> uses = 0, priority by `order`; 0 for a group whose scores do not differ, if that matters
    take_batch(i) --> ARCHIVED, of train step i
    use_again(j) ---> a copy to train on; the row stays, with uses + 1, last_use = j, used_at = "... j"
    restore(S) -----> uses of steps after S are taken off again
    commit(S) ------> gone, if no step after S may use it: used up, too old, or without a signal

A use changes tags of a row and nothing else, so every store keeps it, in the same transactions and snapshots
as the rest. Training on such a group must correct for the weights that made its tokens: `logprobs` and
`response_model_steps` are those of its generation.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from forebay.config import ConfigError, StrictModel
from forebay.replay.format.packed import hand_out
from forebay.replay.query import ARCHIVED
from forebay.replay.stores.contract import StorageBackend, StorageItem, copy_row
from forebay.replay.stores.slices import change
from forebay.types import RolloutState, Status, scores_of

Order = Literal["newest", "priority", "success_rate"]


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """How often, how late and in which order consumed groups are trained on again.

    >>> Reuse(times=2, stale_threshold=9).usable("math", train_step=12)["oldest_model_step"]
    {'$gte': 3}
    """

    times: int
    """Train steps that may use a group, with the one that consumed it."""
    stale_threshold: int
    """A group of this staleness or more, in train steps, is not used."""
    share: float = 0.25
    """Part of a batch."""
    order: Order = "newest"
    compares: bool = True
    """Whether the advantage compares the scores of a group; without, groups of equal scores teach too."""

    def weigh(self, rows: Iterable[StorageItem]) -> None:
        """Give rows that are about to be stored a count of uses, and a rank."""
        for row in rows:
            row.tags = {**row.tags, "uses": 0, "last_use": 0, "used_at": ""}
            # Only finished groups are trained on, and so only those can be used again.
            row.priority *= self.rank(row.item) if row.status is Status.COMPLETED else 0.0

    def rank(self, group: Sequence[RolloutState]) -> float:
        """0 without a signal, else more for what is used sooner."""
        if not self.compares:
            return 1.0
        scores = scores_of(group)
        low, high = min(scores, default=0.0), max(scores, default=0.0)
        if not high > low:
            return 0.0
        # Of two scores, right and wrong, this is the share of right ones.
        rate = (sum(scores) / len(scores) - low) / (high - low)
        return {"newest": 1.0, "priority": high - low, "success_rate": 1 - abs(2 * rate - 1)}[self.order]

    def usable(self, task_name: str, train_step: int) -> dict[str, Any]:
        """The query for the groups of a task that `train_step` may use again."""
        return {
            "task_name": task_name,
            "status": ARCHIVED,
            "train_step": {"$lt": train_step},
            "status_before": Status.COMPLETED,
            "priority": {"$gt": 0},
            "oldest_model_step": {"$gte": train_step - self.stale_threshold},
            "tags.uses": {"$lt": self.times - 1},
            "tags.last_use": {"$lt": train_step},
        }

    def over(self, train_step: int) -> dict[str, Any]:
        """The query for those that no step after `train_step` may use, also after a restore of it."""
        return {
            "$or": [
                {"priority": {"$lte": 0}},
                {"status_before": {"$ne": Status.COMPLETED}},
                # Its staleness is not known, so `usable` never finds it.
                {"oldest_model_step": None},
                {"oldest_model_step": {"$lt": train_step + 1 - self.stale_threshold}},
                # Put by a program, or under other settings.
                {"tags.uses": {"$not_in": list(range(self.times))}},
                {"tags.uses": self.times - 1, "tags.last_use": {"$lte": train_step}},
            ]
        }

    async def use(
        self, storage: StorageBackend, task_sizes: Mapping[str, int], train_step: int
    ) -> dict[str, list[list[RolloutState]]]:
        """Note a use of up to so many groups of each task; copies of them, as stale as at the step."""
        used: dict[str, list[list[RolloutState]]] = {}
        order = "-timestamp_id" if self.order == "newest" else "-priority"
        for task, size in task_sizes.items():
            query = self.usable(task, train_step)
            rows = await storage.get(query, order=order, limit=max(size, 0))
            # Noted before they are handed out, so that none is used more often than its row says.
            await change(storage, rows, lambda row: _used_at(row, [*_uses(row), train_step]), query)
            used[task] = [hand_out(row.item, train_step, copy=True) for row in rows]
        return used

    async def undo(self, storage: StorageBackend, train_step: int) -> int:
        """Take off the uses of steps after `train_step`; return the number of groups that had some."""
        later = {"status": ARCHIVED, "tags.last_use": {"$gt": train_step}}
        rows = await storage.get(later, rows_only=True)
        return await change(
            storage, rows, lambda row: _used_at(row, [s for s in _uses(row) if s <= train_step]), later
        )


def superfluous(reuse: Reuse | None, train_step: int) -> dict[str, Any]:
    """The query for the consumed groups that a checkpoint at `train_step` makes superfluous."""
    consumed = {"status": ARCHIVED, "train_step": {"$lte": train_step}}
    return consumed if reuse is None else consumed | reuse.over(train_step)


class ReuseConfig(StrictModel):
    """Training again on groups that were trained on before, so that each generated one counts more."""

    times: int = Field(default=1, ge=1)
    """Train steps that may use a group; 1: none is used again. With 2 or more, groups whose scores do not
    differ give their places to past ones of their task, beyond ``share``; not where the
    advantage compares no scores."""
    share: float = Field(default=0.25, ge=0, lt=1)
    """Part of each task's share of a batch that past groups fill, rounded down, as far as there are any."""
    order: Order = "newest"
    """Past groups that come first: ``newest``; ``priority``: those whose scores lie furthest apart;
    ``success_rate``: those of which nearest to a half of the rollouts succeeded."""
    max_staleness: int = Field(default=4, ge=0)
    """Sync intervals that a group may wait beyond its own and still be used again; then it is forgotten."""

    def check(self, correction: str, rule: str, *, compares: bool) -> None:
        """ConfigError if the correction or staleness rule does not go with stale groups, or the order with an
        advantage that `compares` no scores of a group."""
        if self.times > 1 and not compares and self.order != "newest":
            raise ConfigError(
                f"replay.reuse.order = {self.order!r} ranks groups by how far their scores lie apart, and "
                f"train.advantage does not compare those: leave it at 'newest'"
            )
        if self.times > 1 and (correction == "none" or rule == "mask"):
            raise ConfigError(
                f"replay.reuse.times = {self.times} trains on groups of older weights: train.correction must "
                f"not be 'none', nor produce.staleness_rule 'mask'; they are {correction!r} and {rule!r}"
            )

    def build(self, sync_weights_interval: int = 1, *, compares: bool = True, weighs: bool = False) -> Reuse | None:
        """The rule for weights that are handed over so often.

        None where nothing is used again, unless it `weighs` groups for a policy that draws by their scores.
        """
        if self.times == 1 and not weighs:
            return None
        threshold = (self.max_staleness + 1) * sync_weights_interval
        given = self.model_dump(exclude={"max_staleness"}) | ({"order": "priority"} if weighs else {})
        return Reuse(**given, stale_threshold=threshold, compares=compares)


def _uses(row: StorageItem) -> list[int]:
    """The train steps that used it again."""
    return list(map(int, str(row.tags["used_at"]).split()))


def _used_at(row: StorageItem, steps: Sequence[int]) -> StorageItem:
    noted = {"uses": len(steps), "last_use": max(steps, default=0), "used_at": " ".join(map(str, steps))}
    return copy_row(row, item=None, tags={**row.tags, **noted})
