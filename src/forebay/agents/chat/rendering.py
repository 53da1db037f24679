"""Chats as tokens: prompts as a whole, and between two turns of the model an increment only.

Between turns the template is never given the conversation: the model's own text would be tokenized again, and
a template that rewrites history (drops earlier reasoning, say) would change tokens the model has seen. It
renders a stand-in conversation whose last assistant message is a marker, and the text after the marker is
what any reply adds to any turn::

    stand-in, no reply    <user>x<end><assistant>MARKER<end>
    stand-in and reply    <user>x<end><assistant>MARKER<end><user>higher<end><assistant>
                                                       ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ the increment
                                                       ^^^^^ not what of it the model wrote itself

A template that only ever appends therefore gives, turn by turn, what it would give for the whole.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from forebay.models.images import Images, holders_in, images_of, load_processor, with_pictures
from forebay.types import IntArray, Message, RolloutState

MARKER = "MARKED"
"""Plain letters, which no template escapes or strips. No other text of ours is rendered."""

CALL_ID = "call00000"
"""Nine letters and digits, which some templates insist on."""


class IncrementRenderer:
    """Renders replies to the model as token increments.

    Invariants: nothing the model wrote is changed or tokenized again; an end-of-turn token stands exactly
    once at the end of each turn, whether the model wrote it or was cut short before; text that looks like a
    token of its own inside a reply (special ones, and added ones such as ``<tool_call>``) is broken up, so
    that no tool or environment can write control tokens.

    In ChatML, after a turn in which the model wrote ``<|im_end|>`` itself, the reply "higher" is::

        \\n<|im_start|>user\\nhigher<|im_end|>\\n<|im_start|>assistant\\n

    Args:
        tokenizer: with a chat template.
        roles: of the replies that will come; each is tried now.

    Raises:
        ValueError: the template does not render such replies; the message says which and what to do.
    """

    def __init__(self, tokenizer: "ChatTokenizer", *, roles: Sequence[str] = ("user",)) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        # Texts that mean something to a template or a model. Some vocabularies also add words and runs of
        # blanks, which text may hold.
        signs = {token for token in added if len(token) > 1 and re.search(r"[^\w\s]", token)}
        longest_first = sorted(signs | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._end = _after_marker(self._text(_stand_in()))
        self._end_ids = self._encode(self._end)
        self._stand_ins = {role: self._find_stand_in(role) for role in dict.fromkeys(roles)}

    def render(
        self, turn_ids: Sequence[int], replies: Sequence[Message], *, is_cut: bool = False, images: Images = ()
    ) -> IntArray:
        """int32: what stands between the model's turn `turn_ids` and its next, with `replies` in it.

        A turn that `is_cut` by a limit has no end, whatever its last token is. The processor in the
        tokenizer's folder writes as many placeholders as the `images` of the replies take.

        Raises:
            ConfigError: that folder has no processor, or an image cannot be read.
            ValueError: the template does not render these replies, or they have other images.
        """
        harmless = [self._harmless(reply) for reply in with_pictures(replies, images)]
        pictures = [holder["image"] for holder in holders_in(harmless)]
        ids = self._encode(self._between(harmless), pictures)
        return np.asarray(ids[self._num_written(turn_ids, ids, is_cut) :], np.int32)

    def _num_written(self, turn_ids: Sequence[int], ids: Sequence[int], is_cut: bool) -> int:
        """How much of the end of the turn, with which `ids` begin, the model wrote itself."""
        for length in range(min(len(self._end_ids), len(turn_ids)), 0, -1):
            if list(turn_ids[-length:]) == list(ids[:length]):
                return length
        # Models have several end tokens (<|eom_id|>, <|endoftext|>), and the template writes one.
        ended = not is_cut and len(turn_ids) > 0 and int(turn_ids[-1]) in self._special_ids
        return 1 if ended and ids and ids[0] in self._special_ids else 0

    def _between(self, replies: Sequence[Message]) -> str:
        role = replies[0]["role"]
        if role not in self._stand_ins:
            self._stand_ins[role] = self._find_stand_in(role)
        before = self._stand_ins[role]
        turn = _after_marker(self._text(before))
        whole = _after_marker(self._text([*before, *replies], add_generation_prompt=True))
        if not whole.startswith(turn):
            raise ValueError(
                f"the chat template of {self._name!r} writes a turn differently once a "
                f"{role!r} message follows ({turn!r} becomes {whole[: len(turn) + 20]!r}), so "
                f"its replies cannot be appended; give the replies another role or use another template"
            )
        return self._end + whole[len(turn) :]

    def _find_stand_in(self, role: str) -> list[Message]:
        """The stand-in conversation after which the template renders replies of this role.

        Raises:
            ValueError: there is none.
        """
        probe: Message = {"role": role, "content": MARKER.lower()}
        if role == "tool":
            probe |= {"name": "f", "tool_call_id": CALL_ID}
        error: Exception | None = None
        for stand_in in _stand_ins(role):
            try:
                before = _after_marker(self._text(stand_in))
                after = _after_marker(self._text([*stand_in, probe], add_generation_prompt=True))
            # Templates refuse what they do not know in many ways: raise_exception, missing attributes.
            except Exception as refusal:
                error = refusal
                continue
            if after.startswith(before) and MARKER.lower() in after[len(before) :]:
                return stand_in
        reason = f"{type(error).__name__}: {error}" if error else "it leaves them out"
        raise ValueError(
            f"the chat template of {self._name!r} cannot render a message of role {role!r} after an "
            f"assistant's turn ({reason}); use another role, or a template that knows it"
        ) from error

    def _harmless(self, message: Message) -> Message:
        harmless = dict(message)
        for key in ("content", "name"):
            value = message.get(key)
            if isinstance(value, str):
                harmless[key] = self._special.sub(_broken_up, value)
            elif isinstance(value, list):
                harmless[key] = [
                    {**part, "text": self._special.sub(_broken_up, part["text"])}
                    if isinstance(part, dict) and isinstance(part.get("text"), str)
                    else part
                    for part in value
                ]
        return harmless

    def _text(self, messages: Sequence[Message], **options: Any) -> str:
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options))

    def _encode(self, text: str, pictures: Sequence[Any] = ()) -> list[int]:
        if not pictures:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        processor = load_processor(self._name)
        return list(processor(images=pictures, text=[text], add_special_tokens=False)["input_ids"][0])

    @property
    def _name(self) -> str:
        return self._tokenizer.name_or_path or "the given tokenizer"


def _stand_in(**assistant: Any) -> list[Message]:
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARKER, **assistant}]


def _stand_ins(role: str) -> Iterator[list[Message]]:
    """Messages before a tool's answer: an assistant that called a tool, in several dialects."""
    if role == "tool":
        for content in ("", None):
            for arguments in ({"x": MARKER}, f'{{"x": "{MARKER}"}}'):
                function = {"name": "f", "arguments": arguments}
                call = {"id": CALL_ID, "type": "function", "function": function}
                yield _stand_in(content=content, tool_calls=[call])
    yield _stand_in()


