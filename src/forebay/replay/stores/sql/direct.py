"""Statements run past SQLAlchemy, on Python's driver of SQLite.

SQLite needs some microseconds for a small statement, and SQLAlchemy ten times as long to hand it over. Here
it compiles each once, for the names of its values.
"""

import sqlite3
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

Values = dict[str, Any]


class Direct:
    """A connection to SQLite: of SQLAlchemy's methods those that a store uses."""

    dialect = sqlite.dialect(paramstyle="named")

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._cursors: list[sqlite3.Cursor] = []

    def execute(self, statement: sa.Executable, values: Values | list[Values] | None = None) -> sqlite3.Cursor:
        """Run the statement, or run it once for each values of a list."""
        first: Values = (values[0] if isinstance(values, list) else values) or {}
        texts = _TEXTS.setdefault(statement, {})
        if (found := texts.get(names := tuple(first))) is None:
            found = texts[names] = _compile(statement, names)
        text, fixed, lists = found
        if isinstance(values, list):
            return self.exec_driver_sql(text, values)
        given = fixed | first
        for name in lists:
            listed = {f"{name}_{number}": value for number, value in enumerate(given.pop(name))}
            text = text.replace(f"__[POSTCOMPILE_{name}]", ", ".join([f":{key}" for key in listed]))
            given |= listed
        return self.exec_driver_sql(text, given)

    def scalar(self, statement: sa.Executable, values: Values | None = None) -> Any:
        """The first value of the first line; None if there is no line."""
        line = self.execute(statement, values).fetchone()
        return None if line is None else line[0]

    def exec_driver_sql(self, text: str, values: Any = ()) -> sqlite3.Cursor:
        """Run a statement's text, or run it once for each values of a list."""
        run = self._driver.executemany if isinstance(values, list) else self._driver.execute
        cursor: sqlite3.Cursor = run(text, values)
        self._cursors.append(cursor)
        return cursor

    def close(self) -> None:
        """End every statement: one that is not read to its end would keep the connection at this moment."""
        for cursor in self._cursors:
            cursor.close()


Connection = sa.Connection | Direct

_TEXTS: WeakKeyDictionary[sa.Executable, dict[tuple[str, ...], tuple[str, Values, list[str]]]] = WeakKeyDictionary()
"""For each statement and the names of its values: the text, other values, and the names of those that are lists."""


def _compile(statement: Any, names: tuple[str, ...]) -> tuple[str, Values, list[str]]:
    compiled = statement.compile(dialect=Direct.dialect, column_keys=[*names])
    binds = compiled.bind_names.items()
    fixed = {name: bound.value for bound, name in binds if not bound.required and name not in names}
    return compiled.string, fixed, [name for bound, name in binds if bound.expanding]
