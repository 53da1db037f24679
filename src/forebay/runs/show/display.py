"""A run as a person sees it: a live view in a terminal, plain lines in a pipe or a log.

::

    start -> phase, production ... -> step -> rollouts, evaluation when due -> ... -> summary -> close

It takes numbers, strings and rollouts and knows nothing of how they came about. Permanent output is the same
everywhere, 100 columns wide and free of control characters where it is not a terminal; only the live view
(`forebay.runs.show.live`) is a terminal's own. A model's text is shown as text: never as markup, never as
control characters.
"""

import math
import shlex
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from rich import box
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from forebay.agents.extra_fields import conversation_of
from forebay.metrics import EVAL_SCORE, RESPONSE_TOKENS, REWARD, STEP_S, TIME_PREFIX, TOKENS_PER_S
from forebay.produce.prompts.dataset import last_user_text
from forebay.runs.show.live import PERIOD_S, LiveView, panel
from forebay.runs.show.pictures import Rows, terminal_curve
from forebay.runs.show.status import RunStatus, StepNow
from forebay.runs.show.wording import clean, duration, mean, number
from forebay.types import Message, RolloutState, Status, get_group_status

WIDTH = 100
MAX_STEP_LINES = 50
"""A run prints about so many step lines, however many steps it has: two screens of a terminal."""
_HEADER_EVERY = 20
"""Step lines under one header: it never scrolls out of a terminal of usual height."""
_RECENT_STEPS = 20
"""Steps of the smoothed reward and of the estimate of the remaining time: recent enough to follow lengthening
responses."""
_SHOWN_GROUPS = 2
_MAX_MESSAGE = 240
"""Characters of a message of a sampled rollout; both ends stay, for the answer is usually at the end."""
PROGRESS_EVERY_S = 10.0
"""The time between two lines of progress without a terminal: enough to see that it goes on."""
_STEP_WIDTH, _ETA_WIDTH = 9, 7

_EVAL_SHOWN = ("score", "accuracy", "length", "truncated", "return", "min_return")


