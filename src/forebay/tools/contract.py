"""The contract of a tool, and the two ways it can fail.

::

    schema --chat template--> prompt          call(arguments) --> text, and images, that the model reads
                                                 | ToolError, time-out       --> a text about it, as well
                                                 | ToolUnavailableError      --> the rollout is FAILED
"""

from typing import Any, Protocol

Schema = dict[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``, as chat templates take it."""

Result = str | list[Any]
"""Text, or a list of texts and images: bytes of a file, or an image of PIL."""


class ToolError(Exception):
    """The call was wrong; the model reads the message and may call again."""


class ToolUnavailableError(RuntimeError):
    """The tool itself is broken: nothing that the model can do, so the rollout must not count."""


class Tool(Protocol):
    """Something that a model may call by name.

    Invariants: calls may run at the same time and may be cancelled; one that is interrupted is made again,
    so a tool with effects outside must bear that. The time limit of a call does not count what it spends in
    `forebay.aio.time_limits.not_counted`, for tools that wait until it is their turn.
    """

    name: str
    schema: Schema

    async def call(self, arguments: dict[str, Any]) -> Result:
        """The result as the model reads it.

        Raises:
            ToolError: the arguments do not fit or the call has no result.
            ToolUnavailableError: the tool does not work.
        """


def make_schema(name: str, description: str, **parameters: str) -> Schema:
    """The schema of a tool whose parameters are all required texts, with a description each."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": text} for key, text in parameters.items()},
                "required": list(parameters),
            },
        },
    }


def only_argument(tool: str, name: str, arguments: dict[str, Any]) -> str:
    """The text argument `name`, which must be the only one.

    Raises:
        ToolError: it is not.
    """
    if set(arguments) != {name}:
        given = ", ".join(arguments) or "none"
        raise ToolError(f"{tool} takes the argument {name!r} and no other, got {given}")
    return str(arguments[name])
