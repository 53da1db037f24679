"""Conversations to learn from: each is one sequence of tokens, with a mask on those that the model writes.

::

    rows --load_conversations, load_prompts--> prompts --Demonstrations--> prompt ids, response ids, mask

Tokens are those that a rollout with the same turns would have: what the assistant says and its end are the
model's own tokens, and everything between two turns is an increment (`forebay.agents.chat.rendering`).
"""

from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from forebay.agents.chat.conversation import RequestError, plain_message, with_names
from forebay.agents.chat.rendering import IncrementRenderer, offered_tools, render_prompt
from forebay.config import ConfigError, errors_about
from forebay.models.images import images_of
from forebay.produce.prompts.dataset import Prompt, known_characters
from forebay.types import IntArray, Message

ROLES = ("system", "developer", "user", "assistant", "tool")


class Demonstrations:
    """The examples of a warm-up: prompts and turns as rollouts have them.

    The turns are the row's column ``demonstration``, the messages after the prompt; without it the answer;
    without that all turns of the chat itself.

    ::

        prompt_ids, response_ids, mask, mm_info = Demonstrations(tokenizer).example(prompt)
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _increments(self) -> IncrementRenderer:
        return IncrementRenderer(self._tokenizer, roles=())

    def example(
        self, prompt: Prompt, tools: list[dict[str, Any]] | None = None
    ) -> tuple[IntArray, IntArray, IntArray, dict[str, Any] | None]:
        """(prompt ids, response ids, mask, mm_info): 1 on the turns, each with its end-of-sequence token.

        `tools` are told to the model where the prompt has none of its own.

        Raises:
            ConfigError: there is no turn of the assistant, or the messages are no conversation.
            ValueError: the chat template cannot render its replies.
        """
        offered = offered_tools(tools if prompt.tools is None else prompt.tools, prompt.tool_choice)
        asked, shown = _conversation(prompt)
        ids, mask = list[int](), list[int]()
        with known_characters(prompt, self._tokenizer), errors_about(prompt.place or "a prompt"):
            prompt_ids = render_prompt(self._tokenizer, asked, offered, images_of(prompt))
            for is_turn, messages in groupby(shown, _is_turn):
                if is_turn:
                    text = self._written(next(messages))
                    new = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
                    new = [*new, self._tokenizer.eos_token_id]
                else:
                    new = self._increments.render(ids, list(messages)).tolist()
                ids += new
                mask += [int(is_turn)] * len(new)
        return prompt_ids, np.asarray(ids, np.int32), np.asarray(mask, np.int32), prompt.mm_info

    def _written(self, message: Message) -> str:
        """The model's text in `message`: its content; with calls of tools, what the chat template writes."""
        if not message.get("tool_calls"):
            if not message["content"]:
                raise ConfigError("a turn of the assistant has neither text nor tool_calls")
            return str(message["content"])
        # Any question will do: only what the template puts around the reply is looked at.
        asked: list[Message] = [{"role": "user", "content": "x"}]
        render, end = self._tokenizer.apply_chat_template, self._tokenizer.eos_token
        before = render(asked, tokenize=False, add_generation_prompt=True)
        whole = render([*asked, message], tokenize=False)
        text, found, _ = whole.removeprefix(before).rpartition(end)
        named = all(call["function"]["name"] in text for call in message["tool_calls"])
        if not (found and named and whole.startswith(before)):
            said = f"the chat template writes calls of tools as {whole!r}, not between {before!r} and {end!r}"
            raise ConfigError(f"{said}: give such turns a text as content instead of tool_calls")
        return str(text)


def _conversation(prompt: Prompt) -> tuple[list[Message], list[Message]]:
    """The messages before the first turn that `prompt` comes with, and those from there to the last turn."""
    answer = (prompt.reward_model or {}).get("ground_truth")
    has_turn = _is_turn(prompt.message[-1])
    answers = [] if answer is None or has_turn else [{"role": "assistant", "content": str(answer)}]
    shown = prompt.extra.get("demonstration") or answers
    messages = [*prompt.message, *shown]
    # Turns in the prompt of a task are given to the model, not asked of it.
    given = len(prompt.message) if shown else 0
    turns = [place for place, message in enumerate(messages) if _is_turn(message) and place >= given]
    roles = [message["role"] for message in messages]
    with errors_about(prompt.place or "a prompt", ConfigError, RequestError):
        # A difference of 1 is two turns on end, with nothing said between them.
        if not turns or turns[0] == 0 or 1 in np.diff(turns) or not {*roles} <= {*ROLES}:
            raise ConfigError(
                f"a conversation has messages of {', '.join(ROLES)}, and one of the assistant after one that "
                f"is not; got {', '.join(roles)} (a task needs data.columns.answer or a column demonstration)"
            )
        # A processor needs the parts of images.
        plain = list if prompt.mm_info else lambda part: [*map(plain_message, part)]
        learned = [plain_message(message) for message in messages[turns[0] : turns[-1] + 1]]
        return plain(messages[: turns[0]]), with_names(learned)


def _is_turn(message: Message) -> bool:
    return bool(message["role"] == "assistant")
