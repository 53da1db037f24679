"""A prompt dataset: a finite, indexable sequence of `Prompt` records made from the rows of any source.

Not a stream and not a cache: the rows stay where they are and a `Prompt` is made when it is asked for.

::

    source --open_source--> rows --where, columns--> Prompt 0..N-1 --shuffle_seed--> --start, size--> prompts
    prompts --hold_out(evaluation prompts)--> --check_prompt_lengths(tokenizer)--> Sampler
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from forebay.agents.chat.rendering import AS_IDS, ChatTokenizer, offered_tools, render_prompt
from forebay.config import ArgumentPaths, ConfigError, StrictModel, did_you_mean, errors_about
from forebay.models.image_files import take_images
from forebay.models.images import IMAGES, images_of, with_pictures
from forebay.produce.prompts.expressions import compile_column, compile_expression
from forebay.produce.prompts.sequences import LazySequence, shuffled
from forebay.produce.prompts.sources import locate_source, open_source
from forebay.types import Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """One prompt and what is needed to judge its rollouts. Read-only: rollouts get copies of the chat.

    >>> message = [{"role": "user", "content": "12+34="}]
    >>> Prompt(message=message, reward_model={"ground_truth": "46"}).extra
    {}
    """

    message: list[Message]
    reward_model: dict[str, Any] | None = None
    data_source: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    """None: those of the agent."""
    tool_choice: str | dict[str, Any] | None = None
    """As in the chat API: ``"none"`` offers no tools."""
    mm_info: dict[str, Any] | None = None
    """``{"images": [...]}``: the bytes of their files, in the order of their placeholders in the chat."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The row's other columns; they become the rollouts' ``extra_fields``."""
    place: str = ""
    """Where the row stands, for messages."""


class DataConfig(StrictModel):
    """Which prompts: a source, the meaning of its columns, and the part of it to use.

    Two parts of one source share no row when their ``start`` and ``size`` do not overlap (and their
    ``shuffle_seed`` is the same). `hold_out` also removes equal texts. Do not split a reasoning-gym generator
    by seed: problem i of seed s is problem i - 1 of seed s + 1, so neighboring seeds share nearly everything.

    >>> train = DataConfig(source="addition", arguments={"digits": 2}, size=4000)
    >>> held_out = DataConfig(source="addition", arguments={"digits": 2}, start=4000, size=200)
    """

    source: Annotated[str | list[str], AfterValidator(lambda source, info: locate_source(source, info.context))]
    """A ``.jsonl``, ``.json``, ``.csv``, ``.parquet`` or ``.arrow`` file, pattern or list; a folder of
    `datasets.save_to_disk`; a dataset of the hub as ``owner/name``; ``addition``, ``sorting``,
    ``reasoning_gym:NAME``, or ``package.module:function`` returning rows."""
    arguments: Annotated[dict[str, Any], ArgumentPaths] = Field(default_factory=dict)
    """Keyword arguments of a generator or function; ``split`` for a dataset that has splits; for one of the
    hub also ``subset``, ``revision``, ``streaming`` (set `size`), ``data_files`` and ``data_dir``."""
    where: str | None = None
    """Keep only the rows for which this Jinja expression over their columns is true: ``level >= 3``."""
    columns: dict[str, str] = Field(default_factory=dict)
    """New columns: the name of the column that each is, or a Jinja template over the row's columns.
    ``prompt`` holds a text, which becomes one user message, or a chat list; ``answer`` becomes
    ``reward_model["ground_truth"]``, and ``answer = ""`` says that there is none."""
    system_prompt: str | None = None
    """Put before every prompt that does not begin with a system message of its own."""
    shuffle_seed: int | None = None
    """Shuffle before `start` and `size` cut; None keeps the order of the source."""
    start: int = Field(default=0, ge=0)
    """Number of prompts left out at the beginning."""
    size: int | None = Field(default=None, gt=0)
    """Number of prompts; None takes all."""


