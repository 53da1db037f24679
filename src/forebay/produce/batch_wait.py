"""The consumer's wait in a separate run: until the batch is there, or it is certain that it will not come.

::

    every put, every change of the producer's state --> whole?  yes --> take it
                                                          |  no, and the producer ...
           works, or is paused  (wait on) <---------------+--> has ended --> ProductionError, ConnectionLost
                                                          +--> was never started, and nobody else puts
                                                          |    groups, for a while: ProductionError
                                                          +--> has weights that are too old
                                                               newer ones exist: synchronize
                                                               none do: ProductionError

It takes nothing and starts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from forebay.produce.background import BackgroundProducer, ProductionStopped
from forebay.produce.starvation import HeldUpBatch
from forebay.produce.strategies.budget import ProductionError
from forebay.produce.tasks import TaskRunner, count_pending
from forebay.produce.waiting import relayed
from forebay.replay import ConnectionLost, ReplayBuffer
from forebay.types import Status

START_GRACE_S = 10.0
"""For a producer whose task is about to start, or for whoever fills the buffer in its place."""

Describe = Callable[[Mapping[str, int], int], Awaitable[str]]
"""Words for every counter, given the shares and the train step."""


class BatchWait:
    """Waits for batches.

    Invariant: a wait ends with the put that completes the batch, and no state in which nobody can complete it
    goes unnoticed.

    >>> ready = await BatchWait(runners, buffer, producer, describe).until_ready({"math": 16}, train_step=3)
    """

    def __init__(
        self,
        runners: Mapping[str, TaskRunner],
        replay_buffer: ReplayBuffer,
        producer: BackgroundProducer,
        describe: Describe,
    ) -> None:
        self._runners = runners
        self._buffer = replay_buffer
        self._producer = producer
        self._describe = describe

    async def until_ready(self, sizes: Mapping[str, int], train_step: int) -> bool:
        """True once the buffer has the batch; False if only newer weights, which exist, can help.

        waits for: puts, and the producer's state; woken by: both, and a timer where no producer runs;
        produces: nothing.

        Raises:
            ConnectionLost: the buffer is lost, for this process or for the producer.
            ProductionError: there will be no batch.
        """
        producer, buffer, news = self._producer, self._buffer, asyncio.Event()
        asked_at = None
        sources = (producer.changes.wait, producer.changes.version), (buffer.wait_for_change, buffer.version)
        async with relayed(news, *sources):
            with HeldUpBatch(sizes, train_step) as held_up:
                while True:
                    news.clear()
                    counts = await buffer.count_statuses(sizes, [Status.COMPLETED])
                    held_up.ready = {name: cells[Status.COMPLETED] for name, cells in counts.items()}
                    lacking = [name for name, size in sizes.items() if held_up.ready[name] < size]
                    if not lacking:
                        return True
                    if producer.is_shut_down or producer.has_ended:
                        await self._raise_end(sizes, train_step)
                    if producer.is_waiting_for_weights and asked_at != buffer.version:
                        # What it has found out may be of before the last change, or before this call.
                        asked_at = buffer.version
                        producer.reconsider()
                    elif producer.is_waiting_for_weights and not self._may_still_come(lacking):
                        await self._require_newer_weights(sizes, train_step)
                        return False
                    await self._wait_for(news, sizes, train_step)

    async def _wait_for(self, news: asyncio.Event, sizes: Mapping[str, int], train_step: int) -> None:
        if self._producer.was_started:
            await news.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_GRACE_S):
                await news.wait()
        if not news.is_set() and not self._producer.was_started:
            counters = await self._describe(sizes, train_step)
            raise ProductionError(
                f"produce_loop was never started, and nothing else has changed the buffer for "
                f"{START_GRACE_S:g} s; start it as a task before get_batch: {counters}"
            )

    def _may_still_come(self, lacking: Sequence[str]) -> bool:
        """Whether what is in flight can complete the batch: where nothing expires, old groups count."""
        return any(
            count_pending(self._runners[name]) > 0
            and getattr(self._runners[name].produce_strategy, "stale_threshold", None) is None
            for name in lacking
        )

    async def _require_newer_weights(self, sizes: Mapping[str, int], train_step: int) -> None:
        if train_step - 1 <= self._producer.model_step:
            counters = await self._describe(sizes, train_step)
            raise ProductionError(
                f"production stands still, and there are no newer weights to help it: {counters}"
            )

    async def _raise_end(self, sizes: Mapping[str, int], train_step: int) -> None:
        failure = self._producer.failure
        if isinstance(failure, ConnectionLost) and not self._producer.is_shut_down:
            raise ConnectionLost(str(failure)) from failure
        counters = await self._describe(sizes, train_step)
        if failure is not None and not self._producer.is_shut_down:
            reason = str(failure) or type(failure).__name__
            raise ProductionError(f"production has failed: {reason}; {counters}") from failure
        raise ProductionStopped(f"production was shut down; {counters}")
