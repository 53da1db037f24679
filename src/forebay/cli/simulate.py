"""The ``forebay simulate`` command: what a run would do on a cluster, without the cluster.

::

    forebay simulate RUN.toml [key=value ...] --cluster CLUSTER.toml    one run, and the synchronous one
    forebay simulate RUN.toml --cluster CLUSTER.toml --sweep max_staleness=0,1,2 --sweep split=4:4,6:2
    forebay simulate --calibrate RUN_FOLDER [--sweep ...]               the rates of a real run

Keys that begin with ``cluster.`` are the cluster's. It writes tables and pictures only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forebay.cli.errors import one_message

PIPED_WIDTH = 150
"""Columns when the output is no terminal; a sweep over three settings fits."""


def simulate_run(
    run_file: Annotated[
        Path | None, typer.Argument(help="A TOML run file. Left out with --calibrate.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes: produce.max_staleness=2, cluster.engines=8."),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="The cluster's file; see recipes/clusters/example.toml.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,...",
            help="Try all values; repeated: every combination. split=6:2 shares devices out.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Train steps to simulate.")] = 50,
    out: Annotated[
        Path | None, typer.Option(help="Folder for pictures, page and numbers; else beside the run's folder.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Simulations at a time; else one for each core.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="RUN_FOLDER", help="Measure the cluster on a run trained with trace=true."),
    ] = None,
) -> None:
    """Predict step time, idle shares and staleness of a run on a cluster, and compare settings."""
    if calibrate is not None and run_file is not None:
        # With --calibrate the first positional argument is an override, not a file.
        overrides, run_file = [str(run_file), *(overrides or [])], None
    with one_message():
        from forebay.simulation.commands import simulate_and_show

        simulate_and_show(
            Console(width=None if sys.stdout.isatty() else PIPED_WIDTH),
            run_file=run_file,
            calibrate_on=calibrate,
            overrides=overrides or [],
            cluster_file=cluster,
            sweeps=sweep or [],
            steps=steps,
            out=out,
            jobs=jobs,
        )
