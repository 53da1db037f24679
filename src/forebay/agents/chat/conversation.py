"""A program's conversation with the model: messages in one form, and their tokens.

::

    program's message --plain_message--> recorded: text, no empty fields, arguments as objects
    recorded ones --render_conversation--> token ids of a prompt

    Trajectory: prompt --> turn, mask 1 --> continue_with(messages, increment), mask 0 --> turn --> ...
                                              '-- take_back(), if it got no answer
                note() --> extra_fields of the rollout, from which it is made again after a pause
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.agents.chat.rendering import ChatTokenizer, render_prompt
from forebay.agents.extra_fields import RECORD_KEY
from forebay.types import TOKEN_FIELDS, IntArray, Message, RolloutState


@dataclass(eq=False)
class Trajectory:
    """One recorded conversation and its tokens.

    Invariants: ``turn_starts`` has an entry for each turn that was asked for, and ``finish_reasons`` one for
    each that was finished; what `note` keeps is enough to make it again, with the rollout.
    """

    state: RolloutState
    tools: list[dict[str, Any]] | None
    messages: list[Message]
    """The messages in the form of `plain_message`, the model's own turns included."""
    turn_starts: list[int] = field(default_factory=lambda: [0])
    """Where in ``response_ids`` each turn of the model begins."""
    finish_reasons: list[str] = field(default_factory=list)
    """The reason of each finished turn, as the program was told."""
    is_exhausted: bool = False
    """Whether the budget or the context cut the latest turn, or refused the next."""
    is_busy: bool = False
    num_replayed: int | None = None
    """While the program runs again after a pause: how many messages it has been seen to repeat."""

    @property
    def turn_ids(self) -> list[int]:
        """The tokens of the latest turn."""
        ids: list[int] = self.state.response_ids[self.turn_starts[-1] :].tolist()
        return ids

    @property
    def is_cut(self) -> bool:
        """Whether a limit ended the latest finished turn."""
        return bool(self.finish_reasons) and self.finish_reasons[-1] == "length"

    def place_of_turn(self, position: int) -> int | None:
        """Which turn of the model the message at `position` is; None if it is none."""
        if self.messages[position]["role"] != "assistant":
            return None
        # Those that the program began with come before.
        later = sum(message["role"] == "assistant" for message in self.messages[position:])
        place = len(self.finish_reasons) - later
        return place if place >= 0 else None

    def note(self) -> None:
        """Keep the record with the rollout, as plain data."""
        recorded = ("tools", "messages", "turn_starts", "finish_reasons", "is_exhausted")
        self.state.extra_fields[RECORD_KEY] = {name: getattr(self, name) for name in recorded}

    def continue_with(self, messages: list[Message], ids: IntArray) -> None:
        """Append the increment `ids`, which makes the conversation `messages`."""
        state = self.state
        step = int(state.response_model_steps[-1])
        state.append(ids, logprobs=np.zeros(len(ids), np.float32), mask=0, model_step=step)
        self.turn_starts = [*self.turn_starts, len(state.response_ids)]
        self.messages = messages
        self.note()

    def take_back(self) -> None:
        """Undo the latest `continue_with`, unless the model has begun to answer."""
        if self.turn_ids or len(self.turn_starts) == 1:
            return
        cut_unanswered(self.state)
        self.turn_starts = self.turn_starts[:-1]
        while self.messages[-1]["role"] != "assistant":
            self.messages = self.messages[:-1]
        self.note()


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
    # OpenAI's newer name for it, which templates do not know.
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
    for form in (named, [with_text_arguments(message) for message in named]):
        try:
            return render_prompt(tokenizer, form, tools)
        # They refuse what they do not know in many ways: raise_exception, missing attributes.
        except Exception as error:
            refusal = refusal or error
    raise RequestError(f"the chat template cannot render these messages: {refusal}") from refusal


def with_text_arguments(message: Message) -> Message:
    """A copy of a recorded message as the API writes it: the arguments of tool calls are text."""
    changed = dict(message)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = []
        for call in calls:
            arguments = call["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            changed["tool_calls"].append({**call, "function": {**call["function"], "arguments": text}})
    return changed


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"content must be text, got {type(content).__name__}")
    parts = []
    for part in content:
        given = part if isinstance(part, Mapping) else {"type": type(part).__name__}
        if given.get("type") != "text" or not isinstance(given.get("text"), str):
            raise RequestError(f"content of type {given.get('type')!r} is not supported; only text is")
        parts.append(given["text"])
    return "".join(parts)


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"a tool call has no function with a name: {json.dumps(call, default=str)[:200]}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Text that is not JSON stays the text that the model wrote.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def cut_unanswered(state: RolloutState) -> None:
    """Take off what follows the model's last token: replies that it has no room to answer teach nothing."""
    end = len(state.response_ids)
    while end and not state.response_mask[end - 1]:
        end -= 1
    surplus = len(state.response_ids) - end
    if end and surplus:
        state.tokens = state.tokens[: len(state.tokens) - surplus].copy()
        for name in TOKEN_FIELDS:
            setattr(state, name, getattr(state, name)[:end].copy())
