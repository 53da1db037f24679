"""Says when a task goes hungry: it gets no share of the batches, or holds up everybody else's.

Both are legal (a small weight, a slow task) and neither ends by itself, so somebody should look.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import TracebackType

logger = logging.getLogger(__name__)

HUNGRY_BATCHES = 20
"""Batches in a row without a group of the task: with fewer, small weights take their turns."""
HELD_UP_S = 60.0
"""How long a batch waits for some tasks while others are ready, before it is said; then twice as long."""
MAX_WARNINGS = 10
"""By then it has waited for most of a day, and has been told often enough."""


class StarvationAlarm:
    """Counts, per task, the batches since its last share, and warns.

    >>> alarm = StarvationAlarm({"math": 1.0, "code": 0.01})
    >>> for step in range(1, 21):
    ...     alarm.count_batch({"math": 16, "code": 0}, step)      # the 20th call warns of "code"
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)
        self._hungry = dict.fromkeys(weights, 0)

    def count_batch(self, sizes: Mapping[str, int], train_step: int) -> None:
        """Enter how the batch of `train_step` is shared."""
        for name, weight in self.weights.items():
            self._hungry[name] = self._hungry[name] + 1 if sizes.get(name, 0) == 0 and weight > 0 else 0
            if self._hungry[name] and self._hungry[name] % HUNGRY_BATCHES == 0:
                logger.warning(
                    "task %s (weight %g) had no share of the last %d batches; train step %d is shared as "
                    "%s: raise its weight or the batch size",
                    name,
                    weight,
                    self._hungry[name],
                    train_step,
                    dict(sizes),
                )


class HeldUpBatch:
    """``with HeldUpBatch(...) as held_up:`` warns, while inside, of tasks that hold up the others.

    Set ``ready`` to the COMPLETED groups of each task whenever they are counted.

    waits for: the clock; woken by: one timer; produces: log lines, at `HELD_UP_S` and its doubles. A batch of
    a single task waits for nobody else, and has no timer.
    """

    def __init__(self, sizes: Mapping[str, int], train_step: int) -> None:
        self._sizes = {name: size for name, size in sizes.items() if size > 0}
        self._train_step = train_step
        self._waited_s = 0.0
        self._num_warnings = 0
        self._timer: asyncio.TimerHandle | None = None
        self.ready: Mapping[str, int] = {}

    def __enter__(self) -> HeldUpBatch:
        if len(self._sizes) > 1:
            self._set_timer(HELD_UP_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, after_s: float) -> None:
        self._waited_s += after_s
        self._timer = asyncio.get_running_loop().call_later(after_s, self._warn)

    def _warn(self) -> None:
        counts = {name: f"{self.ready.get(name, 0)} of {size}" for name, size in self._sizes.items()}
        lacking = [name for name, size in self._sizes.items() if self.ready.get(name, 0) < size]
        if len(lacking) < len(counts):
            logger.warning(
                "the batch of train step %d has waited %.0f s for %s while others are ready: %s",
                self._train_step,
                self._waited_s,
                ", ".join(lacking),
                counts,
            )
        self._num_warnings += 1
        if self._num_warnings < MAX_WARNINGS:
            self._set_timer(self._waited_s)
