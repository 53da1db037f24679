"""Conversations to learn from: their turns as tokens, and what the model reads before each.

::

    rows with ``messages`` --load_conversations--> Prompt: message up to the first turn, ``demonstration``
    Prompt --Demonstrations--> examples: (read, written) of each turn; conversation: one sequence, its mask

Tokens are those that a rollout with the same turns would have: what the assistant says and its end are the
model's own tokens, and everything between two turns is an increment (`forebay.agents.chat.rendering`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from forebay.agents.chat.conversation import RequestError, plain_message, with_names
from forebay.agents.chat.rendering import IncrementRenderer, offered_tools, render_prompt
from forebay.config import ConfigError, errors_about
from forebay.produce.prompts.dataset import DataConfig, Prompt, hold_out, known_characters, load_prompts
from forebay.produce.prompts.sequences import shuffled
from forebay.types import Message

HELD_OUT, MOST_HELD_OUT = 0.05, 256
"""Share of the conversations that is held out, and their number at most."""
ROLES = ("system", "user", "assistant", "tool")


class Demonstrations:
    """The examples of a warm-up: prompts and turns as rollouts have them.

    The row's column ``demonstration`` holds the messages after the prompt; without it the answer is the turn.

    >>> [(prompt_ids, turn_ids)] = Demonstrations(tokenizer).examples(Prompt(message=..., reward_model=...))
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _increments(self) -> IncrementRenderer:
        return IncrementRenderer(self._tokenizer, roles=())

    def examples(
        self, prompt: Prompt, tools: list[dict[str, Any]] | None = None
    ) -> Iterator[tuple[list[int], list[int]]]:
        """(what the model reads, what it should write, the end-of-sequence token too), for each of its turns.

        `tools` are told to it where the prompt has none of its own.

        Raises:
            ConfigError: there is no answer, or the demonstration is not one.
            ValueError: the chat template cannot render its replies.
        """
        offered = offered_tools(tools if prompt.tools is None else prompt.tools, prompt.tool_choice)
        seen: list[int] = []
        turn_ids: list[int] = []
        with known_characters(prompt, self._tokenizer):
            for before, message in _turns(prompt):
                if turn_ids:
                    seen = [*seen, *turn_ids, *self._increments.render(turn_ids, before).tolist()]
                else:
                    seen = render_prompt(self._tokenizer, [*prompt.message, *before], offered).tolist()
                text_ids = self._tokenizer.encode(self._written(message), add_special_tokens=False)
                turn_ids = [*text_ids, self._tokenizer.eos_token_id]
                yield seen, turn_ids

    def conversation(self, prompt: Prompt) -> tuple[list[int], list[int], list[int]]:
        """(prompt ids, response ids, mask) with all turns of `prompt`: 1 on what the model should write.

        The last turn is read after all turns before it, so one pass trains them all.
        """
        turns = list(self.examples(prompt))
        start, ids = len(turns[0][0]), [*turns[-1][0], *turns[-1][1]]
        mask = [0] * len(ids)
        for seen, written in turns:
            mask[len(seen) : len(seen) + len(written)] = [1] * len(written)
        return ids[:start], ids[start:], mask[start:]

    def _written(self, message: Message) -> str:
        """The model's text in `message`: its content; with calls of tools, what the chat template writes."""
        if not message.get("tool_calls"):
            return str(message["content"])
        asked: list[Message] = [{"role": "user", "content": "x"}]
        render, end = self._tokenizer.apply_chat_template, self._tokenizer.eos_token
        before = render(asked, tokenize=False, add_generation_prompt=True)
        whole = render([*asked, message], tokenize=False)
        text, found, _ = whole.removeprefix(before).rpartition(end)
        if not found or not whole.startswith(before):
            said = f"the chat template writes calls of tools as {whole!r}, not between {before!r} and {end!r}"
            raise ConfigError(f"{said}: give such turns a text as content instead of tool_calls")
        return str(text)


def load_conversations(data: DataConfig, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """The conversations to train on, in an order by `seed`, and those held out, which none of them equals.

    A row has the whole conversation in its column ``messages``. Its prompt is what comes before the first
    turn of the assistant.

    Raises:
        ConfigError: the source cannot be opened, or a row is no such conversation.
    """
    columns = {"prompt": "messages", "answer": "", **data.columns}
    whole = load_prompts(data.model_copy(update={"columns": columns}))
    whole = shuffled(whole, f"warm-up/{seed}")
    count = min(int(len(whole) * HELD_OUT), MOST_HELD_OUT)
    apart, training = whole[:count], hold_out(whole[count:], whole[:count])
    return [_as_demonstration(prompt) for prompt in training], [_as_demonstration(prompt) for prompt in apart]


def _as_demonstration(prompt: Prompt) -> Prompt:
    with errors_about(prompt.place, ConfigError, RequestError):
        messages = with_names([plain_message(message) for message in prompt.message])
        roles = [message["role"] for message in messages]
        if not set(roles) <= set(ROLES) or "assistant" not in roles[1:] or roles[0] == "assistant":
            said = f"a conversation has messages of {', '.join(ROLES)}, and an assistant's after another's"
            raise ConfigError(f"{said}; got {', '.join(roles)}")
        first = roles.index("assistant")
        shown = {**prompt.extra, "demonstration": messages[first:]}
        return replace(prompt, message=messages[:first], extra=shown)


def _turns(prompt: Prompt) -> Iterator[tuple[list[Message], Message]]:
    """The turns that `prompt` comes with, each with the messages before it and after the turn before that."""
    answer = (prompt.reward_model or {}).get("ground_truth")
    shown = prompt.extra.get("demonstration")
    if shown is None and answer is None:
        raise ConfigError(
            "[warmup] needs an answer for every prompt: set data.columns.answer, or give the rows a column "
            "'demonstration' with the messages after the prompt"
        )
    before: list[Message] = []
    for place, message in enumerate(shown or [{"role": "assistant", "content": str(answer)}]):
        if message["role"] != "assistant":
            before.append(message)
            continue
        if (place and not before) or not isinstance(message.get("content"), str):
            at = f"{prompt.place}: " if prompt.place else ""
            raise ConfigError(
                f"{at}the assistant's messages of a demonstration need a text, and replies between them; got "
                f"{str(message)[:200]}"
            )
        yield before, message
        before = []
