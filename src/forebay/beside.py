"""Where a run file's modules, data and models are looked for: beside it, then in the working folder.

::

    search_path of the run file, or (its folder, the working folder)
        --make_importable--> sys.path, from which processes that the run starts get theirs
        --locate-----------> "data/train.jsonl" becomes "/home/me/project/data/train.jsonl"

The resolved run file has the folders and the absolute paths, so every later command finds the same, from any
working folder.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic import AfterValidator, ValidationInfo

_LOOKS_LIKE_PATH = re.compile(r"(?=.*\w)[^:\n]*[./][^:\n]*")
_imported_from: list[str] = []
"""The folders of the run file read last."""


def search_folders(given: Sequence[str], beside: Path | None) -> list[Path]:
    """The folders of the key ``search_path``; without it that of the run file, then the working folder."""
    base = Path.cwd() if beside is None else beside.resolve()
    folders = [base / folder for folder in given] if given else [base, Path.cwd()]
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def make_importable(folders: Sequence[Path]) -> None:
    """Have `folders` first in ``sys.path``, in this order."""
    names = [str(folder) for folder in folders]
    sys.path[:] = [*names, *(path for path in sys.path if path not in names)]
    _imported_from[:] = names


def imported_from() -> list[str]:
    """The folders given to `make_importable` last."""
    return list(_imported_from)


def check_is_meant(name: str) -> None:
    """Check that the imported top-level module `name` is the one in the run file's folders, if one is there.

    Raises:
        ImportError: another one of that name was imported before.
    """
    found = PathFinder.find_spec(name, _imported_from)
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if found is None or found.origin is None or not isinstance(loaded, str | None):
        return
    if loaded is None or Path(loaded).resolve() != Path(found.origin).resolve():
        raise ImportError(
            f"{found.origin} has the name of a module that is imported already, from "
            f"{loaded or 'Python itself'}; rename your file"
        )


def locate(text: str, folders: Sequence[Path] | None) -> str:
    """`text` as an absolute path if it names something in one of `folders`; otherwise as it is.

    A pattern such as ``data/*.jsonl`` becomes one for the first folder in which it matches something.
    """
    if not text or "\0" in text or Path(text).expanduser().is_absolute():
        return text
    for folder in folders or ():
        path = str(folder / text)
        # `os.path.exists` says False, and does not raise, for a name that is too long.
        if os.path.exists(path) or (
            glob.has_magic(text) and glob.glob(text, root_dir=folder, recursive=True)
        ):
            return path
    return text


def _located_arguments(value: Any, info: ValidationInfo) -> Any:
    return _deep(value, info.context)


def _deep(value: Any, folders: Sequence[Path] | None) -> Any:
    if isinstance(value, dict):
        return {key: _deep(item, folders) for key, item in value.items()}
    if isinstance(value, list):
        return [_deep(item, folders) for item in value]
    # Words such as "answer" stay words, even with a file of that name, and "[0-9].*" is no pattern of files.
    is_path = isinstance(value, str) and _LOOKS_LIKE_PATH.fullmatch(value) and not glob.has_magic(value)
    return locate(value, folders) if is_path else value


ArgumentPaths = AfterValidator(_located_arguments)
"""For the type of a table of arguments: texts in it that name a file or folder become absolute."""
