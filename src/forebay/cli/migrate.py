"""The ``forebay migrate`` command: run folders and databases of version 0.1, converted in their place.

::

    run folder --> checksums of every checkpoint and of the model, as they are now
    database   --> the present schema (`upgrade` of `forebay.replay.stores.sql.connections`)

Snapshots and ledgers of version 0.1 are read as they are, and so are its run files, with a note where a key
has another name now.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.errors import one_message
from forebay.cli.source import hide_password, is_sql
from forebay.extras import needed_by
from forebay.io.durable import CHECKSUMS, seal, sync_tree


def convert(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A run folder or a database of version 0.1.")],
) -> None:
    """Convert what version 0.1 wrote, in its place; no process may be using it."""
    with one_message(ValueError, OSError):
        typer.echo(_convert(path))


def _convert(path: str) -> str:
    if is_sql(path):
        with needed_by("a SQL store"):
            from forebay.replay.stores.sql.connections import upgrade
        return f"{hide_password(path)}: {upgrade(path)} groups converted"
    # Here, because every command imports this module, and run files know all parts of a run.
    from forebay.runs.folder import RUN_FILE, list_checkpoints

    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"there is nothing at {path!r}")
    if not (folder / RUN_FILE).is_file():
        raise ValueError(f"{path!r} is neither a run folder nor a database; name one of version 0.1")
    models = [place for place in (folder / "warmup", folder / "model") if place.is_dir()]
    places = [place for place in (*list_checkpoints(folder), *models) if not (place / CHECKSUMS).exists()]
    for place in places:
        # The parts of a checkpoint are checked alone, too.
        for part in (place / "trainer", place / "manager", place):
            if part.is_dir():
                seal(part)
        sync_tree(place)
    names = ", ".join(place.name for place in places)
    return f"{path}: checksums written for {names}" if names else f"{path}: nothing to convert"