def load_prompts(config: DataConfig) -> Sequence[Prompt]:
    """The prompts that `config` describes, in its order.

    The first row is looked at now, and all rows of a text file or where there is a `where`; the others when
    they are asked for.

    Raises:
        ConfigError: the source cannot be opened, a row does not fit, or there are fewer prompts than asked.
    """
    end = None if config.size is None else config.start + config.size
    keep = None if config.where is None else compile_expression("data.where", config.where)
    source = open_source(config.source, config.arguments, end, keep)
    made = {name: compile_column(name, text) for name, text in config.columns.items()}
    num_rows = len(source.rows)
    if num_rows < (config.start + 1 if end is None else end):
        raise ConfigError(
            f"data source {config.source!r} has {num_rows} prompts, but start = {config.start} and "
            f"size = {config.size} ask for more; lower one of them"
        )
    if source.no_shuffle and config.shuffle_seed is not None:
        raise ConfigError(
            f"data source {config.source!r} {source.no_shuffle}, and leave out shuffle_seed = {config.shuffle_seed}"
        )
    prompts: Sequence[Prompt] = LazySequence(
        lambda index: _make_prompt(source.rows[index], config, made, source.place(index)), range(num_rows)
    )
    # All are made, and so checked, now: it is cheap where the rows are objects already.
    if source.in_memory:
        prompts = list(prompts)
    if config.shuffle_seed is not None:
        prompts = shuffled(prompts, f"prompts/{config.shuffle_seed}")
    prompts = prompts[config.start : end]
    # Made and thrown away: a wrong column is an error now, not at the first rollout.
    _ = prompts[0]
    return prompts


