"""The work of `forebay simulate`: read or measure a cluster, simulate, show and write the findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

from forebay.config import ConfigError, read_toml
from forebay.runs.folder import RUN_FILE, saved_config
from forebay.simulation.calibration import calibrate
from forebay.simulation.cluster import changed_cluster, load_cluster
from forebay.simulation.report import calibration_table, comparison_table, sweep_table, write_report
from forebay.simulation.sweep import CLUSTER, combine, count_runs, parse_axis, rank, run_cases


def simulate_and_show(
    console: Console,
    *,
    run_file: Path | None,
    calibrate_on: Path | None,
    overrides: Sequence[str],
    cluster_file: Path | None,
    sweeps: Sequence[str],
    steps: int,
    out: Path | None,
    jobs: int | None,
) -> Path:
    """Simulate, print tables, write pictures and numbers; the page that was written.

    `calibrate_on` is the folder of a real run. `overrides` are of the run file; those that begin with
    ``cluster.`` are of the cluster.

    Raises:
        ConfigError: a file, key or value does not fit, or the run cannot run at all.
    """
    of_cluster = [key.removeprefix(CLUSTER) for key in overrides if key.startswith(CLUSTER)]
    of_run = [key for key in overrides if not key.startswith(CLUSTER)]
    measured = None
    if calibrate_on is not None:
        if cluster_file is not None:
            raise ConfigError("--calibrate measures the cluster: leave --cluster out")
        run_file = calibrate_on / RUN_FILE
        cluster, measured = calibrate(calibrate_on, saved_config(calibrate_on))
        cluster = changed_cluster(cluster, of_cluster)
    elif run_file is None or cluster_file is None:
        raise ConfigError(
            "name a run file and a cluster, for example recipes/demo_separate.toml "
            "--cluster recipes/clusters/example.toml; or --calibrate RUN_FOLDER"
        )
    else:
        cluster = load_cluster(cluster_file, of_cluster)
    axes = [parse_axis(text) for text in sweeps]
    cases = list(combine(read_toml(run_file), of_run, cluster, axes, beside=run_file.parent))
    columns = (SpinnerColumn(), "simulating", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=count_runs(cases))
        ranked = rank(run_cases(cases, steps, jobs=jobs, on_done=lambda: progress.advance(bar)))
    best = ranked[0]
    if best.result is None:
        raise ConfigError(f"nothing of this can run: {best.problem}")
    settings = ", ".join(f"{key}={value}" for key, value in best.case.settings.items())
    tables: list[RenderableType] = [sweep_table(ranked)] if axes else []
    tables.append(comparison_table(best, f"best: {settings}" if axes else best.case.config.name))
    if measured is not None and not axes and not overrides:
        tables.append(calibration_table(measured, best.result))
    for table in tables:
        console.print(table)
    config = cases[0].config
    page = write_report(out or config.output / f"{config.name}.simulation", ranked, tables)
    console.print(f"pictures and numbers: {page}", highlight=False, soft_wrap=True)
    return page
