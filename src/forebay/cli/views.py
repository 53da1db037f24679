"""Tables and texts for a terminal.

Text that a model, a dataset or a user wrote is shown as text: never as markup, and never as a sequence that a
terminal would obey.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from forebay.agents.extra_fields import conversation_of, facts_of
from forebay.cli.source import Digest
from forebay.replay import StorageItem
from forebay.replay.query import plain_value
from forebay.types import UNLABELED, RolloutState, Status

size = decimal
"""Bytes in the unit that fits."""
MAX_HISTOGRAM_LINES = 20
"""More values than this share lines, so that the histogram stays on one screen."""
BAR_WIDTH = 40
MAX_RESULT_CHARACTERS = 2000
"""The part of a tool's result that is shown: a screen of it."""


def plain(text: object, style: str = "") -> Text:
    """`text` with everything a terminal would act on written out, but for line ends and tabs."""
    shown = "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1]
        for character in str(text)
    )
    return Text(shown, style)


def number(value: float | None, digits: int = 2) -> str:
    """`value` with thousands apart; ``-`` where there is none."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def section(title: str, *content: RenderableType) -> Group:
    """A heading with its content, indented."""
    return Group(Text(f"\n{title}", "bold"), *(Padding(part, (0, 0, 0, 2), expand=False) for part in content))


def table(*columns: str, rows: Iterable[Sequence[Any]] = (), left: int | Iterable[int] = 1) -> Table:
    """A table of `rows`, whose numbers are shown as by `number` and whose texts as by `plain`.

    The first `left` columns, or those with these indices, hold text and the others numbers.
    """
    texts = range(left) if isinstance(left, int) else set(left)
    made = Table(box=None, pad_edge=False, header_style="dim", show_header=any(columns))
    for place, column in enumerate(columns):
        made.add_column(Text(column), justify="left" if place in texts else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def _cell(value: Any) -> RenderableType:
    if value is None or isinstance(value, int | float):
        return number(value)
    return plain(value) if isinstance(value, str) else value


def _by_task(rows: Iterable[StorageItem]) -> Iterator[tuple[str, list[StorageItem]]]:
    ordered = sorted(rows, key=lambda row: row.task_name)
    return ((task, list(members)) for task, members in groupby(ordered, key=lambda row: row.task_name))


def counts_table(rows: Iterable[StorageItem]) -> Table:
    """Groups by task and status, with sums."""
    tasks = {task: Counter(Status(row.status) for row in members) for task, members in _by_task(rows)}
    if len(tasks) > 1:
        tasks["all"] = sum(tasks.values(), Counter())
    statuses = [status for status in Status if any(status in counts for counts in tasks.values())]
    lines = [
        (task, *(counts[status] or "." for status in statuses), counts.total() - counts[Status.ARCHIVED])
        for task, counts in tasks.items()
    ]
    return table("task", *(status.value for status in statuses), "live", rows=lines)


def histogram(values: Sequence[int]) -> Table:
    """How often each value comes, with a bar; neighboring values share a line where there are too many."""
    low, high = min(values), max(values)
    # Rounded up, or there would be a line too many.
    width = -(-(high - low + 1) // MAX_HISTOGRAM_LINES)
    counts = Counter((value - low) // width for value in values)
    most = max(counts.values())
    lines = []
    for place in range((high - low) // width + 1):
        start, end = low + place * width, min(low + (place + 1) * width - 1, high)
        label = str(start) if width == 1 else f"{start}..{end}"
        lines.append((label, counts[place], Bar(most, 0, counts[place], width=BAR_WIDTH)))
    return table("", "groups", "", rows=lines, left=(0, 2))


def ages_table(rows: Iterable[StorageItem], train_steps: Mapping[str, int | None]) -> Table:
    """A row for each task: train step, the weights that made the live groups, how stale they are."""
    lines = []
    for task, members in _by_task(rows):
        staleness = [row.staleness for row in members]
        steps = [row.oldest_model_step for row in members if row.oldest_model_step is not None]
        weights = min(steps, default=None), max(steps, default=None)
        median = number(float(np.median(staleness)), 1)
        lines.append((task, train_steps.get(task), *weights, min(staleness), median, max(staleness)))
    columns = ("train step", "oldest weights", "newest weights", "least stale", "median", "most stale")
    return table("task", *columns, rows=lines)


def sizes_table(rows: Iterable[StorageItem], digests: Mapping[int, Digest]) -> Table:
    """A row for each task: groups, rollouts and response tokens, ARCHIVED groups too."""
    lines = []
    for task, members in _by_task(rows):
        found = [digests[row.uid] for row in members]
        rollouts, tokens = sum(one.num_rollouts for one in found), sum(one.num_tokens for one in found)
        longest = max(one.max_tokens for one in found)
        lines.append((task, len(found), rollouts, tokens, number(tokens / rollouts, 1), longest))
    columns = ("groups", "rollouts", "tokens", "tokens per rollout", "longest rollout")
    return table("task", *columns, rows=lines)


def rows_table(rows: Iterable[StorageItem], digests: Mapping[int, Digest]) -> Table:
    """One line per group."""
    lines = []
    for row in rows:
        digest = digests[row.uid]
        consumed = "" if row.train_step is None else f" (train step {row.train_step})"
        status = f"{Status(row.status).value}{consumed}"
        sizes = digest.num_rollouts, digest.num_tokens, digest.score
        ages = row.staleness, f"{row.priority:g}"
        lines.append((str(row.uid), digest.group_id, row.task_name, status, *ages, *sizes, tags_text(row)))
    columns = ("group", "task", "status", "staleness", "priority", "rollouts", "tokens", "score", "tags")
    return table("uid", *columns, rows=lines, left=(0, 1, 2, 3, 9))


def tags_text(row: StorageItem) -> str:
    """``level=3 kind="add"``: text in quotes, so that kinds can be told apart."""
    pairs = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in sorted(row.tags.items()))
    return " ".join(pairs)


def group_view(row: StorageItem, group: Sequence[RolloutState]) -> Group:
    """One group: its row, its prompt, and every rollout."""
    facts: dict[str, object] = {
        "group": group[0].group_id,
        "task": row.task_name,
        "status": Status(row.status).value,
        "staleness": row.staleness,
        "priority": f"{row.priority:g}",
        "tags": tags_text(row),
    }
    if row.train_step is not None:
        facts["consumed"] = f"train step {row.train_step}, was {plain_value(row.status_before)}"
    lines = [(Text(name, "dim"), str(value)) for name, value in facts.items()]
    prompt = group[0].message
    return Group(
        table("", "", rows=lines, left=2),
        section("prompt", *_messages(prompt)),
        # A prompt that members share is shown once.
        *(_rollout_view(state, None if state.message == prompt else state.message) for state in group),
    )


def _messages(messages: Iterable[object]) -> Iterator[RenderableType]:
    """Each message's role and content; a tool's result only as far as it is not long."""
    for message in messages:
        if not isinstance(message, Mapping):
            yield plain(_content(message))
            continue
        role = str(message.get("role", "?"))
        named = f" {message['name']}" if message.get("name") else ""
        yield plain(f"{role}{named}", "bold cyan")
        content = _content(message.get("content") or "")
        if role == "tool" and len(content) > MAX_RESULT_CHARACTERS:
            left = len(content) - MAX_RESULT_CHARACTERS
            content = f"{content[:MAX_RESULT_CHARACTERS]}... ({left} characters left out)"
        if content:
            yield plain(content)
        if message.get("tool_calls"):
            yield Text("calls ", "dim") + plain(_content(message["tool_calls"]))


def _rollout_view(state: RolloutState, own_prompt: Sequence[object] | None) -> Group:
    reward = state.reward if isinstance(state.reward, Mapping) else {}
    title = f"{state.rollout_id}: {state.status.value}, score {reward.get('score', '-')}"
    parts: list[RenderableType] = [Text(), Rule(plain(title), align="left", characters="-", style="dim")]
    if own_prompt is not None:
        parts.append(section("prompt", *_messages(own_prompt)))
    if conversation := conversation_of(state):
        parts.append(section("conversation", *_messages(conversation)))
    if not conversation or (conversation[-1].get("role") != "assistant" and state.response):
        # All there is, or what an interrupted rollout has of its next turn.
        parts.append(plain(state.response))
    facts = [f"{number(len(state.response_ids))} tokens", f"finish reason {state.finish_reason or '-'}"]
    facts += [f"{name} {_content(value)}" for name, value in facts_of(state).items()]
    parts += [plain(", ".join(facts), "dim"), Text(version_spans(state), "dim")]
    if state.reward is not None:
        parts.append(Text("reward ", "dim") + plain(_content(state.reward)))
    if state.error_msg:
        parts.append(Text("error ", "red") + plain(state.error_msg))
    return Group(*parts)


def version_spans(state: RolloutState) -> str:
    """Which weights made which response tokens: ``weights: step 3 for 0-11, environment for 12-19``."""
    makers = [
        # The mask first: tokens of an environment may carry a step, but no weights made them.
        "environment" if mask == 0 else "not labeled" if step == UNLABELED else f"step {step}"
        for step, mask in zip(state.response_model_steps.tolist(), state.response_mask.tolist(), strict=True)
    ]
    spans, start = [], 0
    for maker, tokens in groupby(makers):
        end = start + len(list(tokens))
        spans.append(f"{maker} for {start}-{end - 1}")
        start = end
    return "weights: " + (", ".join(spans) or "-")


def _content(value: object) -> str:
    """A message's content or a reward: text as it is, anything else as close to JSON as it comes."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=repr, ensure_ascii=False)
    # Keys that JSON does not have, and values that hold themselves.
    except (TypeError, ValueError, RecursionError):
        return repr(value)
