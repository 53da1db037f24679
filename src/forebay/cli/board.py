"""The ``forebay board`` command: the page of one or more runs, served or written into one file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.errors import one_message
from forebay.config import ConfigError

HERE = Path()


def board(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders, or folders with runs below; left out: this one."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to serve on; away from loopback a token is asked for.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; the next free one if it is taken.")] = 7331,
    beside: Annotated[bool, typer.Option(hidden=True, help="End when standard input does.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Instead of serving, write one self-contained file: NAME.html, or NAME.json, the timeline "
            "of a run for https://ui.perfetto.dev."
        ),
    ] = None,
) -> None:
    """Show runs in a browser: numbers, rollouts, what flows where, what was dropped."""
    with one_message():
        from forebay.board.server import Board, serve
        from forebay.runs.record.history import read_spans
        from forebay.watching.trace import write_trace

        named = folders or [HERE]
        for folder in named:
            if not folder.is_dir():
                raise ConfigError(f"there is no folder {str(folder)!r}; name a run's, for example runs/NAME")
        shown = Board([folder.resolve() for folder in named])
        # Where none is named, the page may be opened before the first run is there.
        if not shown.runs() and folders:
            raise ConfigError(f"there is no run at or below {', '.join(map(repr, map(str, named)))}")
        if export is not None and export.suffix == ".json":
            # A timeline is of one run.
            write_trace(export, read_spans(named[0]))
            typer.echo(f"written: {export}")
            return
        if export is not None:
            from forebay.board.export import write_report

            typer.echo(f"written: {write_report(shown, export)}")
            return
        serve(shown, host=host, port=port, say=typer.echo, ends=sys.stdin if beside else None)
