"""Ends production that only spins: too many failures, nothing but aborts, or almost nothing accepted."""

from __future__ import annotations

from collections import Counter

from forebay.types import RolloutState, Status

MAX_FAILED_PER_GROUP = 2
"""Failed groups allowed per group asked for, before production gives up: more is a fault, not bad luck."""
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
        self._last_error: str | None = None

    def count(self, status: Status, group: list[RolloutState]) -> None:
        """Enter that a group ended with `status`."""
        self._outcomes[status] += 1
        if status is Status.FAILED:
            self._last_error = next((state.error_msg for state in group if state.error_msg), self._last_error)

    def reset(self) -> None:
        """The batch is there; the next one has a budget of its own."""
        self._outcomes.clear()

    def check(self, task_name: str, *, train_step: int, batch_size: int) -> None:
        """Raise if going on makes no sense.

        Raises:
            ProductionError: too many groups failed or were aborted, or almost none was accepted.
        """
        size, outcomes = max(1, batch_size), self._outcomes
        # A call may produce far more than its batch; that allows for more failures.
        yardstick = max(size, outcomes[Status.COMPLETED])
        allowed = max(MIN_FAILED, MAX_FAILED_PER_GROUP * yardstick)
        if outcomes[Status.FAILED] >= allowed:
            problem = f"; the last failure: {self._last_error or 'no reason given'}"
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
