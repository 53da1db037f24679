"""Statements of SQLAlchemy run past it, on Python's driver of SQLite.

::

    statement --compiled once, for these names of values--> text, order of its values --> cursor of `sqlite3`

SQLite needs some microseconds for a small statement, and SQLAlchemy ten times as long to hand it over.
"""

import sqlite3
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa

Values = dict[str, Any]
Bind = Callable[[Values], tuple[str, tuple[Any, ...]]]
"""The text of a statement for these values, and the values in its order."""


class Direct:
    """A connection to SQLite: of SQLAlchemy's methods those that a store uses."""

    def __init__(self, dialect: sa.Dialect, driver: sqlite3.Connection) -> None:
        self.dialect = dialect
        self._driver = driver

    def execute(self, statement: sa.Executable, values: Values | list[Values] | None = None) -> sqlite3.Cursor:
        """Run the statement, or run it once for each values of a list."""
        each = values if isinstance(values, list) else [values or {}]
        names = tuple(each[0])
        texts = _TEXTS.setdefault(statement, {})
        if (bind := texts.get(names)) is None:
            bind = texts[names] = _compile(statement, names, self.dialect)
        bound = [bind(some) for some in each]
        text, ordered = bound[0]
        return self.exec_driver_sql(text, [ordered for _, ordered in bound] if each is values else ordered)

    def scalar(self, statement: sa.Executable, values: Values | None = None) -> Any:
        """The first value of the first line; None if there is no line."""
        line = self.execute(statement, values).fetchone()
        return None if line is None else line[0]

    def exec_driver_sql(self, text: str, values: tuple[Any, ...] | list[tuple[Any, ...]] = ()) -> sqlite3.Cursor:
        """Run a statement's text, or run it once for each values of a list."""
        run = self._driver.executemany if isinstance(values, list) else self._driver.execute
        return run(text, values)


Connection = sa.Connection | Direct

_TEXTS: WeakKeyDictionary[sa.Executable, dict[tuple[str, ...], Bind]] = WeakKeyDictionary()
"""Kept as long as their statements."""


def _compile(statement: Any, names: tuple[str, ...], dialect: sa.Dialect) -> Bind:
    compiled = statement.compile(dialect=dialect, column_keys=[*names])
    text, order, parameters = compiled.string, compiled.positiontup, compiled.binds
    fixed = {name: parameters[name].value for name in order if name not in names}
    lists = {name for name in order if parameters[name].expanding}

    def bind(values: Values) -> tuple[str, tuple[Any, ...]]:
        given = {**fixed, **values} if fixed else values
        if not lists:
            return text, tuple([given[name] for name in order])
        parts = [given[name] if name in lists else [given[name]] for name in order]
        shown = text
        for name in lists:
            shown = shown.replace(f"__[POSTCOMPILE_{name}]", ", ".join("?" * len(given[name])))
        return shown, tuple([value for part in parts for value in part])

    return bind
