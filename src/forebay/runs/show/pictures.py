"""The learning curve of a run, as a PNG and as text for a terminal.

::

    history      [{"train_step": 1, "reward": ..}, ..] --+--> learning_curve  PNG
    evaluations  [{"train_step": 0, "eval/score": ..}] --+--> terminal_curve  text

Rows are those of ``metrics.jsonl``; a missing or ``None`` number is a gap, and a run without a quantity gets
an empty panel. The time of each phase is in the step lines and in ``time/<phase>_s``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.metrics import EVAL_SCORE, RESPONSE_TOKENS, REWARD, STEP_S, TOKENS_PER_S

Rows = Sequence[Mapping[str, float | None]]
Floats = NDArray[np.float64]

# Okabe & Ito 2008, "Color universal design": told apart with every common color blindness.
BLUE, ORANGE = "#0072B2", "#D55E00"

_SMOOTHING_SHARE = 0.1
"""The smoothed line averages over this share of the run: enough to see a trend through sampling noise."""


# The box-drawing characters of plotext's frame: lines, then corners and ticks.
_ASCII_FRAME = str.maketrans("\u2500\u2502\u250c\u2510\u2514\u2518\u2524\u252c", "-|++++++")


class Curve(NamedTuple):
    """One quantity over train steps, where it is known."""

    steps: Floats
    values: Floats


class Curves(NamedTuple):
    """The metrics of a learning curve."""

    main: tuple[str, str, str]
    """Metric, label and unit."""
    evaluation: tuple[str, str]
    """Metric and label."""
    others: Sequence[tuple[str, str, str]]
    """Metric, title and unit of each further panel."""


LANGUAGE_MODEL = Curves(
    main=(REWARD, "reward", "mean reward"),
    evaluation=(EVAL_SCORE, "held-out score"),
    others=(
        (RESPONSE_TOKENS, "response length", "tokens"),
        (TOKENS_PER_S, "throughput", "tokens/s"),
        (STEP_S, "time of a step", "seconds"),
    ),
)


def read_curve(rows: Rows, name: str) -> Curve:
    """The finite values of `name` by train step."""
    pairs = [(row["train_step"], value) for row in rows if (value := row.get(name)) is not None]
    points = np.array(pairs, np.float64).reshape(-1, 2)
    points = points[np.isfinite(points[:, 1])]
    return Curve(points[:, 0], points[:, 1])


def smooth(values: Floats, window: int) -> Floats:
    """Centered moving average over `window` entries; at the ends over those there are."""
    kernel = np.ones(min(window, max(len(values), 1)))
    if len(values) == 0:
        return values
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _window(curve: Curve) -> int:
    # Odd, so that the average is centered on its step.
    return 2 * int(len(curve.values) * _SMOOTHING_SHARE / 2) + 1


def learning_curve(history: Rows, evaluations: Rows, path: Path, curves: Curves = LANGUAGE_MODEL) -> None:
    """Write a PNG: reward and held-out score above; length, speed and time below."""
    # A figure without pyplot: no global state, no window system (a PNG is drawn by Agg), any thread.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, len(curves.others), height_ratios=[1.8, 1])
    axes: Any = figure.add_subplot(grid[0, :])
    name, label, unit = curves.main
    _draw_line(axes, read_curve(history, name), "learning curve", unit, label=label)
    scores = read_curve(evaluations, curves.evaluation[0])
    if len(scores.values):
        low, high = axes.get_ylim()
        axes.plot(*scores, "D--", color=ORANGE, markersize=6, linewidth=1, label=curves.evaluation[1])
        for index in {0, len(scores.values) - 1}:
            at = (scores.steps[index], scores.values[index])
            style = {"ha": "center", "fontsize": 9, "color": ORANGE}
            axes.annotate(f"{at[1]:.3g}", at, (0, 9), textcoords="offset points", **style)
        # The limits are those of the rewards until now; a tenth more, for the numbers above the points.
        axes.set_ylim(min(low, 1.1 * scores.values.min()), max(high, 1.1 * scores.values.max()))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False, fontsize=9)
    for column, (name, title, unit) in enumerate(curves.others):
        _draw_line(figure.add_subplot(grid[1, column]), read_curve(history, name), title, unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_line(axes: Any, curve: Curve, title: str, unit: str, *, label: str | None = None) -> None:
    """The raw values thin, their moving average thick; short runs as points on a line."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    window = _window(curve)
    if window == 1:
        axes.plot(*curve, "o-", color=BLUE, markersize=3.5, linewidth=1.2, label=label)
    else:
        raw, mean = (f"{label} of each step", f"{label}, mean over {window} steps") if label else (None, None)
        axes.plot(*curve, color=BLUE, linewidth=0.8, alpha=0.4, label=raw)
        axes.plot(curve.steps, smooth(curve.values, window), color=BLUE, linewidth=2, label=mean)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("train step", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if (curve.values >= 0).all():
        axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def terminal_curve(
    history: Rows,
    evaluations: Rows,
    *,
    width: int,
    height: int,
    ascii_only: bool,
    names: tuple[str, str] = (REWARD, EVAL_SCORE),
) -> str:
    """The smoothed reward and the held-out scores as lines of text without colors; "" without rewards.

    `names` are the metrics that stand for the two.
    """
    import plotext

    reward = read_curve(history, names[0])
    if len(reward.values) < 2:
        return ""
    # plotext keeps one figure for the whole process, and by itself cuts it to the terminal's size.
    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    line = smooth(reward.values, _window(reward))
    marker = "*" if ascii_only else "braille"
    figure.draw(figure.signal(reward.steps.tolist(), line.tolist(), marker=marker).lines())
    scores = read_curve(evaluations, names[1])
    if len(scores.values):
        figure.draw(figure.signal(scores.steps.tolist(), scores.values.tolist(), marker="o"))
    text: str = figure.build().string(colorless=True)
    figure.clear()
    return text.translate(_ASCII_FRAME) if ascii_only else text
