"""Which groups are taken next: policies rank the rows of a store, they never look at payloads.

::

    get(count, query, store): store.take_first(count, query, order) -> payloads
                              or: store.get(query, rows_only) -> draw -> store.take -> payloads

A policy keeps no copy of the content, so nothing has to be told to it when rows expire, are evicted or come
back. It may have a state of its own (`PrioritizedReplayPolicy` has its random numbers), which is saved with
the buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from forebay.replay.query import QueryLike
from forebay.replay.storage import ARRIVAL, STALEST, StorageBackend, StorageItem


class ReplayPolicy(ABC):
    """Chooses what is taken. Subclasses write `get`; it removes what it returns through the store's `take`.

    >>> class NewestFirst(ReplayPolicy):
    ...     async def get(self, count, query, storage_backend):
    ...         return await take_ranked(count, query, storage_backend, order="-timestamp_id")
    """

    async def put(self, item: StorageItem, storage_backend: StorageBackend) -> None:
        """Store `item`."""
        await storage_backend.put(item)

    @abstractmethod
    async def get(self, count: int, query: QueryLike, storage_backend: StorageBackend) -> list[Any]:
        """Remove and return up to `count` groups that match, best first; fewer only if there are fewer."""

    async def count(self, query: QueryLike, storage_backend: StorageBackend) -> int:
        """How many groups match."""
        return await storage_backend.count(query)

    def state_dict(self) -> dict[str, Any]:
        """What a snapshot keeps of the policy, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: `state` is not of this policy.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state to load, got {sorted(state)}")


async def take_ranked(
    count: int, query: QueryLike, storage_backend: StorageBackend, *, order: str
) -> list[Any]:
    """Take the first `count` matching groups in `order`."""
    taken = await storage_backend.take_first(count, query, order=order)
    return [item.item for item in taken]


class FIFOReplayPolicy(ReplayPolicy):
    """In order of arrival.

    >>> groups = await FIFOReplayPolicy().get(8, {"status": "completed"}, store)
    """

    async def get(self, count: int, query: QueryLike, storage_backend: StorageBackend) -> list[Any]:
        """See `ReplayPolicy.get`."""
        return await take_ranked(count, query, storage_backend, order=ARRIVAL)


class StalenessReplayPolicy(ReplayPolicy):
    """Most stale first, ties in order of arrival, so that nothing expires unused.

    >>> groups = await StalenessReplayPolicy().get(8, {"status": "completed"}, store)
    """

    async def get(self, count: int, query: QueryLike, storage_backend: StorageBackend) -> list[Any]:
        """See `ReplayPolicy.get`."""
        return await take_ranked(count, query, storage_backend, order=STALEST)


class PrioritizedReplayPolicy(ReplayPolicy):
    """Draws groups without replacement with probability proportional to their priority.

    The same seed and the same sequence of calls draw the same groups. A priority of 0 is drawn only when
    nothing else is left. The draw reads all matching rows (their priorities, no payloads).

    >>> policy = PrioritizedReplayPolicy(seed=7)
    >>> groups = await policy.get(8, {"status": "completed"}, store)
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))

    async def get(self, count: int, query: QueryLike, storage_backend: StorageBackend) -> list[Any]:
        """See `ReplayPolicy.get`."""
        taken: list[StorageItem] = []
        while len(taken) < count:
            rows = await storage_backend.get(query, rows_only=True)
            if not rows:
                break
            ranks = self._draw([row.priority for row in rows], count - len(taken))
            taken += await storage_backend.take([rows[i].uid for i in ranks], query=query)
        return [item.item for item in taken]

    def state_dict(self) -> dict[str, Any]:
        """The state of the random numbers."""
        return {"random": self._random.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ReplayPolicy.load_state_dict`."""
        self._random.bit_generator.state = state["random"]

    def _draw(self, priorities: list[float], count: int) -> list[int]:
        """Positions of a weighted draw without replacement, in the order drawn.

        Each item waits an exponential time with its priority as rate, and the first `count` to arrive are
        drawn: the sequence of arrivals is that of drawing one after another (Efraimidis and Spirakis,
        "Weighted random sampling with a reservoir", 2006, in logarithmic form).
        """
        weights = np.asarray(priorities, np.float64)
        waits = np.full(len(weights), np.inf)
        np.divide(self._random.standard_exponential(len(weights)), weights, out=waits, where=weights > 0)
        return [int(i) for i in np.argsort(waits, kind="stable")[:count]]