class RunDisplay:
    """Shows one run on a console.

    Invariants: no method raises because of what a model wrote; every step line is the mean of the steps since
    the line before; after `close` the terminal is as it was. `close` may be called again.

    >>> display = RunDisplay(Console(width=100, no_color=True))
    >>> display.step(2, 2, {"reward": 0.25, "tokens_per_s": 9120.0, "step_s": 0.5, "time/train_s": 0.5})
         step  reward   eval  tokens/s  length  s/step    ETA  % of time
          2/2   0.250      -      9.1k       -   0.500   0:00  train 100
    >>> display.close()
    """

    numbers: ClassVar[Mapping[str, tuple[str, int]]] = {
        "reward": (REWARD, 8),
        "eval": (EVAL_SCORE, 7),
        "tokens/s": (TOKENS_PER_S, 10),
        "length": (RESPONSE_TOKENS, 8),
        "s/step": (STEP_S, 8),
    }
    """The columns of a step line: which metric, how wide. The first is drawn, with ``eval``, as the curve."""
    curve_title: ClassVar[str] = "reward by train step, smoothed; o: held-out score"
    saved: ClassVar[Mapping[str, str]] = {
        "model": "the trained model and its tokenizer",
        "metrics.jsonl": "every number of every step",
        "history": "every rollout, in Parquet, for forebay board",
        "checkpoints": "to go on from",
    }
    """The content of a run folder at the end, by pattern."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`console` is standard output if left out; `clock` counts seconds."""
        self._console = console or _standard_output()
        self._is_ascii = not self._console.encoding.startswith("utf")
        self._clock = clock
        self._started_at = clock()
        self.on_note: Callable[[str, str], object] = lambda kind, text: None
        """Told of each ``warning`` and ``message``, with its text."""
        self._live: LiveView | None = None
        self._status: RunStatus | None = None
        self._lines_under_header = 0
        self._window: list[Mapping[str, float]] = []
        self._recent: deque[Mapping[str, float]] = deque(maxlen=_RECENT_STEPS)
        self._eval_score: float | None = None
        self._step, self._total = 0, 0
        self._phase, self._phase_at = "", clock()
        self.phase_name, self._progress_at = "", self._phase_at
        """Name of the latest `phase`."""
        self._produced: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, name: str, facts: Mapping[str, object], *, step: int = 0, total: int = 0) -> None:
        """Say what runs, one line for each fact, and begin the live view at `step` of `total`.

        On a terminal an event loop must be running.
        """
        self._step, self._total = step, total
        self._print(Text(f"forebay {clean(name)}", "bold"))
        self._print_facts(facts)
        if self._console.is_terminal:
            self._live = LiveView(self._console, self._panel)

    def follow(self, status: RunStatus) -> None:
        """Show `status` in the live view from now on."""
        self._status = status
        if self._live is not None:
            self._live.look = status.count_buffer

    def phase(self, name: str) -> None:
        """The run now does `name`."""
        self._phase, self._phase_at, self._produced = name, self._clock(), None
        self.phase_name, self._progress_at = name, self._phase_at
        if self._live is not None and self._status is None:
            # While a run is being built the event loop stands still, and no timer would draw.
            self._live.draw()

    def progress(self, done: int, total: int, note: str) -> None:
        """`done` of `total` parts of the present phase are done: in the live view, or a line now and then."""
        now = self._clock()
        text = f"{self.phase_name} {done}/{total}, {note}"
        if self._live is not None:
            if now - self._progress_at >= PERIOD_S:
                self._phase, self._progress_at = text, now
                self._live.draw()
        elif now - self._progress_at >= PROGRESS_EVERY_S and done < total:
            self._progress_at = now
            rest_s = (now - self._phase_at) * (total - done) / done
            self.message(f"{text}, about {duration(rest_s)} to go")

    def production(self, done: int, total: int) -> None:
        """`done` of the `total` groups of this step are there."""
        self._produced = (done, total)

    def count_group(self, task_name: str, group: Sequence[RolloutState]) -> None:
        """Count a stored group for the step under way; those of a background producer have no step."""
        if self._produced is not None and get_group_status(group) is Status.COMPLETED:
            self.production(self._produced[0] + 1, self._produced[1])

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Train step `step` of `total` is done, with these numbers."""
        self._step, self._total, self._produced = step, total, None
        self._window.append(metrics)
        self._recent.append(metrics)
        every = max(1, math.ceil(total / MAX_STEP_LINES))
        if step % every == 0 or step == total:
            self._print_step_line()
            self._window = []

    def rollouts(self, groups: Sequence[Sequence[RolloutState]]) -> None:
        """A table of the best and the worst rollout of a few groups, with the whole conversation of each."""
        table = Table(box=box.SIMPLE_HEAD, width=min(WIDTH, self._console.width), header_style="dim")
        table.add_column("prompt", ratio=2, overflow="fold")
        table.add_column("response", ratio=3, overflow="fold")
        for name in ("reward", "tokens", "finish"):
            table.add_column(name, justify="right", no_wrap=True)
        # From places far apart: a batch has its groups in the order of the tasks.
        stride = max(1, len(groups) // _SHOWN_GROUPS)
        for group in groups[::stride][:_SHOWN_GROUPS]:
            ranked = sorted(group, key=_score, reverse=True)
            asked = ranked[0].message
            # A system message is the same for all prompts of a task.
            prompt = _told([message for message in asked if message.get("role") != "system"] or asked)
            # The first and the last: the best and the worst.
            for state in ranked[:: max(1, len(ranked) - 1)]:
                turns = conversation_of(state)
                table.add_row(
                    Text(prompt if state is ranked[0] else ""),
                    Text(_told(turns) if turns else clean(state.response, _MAX_MESSAGE)),
                    number(_score(state) if state.reward else None),
                    str(len(state.response_ids)),
                    Text(clean(state.finish_reason or state.status.value)),
                )
        self._print(table)
        self._lines_under_header = 0  # the table has pushed the header away

    def evaluation(self, label: str, metrics: Mapping[str, float]) -> None:
        """The held-out prompts were tried: one line, and one more for each task if there are several."""
        self._eval_score = metrics.get(self.numbers["eval"][0])
        for scope, values in _eval_scopes(metrics).items():
            numbers = "  ".join(f"{name} {number(value)}" for name, value in values.items())
            self._print(Text.assemble(("  eval ", "cyan"), f"{clean(label)} {clean(scope)}".ljust(13), "  ", numbers))

    def message(self, text: str) -> None:
        """A line for the person."""
        self.on_note("message", text)
        self._print(Text(clean(text)))

    def warning(self, text: str) -> None:
        """A line for the person to act on."""
        self.on_note("warning", text)
        self._print(Text(f"warning: {clean(text)}", "yellow"))

    def traceback(self, error: BaseException) -> None:
        """Print where `error` was raised."""
        for line in "".join(traceback.format_exception(error)).splitlines():
            indent = len(line) - len(line.lstrip(" "))
            self._print(Text(" " * indent + clean(line), "dim"))

    def interrupted(self) -> None:
        """Ctrl-C was pressed once."""
        text = "Stopping: this step is finished and saved first. Press Ctrl-C again to leave at once."
        self._print(Text(text, "yellow"))

    def summary(self, history: Rows, evaluations: Rows, facts: Mapping[str, object], folder: Path) -> None:
        """How the run went: held-out scores before and after, the curve, these facts, where it is saved."""
        # First: the summary is to stay, and the live view would be drawn over it.
        self.close()
        self._console.rule(Text("summary"), style="dim", characters="-")
        if len(evaluations) > 1:
            self._print(_before_and_after(evaluations[0], evaluations[-1]))
        curve = terminal_curve(
            history,
            evaluations,
            names=(next(iter(self.numbers.values()))[0], self.numbers["eval"][0]),
            width=min(WIDTH, self._console.width),
            height=12,
            ascii_only=self._is_ascii,
        )
        if curve:
            self._print(Text(f"\n{self.curve_title}", "dim"))
            self._print(Text(curve))
        took = f"{duration(self._clock() - self._started_at)} in this process"
        self._print_facts({"steps": len(history), "time": took, **facts})
        self._print(Text("\nsaved", "bold"))
        found = {str(path): what for name, what in self.saved.items() for path in folder.glob(name)}
        self._print_facts(found)
        self._print(Text("\nnext", "bold"))
        place = shlex.quote(str(folder))
        commands = {"try it": f"forebay eval {place}"} if evaluations else {}
        more = f" steps={2 * max(1, self._total)}" if self._step >= self._total else ""
        self._print_facts({**commands, "go on": f"forebay train --resume {place}{more}"})

    def stopped(self, what_is_kept: str) -> None:
        """The run was stopped before its first step."""
        during = f" ({self.phase_name})" if self.phase_name else ""
        self.message(f"stopped before the first train step{during}: {what_is_kept}")

    def close(self) -> None:
        """End the live view."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, soft_wrap=isinstance(what, Text), highlight=False)

    def _print_facts(self, facts: Mapping[str, object]) -> None:
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self._print(Text.assemble((f"  {clean(name).ljust(width)}  ", "dim"), clean(str(value))))

    def _print_step_line(self) -> None:
        widths = {name: width for name, (_, width) in self.numbers.items()}
        if self._lines_under_header % _HEADER_EVERY == 0:
            header = "".join(name.rjust(width) for name, width in widths.items())
            self._print(Text(f"{'step':>{_STEP_WIDTH}}{header}{'ETA':>{_ETA_WIDTH}}  % of time", "dim"))
        line = Text(f"{self._step}/{self._total}".rjust(_STEP_WIDTH))
        for place, (name, value) in enumerate(self._shown(self._window).items()):
            line.append(value.rjust(widths[name]), "" if place else "bold")
        line.append(self._eta().rjust(_ETA_WIDTH))
        line.append(_time_split(self._window, min(WIDTH, self._console.width) - line.cell_len))
        self._print(line)
        self._lines_under_header += 1

    def _shown(self, rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
        """The numbers of a step line, as means of `rows`; of evaluations the last."""
        means = {name: number(mean(rows, metric)) for name, (metric, _) in self.numbers.items()}
        return means | {"eval": number(self._eval_score)}

    def _eta(self) -> str:
        step_s = mean(self._recent, STEP_S)
        return "-" if math.isnan(step_s) else duration((self._total - self._step) * step_s)

    def _panel(self) -> RenderableType:
        done, total = self._produced or (0, 0)
        facts = self._shown(list(self._recent)[-1:])
        if self._recent:
            name, (metric, _) = next(iter(self.numbers.items()))
            facts[name] += f" (mean of {len(self._recent)}: {number(mean(self._recent, metric))})"
        step = StepNow(
            step=self._step,
            total=self._total,
            # The groups of the step under way move the bar too, so that slow steps are seen to move.
            done=done / total if total else 0.0,
            eta=self._eta(),
            phase=f"{self._phase} {done}/{total} groups" if total else self._phase,
            phase_s=self._clock() - self._phase_at,
            facts={name: value for name, value in facts.items() if value != "-"} or {"": "-"},
        )
        now = None if self._status is None else self._status.now()
        return panel(step, now, width=self._console.width, ascii_only=self._is_ascii)


def _standard_output() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    reconfigure: Any = getattr(console.file, "reconfigure", None)
    if reconfigure is not None:
        # A model may write any character; a terminal that cannot show it gets a question mark.
        reconfigure(errors="replace")
    return console


def _before_and_after(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> Table:
    names = (f"step {before['train_step']:.0f}", f"step {after['train_step']:.0f}", "change")
    columns = (Column(name, justify="right") for name in names)
    table = Table("held-out", *columns, box=box.SIMPLE_HEAD, header_style="dim")
    last = _eval_scopes(after)
    for scope, values in _eval_scopes(before).items():
        for name, first_value in values.items():
            last_value = last.get(scope, {}).get(name)
            change = "-"
            if first_value is not None and last_value is not None:
                change = ("+" if last_value >= first_value else "") + number(last_value - first_value)
            table.add_row(Text(clean(f"{scope} {name}")), number(first_value), number(last_value), change)
    return table


def _eval_scopes(metrics: Mapping[str, float | None]) -> dict[str, dict[str, float | None]]:
    """The numbers worth a person's eye, by task; "" stands for all tasks together."""
    scopes: dict[str, dict[str, float | None]] = {}
    for key, value in metrics.items():
        scope, _, name = key.removeprefix("eval/").rpartition("/")
        scopes.setdefault(scope, {})[name] = value
    shown = {}
    for scope, values in scopes.items():
        # Of pass@1, pass@2, pass@4 ... the last says most besides the score.
        passes = sorted((name for name in values if name.startswith("pass@")), key=lambda name: int(name[5:]))
        names = [*_EVAL_SHOWN, *(passes[-1:] if len(passes) > 1 else ())]
        if values.get("failed"):
            names.append("failed")
        if worth := {name: values[name] for name in names if name in values}:
            shown[scope] = worth
    return shown


def _told(messages: Sequence[Message]) -> str:
    """The messages one under the other, each behind its role; a single one is only its text."""
    texts = [clean(last_user_text([message]), _MAX_MESSAGE) for message in messages]
    if len(texts) == 1:
        return texts[0]
    roles = [clean(str(message.get("role", "?"))) for message in messages]
    return "\n".join(f"{role}: {text}" for role, text in zip(roles, texts, strict=True))


def _score(state: RolloutState) -> float:
    return float(state.reward["score"]) if state.reward and "score" in state.reward else -math.inf


def _time_split(rows: Sequence[Mapping[str, float]], width: int) -> str:
    """``  generate 55  train 40  sync 5``: each phase's share in percent, most first, as many as fit."""
    seconds: dict[str, float] = {}
    for name, value in (item for row in rows for item in row.items()):
        if name.startswith(TIME_PREFIX):
            phase = name.removeprefix(TIME_PREFIX).removesuffix("_s")
            seconds[phase] = seconds.get(phase, 0.0) + value
    total = sum(seconds.values())
    text = ""
    for phase in sorted(seconds, key=lambda phase: -seconds[phase]):
        share = f"  {phase} {100 * seconds[phase] / total:.0f}" if total else ""
        # They come in falling order: after the first of 0% there are no others.
        if len(text) + len(share) > width or share.endswith(" 0"):
            break
        text += share
    return text
