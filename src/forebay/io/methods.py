"""Methods of an object in another process: how a client calls them, and how arguments and results are sent.

::

    client.count("math", COMPLETED) --called--> client._call("count", task_name=..., group_status=...)
                                                        |                         ^
    Call: method, arguments as a map of their names <---'   Answer: the result ---'
          '-- checked against `Method.arguments`, the types of the method's own signature
"""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, get_type_hints

import msgspec

Given = ParamSpec("Given")
Value = TypeVar("Value")


def called(
    method: Callable[Concatenate[Any, Given], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[Any, Given], Coroutine[Any, Any, Value]]:
    """The method of a client that calls `method` there: with its arguments, its defaults and its result.

    The client has a method ``_call(name, **arguments)`` that returns the result, or raises the error.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def call(self: Any, /, *args: Given.args, **kwargs: Given.kwargs) -> Value:
        bound = signature.bind(self, *args, **kwargs)
        # Defaults are sent, too: the struct that the other end decodes them into has none.
        bound.apply_defaults()
        del bound.arguments["self"]
        value: Value = await self._call(method.__name__, **bound.arguments)
        return value

    return call


class Method(NamedTuple):
    """The types of a method's arguments, as a struct with their names, and that of its result.

    >>> async def add(first: int, second: int = 0) -> int: ...
    >>> msgspec.convert({"first": 1, "second": 2}, Method.of(add).arguments)
    add(first=1, second=2)
    """

    arguments: Any
    result: Any

    @staticmethod
    def of(method: Callable[..., Any], **other: Any) -> "Method":
        """The types of the method's annotations, or these."""
        kinds = get_type_hints(method) | other
        result = kinds.pop("return")
        arguments = msgspec.defstruct(method.__name__, [*kinds.items()], forbid_unknown_fields=True)
        return Method(arguments, result)
