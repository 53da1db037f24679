"""Reading the tool calls in what a model wrote, in the dialects of the chat templates.

::

    text of a turn, special tokens included --parser--> ToolCall: name, arguments | what is wrong with it
    tokens of a turn --TurnReader--> chat message: tool_calls, and the text before them

| name        | what models write                                                                    |
|-------------|--------------------------------------------------------------------------------------|
| `hermes`    | ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>`` (Hermes, Qwen, SmolLM)   |
| `llama3`    | ``{"name": "f", "parameters": {...}}`` alone, perhaps after ``<|python_tag|>``        |
| `mistral`   | ``[TOOL_CALLS][{"name": "f", "arguments": {...}}]`` or ``[TOOL_CALLS]f[ARGS]{...}``   |
| `tokenizer` | whatever the tokenizer's own ``response_template`` says                               |
| a pattern   | a regular expression with a group ``arguments`` and perhaps one ``name``              |

A malformed call is a call too: the model reads what is wrong with it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.agents.chat.conversation import RequestError
from forebay.agents.chat.rendering import CALL_ID, ChatTokenizer
from forebay.config import errors_about
from forebay.types import Message

Schemas = Sequence[dict[str, Any]]


class TurnReader:
    """Makes the chat message that an agent program gets of a turn's tokens.

    A turn with a call that cannot be read is text: the program reads it.

    Args:
        tokenizer: of the model.
        parse: finds the calls in a turn; None: it knows text only, and refuses tools.
    """

    def __init__(self, tokenizer: ChatTokenizer, parse: "Parser | None" = None) -> None:
        self._tokenizer, self._parse = tokenizer, parse
        special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def check(self, tools: Schemas | None) -> None:
        """Refuse tools whose calls could not be read.

        Raises:
            RequestError: there are tools and no parser, or they are not a list of function schemas.
        """
        if tools and self._parse is None:
            raise RequestError(
                f"tools were given, but the chat template of {self._tokenizer.name_or_path!r} does not tell "
                f"how its model writes calls; set the agent's argument parser"
            )
        for tool in tools or ():
            if not isinstance(tool, dict) or not isinstance((tool.get("function") or {}).get("name"), str):
                raise RequestError(f"a tool has no function with a name: {str(tool)[:200]}")

    def read(
        self, turn_ids: Sequence[int], tools: Schemas | None, num_calls: int = 0, *, is_cut: bool = False
    ) -> Message:
        """The message; ``tool_calls`` as the chat API has them, their arguments as objects.

        Without `tools` all is text. `num_calls` is how many calls the conversation has so far, for ids that
        are not used twice. A turn that `is_cut` by a limit lacks its end.
        """
        ids = list(turn_ids)
        plain = {"role": "assistant", "content": str(self._tokenizer.decode(ids, skip_special_tokens=True))}
        if not tools or self._parse is None:
            return plain
        if ids and not is_cut and ids[-1] in self._tokenizer.all_special_ids:
            # The end of the turn, not a part of it.
            ids.pop()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        found = self._parse(text)
        if not found or any(call.problem or (call.name is None and len(tools) != 1) for call in found):
            return plain
        known = {tool["function"]["name"]: tool["function"] for tool in tools}
        calls = [api_call(number, *resolved(call, known)) for number, call in enumerate(found, start=num_calls)]
        starts = [position for sign in _SIGNS if (position := text.find(sign)) >= 0]
        # Where no tag shows the beginning of the calls, no text stands before them.
        before = self._special.sub("", text[: min(starts, default=0)]).strip()
        return {"role": "assistant", "content": before, "tool_calls": calls}


@dataclass(frozen=True)
class ToolCall:
    """One call that a model wrote.

    Either `problem` says why it cannot be made, or `arguments` are those of the tool `name`. A text in place
    of a mapping is for a tool with one parameter, and no name for the only tool there is.
    """

    name: str | None = None
    arguments: dict[str, Any] | str = ""
    problem: str | None = None


Parser = Callable[[str], list[ToolCall]]

# The blanks around a call are not its business: beside `.*?` they would be tried in every split of them.
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"
_ARGUMENTS = ("arguments", "parameters")
_CALL = re.compile(r"(?:(?<![\w.-])([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{))?(?=[\[{])")
"""Where JSON begins, perhaps with the name of its call before it."""
_decoder = json.JSONDecoder()

MAX_DEPTH = 50
"""Of a call's arguments; more than any tool takes, and less than what breaks those that print or copy it."""


