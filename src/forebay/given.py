"""The objects that a run started from Python was given: a judge, rows of prompts.

::

    forebay.run(config, judge=f, data=rows) --during(...)--> "forebay.given:judge_0" in the run file
                                                                 | looked up as any "package.module:Name"
                                                                 v
                                              f, as long as that call lasts; later: an error that says so

The objects belong to the call: two runs of one process do not see each other's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from forebay.config import ConfigError

_OBJECTS: ContextVar[Mapping[str, Any]] = ContextVar("objects", default={})  # noqa: B039 never written to
_KINDS = ("judge", "data", "eval_data")


@contextmanager
def during(objects: Mapping[str, Any]) -> Iterator[None]:
    """Have `objects` found under their names inside."""
    token = _OBJECTS.set(objects)
    try:
        yield
    finally:
        _OBJECTS.reset(token)


def __getattr__(name: str) -> Any:
    kind, _, number = name.rpartition("_")
    if kind not in _KINDS or not number.isdecimal():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _OBJECTS.get()[name]
    # Not an AttributeError: `import_object` would say that this module has no such name.
    except KeyError:
        raise ConfigError(
            f"the {kind} of task {number} was a Python object of the program that started this run; give it "
            f"again: forebay.run(resume=FOLDER, {kind}=...), or name one: tasks.{number}.{kind}..."
        ) from None
