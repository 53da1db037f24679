"""What a person sees of a run: a live line in a terminal, plain lines in a pipe or a log.

::

    start -> phase, production ... -> step -> rollouts, evaluation when due -> ... -> summary -> close

It takes numbers, strings and rollouts and knows nothing of how they came about. Permanent output is the same
everywhere, 100 columns wide and free of control characters where it is not a terminal; only the live line
with the progress bar is a terminal's own. Whatever a model wrote is shown as text: never as markup, never as
control characters.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forebay.metrics import EVAL_SCORE, RESPONSE_TOKENS, REWARD, SAMPLES, STEP_S, TIME_PREFIX, TOKENS_PER_S
from forebay.runs.pictures import Rows, terminal_curve
from forebay.types import Message, RolloutState

WIDTH = 100
MAX_STEP_LINES = 50
"""A run prints about so many step lines, however many steps it has: two screens of a terminal."""
_HEADER_EVERY = 20
"""Step lines under one header: it never scrolls out of a terminal of usual height."""
_ETA_STEPS = 20
"""Steps the remaining time is estimated from: recent enough to follow lengthening responses."""
_REDRAW_S = 0.1
"""Seconds between two drawings of the live line while groups come in."""
_SHOWN_GROUPS = 2
_MAX_PROMPT, _MAX_RESPONSE = 120, 240
"""Characters of a sampled rollout; both ends stay, for the answer is usually at the end."""

_COLUMNS = {"step": 9, "reward": 8, "eval": 7, "tokens/s": 10, "length": 8, "s/step": 8, "ETA": 7}
_EVAL_SHOWN = ("score", "accuracy", "length", "truncated")
_SAVED = {
    "model": "the trained model and its tokenizer",
    "learning_curve.png": "reward, length, speed and time by step",
    "metrics.jsonl": "every number of every step",
    "rollouts.jsonl": "sampled rollouts of every step",
    "checkpoints": "to go on from: forebay train --resume",
}


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

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`console` is standard output if left out; `clock` counts seconds."""
        self._console = console or _standard_output()
        self._clock = clock
        self._started_at = clock()
        self._live: Live | None = None
        self._lines_under_header = 0
        self._window: list[Mapping[str, float]] = []
        self._step_times: deque[float] = deque(maxlen=_ETA_STEPS)
        self._eval_score: float | None = None
        self._step, self._total = 0, 0
        self._now = ""
        self._produced: tuple[int, int] | None = None
        self._drawn_at = -math.inf

    def __enter__(self) -> RunDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, name: str, facts: Mapping[str, object], *, step: int = 0, total: int = 0) -> None:
        """Say what runs, one line for each fact, and begin the live line at `step` of `total`."""
        self._step, self._total = step, total
        self._print(Text(f"forebay {_clean(name)}", "bold"))
        self._print_facts(facts)
        if self._console.is_terminal:
            # Refreshed when something changes and not by a thread, which would fight for the compute cores.
            self._live = Live(
                get_renderable=self._live_line, console=self._console, auto_refresh=False, transient=True
            )
            self._live.start()

    def phase(self, name: str) -> None:
        """The run now does `name`."""
        self._now, self._produced = name, None
        self._refresh()

    def production(self, done: int, total: int) -> None:
        """`done` of the `total` groups of this step are there."""
        self._produced = (done, total)
        # Groups may finish by the hundred in a second, and drawing a line takes a millisecond.
        if done == total or self._clock() - self._drawn_at >= _REDRAW_S:
            self._refresh()

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Train step `step` of `total` is done, with these numbers."""
        self._step, self._total = step, total
        self._window.append(metrics)
        if STEP_S in metrics:
            self._step_times.append(metrics[STEP_S])
        every = max(1, math.ceil(total / MAX_STEP_LINES))
        if step % every == 0 or step == total:
            self._print_step_line()
            self._window = []
        self._refresh()

    def rollouts(self, groups: Sequence[Sequence[RolloutState]]) -> None:
        """A table of the best and the worst rollout of a few groups."""
        table = Table(box=box.SIMPLE_HEAD, width=min(WIDTH, self._console.width), header_style="dim")
        table.add_column("prompt", ratio=2, overflow="fold")
        table.add_column("response", ratio=3, overflow="fold")
        for name in ("reward", "tokens", "finish"):
            table.add_column(name, justify="right", no_wrap=True)
        stride = max(1, len(groups) // _SHOWN_GROUPS)
        for group in groups[::stride][:_SHOWN_GROUPS]:
            ranked = sorted(group, key=_score, reverse=True)
            for state in ranked[:: max(1, len(ranked) - 1)]:
                prompt = _clean(_last_user_text(state.message), _MAX_PROMPT) if state is ranked[0] else ""
                table.add_row(
                    Text(prompt),
                    Text(_clean(state.response, _MAX_RESPONSE)),
                    _number(_score(state) if state.reward else None),
                    str(len(state.response_ids)),
                    Text(_clean(state.finish_reason or state.status.value)),
                )
        self._print(table)
        self._lines_under_header = 0  # the table has pushed the header away

    def evaluation(self, label: str, metrics: Mapping[str, float]) -> None:
        """The held-out prompts were tried: one line, and one more for each task if there are several."""
        self._eval_score = metrics.get(EVAL_SCORE)
        for scope, values in _eval_scopes(metrics).items():
            numbers = "  ".join(f"{name} {_number(value)}" for name, value in values.items())
            self._print(
                Text.assemble(("  eval ", "cyan"), f"{_clean(label)} {_clean(scope)}".ljust(15), numbers)
            )

    def message(self, text: str) -> None:
        """A line for the person."""
        self._print(Text(_clean(text)))

    def warning(self, text: str) -> None:
        """A line for the person to act on."""
        self._print(Text(f"warning: {_clean(text)}", "yellow"))

    def traceback_line(self, text: str) -> None:
        """One line of a traceback, whose indentation means something."""
        indent = len(text) - len(text.lstrip(" "))
        self._print(Text(" " * indent + _clean(text), "dim"))

    def interrupted(self) -> None:
        """Ctrl-C was pressed once."""
        self._print(
            Text(
                "Stopping: this step is finished and saved first. Press Ctrl-C again to leave at once.",
                "yellow",
            )
        )

    def summary(
        self, history: Rows, evaluations: Rows, balance: Mapping[str, Mapping[str, int]], folder: Path
    ) -> None:
        """How the run went: held-out scores before and after, the curve, the totals, and where it is saved.

        `balance` counts groups by task and outcome.
        """
        self.close()
        self._console.rule(Text("summary"), style="dim", characters="-")
        if evaluations:
            self._print(_before_and_after(evaluations[0], evaluations[-1]))
        self._print_curve(history, evaluations)
        samples = sum(row.get(SAMPLES) or 0.0 for row in history)
        tokens = sum((row.get(SAMPLES) or 0.0) * (row.get(RESPONSE_TOKENS) or 0.0) for row in history)
        groups = {
            f"groups {task}": ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items() if count)
            for task, counts in balance.items()
        }
        facts = {
            "steps": len(history),
            "time": f"{_duration(self._clock() - self._started_at)} in this process",
            "rollouts": f"{samples:,.0f} with {tokens:,.0f} tokens trained",
            **groups,
        }
        self._print_facts(facts)
        self._print(Text("\nsaved", "bold"))
        self._print_facts(
            {str(folder / name): what for name, what in _SAVED.items() if (folder / name).exists()}
        )

    def close(self) -> None:
        """End the live line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, soft_wrap=isinstance(what, Text), highlight=False)

    def _print_facts(self, facts: Mapping[str, object]) -> None:
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self._print(Text.assemble((f"  {_clean(name).ljust(width)}  ", "dim"), _clean(str(value))))

    def _print_step_line(self) -> None:
        cells = {
            "step": f"{self._step}/{self._total}",
            "reward": _number(_mean(self._window, REWARD)),
            "eval": _number(self._eval_score),
            "tokens/s": _number(_mean(self._window, TOKENS_PER_S)),
            "length": _number(_mean(self._window, RESPONSE_TOKENS)),
            "s/step": _number(_mean(self._window, STEP_S)),
            "ETA": self._eta(),
        }
        if self._lines_under_header % _HEADER_EVERY == 0:
            header = "".join(name.rjust(width) for name, width in _COLUMNS.items())
            self._print(Text(f"{header}  % of time", "dim"))
        line = Text()
        for name, width in _COLUMNS.items():
            line.append(cells[name].rjust(width), "bold" if name == "reward" else "")
        line.append(_time_split(self._window, WIDTH - sum(_COLUMNS.values())))
        self._print(line)
        self._lines_under_header += 1

    def _eta(self) -> str:
        if not self._step_times:
            return "-"
        return _duration((self._total - self._step) * sum(self._step_times) / len(self._step_times))

    def _print_curve(self, history: Rows, evaluations: Rows) -> None:
        ascii_only = not self._console.encoding.startswith("utf")
        width = min(WIDTH, self._console.width)
        if curve := terminal_curve(history, evaluations, width=width, height=12, ascii_only=ascii_only):
            self._print(Text("\nreward by train step, smoothed; o: held-out score", "dim"))
            self._print(Text(curve))

    def _refresh(self) -> None:
        if self._live is not None:
            self._drawn_at = self._clock()
            self._live.refresh()

    def _live_line(self) -> RenderableType:
        done, total = self._produced or (0, 0)
        now = f"{self._now} {done}/{total} groups" if total else self._now
        # The groups of the step under way move the bar too, so that slow steps are seen to move.
        fraction = self._step + (done / total if total else 0.0)
        bar = ProgressBar(total=max(self._total, 1), completed=fraction, width=30)
        line = Table.grid(padding=(0, 2))
        line.add_row(f"  step {self._step}/{self._total}", bar, Text(now), f"ETA {self._eta()}")
        return line


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
    table = Table(box=box.SIMPLE_HEAD, header_style="dim")
    table.add_column("held-out")
    steps = (f"step {before['train_step']:.0f}", f"step {after['train_step']:.0f}", "change")
    for name in steps:
        table.add_column(name, justify="right")
    last = _eval_scopes(after)
    for scope, values in _eval_scopes(before).items():
        for name, first_value in values.items():
            last_value = last.get(scope, {}).get(name)
            change = "-"
            if first_value is not None and last_value is not None:
                change = ("+" if last_value >= first_value else "") + _number(last_value - first_value)
            table.add_row(Text(_clean(f"{scope} {name}")), _number(first_value), _number(last_value), change)
    return table