def parse_hermes(text: str) -> list[ToolCall]:
    """Calls in ``<tool_call>`` tags; the last may lack its end."""
    return [_read_call(body.strip()) for body in _HERMES.findall(text)]


def parse_llama3(text: str) -> list[ToolCall]:
    """Calls that are the whole turn, one after the other, separated by blanks or semicolons.

    Without the tag, JSON with a name but no arguments is an answer.
    """
    body = text.strip()
    if body.startswith(_PYTHON_TAG):
        return _read_calls(body.removeprefix(_PYTHON_TAG))
    if body.startswith("{") and '"name"' in body and any(f'"{key}"' in body for key in _ARGUMENTS):
        return _read_calls(body, needs_arguments=True)
    return []


def parse_mistral(text: str) -> list[ToolCall]:
    """Calls after ``[TOOL_CALLS]``: a list of them, or each by its name."""
    _, tag, body = text.partition(_TOOL_CALLS)
    # The tag may stand before each call; its bracket begins no list.
    return _read_calls(body.replace(_TOOL_CALLS, " "), is_named=True) if tag else []


def parse_pattern(pattern: str) -> Parser:
    """A parser of what matches a regular expression.

    Raises:
        ValueError: it is not one, or has no group ``arguments``.

    >>> parse_pattern(r"=(?P<arguments>.*?)=")("so =1+2= is")
    [ToolCall(name=None, arguments='1+2', problem=None)]
    """
    with errors_about(f"parser {pattern!r} is not a regular expression", re.error):
        compiled = re.compile(pattern, re.DOTALL)
    if "arguments" not in compiled.groupindex:
        raise ValueError(f"parser {pattern!r} has no group (?P<arguments>...)")

    def parse(text: str) -> list[ToolCall]:
        found = [match.groupdict() for match in compiled.finditer(text)]
        return [ToolCall(groups.get("name"), _as_mapping(groups["arguments"] or "")) for groups in found]

    return parse


def parse_by(tokenizer: Any) -> Parser:
    """A parser that follows the tokenizer's ``response_template``."""

    def parse(text: str) -> list[ToolCall]:
        try:
            calls = tokenizer.parse_response(text, prefix="").get("tool_calls") or []
            _check_depth(calls)
            return [_from_json(call.get("function", call)) for call in calls]
        # A template is a program of its author, and a model may write text that breaks it.
        except Exception as error:
            return [_malformed(text, error)]

    return parse


PARSERS: dict[str, Parser] = {"hermes": parse_hermes, "llama3": parse_llama3, "mistral": parse_mistral}
"""Parsers by name; ``tokenizer`` and patterns besides."""

_SIGNS = {"<tool_call>": "hermes", _TOOL_CALLS: "mistral", _PYTHON_TAG: "llama3"}


def choose_parser(parser: str | Parser | None, tokenizer: ChatTokenizer) -> Parser:
    """`parser` itself, the one it names, or for None the one that suits the tokenizer.

    Raises:
        ValueError: the name is unknown, or nothing tells which dialect the model speaks.
    """
    if callable(parser):
        return parser
    has_template = getattr(tokenizer, "response_template", None) is not None
    if parser is None and not has_template:
        template = str(tokenizer.chat_template or "")
        parser = next((dialect for sign, dialect in _SIGNS.items() if sign in template), None)
        if parser is None:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path or 'the given tokenizer'!r} does not tell how "
                f"its model writes tool calls; set parser to one of {', '.join(PARSERS)}, or to a regular "
                f"expression with a group (?P<arguments>...)"
            )
    if parser is None or parser == "tokenizer":
        if not has_template:
            raise ValueError(f"parser 'tokenizer': {tokenizer.name_or_path!r} has no response_template; name another")
        return parse_by(tokenizer)
    return _named(parser)


def check_parser(parser: Any) -> None:
    """Refuse a `parser` that neither names a dialect nor is a pattern of calls.

    Raises:
        ValueError: the name is unknown, or it is no such pattern.
    """
    if isinstance(parser, str) and parser != "tokenizer":
        _named(parser)


