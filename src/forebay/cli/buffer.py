"""The ``forebay buffer`` and ``forebay ledger`` commands: looking into what a run left on disk.

::

    forebay buffer inspect PATH                  what is in it: counts, staleness, ages, sizes, ledger balance
    forebay buffer show    PATH UID              one group: prompt, responses, rewards, weights of every token
    forebay buffer query   PATH '{"staleness": {"$gte": 2}}'
    forebay buffer export  PATH out.parquet      one line per rollout, for pandas, Polars, DuckDB
    forebay buffer migrate FROM TO               to another store or a snapshot
    forebay buffer serve   ADDRESS               the buffer for other processes, until Ctrl-C or SIGTERM
    forebay ledger RUN_FOLDER                    what became of every group, and whether dropping bends it
    forebay migrate PATH                         a run folder or a database of version 0.1, in its place

PATH is a snapshot folder, a checkpoint, a run folder (its newest checkpoint), or a database: a URL, or an
SQLite file. Of the commands that look, only ``export`` and ``migrate`` write, and only what they are told to.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console

from forebay.cli.errors import MARKUP, one_message

app = typer.Typer(
    help="Look into a replay buffer on disk, move it, or serve it.",
    no_args_is_help=True,
    rich_markup_mode=MARKUP,
)

PIPED_WIDTH = 160
"""Columns when the output is no terminal; a table of groups fits."""

BufferPath = Annotated[
    str, typer.Argument(metavar="PATH", help="A snapshot, checkpoint or run folder, or a database.")
]
QueryText = Annotated[
    str, typer.Argument(metavar="QUERY", help='JSON, such as \'{"task_name": "math", "tags.level": 3}\'.')
]


@app.command()
def inspect(path: BufferPath) -> None:
    """Show what is in a buffer: counts, staleness, ages, sizes, and the ledger's balance."""
    _do(lambda commands: commands.inspect_buffer(path, _console()))


@app.command()
def show(
    path: BufferPath, uid: Annotated[int, typer.Argument(metavar="UID", help="As `query` lists it.")]
) -> None:
    """Show one group: prompt, responses, rewards, and the weights that made each span of tokens."""
    _do(lambda commands: commands.show_group(path, uid, _console()))


@app.command()
def query(
    path: BufferPath,
    query: QueryText = "{}",
    order: Annotated[
        str | None, typer.Option(help="timestamp_id, staleness or priority; - in front: descending.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Groups to show at most.")] = 50,
) -> None:
    """List the groups that match a query."""
    _do(lambda commands: commands.query_buffer(path, query, order, limit, _console()))


@app.command()
def export(
    path: BufferPath,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The Parquet file to write.")],
    query: Annotated[str, typer.Option(help="Only the groups that match, as in `query`.")] = "{}",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Write rows and rollouts to a Parquet file, one line per rollout."""
    _do(lambda commands: commands.export_buffer(path, target, query, overwrite, _console()))


@app.command()
def migrate(
    source: Annotated[str, typer.Argument(metavar="FROM", help="As PATH elsewhere.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="A new folder, or an empty database.")],
    policy: Annotated[
        str | None,
        typer.Option(help="Policy that a snapshot of a database is for; its class name."),
    ] = None,
) -> None:
    """Copy everything: a snapshot to a database, a database to a snapshot, or like to like."""
    _do(lambda commands: commands.migrate_buffer(source, target, policy, _console()))


@app.command()
def serve(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="A path, for a Unix socket, or tcp://HOST:PORT (port 0: any)."
        ),
    ],
    store: Annotated[str, typer.Option(help="`memory`, a SQLite file, or the URL of a database.")] = "memory",
    policy: Annotated[
        str, typer.Option(help="`staleness`, `fifo` or `prioritized`: the order in which groups are taken.")
    ] = "staleness",
    max_live: Annotated[
        int | None, typer.Option(min=1, help="Puts wait while there are so many live groups.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Instead: what arrived first is evicted above so many.")
    ] = None,
    max_clients: Annotated[
        int | None, typer.Option(min=1, help="Connections at a time (900); a further client is refused.")
    ] = None,
    keep_consumed: Annotated[
        bool, typer.Option("--keep-consumed", help="Keep consumed groups after their checkpoint.")
    ] = False,
    snapshot: Annotated[
        Path | None, typer.Option(help="Resumed at the start, if there, and saved at the end (memory only).")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="Holds the token; else the variable FOREBAY_BUFFER_TOKEN. Needed off loopback."),
    ] = None,
) -> None:
    """Serve a replay buffer to other processes, for `RemoteReplayBuffer.connect(ADDRESS)`.

    Prints where it listens. Ctrl-C or SIGTERM ends it: what runs comes to its end, what waits is told.
    """
    given = locals()
    with one_message(ValueError, OSError):
        from forebay.replay.remote.server import ServeOptions, serve_buffer

        options = ServeOptions(**given)
        asyncio.run(serve_buffer(options, typer.echo))


def show_ledger(
    path: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A run's folder, or a ledger.jsonl.")],
    task: Annotated[str | None, typer.Option(help="Compare the groups of this task only.")] = None,
) -> None:
    """Show what became of every group, and how dropped groups differ from trained ones."""
    _do(lambda commands: commands.ledger_report(path, task, _console()))


def convert(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A run folder or a database of version 0.1.")],
) -> None:
    """Convert what version 0.1 wrote, in its place; no process may be using it."""
    with one_message(ValueError, OSError):
        from forebay.inspection.migration import migrate

        typer.echo(migrate(path))


def _do(action: Callable[[ModuleType], Coroutine[Any, Any, None]]) -> None:
    """Run one of `forebay.inspection.commands`, which is loaded here: the other commands need less."""
    with one_message(ValueError, OSError):
        from forebay.inspection import commands

        asyncio.run(action(commands))


def _console() -> Console:
    """Text as it is: no markup, no emoji codes, no colors for what looks like a number."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(markup=False, emoji=False, highlight=False, width=width)