def _eval_scopes(metrics: Mapping[str, float | None]) -> dict[str, dict[str, float | None]]:
    """The numbers worth a person's eye, by task; "" stands for all tasks together."""
    scopes: dict[str, dict[str, float | None]] = {}
    for key, value in metrics.items():
        scope, _, name = key.removeprefix("eval/").rpartition("/")
        scopes.setdefault(scope, {})[name] = value
    return {scope: shown for scope, values in scopes.items() if (shown := _worth_showing(values))}


def _worth_showing(values: Mapping[str, float | None]) -> dict[str, float | None]:
    shown = {name: values[name] for name in _EVAL_SHOWN if name in values}
    # Of pass@1, pass@2, pass@4 ... the last says most besides the score.
    passes = sorted((name for name in values if name.startswith("pass@")), key=lambda name: int(name[5:]))
    if len(passes) > 1:
        shown[passes[-1]] = values[passes[-1]]
    if values.get("failed"):
        shown["failed"] = values["failed"]
    return shown


def _last_user_text(message: Sequence[Message]) -> str:
    contents = [turn.get("content") for turn in message if turn.get("role") == "user"]
    content = contents[-1] if contents else (message[-1].get("content") if message else "")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", f"<{part.get('type')}>")) for part in content)
    return str(content or "")


def _score(state: RolloutState) -> float:
    return float(state.reward["score"]) if state.reward and "score" in state.reward else -math.inf


def _clean(text: str, limit: int | None = None) -> str:
    """One line of printable characters; the middle is left out where it is longer than `limit`."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(printable.split())
    if limit is None or len(line) <= limit:
        return line
    return f"{line[: limit // 2 - 2]} ... {line[-(limit // 2 - 3) :]}"


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """NaN where no row has a finite `name`."""
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    return sum(values) / len(values) if values else math.nan


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
        if len(text) + len(share) > width or share.endswith(" 0"):
            break
        text += share
    return text


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.1f}M"
    if abs(value) >= 1e3:
        return f"{value / 1e3:.1f}k"
    # Shares and rewards have a thousandth worth seeing; lengths and seconds are larger or need less.
    return f"{value:.1f}" if abs(value) >= 2 else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}:{rest:02}"