def _named(parser: str) -> Parser:
    if parser in PARSERS:
        return PARSERS[parser]
    if "(?P<" in parser:
        return parse_pattern(parser)
    raise ValueError(
        f"unknown parser {parser!r}; known: {', '.join(PARSERS)}, tokenizer, or a regular expression with a "
        f"group (?P<arguments>...)"
    )


def _read_call(body: str) -> ToolCall:
    try:
        value, end = _decode(body)
        if end < len(body):
            raise ValueError(f"Extra data after character {end}")
    except ValueError as error:
        return _malformed(body, error)
    return _from_json(value)


def _read_calls(body: str, *, is_named: bool = False, needs_arguments: bool = False) -> list[ToolCall]:
    """The calls in `body`, one after the other, or all in one list; text between them is passed over.

    Where it `is_named`, a call's name may stand before its arguments. With `needs_arguments`, JSON without
    arguments makes all of it an answer.
    """
    calls: list[ToolCall] = []
    position = 0
    while match := _CALL.search(body, position):
        try:
            value, position = _decode(body, match.end())
        except ValueError as error:
            return [*calls, _malformed(body[match.start() :], error)]
        if needs_arguments and not (isinstance(value, dict) and any(key in value for key in _ARGUMENTS)):
            return []
        if isinstance(value, list):
            # Text behind calls, or behind a list of them, is none.
            calls = calls or [_from_json(call) for call in value]
            break
        calls.append(ToolCall(match[1], value) if is_named and match[1] else _from_json(value))
    return calls or [_malformed(body, "Expecting value in JSON, got no call")]


def _decode(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at `start`, and where it ends.

    Raises:
        ValueError: there is none, or it is nested too deeply.
    """
    try:
        value, end = _decoder.raw_decode(text, start)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    _check_depth(value)
    return value, end


def _check_depth(value: Any) -> None:
    level = [value]
    # Level by level: recursion is what such values break.
    for _ in range(MAX_DEPTH):
        level = [
            part
            for parent in level
            if isinstance(parent, dict | list)
            for part in (parent.values() if isinstance(parent, dict) else parent)
        ]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _from_json(value: Any) -> ToolCall:
    """A call from its JSON form; `arguments` (Llama: ``parameters``) may be JSON text themselves."""
    name = value.get("name") if isinstance(value, dict) else None
    # Halves of surrogate pairs, which JSON can hold, are not printable, and no text of a prompt.
    if not isinstance(name, str) or not name.isprintable():
        return _malformed(json.dumps(value), 'it needs "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _as_mapping(arguments)
    if not isinstance(arguments, dict | str):
        return _malformed(json.dumps(value), "the arguments are not an object")
    return ToolCall(name, arguments)


def _as_mapping(text: str) -> dict[str, Any] | str:
    try:
        value, end = _decode(text.strip())
    except ValueError:
        return text
    return value if isinstance(value, dict) and end == len(text.strip()) else text


def _malformed(body: str, why: object) -> ToolCall:
    return ToolCall(problem=f"the tool call {body[:200]!r} cannot be read: {why}")


def choose_reader(tokenizer: ChatTokenizer, parser: str | Parser | None) -> TurnReader:
    """One that reads calls as `parser` says, for None as the chat template shows; text only if it does not.

    Raises:
        ValueError: `parser` is unknown.
    """
    try:
        return TurnReader(tokenizer, choose_parser(parser, tokenizer))
    except ValueError:
        if parser is not None:
            raise
        return TurnReader(tokenizer)


def resolved(call: ToolCall, tools: Mapping[str, dict[str, Any]]) -> tuple[str | None, dict[str, Any] | str]:
    """The tool's name and the arguments: no name means the only one of `tools`, a text its only parameter."""
    name = next(iter(tools)) if call.name is None and len(tools) == 1 else call.name
    parameters = list((tools.get(name or "", {}).get("parameters") or {}).get("properties") or ())
    if isinstance(call.arguments, str) and len(parameters) == 1:
        return name, {parameters[0]: call.arguments}
    return name, call.arguments


def api_call(number: int, name: str | None, arguments: Any) -> dict[str, Any]:
    """A call as the chat API writes it; `number` makes the calls of a conversation differ."""
    # Templates insist on ids of nine characters.
    return {"id": f"{CALL_ID[:4]}{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
