"""The ``forebay simulate`` command: what a run would do on a cluster, without the cluster.

::

    forebay simulate RUN.toml [key=value ...] --cluster CLUSTER.toml    one run, and the synchronous one
    forebay simulate RUN.toml --cluster CLUSTER.toml --sweep max_staleness=0,1,2 --sweep split=4:4,6:2
    forebay simulate --calibrate RUN_FOLDER [--sweep ...]               the rates of a real run

Keys that begin with ``cluster.`` are the cluster's. Nothing is trained: it shows tables and writes numbers.
"""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forebay.cli.errors import PIPED_WIDTH, Overrides, one_message
from forebay.config import ConfigError, load_config, read_toml

if TYPE_CHECKING:
    from forebay.simulation import ClusterConfig
    from forebay.simulation.calibration import Measured


def simulate_run(
    run_file: Annotated[Path | None, typer.Argument(help="A TOML run file. Left out with --calibrate.")] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Its rates, failures, joins: see recipes/clusters/example.toml.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2,...", help="Try all values, in every combination; also split=6:2."),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Train steps to simulate.")] = 50,
    out: Annotated[
        Path | None, typer.Option(help="Folder for numbers and timeline; else beside the run's folder.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Simulations at a time; else one for each core.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="RUN_FOLDER", help="Measure the cluster on a run that was trained.")
    ] = None,
) -> None:
    """Predict step time, idle shares and staleness of a run on a cluster, and compare settings."""
    if calibrate is not None and run_file is not None:
        # With --calibrate the first positional argument is an override, not a file.
        overrides, run_file = [str(run_file), *(overrides or [])], None
    with one_message():
        # Here, because the loops of a run load torch.
        from rich.progress import track

        from forebay.simulation import report
        from forebay.simulation.sweep import combine, parse_axis, rank, run_cases, split_overrides

        console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
        of_cluster, of_run = split_overrides(overrides or [])
        run_file, described, measured = _read(run_file, calibrate, cluster, of_cluster)
        axes = dict(parse_axis(text) for text in sweep or [])
        cases = list(combine(read_toml(run_file), of_run, described, axes, beside=run_file.parent))
        config = cases[0].config
        folder = out or config.output / f"{config.name}.simulation"
        folder.mkdir(parents=True, exist_ok=True)
        # A timeline is of one simulation, and a sweep has many.
        trace = None if axes else folder / "trace.json"
        shown = partial(track, description="simulating", console=console, transient=True)
        outcomes = run_cases(cases, steps, jobs=jobs, trace=trace, shown=shown)
        best, *_ = ranked = rank(outcomes)
        if best.result is None:
            raise ConfigError(f"nothing of this can run: {best.problem}")
        if axes:
            console.print(report.sweep_table(ranked))
        settings = ", ".join(f"{key}={value}" for key, value in best.case.settings.items())
        console.print(report.comparison_table(best, f"best: {settings}" if axes else config.name))
        # The figures were measured with the run's own settings: others have nothing to be held against.
        if measured is not None and not axes and not overrides:
            console.print(report.calibration_line(measured, best.result), highlight=False, soft_wrap=True)
        report.write_numbers(folder, ranked)
        timeline = "" if trace is None else f"; timeline, for https://ui.perfetto.dev: {trace}"
        console.print(f"numbers: {folder}{timeline}", highlight=False, soft_wrap=True)


def _read(
    run_file: Path | None, calibrate_on: Path | None, cluster_file: Path | None, of_cluster: list[str]
) -> "tuple[Path, ClusterConfig, Measured | None]":
    """The run file, the cluster with its overrides, and the figures of a run that it was measured on."""
    from forebay.runs.folder import RUN_FILE, saved_config
    from forebay.simulation.calibration import calibrate
    from forebay.simulation.cluster import ClusterConfig, changed_cluster

    if calibrate_on is not None:
        if cluster_file is not None:
            raise ConfigError("--calibrate measures the cluster: leave --cluster out")
        cluster, measured = calibrate(calibrate_on, saved_config(calibrate_on))
        return calibrate_on / RUN_FILE, changed_cluster(cluster, of_cluster), measured
    if run_file is None or cluster_file is None:
        raise ConfigError(
            "name a run file and a cluster, for example recipes/demo_separate.toml "
            "--cluster recipes/clusters/example.toml; or --calibrate RUN_FOLDER"
        )
    return run_file, load_config(ClusterConfig, cluster_file, of_cluster), None
