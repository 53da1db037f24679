"""Ends production that only spins: too many failures, nothing but aborts, or almost nothing accepted."""

from __future__ import annotations

from collections import Counter

from forebay.produce.strategies.rules import GroupRules
from forebay.types import FAILED_AT_KEY, RolloutState, Status

MAX_FAILED_PER_GROUP = 2
"""Failed groups allowed per group asked for, before production gives up: more is a fault, not bad luck. A run
file may set the number itself."""
MIN_FAILED = 8
"""Small batches may have a few failures in a row before that says anything."""
MAX_STARTED_PER_GROUP = 64
"""Groups started per group asked for. With fewer than 1 in 64 accepted, the task is far too hard, far too
easy, or the validity function is wrong; waiting longer would look like a hang."""


class ProductionError(RuntimeError):
    """Production cannot go on; the message states the counters and the last reason."""


class ProductionBudget:
    """Counts how groups ended while a batch was produced, and says when going on makes no sense.

    >>> budget = ProductionBudget()
    >>> budget.count(Status.FAILED, group)
    >>> budget.check("math", train_step=3, batch_size=16)
    """

    def __init__(self) -> None:
        self._outcomes: Counter[Status] = Counter()
        self._first_error: str | None = None

    def count(self, status: Status, group: list[RolloutState]) -> None:
        """Enter that a group ended with `status`."""
        self._outcomes[status] += 1
        if status is Status.FAILED:
            failed = next((state for state in group if state.error_msg), None)
            # The first: what comes later may be what it has led to.
            if failed is not None and self._first_error is None:
                place = failed.extra_fields.get(FAILED_AT_KEY)
                self._first_error = f"{failed.error_msg}{f' ({place})' if place else ''}"

    def reset(self) -> None:
        """The batch is there; the next one has a budget of its own."""
        self._outcomes.clear()
        self._first_error = None

    def check(
        self, task_name: str, *, train_step: int, batch_size: int, rules: GroupRules | None = None
    ) -> None:
        """Raise if going on makes no sense; a run's `rules` may say how many groups may fail.

        Raises:
            ProductionError: too many groups failed or were aborted, or almost none was accepted.
        """
        size, outcomes = max(1, batch_size), self._outcomes
        # A call may produce far more than its batch; that allows for more failures.
        yardstick = max(size, outcomes[Status.COMPLETED])
        allowed = max(MIN_FAILED, MAX_FAILED_PER_GROUP * yardstick)
        limit = None if rules is None else rules.max_failed_groups
        if outcomes[Status.FAILED] >= (allowed if limit is None else limit + 1):
            problem = f"; the first failure: {self._first_error or 'no reason given'}"
            if rules is not None:
                problem += (
                    f". Either mend what fails, or let more groups be replaced: set "
                    f"produce.max_failed_groups, now {allowed - 1 if limit is None else limit}. A group goes "
                    f"on without its failed rollouts if {rules.min_members} remain "
                    f"(produce.min_members = {rules.min_members})"
                )
        elif outcomes[Status.ABORTED] >= allowed and not outcomes[Status.COMPLETED]:
            problem = "; the engine aborts everything: is it paused or closed?"
        elif outcomes.total() >= MAX_STARTED_PER_GROUP * yardstick:
            problem = (
                "; if they were filtered, nearly all prompts are too hard or too easy for the model: use "
                "other prompts, more rollouts per prompt, or no filter"
            )
        else:
            return
        counts = ", ".join(f"{count} {status.value}" for status, count in outcomes.items() if count)
        raise ProductionError(
            f"task {task_name!r}, train step {train_step}: {counts} groups, {size} are needed{problem}"
        )
