"""The lines at the bottom of a terminal that say what a run does now.

::

    note(): something has changed --+
                                    +--> one timer --> look() --> draw() --> the next one, not too soon
    a second has passed ------------+

    consumes: notes    waits for: the clock, of the event loop    woken by: one timer
    produces: drawings, in the event loop's thread, for less than `MAX_CPU_SHARE` of its time

`panel` turns the numbers into lines; it draws nothing. Its height depends on the tasks and on whether the run
is stalled, so nothing jumps. A narrow terminal gets fewer fields of each line, the most important ones first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from forebay.runs.show.status import MAX_AGE, Now, TaskNow
from forebay.runs.show.wording import age, clean, percent
from forebay.types import Status
from forebay.watching.activity import GENERATE, JUDGE, PUT, QUEUED, TOOL

logger = logging.getLogger(__name__)

MIN_PERIOD_S = 0.25
"""Between two drawings: nobody reads faster."""
TICK_S = 1.0
"""Without a change, times go on."""
MAX_CPU_SHARE = 0.01
"""Of one core, for counting and drawing: after an expensive one the next is put off."""

MAX_TASKS = 8
"""Lines of tasks: a panel higher than a terminal would be cut off at its end, where a stall is told."""

_STAGE_WORDS = {
    QUEUED: ("queued", "group"),
    GENERATE: ("generating", "rollout"),
    TOOL: ("at a tool:", "rollout"),
    JUDGE: ("judging", "group"),
    PUT: ("storing", "group"),
}
"""What is done, and to what."""
_LABEL_WIDTH = 9
"""Of the first column: no label is longer."""
_MAX_NAME_WIDTH = 24
"""Of the first column where tasks have longer names."""
_COLUMNS = {"ready": 11, "in flight": 11, "aborted": 9, "expired": 9}
_COLUMN_STATUSES = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
_BAR_WIDTH = 30


class LiveView:
    """Redraws a few lines of a terminal when something has changed, never often, or a second has passed.

    Invariants: drawing costs at most `MAX_CPU_SHARE` of a core over any stretch of time; what goes wrong in
    it ends the view with a warning, never the run; after `close` the terminal is as it was.

    >>> live = LiveView(console, lambda: Text("step 1"), look=status.count_buffer)     # in an event loop
    >>> live.note()                                                                    # drawn soon
    >>> live.close()
    """

    def __init__(
        self,
        console: Console,
        render: Callable[[], RenderableType],
        *,
        look: Callable[[], Awaitable[None]] | None = None,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`look` is awaited before each drawing, to bring up to date what `render` reads."""
        self.look = look
        self._loop = asyncio.get_running_loop()
        self._cpu_clock = cpu_clock
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._not_before_s = self._loop.time()
        self._is_soon = False
        """The timer stands at the earliest moment already."""
        # Refreshed from here and not by a thread, which would fight for the compute cores.
        self._live: Live | None = Live(
            get_renderable=render, console=console, auto_refresh=False, transient=True
        )
        self._live.start(refresh=True)
        self._set_timer(TICK_S)

    def note(self) -> None:
        """Something has changed. Costs next to nothing."""
        if not self._is_soon and self._live is not None:
            self._is_soon = True
            if self._task is None:
                self._set_timer(0.0)

    def draw(self) -> None:
        """Draw at once, whatever it costs, as of the last `look`."""
        if self._live is not None:
            self._live.refresh()

    def close(self) -> None:
        """Take the lines away. May be called twice."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _set_timer(self, after_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(max(self._not_before_s, self._loop.time() + after_s), self._start)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._draw(), name="live view")

    async def _draw(self) -> None:
        self._is_soon = False
        started_s = self._cpu_clock()
        try:
            if self.look is not None:
                await self.look()
            self.draw()
        # Whatever a terminal or a store does: a view of the run must not end the run.
        except Exception as error:
            self._task = None
            self.close()
            logger.warning("the live view has ended: %r", error)
            return
        cost_s = (self._cpu_clock() - started_s) / MAX_CPU_SHARE
        self._task = None
        if self._live is not None:
            self._not_before_s = self._loop.time() + max(MIN_PERIOD_S, cost_s)
            self._set_timer(0.0 if self._is_soon else TICK_S)


@dataclass(frozen=True, kw_only=True)
class StepNow:
    """Where the run stands, and what the trainer does."""

    step: int
    total: int
    done: float
    """Of this step, 0 to 1, where that is known."""
    eta: str
    phase: str
    phase_s: float
    facts: Mapping[str, str]
    """Names and numbers of the last steps, the most important first."""


def panel(step: StepNow, now: Now | None, *, width: int, ascii_only: bool = False) -> RenderableType:
    """The lines; without `now`, while the run is being built, the first only."""
    lines = [_step_line(step, width, ascii_only=ascii_only, with_phase=now is None)]
    if now is not None:
        facts = [f"{name} {value}".strip() for name, value in step.facts.items()]
        lines += [_line("last step", facts, width), *_side_lines(step, now, width), *_task_lines(now, width)]
        if now.stall:
            lines.append(_text(f"  {clean(now.stall)}", "bold red"))
    return Group(*lines)


def _text(text: str = "", style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _line(label: str, fields: Sequence[str], width: int) -> Text:
    """`label`, the first field, and as many more as fit."""
    line = _text()
    line.append(f"  {label:<{_LABEL_WIDTH}}", "dim")
    return _extended(line.append(f"  {fields[0]}"), fields[1:], width)


def _extended(line: Text, fields: Iterable[str], width: int) -> Text:
    """With as many of the fields as fit whole."""
    for field in filter(None, fields):
        if line.cell_len + 2 + cell_len(field) > width:
            break
        line.append(f"  {field}")
    return line


def _step_line(step: StepNow, width: int, *, ascii_only: bool, with_phase: bool) -> Text:
    bar_width = min(_BAR_WIDTH, max(8, width // 3))
    share = min(1.0, (step.step + step.done) / max(1, step.total))
    full = round(share * bar_width)
    filled, empty = ("#", "-") if ascii_only else ("\u2501", "\u2500")
    line = _text(f"  step {step.step}/{step.total}  ")
    line.append(filled * full, "green")
    line.append(empty * (bar_width - full), "bright_black")
    return _extended(line, [f"ETA {step.eta}", clean(step.phase) if with_phase else ""], width)


def _side_lines(step: StepNow, now: Now, width: int) -> Iterator[Text]:
    doing = f"{clean(step.phase)} for {age(step.phase_s)}" if step.phase else ""
    yield _line("trainer", [f"busy {percent(now.busy['trainer'])}", doing], width)
    stages = [
        f"{words} {now.stages[stage]} {what}{'s' if now.stages[stage] > 1 else ''}"
        for stage, (words, what) in _STAGE_WORDS.items()
        if stage in now.stages
    ]
    weights = f"weights of step {now.model_step}"
    busy = f"busy {percent(now.busy['producer'])}"
    yield _line("producer", [busy, weights, *(stages or ["nothing in flight"])], width)
    # Without one the line stays, empty: it comes and goes too often.
    fields = ["-"]
    if now.oldest is not None:
        words, what = _STAGE_WORDS[now.oldest.stage]
        since = f"{words} for {age(now.oldest.age_s)}"
        fields = [since, f"{what} {clean(now.oldest.name, 48)}", clean(now.oldest.note)]
    yield _line("oldest", fields, width)


def _task_lines(now: Now, width: int) -> Iterator[Text]:
    names = {name: clean(name, _MAX_NAME_WIDTH) for name in list(now.tasks)[:MAX_TASKS]}
    name_width = max(_LABEL_WIDTH, *map(cell_len, names.values()))
    columns = _columns_that_fit(width - 2 - name_width)
    header = "".join(name.rjust(columns[name]) for name in columns)
    yield _extended(_text(f"  {'groups':<{name_width}}{header}", "dim"), ["ready by staleness"], width)
    for name, shown in names.items():
        cells = _task_cells(now.tasks[name])
        line = _text(f"  {set_cell_size(shown, name_width)}")
        line.append("".join(cells[column].rjust(columns[column]) for column in columns))
        yield _extended(line, [_ages(now.tasks[name]), _rest(now.tasks[name])], width)
    if len(now.tasks) > MAX_TASKS:
        yield _text(f"  and {len(now.tasks) - MAX_TASKS} more tasks", "dim")


def _columns_that_fit(width: int) -> dict[str, int]:
    columns: dict[str, int] = {}
    for name, column_width in _COLUMNS.items():
        if sum(columns.values()) + column_width <= width:
            columns[name] = column_width
    return columns


def _task_cells(task: TaskNow) -> dict[str, str]:
    completed, aborted, expired = (task.groups.get(status, 0) for status in _COLUMN_STATUSES)
    return {
        "ready": f"{completed}/{task.batch}",
        "in flight": str(task.in_flight),
        "aborted": str(aborted),
        "expired": str(expired),
    }


def _ages(task: TaskNow) -> str:
    """``0: 12  1: 7``: how many ready groups are that stale."""
    return "  ".join(
        f"{staleness}{'+' if staleness == MAX_AGE else ''}: {count}" for staleness, count in task.ages.items()
    )


def _rest(task: TaskNow) -> str:
    """The statuses that have no column, where there are any."""
    return "  ".join(
        f"{count} {status.value}"
        for status, count in task.groups.items()
        if count and status not in _COLUMN_STATUSES
    )
