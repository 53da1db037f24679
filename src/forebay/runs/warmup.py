"""The warm-up: a new run's model is trained on the training prompts' own answers before its first rollout.

::

    prompts of all tasks --drawn--> Demonstrations: (what is read, what is to be written) --> supervised steps
                                                                             --> RUN_FOLDER/warmup

It makes a model without any training able to answer at all, so that some rollouts earn a reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forebay.agents import IncrementRenderer, prompt_tools, render_prompt
from forebay.agents.chat.rendering import offered_tools
from forebay.config import ConfigError
from forebay.io.durable import DamagedError, check
from forebay.models import load_model, load_tokenizer
from forebay.produce import Prompt
from forebay.produce.prompts.dataset import known_characters
from forebay.produce.prompts.sequences import LazySequence
from forebay.runs.config import RunConfig
from forebay.runs.data import TaskData, load_data
from forebay.runs.folder import publish
from forebay.runs.show.display import RunDisplay
from forebay.train import WarmupConfig, supervised_warmup
from forebay.types import Message


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

    def examples(self, prompt: Prompt) -> Iterator[tuple[list[int], list[int]]]:
        """(what the model reads, what it should write, the end-of-sequence token too), for each of its turns.

        Raises:
            ConfigError: there is no answer, or the demonstration is not one.
            ValueError: the chat template cannot render its replies.
        """
        offered = offered_tools(prompt.tools, prompt.tool_choice)
        seen: list[int] = []
        turn_ids: list[int] = []
        for before, text in _turns(prompt):
            if turn_ids:
                seen = [*seen, *turn_ids, *self._increments.render(turn_ids, before).tolist()]
            else:
                seen = render_prompt(self._tokenizer, [*prompt.message, *before], offered).tolist()
            text_ids = self._tokenizer.encode(text, add_special_tokens=False)
            turn_ids = [*text_ids, self._tokenizer.eos_token_id]
            yield seen, turn_ids


def warm_up(
    config: RunConfig, source: Path, target: Path, display: RunDisplay, data: Sequence[TaskData] | None = None
) -> Path:
    """Train the model in `source` on the training prompts' own answers; the folder it is saved in, `target`.

    Done once: where `target` exists (a resumed run), it is what the run started from.
    """
    settings = config.warmup
    assert settings is not None
    if target.exists():
        try:
            check(target)
        except DamagedError as error:
            raise ConfigError(f"{error}; delete {str(target)!r} to have the warm-up made again") from None
        return target
    display.phase("warm-up")
    model, tokenizer = load_model(source, config.model), load_tokenizer(source)
    prompts = [
        _with_tools(part.training, prompt_tools(task.agent))
        for task, part in zip(config.tasks, data or load_data(config), strict=True)
    ]
    shown = Demonstrations(tokenizer)
    drawn = _drawn(prompts, settings, config.seed)
    try:
        examples = []
        for prompt in drawn:
            with known_characters(prompt, tokenizer):
                examples += list(shown.examples(prompt))
        losses = supervised_warmup(
            model,
            examples,
            settings,
            pad_token_id=tokenizer.pad_token_id,
            seed=config.seed,
            on_step=lambda step, loss: display.progress(step, settings.steps, f"loss {loss:.3f}"),
        )
    except ValueError as error:
        raise ConfigError(f"[warmup] cannot be done: {error}") from error
    temporary = target.with_name(target.name + ".tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    publish(temporary, target)
    display.message(f"warm-up: {len(losses)} supervised steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return target


def _with_tools(prompts: Sequence[Prompt], tools: list[dict[str, Any]] | None) -> Sequence[Prompt]:
    """`prompts`, those without tools of their own with `tools`."""
    if tools is None:
        return prompts

    def offering(prompt: Prompt) -> Prompt:
        return prompt if prompt.tools is not None else replace(prompt, tools=tools)

    return LazySequence(lambda index: offering(prompts[index]), range(len(prompts)))


def _drawn(data: Sequence[Sequence[Prompt]], settings: WarmupConfig, seed: int) -> list[Prompt]:
    """As many prompts as the warm-up can use, drawn from those of all tasks; making each costs time."""
    places = [(prompts, index) for prompts in data for index in range(len(prompts))]
    order = np.random.default_rng(seed).permutation(len(places))
    return [places[i][0][places[i][1]] for i in order[: settings.steps * settings.batch_size]]


def _turns(prompt: Prompt) -> Iterator[tuple[list[Message], str]]:
    """The turns that `prompt` comes with, each with the messages before it and after the turn before that."""
    answer = (prompt.reward_model or {}).get("ground_truth")
    shown = prompt.extra.get("demonstration")
    if shown is None and answer is None:
        raise ConfigError(
            "[warmup] needs an answer for every prompt: set data.answer_column, or give the rows a column "
            "'demonstration' with the messages after the prompt"
        )
    before: list[Message] = []
    for place, message in enumerate(shown or [{"role": "assistant", "content": str(answer)}]):
        if message["role"] != "assistant":
            before.append(message)
            continue
        if (place and not before) or not isinstance(message.get("content"), str):
            raise ConfigError(
                f"[warmup]: the assistant's messages of a demonstration need a text, and replies between "
                f"them; got {str(message)[:200]}"
            )
        yield before, message["content"]
        before = []
