"""The learning curve of a run as text for a terminal; ``forebay board`` draws all of its numbers.

Rows are those of ``metrics.jsonl``; a missing or ``None`` number is a gap.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.metrics import EVAL_SCORE, REWARD

Rows = Sequence[Mapping[str, float | None]]
Floats = NDArray[np.float64]

_SMOOTHING_SHARE = 0.1
"""The smoothed line averages over this share of the run: enough to see a trend through sampling noise."""


# The box-drawing characters of plotext's frame: lines, then corners and ticks.
_ASCII_FRAME = str.maketrans("\u2500\u2502\u250c\u2510\u2514\u2518\u2524\u252c", "-|++++++")


def read_curve(rows: Rows, name: str) -> tuple[Floats, Floats]:
    """The train steps at which `name` has a finite value, and these values."""
    pairs = [(row["train_step"], value) for row in rows if (value := row.get(name)) is not None]
    points = np.array(pairs, np.float64).reshape(-1, 2)
    points = points[np.isfinite(points[:, 1])]
    return points[:, 0], points[:, 1]


def smooth(values: Floats, window: int) -> Floats:
    """Centered moving average over `window` entries; at the ends over those there are."""
    kernel = np.ones(min(window, max(len(values), 1)))
    if len(values) == 0:
        return values
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


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

    steps, rewards = read_curve(history, names[0])
    if len(rewards) < 2:
        return ""
    # plotext keeps one figure for the whole process, and by itself cuts it to the terminal's size.
    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    # Odd, so that the average is centered on its step.
    line = smooth(rewards, 2 * int(len(rewards) * _SMOOTHING_SHARE / 2) + 1)
    marker = "*" if ascii_only else "braille"
    figure.draw(figure.signal(steps.tolist(), line.tolist(), marker=marker).lines())
    tried_at, scores = read_curve(evaluations, names[1])
    if len(scores):
        figure.draw(figure.signal(tried_at.tolist(), scores.tolist(), marker="o"))
    text: str = figure.build().string(colorless=True)
    return text.translate(_ASCII_FRAME) if ascii_only else text
