"""``forebay keys``: lines of the page ``docs/keys.md``, which the tests hold against the config models."""

import difflib
import re
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from forebay.cli.errors import one_message
from forebay.config import ConfigError

HERE = Path(__file__).parents[1]


class Key(NamedTuple):
    """One key of a run file."""

    path: str
    """The path as in an override; ``tasks.0`` stands for any task."""
    values: str
    """The values that it may have."""
    default: str
    meaning: str
    section: str
    """The part of the page: of which run files, or of which component it is an argument."""


def find_keys(pattern: str) -> list[Key]:
    """The keys whose path has `pattern` in it; if there is none, those whose meaning has.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    inside = HERE / "keys.md"
    # In a wheel the page is part of the package, in a checkout it is in docs/.
    page = inside if inside.is_file() else HERE.parents[1] / "docs" / "keys.md"
    keys, section = list[Key](), ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:].replace("`", "")
        elif line.startswith("| `"):
            # A bar inside a cell is escaped.
            cells = [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])]
            path, values, default, meaning = cells
            keys.append(Key(path.strip("`"), values, default.strip("` "), meaning, section))
    # The page has tasks.0 for any task.
    wanted = re.sub(r"\b\d+\b", "0", pattern.lower())
    for text_of in (lambda key: key.path.lower(), lambda key: f"{key.section} {key.meaning}".lower()):
        if found := [key for key in keys if wanted in text_of(key)]:
            return found
    paths = {key.path for key in keys}
    near = difflib.get_close_matches(wanted, paths | {path.rpartition(".")[2] for path in paths}, n=3)
    raise ConfigError(
        f"no key of a run file has {pattern!r} in its name or meaning"
        + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "; `forebay keys` lists all")
    )


def show_keys(
    pattern: Annotated[
        str, typer.Argument(help="Part of a key's path, or of what it means; left out: all keys.")
    ] = "",
) -> None:
    """Say what the keys of a run file mean: values, defaults, units."""
    with one_message():
        for key in find_keys(pattern):
            values = f"{key.values}; default: {key.default}" if key.default else key.values
            typer.echo(f"{key.path} ({key.section}): {key.meaning} [{values}]")
