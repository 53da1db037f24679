"""The lines at the bottom of a terminal that say what a run does at this moment.

::

    look() --> draw() --> a rest of `PERIOD_S`, or longer the more it cost --> look() ...

    consumes: nothing    waits for: the clock    woken by: a timer of the event loop
    produces: drawings, in the event loop's thread, for less than `MAX_CPU_SHARE` of its time

`panel` turns the numbers into lines; it draws nothing. Its height depends on the tasks and on whether the run
is stalled, so nothing jumps. A narrow terminal gets fewer fields of each line, the most important ones first.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from forebay.runs.show.status import MAX_AGE, Now, StepNow, TaskNow
from forebay.runs.show.wording import age, clean, percent
from forebay.types import Status
from forebay.watching.activity import STAGES

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
"""The time between two drawings: a person reads no faster."""
MAX_CPU_SHARE = 0.01
"""The share of one core for counting and drawing: after an expensive drawing the next is put off."""
MAX_TASKS = 8
"""Lines of tasks: a panel higher than a terminal would be cut off at its end, where a stall is told."""

_LABEL_WIDTH = 9
"""The width of the first column: no label is longer."""
_MAX_NAME_WIDTH = 24
"""The width of the first column where tasks have longer names."""
_COLUMNS = {"ready": 9, "in flight": 9, "aborted": 7, "expired": 7}
"""The columns of the tasks, and their widths."""
_COLUMN_STATUSES = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
_BAR_WIDTH = 30


class LiveView:
    """Redraws a few lines of a terminal twice a second, or seldomer where that is expensive.

    Invariants: drawing costs at most `MAX_CPU_SHARE` of a core over any stretch of time; an error in it ends
    the view with a warning, never the run; after `close` the terminal is as it was.

    ::

        live = LiveView(console, lambda: Text("step 1"))
        live.look = status.count_buffer
        live.close()
    """

    def __init__(self, console: Console, render: Callable[[], RenderableType]) -> None:
        self.look: Callable[[], Awaitable[None]] | None = None
        """Awaited before each drawing, to bring up to date what `render` reads."""
        # Refreshed from here and not by a thread, which would fight for the compute cores.
        self._live = Live(get_renderable=render, console=console, auto_refresh=False, transient=True)
        self._live.start(refresh=True)
        self._task = asyncio.create_task(self._redraw(), name="live view")

    def draw(self) -> None:
        """Draw at once, whatever it costs, as of the last `look`."""
        if self._live.is_started:
            self._live.refresh()

    def close(self) -> None:
        """Take the lines away. May be called twice."""
        self._task.cancel()
        self._live.stop()

    async def _redraw(self) -> None:
        try:
            await look_again_and_again(self._look_and_draw, PERIOD_S, MAX_CPU_SHARE)
        # Whatever a terminal or a store does: a view of the run must not end the run.
        except Exception as error:
            self._live.stop()
            logger.warning("the live view has ended: %r", error)

    async def _look_and_draw(self) -> None:
        if self.look is not None:
            await self.look()
        self.draw()


async def look_again_and_again(look: Callable[[], Awaitable[None]], period_s: float, cpu_share: float) -> None:
    """Await `look` every `period_s`; after an expensive one the next is put off, to keep the `cpu_share`."""
    while True:
        started_s = time.thread_time()
        await look()
        await asyncio.sleep(max(period_s, (time.thread_time() - started_s) / cpu_share))


def panel(step: StepNow, now: Now | None, *, width: int, ascii_only: bool = False) -> RenderableType:
    """The lines; without `now`, while the run is being built, the first only."""
    bar_width = min(_BAR_WIDTH, max(8, width // 3))
    full = round(min(1.0, (step.step + step.done) / max(1, step.total)) * bar_width)
    filled, empty = ("#", "-") if ascii_only else ("\u2501", "\u2500")
    first = _text(f"  step {step.step}/{step.total}  ")
    first.append(filled * full, "green").append(empty * (bar_width - full), "bright_black")
    # The phase has a line of its own once the run is built.
    _fitted(first, [f"ETA {step.eta}", "" if now else clean(step.phase)], width)
    if now is None:
        return Group(first)
    lines = [first, *_side_lines(step, now, width), *_task_lines(now, width)]
    return Group(*lines, *([_text(f"  {clean(now.stall)}", "bold red")] if now.stall else []))


def _text(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _fitted(line: Text, fields: Iterable[str], width: int) -> Text:
    """`line` with as many of the fields as fit whole."""
    for field in filter(None, fields):
        if line.cell_len + 2 + cell_len(field) > width:
            break
        line.append(f"  {field}")
    return line


def _side_lines(step: StepNow, now: Now, width: int) -> Iterator[Text]:
    stages = [
        f"{stage.doing} {count} {stage.what}{'s' if count > 1 else ''}"
        for name, stage in STAGES.items()
        if (count := now.stages.get(name))
    ]
    # Without one the line stays, empty: it comes and goes too often.
    oldest = ["-"]
    if now.oldest:
        slow = now.oldest[0]
        stage = STAGES[slow.stage]
        since = f"{stage.doing} for {age(slow.age_s)}"
        oldest = [since, f"{stage.what} {clean(slow.name, 48)}", clean(slow.note)]
    lines = {
        "last step": [f"{name} {value}".strip() for name, value in step.facts.items()],
        "trainer": [
            f"busy {percent(now.busy['trainer'])}",
            f"{clean(step.phase)} for {age(step.phase_s)}" if step.phase else "",
        ],
        "producer": [
            f"busy {percent(now.busy['producer'])}",
            f"weights of step {now.model_step}",
            *(stages or ["nothing in flight"]),
        ],
        "oldest": oldest,
    }
    for label, (first, *more) in lines.items():
        line = _text("").append(f"  {label:<{_LABEL_WIDTH}}", "dim")
        yield _fitted(line.append(f"  {first}"), more, width)


def _task_lines(now: Now, width: int) -> Iterator[Text]:
    names = {name: clean(name, _MAX_NAME_WIDTH) for name in list(now.tasks)[:MAX_TASKS]}
    name_width = max(_LABEL_WIDTH, *map(cell_len, names.values()))
    header = [*(name.rjust(column) for name, column in _COLUMNS.items()), "ready by staleness"]
    yield _fitted(_text(f"  {'groups':<{name_width}}", "dim"), header, width)
    for name, shown in names.items():
        line = _text(f"  {set_cell_size(shown, name_width)}")
        yield _fitted(line, _task_fields(now.tasks[name]), width)
    if len(now.tasks) > MAX_TASKS:
        yield _text(f"  and {len(now.tasks) - MAX_TASKS} more tasks", "dim")


def _task_fields(task: TaskNow) -> Iterator[str]:
    """The columns; ``0: 12  1: 7``: how many ready groups are that stale; statuses without a column."""
    completed, aborted, expired = (task.buffer.get(status, 0) for status in _COLUMN_STATUSES)
    cells = f"{completed}/{task.batch}", str(task.in_flight), str(aborted), str(expired)
    yield from (cell.rjust(column) for cell, column in zip(cells, _COLUMNS.values(), strict=True))
    yield "  ".join(
        f"{staleness}{'+' if staleness == MAX_AGE else ''}: {count}" for staleness, count in task.ages.items()
    )
    yield "  ".join(
        f"{count} {status.value}" for status, count in task.buffer.items() if count and status not in _COLUMN_STATUSES
    )