def _after_marker(text: str) -> str:
    """The text after the last marker.

    Raises:
        ValueError: the template left it out.
    """
    before, marker, after = text.rpartition(MARKER)
    if not marker:
        raise ValueError(f"the chat template left out what the assistant said; it rendered {before + after!r}")
    return after


def _broken_up(match: re.Match[str]) -> str:
    token = match[0]
    # One character cannot be broken up.
    return f"{token[0]} {token[1:]}" if len(token) > 1 else " "


class ChatTokenizer(Protocol):
    """The parts of a tokenizer that agents use; those of transformers have them."""

    name_or_path: str
    chat_template: Any
    all_special_ids: list[int]
    all_special_tokens: list[str]

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any:
        """The token ids, or the text, of a chat."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """The token ids of a text."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """The text of token ids."""


AS_IDS: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
"""The arguments with which `ChatTokenizer.apply_chat_template` gives what a model reads."""
NO_TOOLS = "none"
"""A rollout's ``tool_choice`` with which its prompt tells of no tools."""


def render_prompt(
    tokenizer: ChatTokenizer, message: list[Message], tools: list[dict[str, Any]] | None = None, images: Images = ()
) -> IntArray:
    """int32, P: the chat as the model sees it, up to where its answer begins.

    With `images`, by the processor in the tokenizer's folder.

    Raises:
        ConfigError: there are images, and that folder has no processor, or one cannot be read.
        ValueError: the chat has placeholders of images, and there are none.
    """
    chat = with_pictures(message, images)
    renderer: ChatTokenizer = load_processor(tokenizer.name_or_path) if images else tokenizer
    ids: Sequence[int] = renderer.apply_chat_template(chat, tools=tools, **AS_IDS)
    # A processor answers with a list of chats.
    return np.asarray(ids, dtype=np.int32).ravel()


def offered_tools(
    tools: list[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None
) -> list[dict[str, Any]] | None:
    """The tools of `tools` that a prompt names."""
    return None if tool_choice == NO_TOOLS else tools


class PromptRenderer:
    """Renders the prompts of rollouts, once for all members of a group.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        if not getattr(tokenizer, "chat_template", None):
            where = getattr(tokenizer, "name_or_path", None) or f"the given tokenizer, {tokenizer!r:.80}"
            raise ValueError(
                f"the tokenizer of {where!r} has no chat template, so chats cannot become tokens: put a "
                f"chat_template.jinja into that folder, set tokenizer.chat_template, or use the instruct "
                f"model"
            )
        self._tokenizer = tokenizer
        # The latest prompt: the members of a group start one after the other, so one entry serves them all.
        self._latest: tuple[list[Message], list[dict[str, Any]] | None, Images, IntArray] | None = None

    def render(self, state: RolloutState) -> None:
        """Give `state` its ``prompt_ids``, and ``tokens`` to begin with, unless it has them."""
        if len(state.prompt_ids) == 0:
            tools = offered_tools(state.tools, state.tool_choice)
            images = images_of(state)
            if self._latest is None or self._latest[:3] != (state.message, tools, images):
                prompt_ids = render_prompt(self._tokenizer, state.message, tools, images)
                # Copies: the chat of a rollout may grow, and must not then count as the same prompt.
                self._latest = ([dict(part) for part in state.message], tools, images, prompt_ids)
            state.prompt_ids = self._latest[3]
        if len(state.tokens) == 0:
            state.tokens = state.prompt_ids
