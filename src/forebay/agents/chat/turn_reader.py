"""From the tokens of a turn to the chat message that a program gets for them.

::

    turn_ids --decode--> text                                             (TurnReader)
                          '--parser--> calls --> tool_calls, and the text before them   (ToolTurnReader)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from forebay.agents.chat.increments import CALL_ID, TurnTokenizer
from forebay.agents.chat.messages import RequestError
from forebay.agents.chat.tool_calls import Parser, ToolCall, choose_parser, text_before_calls
from forebay.types import Message

Schemas = Sequence[dict[str, Any]]


class TurnReader:
    """Makes a chat message of a turn's tokens. This one knows text only, and refuses tools."""

    def __init__(self, tokenizer: TurnTokenizer) -> None:
        self._tokenizer = tokenizer

    def check(self, tools: Schemas | None) -> None:
        """Refuse tools whose calls could not be read.

        Raises:
            RequestError: there are tools.
        """
        if tools:
            raise RequestError(
                f"tools were given, but the chat template of {self._tokenizer.name_or_path!r} does not tell "
                f"how its model writes calls; set the agent's argument parser"
            )

    def read(
        self, turn_ids: Sequence[int], tools: Schemas | None, num_calls: int = 0, *, is_cut: bool = False
    ) -> Message:
        """The message; ``tool_calls`` as the chat API has them, their arguments as objects.

        `num_calls` is how many calls the conversation has so far, for ids that are not used twice. A turn
        that `is_cut` by a limit lacks its end.
        """
        return {"role": "assistant", "content": self._text(turn_ids)}

    def _text(self, turn_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(turn_ids), skip_special_tokens=True))


class ToolTurnReader(TurnReader):
    """Finds the tool calls in a turn. A turn with one that cannot be read is text: the program reads it.

    >>> reader = ToolTurnReader(tokenizer, choose_parser("hermes", tokenizer))      # doctest: +SKIP
    """

    def __init__(self, tokenizer: TurnTokenizer, parse: Parser) -> None:
        super().__init__(tokenizer)
        self._parse = parse
        special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def check(self, tools: Schemas | None) -> None:
        """All tools are welcome.

        Raises:
            RequestError: they are not a list of function schemas.
        """
        for tool in tools or ():
            if not isinstance(tool, dict) or not isinstance((tool.get("function") or {}).get("name"), str):
                raise RequestError(f"a tool has no function with a name: {str(tool)[:200]}")

    def read(
        self, turn_ids: Sequence[int], tools: Schemas | None, num_calls: int = 0, *, is_cut: bool = False
    ) -> Message:
        """As `TurnReader.read`; without `tools` all is text."""
        ids = list(turn_ids)
        if ids and not is_cut and ids[-1] in self._tokenizer.all_special_ids:
            # The end of the turn, not a part of it.
            ids.pop()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        found = self._parse(text) if tools else []
        unreadable = any(
            call.problem is not None or (call.name is None and len(tools or ()) != 1) for call in found
        )
        if not found or unreadable:
            return super().read(turn_ids, tools)
        calls = [_as_api(call, tools or (), num_calls + index) for index, call in enumerate(found)]
        before = self._special.sub("", text_before_calls(text)).strip()
        return {"role": "assistant", "content": before, "tool_calls": calls}


def choose_reader(tokenizer: TurnTokenizer, parser: str | Parser | None) -> TurnReader:
    """One that reads calls as `parser` says, for None as the chat template shows; text only if it does not.

    Raises:
        ValueError: `parser` is unknown.
    """
    try:
        return ToolTurnReader(tokenizer, choose_parser(parser, tokenizer))
    except ValueError:
        if parser is not None:
            raise
        return TurnReader(tokenizer)


def _as_api(call: ToolCall, tools: Schemas, number: int) -> dict[str, Any]:
    """The chat API's form. No name means the only tool; a text means the only parameter."""
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}
    name = next(iter(schemas)) if call.name is None else call.name
    arguments: Any = call.arguments
    if isinstance(arguments, str):
        parameters = (schemas.get(name, {}).get("parameters") or {}).get("properties") or {}
        if len(parameters) == 1:
            arguments = {next(iter(parameters)): arguments}
    return {
        # Templates insist on nine characters.
        "id": f"{CALL_ID[:4]}{number:05}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
