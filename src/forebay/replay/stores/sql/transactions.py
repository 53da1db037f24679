"""How a SQL store begins its transactions: to read one moment, or to write, fenced off if it lost its claim.

::

    claim ------> a new owner in the database
    writing ----> (its turn) -> is this store, which has claimed it, the owner still? -> changes -> commit
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from forebay.replay.stores.errors import OwnerLost
from forebay.replay.stores.sql.schema import insert_or_update, meta
from forebay.replay.stores.sql.write_lock import turns_of


class JsonCodec:
    """Payloads that are JSON values; what a SQL store uses until it is handed another codec.

    >>> JsonCodec().decode(JsonCodec().encode({"prompt": [1, 2]}))
    {'prompt': [1, 2]}
    """

    def encode(self, payload: Any) -> bytes:
        """The payload as JSON; ValueError if it is none."""
        try:
            return json.dumps(payload).encode()
        except TypeError as error:
            raise ValueError(f"the payload is no JSON value ({error}); give the store a codec") from None

    def decode(self, data: bytes) -> Any:
        """The payload; ValueError if the bytes are no JSON."""
        try:
            return json.loads(data)
        except ValueError:
            raise ValueError(
                f"the payload is no JSON, it starts with {data[:8]!r}; open the store with the codec that "
                f"wrote it"
            ) from None

    def status(self, value: str) -> str:
        """The value."""
        return value


class Transactions:
    """Transactions of one store; any thread may begin one.

    >>> with Transactions(engine).writing() as connection: ...
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._my_turn = turns_of(engine.url)
        self._owner: str | None = None

    def claim(self) -> None:
        """See `StorageBackend.claim`."""
        owner = secrets.token_hex(16)
        with self.writing(is_fenced=False) as connection:
            insert_or_update(connection, meta, [{"name": "owner", "value": owner}], "value")
        self._owner = owner

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A transaction that sees one moment of the database."""
        with self._engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    @contextmanager
    def writing(self, *, is_fenced: bool = True) -> Iterator[sa.Connection]:
        """A transaction that is committed at the end, or rolled back by an error.

        Raises:
            OwnerLost: this store has claimed the content, and another one has done so since.
        """
        with (
            self._my_turn(),
            self._engine.connect().execution_options(forebay_write=True) as connection,
            connection.begin(),
        ):
            if is_fenced and self._owner is not None:
                # Locked, so that a claim waits for this transaction, or is seen by it.
                owner = sa.select(meta.c.value).where(meta.c.name == "owner").with_for_update(read=True)
                if connection.scalar(owner) != self._owner:
                    raise OwnerLost(
                        "another process owns the database of the replay buffer by now, and this one must "
                        "not change it any more; end this process"
                    )
            yield connection
