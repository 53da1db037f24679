"""The examples in docstrings run as they stand, with their module's names at hand.

One test a folder: its modules are imported anyway, and few tests are cheap to hand out to workers.
"""

from __future__ import annotations

import doctest
import importlib
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from house_figures import FILES, SOURCE, docstrings, name_of, text_of

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples_in(path: Path) -> int:
    """How many its docstrings have, found by reading: an example that doctest overlooks is none."""
    parser = doctest.DocTestParser()
    return sum(len(parser.get_examples(str(text.value))) for text in docstrings(path))


def modules_by_folder() -> dict[str, list[Path]]:
    folders: dict[str, list[Path]] = defaultdict(list)
    for path in FILES:
        if ">>> " in text_of(path):
            folders[name_of(path.parent)].append(path)
    return folders


FOLDERS = modules_by_folder()


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_examples_of_a_folder_run(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if folder.partition("/")[0] == "cluster":
        pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wrong = []
    for path in FOLDERS[folder]:
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        failed, tried = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
        if failed or tried != examples_in(path):
            wrong.append(f"{name}: {failed} failed, {tried} of {examples_in(path)} tried")
    assert not wrong, capsys.readouterr().out


def test_no_example_is_skipped() -> None:
    assert FOLDERS
    assert not [name_of(path) for path in FILES if "doctest: +SKIP" in text_of(path)]
