"""What `forebay simulate` does: reads or measures a cluster, simulates, shows and writes what came out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

from forebay.config import ConfigError, read_toml
from forebay.runs.folder import RUN_FILE, saved_config
from forebay.simulation.calibration import Measured, calibrate
from forebay.simulation.cluster import ClusterConfig, changed_cluster, load_cluster
from forebay.simulation.pictures import draw_gantt, draw_lag, write_page
from forebay.simulation.sweep import (
    CLUSTER,
    Case,
    Outcome,
    combine,
    count_runs,
    parse_axis,
    rank,
    run_cases,
)
from forebay.simulation.tables import calibration_table, comparison_table, sweep_table

CLUSTER_FILE, NUMBERS, PAGE = "cluster.toml", "simulation.json", "simulation.html"
GANTT, LAG = "gantt.png", "lag.png"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line."""

    run_file: Path | None
    calibrate_on: Path | None
    """The folder of a real run."""
    overrides: Sequence[str]
    """Of the run file and, after ``cluster.``, of the cluster."""
    cluster_file: Path | None
    sweeps: Sequence[str]
    steps: int
    out: Path | None
    jobs: int | None


class _Subject(NamedTuple):
    """What is simulated."""

    run_table: dict[str, Any]
    beside: Path
    """The folder that it was read from."""
    cluster: ClusterConfig
    measured: Measured | None


def simulate_and_show(request: Request, console: Console) -> Path:
    """Simulate, print tables, write pictures and numbers; the page that was written.

    Raises:
        ConfigError: a file, key or value does not fit, or the run cannot run at all.
    """
    subject = _subject(request)
    axes = [parse_axis(text) for text in request.sweeps]
    of_run = [override for override in request.overrides if not override.startswith(CLUSTER)]
    cases = list(combine(subject.run_table, of_run, subject.cluster, axes, beside=subject.beside))
    ranked = rank(_run(cases, request, console))
    best = ranked[0]
    if best.result is None:
        raise ConfigError(f"nothing of this can run: {best.problem}")
    settings = ", ".join(f"{key}={value}" for key, value in best.case.settings.items())
    tables: list[RenderableType] = [sweep_table(ranked)] if axes else []
    tables.append(comparison_table(best, f"best: {settings}" if axes else best.case.config.name))
    if subject.measured is not None and not axes and not request.overrides:
        tables.append(calibration_table(subject.measured, best.result))
    for table in tables:
        console.print(table)
    config = cases[0].config
    folder = request.out or config.output / f"{config.name}.simulation"
    _write(folder, ranked, tables)
    console.print(f"pictures and numbers: {folder / PAGE}", highlight=False, soft_wrap=True)
    return folder / PAGE


def _subject(request: Request) -> _Subject:
    of_cluster = [
        override.removeprefix(CLUSTER) for override in request.overrides if override.startswith(CLUSTER)
    ]
    folder = request.calibrate_on
    if folder is not None:
        if request.cluster_file is not None:
            raise ConfigError("--calibrate measures the cluster: leave --cluster out")
        cluster, measured = calibrate(folder, saved_config(folder))
        return _Subject(read_toml(folder / RUN_FILE), folder, changed_cluster(cluster, of_cluster), measured)
    if request.run_file is None or request.cluster_file is None:
        raise ConfigError(
            "name a run file and a cluster, for example recipes/demo_separate.toml "
            "--cluster recipes/clusters/example.toml; or --calibrate RUN_FOLDER"
        )
    run_table, beside = read_toml(request.run_file), request.run_file.parent
    return _Subject(run_table, beside, load_cluster(request.cluster_file, of_cluster), None)


def _run(cases: Sequence[Case], request: Request, console: Console) -> list[Outcome]:
    columns = (SpinnerColumn(), "simulating", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=count_runs(cases))
        return run_cases(cases, request.steps, jobs=request.jobs, on_done=lambda: progress.advance(bar))


def _write(folder: Path, ranked: Sequence[Outcome], tables: Sequence[RenderableType]) -> None:
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
            "result": None if outcome.result is None else outcome.result.numbers(),
            "synchronous": None if outcome.synchronous is None else outcome.synchronous.numbers(),
        }
        for outcome in ranked
    ]
    (folder / NUMBERS).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
