"""A simulation as pictures: who worked when, and how stale what was trained on was; and a page with both.

::

    SimulationResult --> gantt.png  slots of every engine, colored by the weights; trainer, sync, waiting
                     --> lag.png    tokens by staleness
    tables, pictures --> simulation.html, one file that needs no other
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType

from forebay.simulation.result import PAUSE, Lag, SimulationResult, Span
from forebay.watching.activity import SYNC, TRAIN, WAIT_BATCH

SHOWN_STEPS = 6
"""Train steps of the chart: enough to see the rhythm, few enough to see single rollouts."""

# Okabe & Ito 2008, "Color universal design": told apart with every common color blindness.
_WEIGHTS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GREY, _VERMILION = "#8a8a8a", "#D55E00"
_ROWS = ((TRAIN, "training"), (SYNC, "weight sync"), (PAUSE, "pausing"), (WAIT_BATCH, "trainer waits"))
_PAGE_WIDTH = 150
"""Characters: a sweep over three settings fits."""


def draw_gantt(result: SimulationResult, path: Path, *, shown_steps: int = SHOWN_STEPS) -> None:
    """Write a PNG of the last `shown_steps` train steps: one line for each slot, one bar for each request."""
    # A figure without pyplot: no global state, no window system, any thread.
    from matplotlib.figure import Figure

    ends_s = result.step_ends_s
    end_s = ends_s[-1]
    start_s = ends_s[max(0, len(ends_s) - 1 - shown_steps)]
    figure = Figure(figsize=(13, 8), layout="constrained")
    slots, run = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1.3])
    _draw_slots(slots, result, start_s, end_s)
    _draw_spans(run, result.spans, start_s, end_s)
    for axes in (slots, run):
        for step_end_s in ends_s:
            if start_s <= step_end_s <= end_s:
                axes.axvline(step_end_s, color="black", linewidth=0.6, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(start_s, end_s)
    slots.set_title(
        f"slots of the engines: one bar a request, colored by the weights that it began with, red end: "
        f"interrupted; vertical lines: ends of train steps ({result.engine_idle:.0%} of the slots empty)",
        fontsize=9,
        loc="left",
    )
    run.set_xlabel("virtual seconds", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_slots(axes: Any, result: SimulationResult, start_s: float, end_s: float) -> None:
    from matplotlib.collections import LineCollection

    shown = [s for s in result.segments if s.end_s > start_s and s.start_s < end_s]
    lines = [[(s.start_s, row := s.engine * (result.slots + 1) + s.slot), (s.end_s, row)] for s in shown]
    colors = [_WEIGHTS[s.model_step % len(_WEIGHTS)] for s in shown]
    num_rows = max((line[0][1] for line in lines), default=0) + 1
    # As thick as a row of the chart is high, in points.
    width = max(0.4, 0.8 * 370 / num_rows)
    axes.add_collection(LineCollection(lines, colors=colors, linewidths=width, capstyle="butt"))
    cuts = [
        [(s.end_s, line[0][1] - 0.45), (s.end_s, line[0][1] + 0.45)]
        for s, line in zip(shown, lines, strict=True)
        if s.is_aborted
    ]
    axes.add_collection(LineCollection(cuts, colors=_VERMILION, linewidths=1.0))
    axes.set_ylim(num_rows, -1)
    engines = sorted({s.engine for s in shown})
    axes.set_yticks([engine * (result.slots + 1) + result.slots / 2 for engine in engines])
    axes.set_yticklabels([f"engine {engine + 1}" for engine in engines], fontsize=8)


def _draw_spans(axes: Any, spans: Sequence[Span], start_s: float, end_s: float) -> None:
    for row, (stage, _) in enumerate(_ROWS):
        bars = [
            (span.start_s, span.end_s - span.start_s)
            for span in spans
            if span.stage == stage and span.end_s > start_s and span.start_s < end_s
        ]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=_GREY if stage == WAIT_BATCH else _WEIGHTS[row])
    axes.set_ylim(len(_ROWS) - 0.5, -0.5)
    axes.set_yticks(range(len(_ROWS)), [label for _, label in _ROWS], fontsize=8)


def draw_lag(result: SimulationResult, path: Path) -> None:
    """Write a PNG: the share of trained tokens, and of groups, by staleness."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    parts = (("tokens", result.token_lag), ("groups (their oldest token)", result.group_lag))
    for number, (label, lag) in enumerate(parts):
        lags, shares = _shares(lag)
        text = f"{label}: mean {lag.mean:.2f}"
        axes.bar(lags + (number - 0.5) * 0.4, shares, 0.38, label=text, color=_WEIGHTS[number])
    axes.set_title("staleness of what was trained on", fontsize=10, loc="left")
    axes.set_xlabel("train steps behind", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(parts), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _shares(lag: Lag) -> tuple[Any, Any]:
    lags = np.arange(lag.max + 1)
    counts = np.array([lag.counts.get(int(number), 0) for number in lags], np.float64)
    return lags, counts / max(1.0, counts.sum())


def write_page(path: Path, title: str, tables: Sequence[RenderableType], pictures: Sequence[Path]) -> None:
    """Write one HTML file with the tables and the pictures inside."""
    console = Console(record=True, file=io.StringIO(), width=_PAGE_WIDTH)
    for table in tables:
        console.print(table)
    body = console.export_html(code_format="<pre>{code}</pre>", inline_styles=True)
    images = "\n".join(
        f'<img src="data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}" '
        f'alt="{html.escape(picture.stem)}">'
        for picture in pictures
    )
    name = html.escape(title)
    path.write_text(
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{name}</title>"
        f"<style>body{{font-family:sans-serif;margin:2em}}img{{max-width:100%;display:block}}</style>"
        f"<h1>{name}</h1>{body}{images}</html>\n",
        encoding="utf-8",
    )
