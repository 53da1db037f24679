"""From a run file's entry, or a plain function, to a tool."""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from forebay.aio.time_limits import CallThreads, OverrunError, TooManyOverrunsError
from forebay.config import ConfigError, find_component, look_up, parse_component
from forebay.tools.calculator import Calculator
from forebay.tools.contract import Result, Schema, Tool, ToolError, ToolUnavailableError
from forebay.tools.python import Python
from forebay.tools.search import Search

TOOLS: dict[str, Callable[..., Tool]] = {"calculator": Calculator, "python": Python, "search": Search}
"""The names of tools in a run file; besides, ``package.module:Name`` of a function or of a class of tools."""

NUM_THREADS = 16
"""The threads of one function: most calls wait for another service."""


class FunctionTool:
    """A function as a tool: its signature and docstring are what the model is told.

    Invariants: an ``async`` function runs on the event loop; a plain one runs in a thread of its own, at most
    `num_threads` at a time, which goes on by itself where the call is given up. The time limit of a call
    starts with its thread. An image (of PIL, or the bytes of its file) is a result, and so is a list of
    images and texts; all else that is not text becomes JSON. Exceptions become `ToolError`.

    >>> def weather(city: str) -> str:
    ...     '''Tell the weather.
    ...
    ...     Args:
    ...         city: its name
    ...     '''
    ...     return "rain"
    >>> import asyncio
    >>> asyncio.run(FunctionTool(weather).call({"city": "Oslo"}))
    'rain'

    Args:
        function: every parameter has a type and a line under ``Args:``.
        schema: for the prompt; None: made from the function.
        num_threads: calls of a plain function that run at once.

    Raises:
        ConfigError: the docstring or the types are not enough for a schema.
    """

    def __init__(
        self, function: Callable[..., Any], schema: Schema | None = None, *, num_threads: int = NUM_THREADS
    ) -> None:
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        if schema is None:
            from transformers.utils import get_json_schema

            try:
                schema = get_json_schema(function)
            # transformers has an exception for each thing that may be missing, without a common base.
            except Exception as error:
                raise ConfigError(
                    f"tool {getattr(function, '__name__', function)!r}: {error}; it needs a type for each "
                    f"parameter and a docstring with a line for each under 'Args:'"
                ) from error
        self.schema: Schema = schema
        self.name: str = self.schema["function"]["name"]
        self._threads = CallThreads(timeout_s=None, num_threads=num_threads)

    async def call(self, arguments: dict[str, Any]) -> Result:
        """The result of the function, as text or with images.

        Raises:
            ToolError: the arguments do not fit its signature, or it raised or took too long.
            ToolUnavailableError: too many earlier calls hang.
        """
        try:
            # Bound first, so that a TypeError from inside the function is not taken for a wrong call.
            inspect.signature(self._function).bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{self.name}: {error}") from None
        try:
            if self._is_async:
                result = await self._function(**arguments)
            else:
                result = await self._threads.run(partial(self._function, **arguments))
            pieces = [*result] if isinstance(result, list | tuple) else [result]
            if any(isinstance(piece, bytes) or hasattr(piece, "save") for piece in pieces):
                return pieces
            return result if isinstance(result, str) else json.dumps(result, default=str)
        except (ToolError, ToolUnavailableError):
            raise
        except TooManyOverrunsError as error:
            raise ToolUnavailableError(f"{self.name}: {error}") from None
        except OverrunError as error:
            # The rest of the sentence is about threads: nothing for the model.
            raise ToolError(str(error).partition(";")[0]) from None
        # The model's arguments reach code that was not written for them.
        except (Exception, SystemExit) as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error


def schema_of(tool: Tool | Callable[..., Any] | str | Mapping[str, Any]) -> Schema:
    """The schema of what `build_tool` would make; a class that says its own is not made for it.

    Raises:
        ConfigError: as `build_tool`.
    """
    schema = getattr(find_tool(tool)[0], "schema", None)
    return schema if isinstance(schema, dict) else build_tool(tool).schema


def find_tool(tool: Any) -> tuple[Any, Mapping[str, Any]]:
    """The tool, or class of tools, that `tool` names, and its arguments, which fit; no tool is made.

    Raises:
        ConfigError: as `build_tool`.
    """
    if not isinstance(tool, str | Mapping):
        return tool, {}
    config = parse_component(tool, source="tools")
    found = look_up("tool", config.name, TOOLS)
    if isinstance(found, type):
        find_component("tool", config, TOOLS)
    elif config.arguments:
        raise ConfigError(f"tool {config.name!r} is a function, whose arguments the model gives")
    return found, config.arguments


def build_tool(tool: Tool | Callable[..., Any] | str | Mapping[str, Any]) -> Tool:
    """`tool` itself, a function as a `FunctionTool`, or what a name or table ``name``, ``arguments`` names.

    Raises:
        ConfigError: the name is unknown, or it is no tool or does not take the arguments.
    """
    if isinstance(tool, str | Mapping):
        found, arguments = find_tool(tool)
        return build_tool(found(**arguments) if isinstance(found, type) else found)
    if hasattr(tool, "schema") and hasattr(tool, "call"):
        return cast(Tool, tool)
    if not callable(tool):
        raise ConfigError(f"{tool!r} is neither a tool, with schema and call(arguments), nor a function")
    return FunctionTool(tool)
