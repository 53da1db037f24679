"""What a person sees of a run in environments: facts, one line for every few steps, evaluations, a summary.

On a terminal a bar shows how far the run is; a pipe or a log gets the same lines without it.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from forebay.metrics import REWARD, STEP_S
from forebay.runs.pictures import Rows, terminal_curve
from forebay.runs.wording import clean, duration, mean, number

WIDTH = 100
MAX_STEP_LINES = 25
"""A run prints about so many step lines, however many steps it has."""

RETURN, STEPS_PER_S, LAG = "return", "env_steps_per_s", "lag"
EVAL_RETURN = "eval/return"
_COLUMNS = {"step": 9, "return": 10, "length": 9, "steps/s": 9, "lag": 7, "kl": 8, "s/step": 8}
_SAVED = {
    "learning_curve.png": "returns, lag, speed and time by step",
    "episode.png": "frames of one episode",
    "metrics.jsonl": "every number of every step",
    "checkpoints": "to go on from: forebay train --resume",
}


class FragmentDisplay:
    """Shows one run on a console.

    Invariants: every step line is the mean of the steps since the line before; after the ``with`` block the
    terminal is as it was.

    >>> with FragmentDisplay() as display:
    ...     display.start("cartpole", {"environment": "CartPole-v1"}, step=0, total=60)
    ...     display.step(1, 60, {"return": 21.5})
    """

    def __init__(self, console: Console | None = None) -> None:
        """`console` is standard output if left out."""
        self._console = console or Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = WIDTH
        self._progress = Progress(
            TextColumn("train step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar = self._progress.add_task("")
        self._window: list[Mapping[str, float]] = []
        self._started_s = time.monotonic()
        self._has_header = False

    def __enter__(self) -> FragmentDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

    def start(self, name: str, facts: Mapping[str, object], *, step: int, total: int) -> None:
        """Say what runs, one line for each fact."""
        self._print(Text(f"forebay {clean(name)}", "bold"))
        for key, value in facts.items():
            self._print(Text.assemble((f"  {key:<12}", "dim"), clean(str(value))))
        self._progress.update(self._bar, completed=step, total=total)

    def phase(self, name: str) -> None:
        """The run now does `name`."""
        self._progress.update(self._bar, description=name)

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Train step `step` of `total` is done, with these numbers."""
        self._progress.update(self._bar, completed=step)
        self._window.append(metrics)
        if step % max(1, math.ceil(total / MAX_STEP_LINES)) == 0 or step == total:
            self._print_step(f"{step}/{total}")
            self._window = []

    def _print_step(self, step: str) -> None:
        if not self._has_header:
            header = "".join(f"{name:>{width}}" for name, width in _COLUMNS.items())
            self._print(Text(header, "dim"))
            self._has_header = True
        names = (RETURN, "episode_steps", STEPS_PER_S, LAG, "kl", STEP_S)
        cells = [step, *(number(mean(self._window, name)) for name in names)]
        self._print(
            Text("".join(f"{cell:>{width}}" for cell, width in zip(cells, _COLUMNS.values(), strict=True)))
        )

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The policy was tried."""
        text = (
            f"step {step}: mean return {number(metrics[EVAL_RETURN])} over "
            f"{metrics['eval/episodes']:.0f} episodes (least {number(metrics['eval/min_return'])})"
        )
        self._print(Text.assemble(("  eval ", "cyan"), text))

    def message(self, text: str) -> None:
        """A line for the person."""
        self._print(Text(clean(text)))

    def warning(self, text: str) -> None:
        """A line for the person to act on."""
        self._print(Text(f"warning: {clean(text)}", "yellow"))

    def summary(self, rows: Rows, facts: Mapping[str, object], folder: Path) -> None:
        """How the run went, and where it is saved."""
        ascii_only = not self._console.encoding.startswith("utf")
        width = min(self._console.width, WIDTH)
        curve = terminal_curve(
            _renamed(rows, RETURN, REWARD), [], width=width, height=12, ascii_only=ascii_only
        )
        if curve:
            self._print(Text(f"\nmean return of training episodes\n{curve}"))
        took = duration(time.monotonic() - self._started_s)
        for key, value in {**facts, "took": took}.items():
            self._print(Text.assemble((f"  {key:<12}", "dim"), clean(str(value))))
        for name, what in _SAVED.items():
            if (folder / name).exists():
                self._print(Text.assemble((f"  {folder / name}", "green"), f"  {what}"))
        place = shlex.quote(str(folder))
        self._print(Text(f"  try it      forebay eval {place}"))
        self._print(Text(f"  go on       forebay train --resume {place} steps=N"))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def _renamed(rows: Rows, old: str, new: str) -> Sequence[Mapping[str, float | None]]:
    return [{"train_step": row["train_step"], new: row.get(old)} for row in rows]