def hold_out(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> Sequence[Prompt]:
    """`prompts` without those whose chat equals one of `held_out`'s, so that evaluation cannot leak.

    Where one chat has several answers among `held_out` (a game begins alike for every secret), only those
    with one of these answers are left out.

    Raises:
        ConfigError: nothing is left.
    """
    answers = defaultdict[str, set[str]](set)
    for prompt in held_out:
        answers[_message_key(prompt)].add(_truth(prompt))

    def is_hidden(prompt: Prompt) -> bool:
        known = answers.get(_message_key(prompt), ())
        return len(known) == 1 or _truth(prompt) in known

    kept = [index for index in range(len(prompts)) if not is_hidden(prompts[index])]
    if not kept:
        raise ConfigError(
            f"all {len(prompts)} training prompts are also among the {len(held_out)} evaluation prompts; "
            f"give them different parts of the data with start and size"
        )
    return _subset(prompts, kept, logging.INFO, "their text is held out, too")


def _truth(prompt: Prompt) -> str:
    # A generator's problem also carries its number, which is another one where the same problem comes again.
    return str((prompt.reward_model or {}).get("ground_truth", prompt.reward_model))


HELD_OUT, MOST_HELD_OUT = 0.05, 256
"""Share of the conversations that is held out, and their number at most."""


def load_conversations(data: DataConfig, seed: int) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """The conversations to train on, in an order by `seed`, and those held out, which none of them equals.

    A row has the whole conversation in its column ``messages``.

    Raises:
        ConfigError: the source cannot be opened.
    """
    named = {"columns": {"prompt": "messages", "answer": "", **data.columns}}
    rows = shuffled(load_prompts(data.model_copy(update=named)), f"warm-up/{seed}")
    count = min(int(len(rows) * HELD_OUT), MOST_HELD_OUT)
    return hold_out(rows[count:], rows[:count]), rows[:count]


def check_prompt_lengths(
    prompts: Sequence[Prompt],
    tokenizer: ChatTokenizer,
    limit_tokens: int,
    policy: Literal["error", "drop"] = "error",
    *,
    tools: list[dict[str, Any]] | None = None,
) -> Sequence[Prompt]:
    """`prompts`, all of which are at most `limit_tokens` long as the model sees them.

    `tools` are told to it where a prompt has none of its own. Renders every prompt (some 0.1 ms each). With
    "drop", longer ones are left out and their number logged.

    Raises:
        ConfigError: a prompt is too long and the policy is "error", or all are too long.
    """
    kept: list[int] = []
    for index, num_tokens in enumerate(_lengths(prompts, tokenizer, tools)):
        if num_tokens <= limit_tokens:
            kept.append(index)
        elif policy == "error":
            place = f" ({place})" if (place := prompts[index].place) else ""
            raise ConfigError(
                f"prompt {index} has {num_tokens} tokens, more than the {limit_tokens} that leave "
                f"room for a response; shorten it{place}, raise model.max_context, lower sample.max_tokens, "
                f"or leave out such prompts with overlong_prompts = 'drop'"
            )
    if not kept:
        raise ConfigError(f"all {len(prompts)} prompts are longer than {limit_tokens} tokens")
    return _subset(prompts, kept, logging.WARNING, f"longer than {limit_tokens} tokens")


def _lengths(prompts: Sequence[Prompt], tokenizer: ChatTokenizer, tools: list[dict[str, Any]] | None) -> Iterator[int]:
    """`num_prompt_tokens` of each, in less than half of the time: of plain chats, a call for many."""
    for begin in range(0, len(prompts), 256):
        some, lengths = [*prompts[begin : begin + 256]], list[int]()
        if all(each.tools is None and each.tool_choice is None and each.mm_info is None for each in some):
            # An error names no prompt: one at a time, the one that has it comes up again.
            with suppress(Exception):
                chats: Any = [with_pictures(prompt.message, ()) for prompt in some]
                lengths = [*map(len, tokenizer.apply_chat_template(chats, tools=tools, **AS_IDS))]
        yield from lengths or [num_prompt_tokens(prompt, tokenizer, tools=tools) for prompt in some]


def num_prompt_tokens(prompt: Prompt, tokenizer: ChatTokenizer, *, tools: list[dict[str, Any]] | None = None) -> int:
    """Tokens of `prompt` as the model sees it; `tools` are told to it where the prompt has none of its own.

    Raises:
        ConfigError: it has a character that the tokenizer does not know.
    """
    # Tools are part of the prompt as the model sees it, and can be longer than the question.
    offered = offered_tools(tools if prompt.tools is None else prompt.tools, prompt.tool_choice)
    with known_characters(prompt, tokenizer), errors_about(prompt.place or "a prompt"):
        return len(render_prompt(tokenizer, prompt.message, offered, images_of(prompt)))


@contextmanager
def known_characters(prompt: Prompt, tokenizer: Any) -> Iterator[None]:
    """A character of `prompt` that `tokenizer` cannot encode inside is told as what it is.

    Raises:
        ConfigError: there is one.
    """
    try:
        yield
    except ConfigError:
        raise
    # A tokenizer without an "unknown" token raises a bare Exception, which does not say for what.
    except Exception as error:
        for character in dict.fromkeys("".join(texts_of(prompt))):
            try:
                tokenizer.encode(character, add_special_tokens=False)
            # As above: whatever it raises, it does not know the character.
            except Exception:
                raise ConfigError(
                    f"{prompt.place or 'a prompt'}: the model has no token for the character {character!r} "
                    f"(U+{ord(character):04X}); add it to model.tiny.alphabet, or leave that key out, so "
                    f"that the alphabet is taken from the data"
                ) from error
        raise ConfigError(f"{prompt.place or 'a prompt'}: {error}") from error


def texts_of(prompt: Prompt) -> Iterator[str]:
    """Texts that a model may have to read or to write for `prompt`: messages, answer and demonstration."""
    shown = prompt.extra.get("demonstration")
    for message in [*prompt.message, *(shown if isinstance(shown, list) else ())]:
        content = message.get("content") if isinstance(message, dict) else None
        yield content if isinstance(content, str) else ""
    yield str((prompt.reward_model or {}).get("ground_truth", ""))


def last_user_text(message: Sequence[Message]) -> str:
    """The text of the last message of the user; without one, of the last message."""
    contents = [turn.get("content") for turn in message if turn.get("role") == "user"]
    content = contents[-1] if contents else (message[-1].get("content") if message else "")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", f"<{part.get('type')}>")) for part in content)
    return str(content or "")


def _subset(prompts: Sequence[Prompt], kept: list[int], level: int, why: str) -> Sequence[Prompt]:
    left_out = len(prompts) - len(kept)
    if not left_out:
        return prompts
    logger.log(level, "%d of %d prompts are left out: %s", left_out, len(prompts), why)
    return LazySequence(prompts.__getitem__, kept)


def _message_key(prompt: Prompt) -> str:
    return json.dumps(prompt.message, sort_keys=True, default=str)


def _make_prompt(row: Any, config: DataConfig, made: "Templates", place: str) -> Prompt:
    if isinstance(row, Prompt):
        return row
    if not isinstance(row, Mapping):
        raise ConfigError(f"{place}: a row must be a mapping or a Prompt, got {type(row).__name__}")
    new: dict[str, Any] = {}
    taken: set[str] = set()
    for name, column in {"prompt": "prompt", "answer": "answer", **config.columns}.items():
        if (render := made.get(name)) is not None:
            new[name] = render(row, place)
        # A row that brings a reward_model needs no answer besides.
        elif name != "answer" or (column and (column in row or not row.get("reward_model"))):
            new[name] = _find_column(row, column, name, place)
            taken.add(column)
    rest = {column: value for column, value in row.items() if column not in taken} | new
    message, images = take_images(rest, _make_message(rest.pop("prompt"), config, place), place)
    reward_model = rest.pop("reward_model", None) or {}
    if not isinstance(reward_model, dict):
        raise ConfigError(f"{place}: column 'reward_model' must hold a mapping, got {reward_model!r}")
    if "answer" in new:
        reward_model = {"ground_truth": rest.pop("answer"), **reward_model}
    return Prompt(
        message=message,
        reward_model=reward_model or None,
        data_source=rest.pop("data_source", None) or (config.source if isinstance(config.source, str) else None),
        # Arrow would pad tool schemas that differ with nulls, so both columns may also hold JSON text.
        tools=_read_json(rest, "tools", (list,), "a list of tool schemas", place),
        tool_choice=_read_json(rest, "tool_choice", (str, dict), "a text or an object", place),
        mm_info={IMAGES: images} if images else None,
        extra=rest,
        place=place,
    )


Templates = Mapping[str, Callable[[Mapping[str, Any], str], str] | None]
"""A template by the name of the column; None: it is another column."""


def _find_column(row: Mapping[str, Any], column: str, name: str, place: str) -> Any:
    if column in row:
        return row[column]
    raise ConfigError(
        f"{place} has no column {column!r}; {did_you_mean(column, row)}"
        f"set columns.{name} to one of: {', '.join(map(str, row))}"
    )


def _make_message(value: Any, config: DataConfig, place: str) -> list[Message]:
    if isinstance(value, str) and value:
        message: list[Message] = [{"role": "user", "content": value}]
    elif (
        value
        and isinstance(value, list)
        and all(isinstance(item, dict) and isinstance(item.get("role"), str) and "content" in item for item in value)
    ):
        # Arrow gives every message all the fields that any message has; the absent ones as None.
        message = [{key: part for key, part in item.items() if part is not None} for item in value]
    else:
        raise ConfigError(
            f"{place}: column {config.columns.get('prompt', 'prompt')!r} must hold a text or a chat list of "
            f'{{"role": ..., "content": ...}}, got {str(value)[:80]!r}'
        )
    if config.system_prompt is not None and message[0]["role"] != "system":
        message = [{"role": "system", "content": config.system_prompt}, *message]
    return message


def _read_json(rest: dict[str, Any], column: str, kinds: tuple[type, ...], wanted: str, place: str) -> Any:
    """The value of a column of one of these `kinds`; its JSON text will do."""
    value = rest.pop(column, None)
    # A text that may stand for itself is JSON only if it is an object.
    if isinstance(value, str) and (str not in kinds or value.lstrip().startswith("{")):
        with errors_about(f"{place}: column {column!r} is not valid JSON", ValueError):
            value = json.loads(value)
    if value is not None and not isinstance(value, kinds):
        raise ConfigError(f"{place}: column {column!r} must hold {wanted}, got {value!r}")
    return value or None
