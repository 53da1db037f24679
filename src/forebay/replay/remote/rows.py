"""The rows of a buffer in another process: what `RemoteReplayBuffer.storage` answers.

::

    count(query), get(query, rows_only=True) --> one call --> the store of the server

It is no store: it changes nothing and moves no payload.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from forebay.replay.remote import messages
from forebay.replay.stores.contract import StorageItem
from forebay.types import Status

Ask = Callable[[str, messages.RowsArguments], Awaitable[Any]]


class RemoteRows:
    """Looks at the rows of a server's buffer.

    >>> await buffer.storage.count({"task_name": "math", "staleness": {"$gte": 2}})
    12
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def count(self, query: Mapping[str, Any]) -> int:
        """See `StorageBackend.count`; the query is a dict.

        Raises:
            ValueError: the query is not one.
        """
        return int(await self._ask("count_rows", messages.RowsArguments(dict(query))))

    async def get(
        self,
        query: Mapping[str, Any],
        *,
        order: str | None = None,
        limit: int | None = None,
        rows_only: bool = False,
    ) -> list[StorageItem]:
        """See `StorageBackend.get`; only for ``rows_only=True``.

        Raises:
            ValueError: payloads are asked for, or the query or the order is not one.
        """
        if not rows_only:
            raise ValueError("a remote store shows its rows only; give rows_only=True, or take the groups")
        found = await self._ask("get_rows", messages.RowsArguments(dict(query), order, limit))
        rows = []
        for values in found:
            row = StorageItem(None, **dict(zip(messages.ROW_FIELDS, values, strict=True)))
            row.status = Status(row.status)
            row.status_before = None if row.status_before is None else Status(row.status_before)
            rows.append(row)
        return rows
