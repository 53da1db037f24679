"""The numbers of simulations as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from forebay.simulation.calibration import Measured
from forebay.simulation.result import Lag, SimulationResult
from forebay.simulation.sweep import Outcome

_MANY = 100
"""From here on, digits after the point say nothing."""


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= _MANY else f"{value:.3g}"


def share(value: float) -> str:
    """As a percentage."""
    return f"{value:.1%}"


def result_rows(result: SimulationResult) -> list[tuple[str, str]]:
    """What to say of one simulation, in order."""
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


def sweep_table(ranked: Sequence[Outcome]) -> Table:
    """All cases, the best first and marked."""
    table = Table(box=box.SIMPLE_HEAD)
    keys = list(ranked[0].case.settings)
    table.add_column("")
    for key in keys:
        table.add_column(key.removeprefix("produce."), justify="right")
    for name in ("step s", "steps/h", "x sync", "/ bound", "empty slots", "trainer idle"):
        table.add_column(name, justify="right")
    for name in ("lag mean", "p95", "max", "dropped", "wasted"):
        table.add_column(name, justify="right")
    for place, outcome in enumerate(ranked):
        is_best = place == 0 and outcome.result is not None
        table.add_row(
            "best" if is_best else "",
            *(outcome.case.settings[key] for key in keys),
            *_sweep_cells(outcome),
            style="bold" if is_best else "",
        )
    return table


def _sweep_cells(outcome: Outcome) -> list[Text | str]:
    result = outcome.result
    if result is None:
        return [Text("cannot run", "red")]
    return [
        number(result.step_s),
        number(result.steps_per_hour),
        f"{outcome.speed_up:.2f}",
        f"{result.over_bound:.3f}",
        share(result.engine_idle),
        share(result.trainer_idle),
        f"{result.token_lag.mean:.2f}",
        str(result.token_lag.p95),
        str(result.token_lag.max),
        share(result.dropped_share),
        share(result.wasted_share),
    ]


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
