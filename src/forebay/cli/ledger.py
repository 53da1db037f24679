"""The ``forebay ledger`` command: what became of every group, and whether dropping some bends the rest.

::

    RUN_FOLDER/ledger.jsonl --> its balance, its newest checkpoint against the buffer, dropped against trained
    a buffer on disk        --> `ledger_section`: the ledger near it, held against it
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from forebay.cli.errors import console, in_one_message
from forebay.cli.source import find_snapshot, opened
from forebay.cli.views import number, plain, section, table
from forebay.ledger import Balance, Comparison, Ledger, compare_dropped
from forebay.replay import StorageItem
from forebay.replay.format.snapshot import MANIFEST

LEDGER_FILE = "ledger.jsonl"


@in_one_message
async def show_ledger(
    path: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A run's folder, or a ledger.jsonl.")],
    task: Annotated[str | None, typer.Option(help="Compare the groups of this task only.")] = None,
) -> None:
    """Show what became of every group, and how dropped groups differ from trained ones."""
    out, file = console(), path / LEDGER_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"there is no ledger at {str(file)!r}; name a run folder or a {LEDGER_FILE}")
    ledger = Ledger.read(file)
    if task is not None and task not in ledger.task_names:
        raise ValueError(f"no task {task!r} in {str(file)!r}; tasks: {', '.join(ledger.task_names)}")
    out.print(Text(str(file), "bold"), soft_wrap=True)
    balance = balance_table(ledger.balance(ledger.count_live()))
    out.print(section("groups, by the ledger's own account", balance, *_losses(ledger)))
    await _check_checkpoint(file.parent, out)
    comparisons = compare_dropped(ledger, task)
    if comparisons["all"][0].trained.count == 0 or len(comparisons) == 1:
        out.print(section("bias", Text("nothing to compare: no group was dropped, or none trained")))
        return
    notes = ["difference: mean of the dropped minus mean of the trained; *: beyond 3 standard errors"]
    if task is None and len(ledger.task_names) > 1:
        notes.append("tasks differ by themselves; --task compares within one")
    title = f"bias: dropped against trained groups, {'all tasks' if task is None else f'task {task}'}"
    out.print(section(title, bias_table(comparisons), *(Text(note, "dim") for note in notes)))


async def _check_checkpoint(folder: Path, out: Console) -> None:
    """Hold the newest checkpoint's ledger against its buffer."""
    try:
        buffer = find_snapshot(folder)
        near = _find_ledger(buffer)
    except ValueError:
        # No checkpoint, or one that cannot be read: the books alone were asked for.
        return
    if near is not None and near.is_same_moment:
        async with opened(str(buffer)) as source:
            live = Counter(row.task_name for row in await source.storage.get({}, rows_only=True))
        out.print(section(f"newest checkpoint ({buffer.parents[1].name})", _verdict(near, live)))


def ledger_section(buffer: Path, live: Iterable[StorageItem]) -> Group:
    """The ledger near the snapshot `buffer` against its live rows; empty if there is none."""
    try:
        near = _find_ledger(buffer)
    except ValueError as error:
        # The buffer was asked for; a ledger that cannot be read must not hide it.
        return section("ledger", Text("not readable: ", "yellow") + plain(error))
    if near is None:
        return Group()
    counts = Counter(row.task_name for row in live)
    verdict = _verdict(near, counts, is_database=not (buffer / MANIFEST).is_file())
    return section(f"ledger ({near.location})", balance_table(near.ledger.balance(counts)), verdict)


class _NearLedger(NamedTuple):
    """The ledger of a buffer on disk."""

    ledger: Ledger
    location: str
    is_same_moment: bool
    """Saved together with the buffer. Otherwise it is of the end of its file, which may have gone on."""


def _find_ledger(buffer: Path) -> _NearLedger | None:
    """The ledger saved beside the snapshot `buffer`, else the file near it; None if there is none.

    Raises:
        ValueError: there is one, but it cannot be read.
    """
    saved = buffer.parent / "manager.json"
    if saved.is_file():
        state = json.loads(saved.read_text(encoding="utf-8"))
        return _NearLedger(Ledger.read_checkpoint(state.get("ledger", {}), saved.parent), str(saved), True)
    for folder in (buffer, buffer.parent, buffer.parent.parent):
        if (file := folder / LEDGER_FILE).is_file():
            return _NearLedger(Ledger.read(file), str(file), False)
    return None


def _verdict(near: _NearLedger, live: Mapping[str, int], *, is_database: bool = False) -> Text:
    if losses := _losses(near.ledger):
        return losses[0]
    found = near.ledger.balance(live)
    if found.ok:
        return Text("balanced: every group is in exactly one place", "green")
    if is_database and not found.repeated and all(part.difference >= 0 for part in found.by_task.values()):
        return Text(f"{found.difference} groups are not in the database: they are, or were, in flight or in a batch")
    if not near.is_same_moment:
        return Text("the ledger's file may have gone on since the buffer was saved, or before it", "yellow")
    return Text("NOT balanced: groups are missing (difference > 0), too many (< 0), or repeated", "bold red")


def _losses(ledger: Ledger) -> list[Text]:
    """A line about events that are missing in the ledger's file; nothing if none are."""
    if not ledger.lost_events:
        return []
    said = (
        f"{number(ledger.lost_events)} events are missing in the file: a power cut or the disk took them. "
        "The groups that they were about may be missing here, or stand where they were before"
    )
    return [Text(said, "bold red")]


def balance_table(balance: Balance) -> Table:
    """A row for each task: generated = trained + dropped by reason + live, and rollouts that left, if any."""
    reasons = sorted(balance.dropped)
    parts = balance.by_task | ({"all": balance} if len(balance.by_task) > 1 else {})
    lines = [
        (
            *(name, part.generated, part.trained),
            *(part.dropped.get(reason, 0) for reason in reasons),
            part.live,
            *(Text(number(wrong), "bold red" if wrong else "") for wrong in (part.difference, part.repeated)),
            *(part.retried, part.reused),
            *([part.left] if balance.left else []),
        )
        for name, part in parts.items()
    ]
    others = ("live", "difference", "repeated", "retried", "reused", *(["rollouts left"] if balance.left else []))
    return table("task", "generated", "trained", *reasons, *others, rows=lines)


def bias_table(comparisons: Mapping[str, Sequence[Comparison]]) -> Table:
    """Dropped against trained groups: counts, means, medians, difference of means with its standard error."""
    # Beside a single reason, "all" would say the same twice.
    reasons = [reason for reason in comparisons if reason != "all" or len(comparisons) != 2]
    lines: list[tuple[Any, ...]] = []
    for place, (first, *_) in enumerate(zip(*comparisons.values(), strict=True)):
        trained = first.trained
        lines.append((_UNITS[first.quantity], "trained", trained.count, trained.mean, trained.median, "", ""))
        for reason in reasons:
            one = comparisons[reason][place]
            mark, style = (" *", "bold yellow") if one.is_notable else ("", "")
            signed = "-" if math.isnan(one.difference) else f"{one.difference:+,.2f}"
            label = "dropped" if reason == "all" else f"dropped: {reason}"
            summary = one.dropped.count, one.dropped.mean, one.dropped.median
            lines.append(("", label, *summary, Text(signed + mark, style), one.standard_error))
    columns = ("groups", "mean", "median", "difference", "standard error")
    return table("quantity", "of", *columns, rows=lines, left=2)


_UNITS = {"num_tokens": "tokens", "latency_s": "seconds", "score": "first score"}
