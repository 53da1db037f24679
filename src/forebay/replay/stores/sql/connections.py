"""The connections of a SQL store to PostgreSQL: when a server counts as lost, and how to let go of it.

::

    partition --TCP: no answer to keep-alives, or to data--> the call fails (`LINK`)
    a server that works on one statement for too long --it ends the statement itself (`STATEMENT_S`)
    a server that is frozen, says nothing --silent_s > SILENT_S--> cut: the call fails

A thread that waits in the driver cannot be cancelled; it goes on when its connection is shut down under it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

SILENT_S = 60.0
"""A statement takes milliseconds; a server that is silent for so long is taken for lost."""
STATEMENT_S = 50.0
"""The server gives up earlier than the client, so that a live one says what was wrong."""
LINK = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
"""Of libpq, in seconds, the last one in milliseconds: a partition is noticed after 25 s."""


def postgres_engine(url: sa.URL) -> sa.Engine:
    """An engine whose connections notice that the server is gone; what `url` says of that stands."""
    engine = sa.create_engine(
        url, connect_args={name: value for name, value in LINK.items() if name not in url.query}
    )
    if "statement_timeout" not in str(url.query.get("options", "")):
        event.listen(engine, "connect", _limit_statements)
    return engine


def _limit_statements(connection: Any, _: object) -> None:
    connection.execute(f"SET statement_timeout = {1000 * int(STATEMENT_S)}")
    connection.commit()


class Links:
    """Which thread is using which connection, and since when the server has said nothing to it.

    >>> links = Links(engine)
    >>> links.silent_s(thread.ident)      # since its last statement was answered
    >>> links.cut(thread.ident)           # its call fails now
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._used: dict[int, Any] = {}
        self._heard_s: dict[int, float] = {}
        event.listen(engine, "checkout", self._note_use)
        event.listen(engine, "checkin", self._note_return)
        event.listen(engine, "after_cursor_execute", self._note_answer)

    def begin(self) -> None:
        """This thread begins a call."""
        self._heard_s[threading.get_ident()] = time.monotonic()

    def silent_s(self, thread: int | None) -> float:
        """Seconds since the thread began its call, or had its last answer."""
        return time.monotonic() - self._heard_s.get(thread or 0, time.monotonic())

    def cut(self, thread: int | None) -> None:
        """Shut down the connection that the thread uses; a thread that is connecting has its own limit."""
        connection = self._used.get(thread or 0)
        if connection is None:
            return
        # It may have come back just now, or have been shut down already.
        with suppress(OSError, sa.exc.SQLAlchemyError, connection.OperationalError):
            descriptor = os.dup(connection.fileno())
            with socket.socket(fileno=descriptor) as link:
                link.shutdown(socket.SHUT_RDWR)

    def _note_use(self, connection: Any, *_: object) -> None:
        self._used[threading.get_ident()] = connection

    def _note_return(self, *_: object) -> None:
        self._used.pop(threading.get_ident(), None)

    def _note_answer(self, *_: object) -> None:
        self._heard_s[threading.get_ident()] = time.monotonic()
