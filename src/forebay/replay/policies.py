"""Which groups are taken next: policies rank the rows of a store, they never look at payloads.

::

    get(count, query, store): store.take_first(count, query, order)   -> payloads
                          or: store.take_drawn(count, query, random)  -> payloads

A policy keeps no copy of the content, so nothing has to be told to it when rows expire, are evicted or come
back. It may have a state of its own (`PrioritizedReplayPolicy` has its random numbers), which is saved with
the buffer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from forebay.config import ConfigError, errors_about, look_up
from forebay.replay.query import QueryLike
from forebay.replay.stores.archiving import taking
from forebay.replay.stores.contract import ARRIVAL, STALEST, StorageBackend, StorageItem


class ReplayPolicy:
    """Chooses which groups are taken: the first in its `order`, or what `get` of a subclass removes.

    >>> class NewestFirst(ReplayPolicy):
    ...     order = "-timestamp_id"
    """

    order: ClassVar[str] = ARRIVAL
    """Which groups are taken first, as `StorageBackend.get` takes it."""

    async def put(self, item: StorageItem, storage_backend: StorageBackend) -> None:
        """Store `item`, whose group is not empty."""
        await storage_backend.put(item)

    async def put_many(
        self,
        items: Sequence[StorageItem],
        storage_backend: StorageBackend,
        *,
        receipt: bytes | None = None,
        aged_at: int | None = None,
    ) -> None:
        """Store `items`, all of them or none; see `StorageBackend.put_many`.

        For a policy that has a `put` of its own one by one; if one fails, those before it are taken out.
        """
        if type(self).put is not ReplayPolicy.put:
            async with taking(storage_backend, None) as view:
                for item in items:
                    await self.put(item, cast(StorageBackend, view))
            # They are stored; only the receipt is left.
            items = ()
        if items or receipt is not None:
            # Other stores need not know the keyword.
            aged = {"aged_at": aged_at} if storage_backend.is_shared else {}
            await storage_backend.put_many(items, receipt=receipt, **aged)

    async def get(self, count: int, query: QueryLike, storage_backend: StorageBackend) -> list[Any]:
        """Remove and return up to `count` groups that match, best first; fewer only if there are fewer.

        An override removes what it returns through the store's `take`, `take_first` or `take_drawn`.
        """
        return await take_ranked(count, query, storage_backend, order=self.order)

    async def count(self, query: QueryLike, storage_backend: StorageBackend) -> int:
        """How many groups match."""
        return await storage_backend.count(query)

    def state_dict(self) -> dict[str, Any]:
        """The policy's part of a snapshot, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: `state` is not of this policy.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state to load, got {sorted(state)}")


async def take_ranked(count: int, query: QueryLike, storage_backend: StorageBackend, *, order: str) -> list[Any]:
    """Take the first `count` matching groups in `order`."""
    return [item.item for item in await storage_backend.take_first(count, query, order=order)]


class FIFOReplayPolicy(ReplayPolicy):
    """Takes groups in the order in which they arrived."""


class StalenessReplayPolicy(ReplayPolicy):
    """Most stale first, ties in order of arrival, so that nothing expires unused."""

    order = STALEST


class PrioritizedReplayPolicy(ReplayPolicy):
    """Draws groups without replacement with probability proportional to their priority.

    The same seed and the same sequence of calls draw the same groups, on every store; for the limits of
    floating point see `SumTree`. A priority of 0 is drawn only when nothing else is left. A draw is the
    store's work (`StorageBackend.take_drawn`): O(log n) of a task and a status on `IndexedStorage`.

    >>> from forebay.replay import ReplayBuffer
    >>> ReplayBuffer(PrioritizedReplayPolicy(seed=7)).version
    0
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))

    async def get(self, count: int, query: QueryLike, storage_backend: StorageBackend) -> list[Any]:
        """Draw up to `count` groups that match."""
        taken = await storage_backend.take_drawn(count, query, self._random.random)
        return [item.item for item in taken]

    def state_dict(self) -> dict[str, Any]:
        """The state of the random numbers."""
        return {"random": self._random.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of the random numbers; ValueError if it is damaged."""
        # Into a new one: a damaged state must leave the one in use as it was.
        fresh = np.random.PCG64()
        try:
            fresh.state = state["random"]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"the state of the random numbers is damaged: {error!r}") from None
        self._random = np.random.Generator(fresh)


POLICIES: dict[str, type[ReplayPolicy]] = {
    "fifo": FIFOReplayPolicy,
    "staleness": StalenessReplayPolicy,
    "prioritized": PrioritizedReplayPolicy,
}


def find_policy(name: str, *, seed: int = 0) -> ReplayPolicy:
    """A new policy of that name, with `seed` if it draws, or of that ``package.module:Class``.

    Raises:
        ConfigError: there is no such policy, or it is something else.
    """
    found = look_up("replay.policy", name, POLICIES)
    if found is PrioritizedReplayPolicy:
        return PrioritizedReplayPolicy(seed=seed)
    with errors_about(f"replay.policy {name!r} is made without arguments", TypeError):
        made = found()
    if not isinstance(made, ReplayPolicy):
        raise ConfigError(f"replay.policy {name!r} is no ReplayPolicy; derive its class from that")
    return made
