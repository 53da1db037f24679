"""Connections to PostgreSQL that notice when the server is lost, and can be given up.

::

    partition --TCP: no answer to keep-alives, or to data--> the call fails (`LINK`)
    a server that works on one statement for too long --it ends the statement itself (`STATEMENT_S`)
    a server that is frozen --no byte for `SILENT_S`--> the call fails
    a caller that was cancelled --`worker.is_cut`--> the call fails

Without this, a thread that waits in the driver waits for ever.
"""

from collections.abc import Generator
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy import event

from forebay.replay.stores.sql.worker import is_cut

SILENT_S = 60.0
"""A statement takes milliseconds; a server that is silent for so long is taken for lost."""
WAKE_S = 0.1
"""psycopg's own interval: it looks for a Ctrl-C ten times a second."""
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
    """An engine of `PatientConnection`s; limits that `url` names stand."""
    engine = sa.create_engine(url, connect_args={name: value for name, value in LINK.items() if name not in url.query})

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, arguments: Any, options: Any) -> PatientConnection:
        connection = PatientConnection.connect(*arguments, **options)
        if "statement_timeout" not in str(url.query.get("options", "")):
            connection.execute(f"SET statement_timeout = {1000 * int(STATEMENT_S)}")
            # A rollback would undo it as long as it is not committed.
            connection.commit()
        return connection

    return engine


class PatientConnection(psycopg.Connection[Any]):
    """A connection whose waits end: when the server is silent for too long, or the thread's job is cut."""

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """As psycopg's, which wakes `gen` every `WAKE_S`, also if there is nothing to read."""
        return super().wait(self._while_heard(gen, int(SILENT_S / WAKE_S)), *arguments, **options)

    def _while_heard(self, steps: Any, most_silent: int) -> Generator[Any, Any, Any]:
        send, num_silent, ready = steps.send, 0, None
        while True:
            try:
                wanted = send(ready)
            except StopIteration as end:
                return end.value
            ready = yield wanted
            if ready:
                num_silent = 0
                continue
            num_silent += 1
            if is_cut() or num_silent > most_silent:
                # Closed, so that the pool does not use it again; a late answer would be read as another's.
                self.pgconn.finish()
                raise psycopg.OperationalError("the server does not answer, the connection was given up")
