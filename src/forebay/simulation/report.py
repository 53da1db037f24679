"""The findings of simulations for people: tables for a terminal, pictures, and a page with all of them.

::

    SimulationResult --> gantt.png        slots of every engine, colored by the weights; what the run did
                     --> lag.png          tokens by staleness
    Outcomes ----------> tables, simulation.json
    tables, pictures --> simulation.html  one file that needs no other
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from forebay.simulation.calibration import Measured
from forebay.simulation.prediction import PAUSE, Lag, SimulationResult, Span
from forebay.simulation.sweep import Outcome
from forebay.watching.activity import SYNC, TRAIN, WAIT_BATCH

CLUSTER_FILE, NUMBERS, PAGE = "cluster.toml", "simulation.json", "simulation.html"
GANTT, LAG = "gantt.png", "lag.png"
SHOWN_STEPS = 6
"""Train steps of the chart: enough to see the rhythm, few enough to see single rollouts."""
_MANY = 100
"""From here on, digits after the point say nothing."""

# Okabe & Ito 2008, "Color universal design": told apart with every common color blindness.
_WEIGHTS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GRAY, _VERMILION = "#8a8a8a", "#D55E00"
_ROWS = ((TRAIN, "training"), (SYNC, "weight sync"), (PAUSE, "pausing"), (WAIT_BATCH, "trainer waits"))
_PAGE_WIDTH = 150
"""Characters: a sweep over three settings fits."""


def write_report(folder: Path, ranked: Sequence[Outcome], tables: Sequence[RenderableType]) -> Path:
    """Write pictures and the cluster of the best outcome, and numbers of all; the page with all of it."""
    best = ranked[0]
    assert best.result is not None
    folder.mkdir(parents=True, exist_ok=True)
    draw_gantt(best.result, folder / GANTT)
    draw_lag(best.result, folder / LAG)
    title = f"simulation of {best.case.config.name}"
    write_page(folder / PAGE, title, tables, [folder / GANTT, folder / LAG])
    cluster = best.case.cluster.model_dump(mode="json", exclude_none=True)
    (folder / CLUSTER_FILE).write_text(tomli_w.dumps(cluster), encoding="utf-8")
    numbers = [
        {
            "settings": dict(outcome.case.settings),
            "problem": outcome.problem,
            "result": outcome.result and outcome.result.numbers(),
            "synchronous": outcome.synchronous and outcome.synchronous.numbers(),
        }
        for outcome in ranked
    ]
    (folder / NUMBERS).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return folder / PAGE


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= _MANY else f"{value:.3g}"


def share(value: float) -> str:
    """As a percentage."""
    return f"{value:.1%}"


def result_rows(result: SimulationResult) -> list[tuple[str, str]]:
    """The lines about one simulation, in order."""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(result.dropped.items()))
    return [
        ("step", f"{number(result.step_s)} s"),
        ("steps per hour", number(result.steps_per_hour)),
        ("lower bound of a step", f"{number(result.bound_s)} s (x {result.over_bound:.3f})"),
        ("  generation, slots full", f"{number(result.generation_s)} s"),
        ("  training", f"{number(result.training_s)} s"),
        ("empty slots", share(result.engine_idle)),
        ("trainer idle", share(result.trainer_idle)),
        ("weights handed over", share(result.sync_share)),
        ("mean response trained", f"{number(result.mean_tokens)} tokens"),
        ("staleness of tokens", _lag(result.token_lag)),
        ("staleness of groups", _lag(result.group_lag)),
        ("groups dropped", f"{share(result.dropped_share)}{f' ({dropped})' if dropped else ''}"),
        ("tokens wasted", share(result.wasted_share)),
    ]


def _lag(lag: Lag) -> str:
    return f"mean {lag.mean:.2f}, p95 {lag.p95}, max {lag.max}"


def comparison_table(outcome: Outcome, title: str) -> Table:
    """One run beside the synchronous run of the same workload."""
    assert outcome.result is not None
    columns = [("this run", outcome.result)]
    if outcome.synchronous is not None:
        columns.append(("synchronous", outcome.synchronous))
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("")
    for name, _ in columns:
        table.add_column(name)
    rows = [result_rows(result) for _, result in columns]
    for cells in zip(*rows, strict=True):
        table.add_row(cells[0][0], *(text for _, text in cells))
    if outcome.synchronous is not None:
        table.add_row("over synchronous", f"{outcome.speed_up:.2f} x", "1")
    return table


_SWEEP_COLUMNS: dict[str, Callable[[Outcome, SimulationResult], str]] = {
    "step s": lambda _, result: number(result.step_s),
    "steps/h": lambda _, result: number(result.steps_per_hour),
    "x sync": lambda outcome, _: f"{outcome.speed_up:.2f}",
    "/ bound": lambda _, result: f"{result.over_bound:.3f}",
    "empty slots": lambda _, result: share(result.engine_idle),
    "trainer idle": lambda _, result: share(result.trainer_idle),
    "lag mean": lambda _, result: f"{result.token_lag.mean:.2f}",
    "p95": lambda _, result: str(result.token_lag.p95),
    "max": lambda _, result: str(result.token_lag.max),
    "dropped": lambda _, result: share(result.dropped_share),
    "wasted": lambda _, result: share(result.wasted_share),
}


def sweep_table(ranked: Sequence[Outcome]) -> Table:
    """All cases, the best first and marked."""
    table = Table(box=box.SIMPLE_HEAD)
    keys = list(ranked[0].case.settings)
    table.add_column("")
    for name in (*(key.removeprefix("produce.") for key in keys), *_SWEEP_COLUMNS):
        table.add_column(name, justify="right")
    for place, outcome in enumerate(ranked):
        result, cells = outcome.result, list[Text | str]([Text("cannot run", "red")])
        if result is not None:
            cells = [cell(outcome, result) for cell in _SWEEP_COLUMNS.values()]
        is_best = place == 0 and result is not None
        settings = [outcome.case.settings[key] for key in keys]
        table.add_row("best" if is_best else "", *settings, *cells, style="bold" if is_best else "")
    return table


def calibration_table(measured: Measured, predicted: SimulationResult) -> Table:
    """A real run beside its prediction."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "measured", "predicted", "off by"):
        table.add_column(name, justify="right" if name else "left")
    error = predicted.step_s / measured.step_s - 1
    table.add_row("step", f"{number(measured.step_s)} s", f"{number(predicted.step_s)} s", f"{error:+.1%}")
    table.add_row(
        "stalest rollout of a batch", f"{measured.staleness:.2f}", f"{predicted.stalest_mean:.2f}", ""
    )
    return table


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
        axes.broken_barh(bars, (row - 0.4, 0.8), color=_GRAY if stage == WAIT_BATCH else _WEIGHTS[row])
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
