"""The ``forebay init`` command: a recipe or an example, written into a folder to start from."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from forebay.cli.errors import console, one_message
from forebay.config import ConfigError, did_you_mean

RUN_FILE = "run.toml"


def find_starts() -> dict[str, Path]:
    """The starts, by name: run files, folders with a run file, programs."""
    inside = Path(__file__).parents[1]
    # In a wheel they are part of the package, in a checkout they stand beside src/.
    root = inside if (inside / "recipes").is_dir() else inside.parents[1]
    run_files = sorted((root / "recipes").glob("*.toml"))
    folders = [path.parent for path in sorted((root / "recipes").glob(f"*/{RUN_FILE}"))]
    programs = sorted((root / "examples").glob("*.py"))
    return {path.stem: path for path in [*folders, *run_files, *programs]}


def describe(path: Path) -> str:
    """The first sentence of a start's own comment or docstring."""
    text = (path / RUN_FILE if path.is_dir() else path).read_text(encoding="utf-8")
    lines = [line.lstrip('#" ').rstrip('" ') for line in text.splitlines()[:3]]
    return " ".join(line for line in lines if "=" not in line).partition(". ")[0].rstrip(".")


def write_start(name: str, folder: Path) -> list[Path]:
    """Write the start `name` into `folder`, which is made if it is missing.

    Returns:
        The files that were written.

    Raises:
        ConfigError: there is no such start, or one of its files is there already.
    """
    starts = find_starts()
    if name not in starts:
        hint = did_you_mean(name, starts)
        raise ConfigError(f"nothing to start from is called {name!r}; {hint}known: {', '.join(starts)}")
    start = starts[name]
    files = sorted(file for file in start.iterdir() if file.is_file()) if start.is_dir() else [start]
    targets = [folder / (RUN_FILE if start.suffix == ".toml" else file.name) for file in files]
    if there := [str(target) for target in targets if target.exists()]:
        raise ConfigError(f"there already: {', '.join(there)}; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file, target in zip(files, targets, strict=True):
        shutil.copyfile(file, target)
    return targets


def init(
    name: Annotated[str | None, typer.Argument(help="What to start from; left out: a list.")] = None,
    folder: Annotated[
        Path | None, typer.Argument(help="Where to write it; left out: a new folder of that name.")
    ] = None,
) -> None:
    """Write a run file with its data and reward function, or a program, to start from."""
    with one_message():
        if name is None:
            table = Table.grid(padding=(0, 1))
            for start, path in find_starts().items():
                table.add_row(start, describe(path))
            console().print(table)
            typer.echo("\nforebay init NAME [FOLDER] writes one; own_task has data and a reward to replace")
            return
        written = write_start(name, folder or Path(name))
        for file in written:
            typer.echo(f"wrote {file}")
        run_file = next((file for file in written if file.name == RUN_FILE), None)
        typer.echo(f"next: forebay train {run_file}" if run_file else f"next: python {written[0]}")
