"""Keywords that were renamed stay accepted: callers of an earlier version go on working."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def old_keywords(**names: str) -> Callable[[Class], Class]:
    """A class decorator: the constructor also takes each old keyword in place of the new one.

    >>> @old_keywords(judger="judge")
    ... class Loop:
    ...     def __init__(self, judge=None):
    ...         self.judge = judge
    >>> Loop(judger="exact").judge
    'exact'

    Raises:
        TypeError: a call of the constructor gives a keyword under both names.
    """

    def decorate(cls: Class) -> Class:
        construct = vars(cls)["__init__"]

        @functools.wraps(construct)
        def __init__(self: Any, *args: Any, **keywords: Any) -> None:
            for old, new in names.items():
                if old in keywords:
                    if new in keywords:
                        raise TypeError(f"{cls.__name__}: {old!r} is the old name of {new!r}; give only that")
                    keywords[new] = keywords.pop(old)
            construct(self, *args, **keywords)

        setattr(cls, "__init__", __init__)  # noqa: B010 - mypy refuses the plain assignment
        return cls

    return decorate
