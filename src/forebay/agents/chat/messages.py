"""Messages of the chat API, in the one form in which they are recorded, compared and rendered.

::

    program's message --plain_message--> recorded: text, no empty fields, arguments as objects
    recorded ones --render_conversation--> token ids of a prompt
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.agents.chat.rendering import ChatTokenizer, render_prompt
from forebay.types import IntArray, Message


class RequestError(ValueError):
    """The program asked for something that cannot be given; it is told so, and may go on."""


def plain_message(message: Mapping[str, Any]) -> Message:
    """`message` in one form, so that what comes back from a program can be compared with what was sent.

    Text parts are joined, empty fields left out, the arguments of tool calls become objects.

    Raises:
        RequestError: it is not a message, has no role, or has content that is not text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message has no role: {json.dumps(message, default=str)[:200]}")
    role = "system" if message["role"] == "developer" else message["role"]
    plain: Message = {"role": role, "content": _text(message.get("content"))}
    for key in ("name", "tool_call_id"):
        if message.get(key):
            plain[key] = message[key]
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def with_names(messages: Sequence[Message]) -> list[Message]:
    """`messages` with tools' names in their results, which some templates write; the API has only ids."""
    names = {call["id"]: call["function"]["name"] for m in messages for call in m.get("tool_calls", ())}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def render_conversation(
    tokenizer: ChatTokenizer, messages: Sequence[Message], tools: list[dict[str, Any]] | None
) -> IntArray:
    """int32, P: `messages` as the model sees them, up to where its answer begins.

    Raises:
        RequestError: the chat template refuses them.
    """
    named = with_names(messages)
    refusal: Exception | None = None
    # Templates take the arguments of tool calls as objects or as text, and few take both.
    for form in (named, [_with_text_arguments(message) for message in named]):
        try:
            return render_prompt(tokenizer, form, tools)
        # They refuse what they do not know in many ways: raise_exception, missing attributes.
        except Exception as error:
            refusal = refusal or error
    raise RequestError(f"the chat template cannot render these messages: {refusal}") from refusal


def arguments_as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded tool call as the API writes it."""
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {**call, "function": {**call["function"], "arguments": text}}


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [arguments_as_text(call) for call in message["tool_calls"]]}


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"content must be text, got {type(content).__name__}")
    parts = []
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"content of type {kind!r} is not supported; only text is")
        parts.append(part["text"])
    return "".join(parts)


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"a tool call has no function with a name: {json.dumps(call, default=str)[:200]}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # What is not JSON stays the text that the model wrote.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
