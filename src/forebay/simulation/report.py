"""The findings of simulations for people: tables for a terminal, and files with all numbers.

::

    SimulationResult, Outcomes --> tables
                              '--> simulation.json, cluster.toml
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import tomli_w
from rich import box
from rich.table import Column, Table
from rich.text import Text

from forebay.simulation.calibration import Measured
from forebay.simulation.prediction import SimulationResult, Staleness
from forebay.simulation.sweep import Outcome

_MANY = 100
"""From here on, digits after the point say nothing."""


def write_numbers(folder: Path, ranked: Sequence[Outcome]) -> None:
    """Write the numbers of all outcomes, and the cluster of the best."""
    cluster = ranked[0].case.cluster.model_dump(mode="json", exclude_none=True)
    (folder / "cluster.toml").write_text(tomli_w.dumps(cluster), encoding="utf-8")
    numbers = [
        {
            "settings": dict(outcome.case.settings),
            "problem": outcome.problem,
            "result": outcome.result and outcome.result.numbers(),
            "synchronous": outcome.synchronous and outcome.synchronous.numbers(),
        }
        for outcome in ranked
    ]
    (folder / "simulation.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def number(value: float) -> str:
    """Text with three significant digits; whole numbers from `_MANY` on."""
    return f"{value:,.0f}" if abs(value) >= _MANY else f"{value:.3g}"


def result_rows(result: SimulationResult) -> list[tuple[str, str]]:
    """The lines about one simulation, in order."""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(result.dropped.items()))
    return [
        ("step", f"{number(result.step_s)} s"),
        ("steps per hour", number(result.steps_per_hour)),
        ("lower bound of a step", f"{number(result.bound_s)} s (x {result.over_bound:.3f})"),
        ("  generation, slots full", f"{number(result.generation_s)} s"),
        ("  training", f"{number(result.training_s)} s"),
        ("empty slots", f"{result.engine_idle:.1%}"),
        ("trainer idle", f"{result.trainer_idle:.1%}"),
        ("weights handed over", f"{result.sync_share:.1%}"),
        ("mean response trained", f"{number(result.mean_tokens)} tokens"),
        ("staleness of tokens", _staleness(result.token_staleness)),
        ("staleness of groups", _staleness(result.group_staleness)),
        ("groups dropped", f"{result.dropped_share:.1%}{f' ({dropped})' if dropped else ''}"),
        ("tokens wasted", f"{result.wasted_share:.1%}"),
        ("engine failures", "{engine_restarts:,g}, {retries:,g} requests moved".format(**result.engines)),
    ]


def _staleness(of: Staleness) -> str:
    return f"mean {of.mean:.2f}, p95 {of.p95}, max {of.max}"


def comparison_table(outcome: Outcome, title: str) -> Table:
    """One run beside the synchronous run of the same workload."""
    results = {"this run": outcome.result, "synchronous": outcome.synchronous}
    columns = {name: result_rows(result) for name, result in results.items() if result is not None}
    table = Table("", *columns, box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(cells[0][0], *(text for _, text in cells))
    if outcome.synchronous is not None:
        table.add_row("over synchronous", f"{outcome.speed_up:.2f} x", "1")
    return table


_SWEEP_COLUMNS: dict[str, Callable[[Outcome, SimulationResult], str]] = {
    "step s": lambda _, result: number(result.step_s),
    "steps/h": lambda _, result: number(result.steps_per_hour),
    "x sync": lambda outcome, _: f"{outcome.speed_up:.2f}",
    "/ bound": lambda _, result: f"{result.over_bound:.3f}",
    "empty slots": lambda _, result: f"{result.engine_idle:.1%}",
    "trainer idle": lambda _, result: f"{result.trainer_idle:.1%}",
    "lag mean": lambda _, result: f"{result.token_staleness.mean:.2f}",
    "p95": lambda _, result: str(result.token_staleness.p95),
    "max": lambda _, result: str(result.token_staleness.max),
    "dropped": lambda _, result: f"{result.dropped_share:.1%}",
    "wasted": lambda _, result: f"{result.wasted_share:.1%}",
}


def sweep_table(ranked: Sequence[Outcome]) -> Table:
    """All cases, the best, which can run, first and marked."""
    keys = list(ranked[0].case.settings)
    names = (*(key.removeprefix("produce.") for key in keys), *_SWEEP_COLUMNS)
    table = Table("", *(Column(name, justify="right") for name in names), box=box.SIMPLE_HEAD)
    for place, outcome in enumerate(ranked):
        result, cells = outcome.result, list[Text | str]([Text("cannot run", "red")])
        if result is not None:
            cells = [cell(outcome, result) for cell in _SWEEP_COLUMNS.values()]
        settings = [outcome.case.settings[key] for key in keys]
        table.add_row("" if place else "best", *settings, *cells, style="" if place else "bold")
    return table


def calibration_line(measured: Measured, predicted: SimulationResult) -> str:
    """A real run beside its prediction."""
    return (
        f"measured: a step of {number(measured.step_s)} s; predicted: {number(predicted.step_s)} s, off by "
        f"{predicted.step_s / measured.step_s - 1:+.1%}. Stalest rollout of a batch, measured: "
        f"{measured.staleness:.2f}; predicted: {predicted.stalest_mean:.2f}"
    )
