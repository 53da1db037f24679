"""The pages keep their word: their Python runs, their run files resolve, the paths they name are there.

All blocks of Python of a page run in order as one program (``await`` is allowed), after the file of that name
in `given_on_pages`, which makes what the page takes as given. ``print(...)  # text`` promises that text.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forebay.config import load_config
from forebay.runs.config import RunConfig
from ray_cluster import local_cluster
from warm_python import ADDRESS, SERVER

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GIVEN = Path(__file__).parent / "given_on_pages"

# Programs that a page starts are forked as well, and what it leaves in a temporary folder is in the test's.
RUN_PROGRAM = f"""
import ast, asyncio, inspect, os, sys, tempfile
sys.path.append({str(Path(__file__).parent)!r})
from warm_python import warm_python
tempfile.tempdir = os.getcwd()
scope = {{"__name__": "__main__"}}
async def main():
    for text in sys.argv[1:]:
        code = compile(text, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            await eval(code, scope)
        else:  # it may start event loops of its own
            await asyncio.to_thread(exec, code, scope)
with warm_python():
    asyncio.run(main())
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def programs() -> list[Any]:
    return [
        pytest.param(page, id=f"ray {page.name}" if _uses_ray(page) else page.name)
        for page in PAGES
        if blocks(page, "python")
    ]


def _uses_ray(page: Path) -> bool:
    return any("forebay.cluster" in block or "make_cluster" in block for block in blocks(page, "python"))


def test_there_are_programs() -> None:
    assert len(programs()) >= 10


@pytest.fixture(scope="session")
def ray() -> Iterator[ModuleType]:
    with local_cluster() as ray:
        yield ray


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("page", programs())
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    SERVER.begin()
    environment = {**os.environ, ADDRESS: SERVER.address}
    if _uses_ray(page):
        # It would start a cluster of its own.
        ray = request.getfixturevalue("ray")
        environment |= {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "RAY_AUTH_MODE": "token"}
    given = GIVEN / f"{page.stem}.py"
    texts = ([given.read_text(encoding="utf-8")] if given.exists() else []) + blocks(page, "python")
    done = subprocess.run(
        [sys.executable, "-c", RUN_PROGRAM, *texts],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for block in texts:
        for promised in re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE):
            assert promised in done.stdout


BASE = {
    "name": "page",
    "steps": 1,
    "batch_size": 2,
    "rollouts_per_prompt": 2,
    "model": {"source": "tiny", "max_context": 64},
    "tasks": [{"name": "sums", "data": {"source": "addition"}, "judge": "exact_match", "sample": {"max_tokens": 4}}],
}
"""A run file that a page's tables are put into."""


@pytest.mark.usefixtures("forgotten_modules")
@pytest.mark.parametrize(
    ("page", "table"),
    [
        pytest.param(page, table, id=f"{page.name}-{number}")
        for page in PAGES
        for number, table in enumerate(blocks(page, "toml"))
    ],
)
def test_the_run_files_of_a_page_resolve(
    page: Path, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "recipes" / "process_rewards")
    monkeypatch.syspath_prepend(GIVEN / "modules")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    read = tomllib.loads(table)
    if "steps" not in read:
        read = _in_a_run_file(read)
    (tmp_path / "run.toml").write_text(_as_toml(read), encoding="utf-8")
    assert load_config(RunConfig, tmp_path / "run.toml", [])


def _in_a_run_file(tables: dict[str, Any]) -> dict[str, Any]:
    """The base with the tables of a page: ``tasks``, and keys of a task, belong to its one task."""
    (task,) = BASE["tasks"]
    of_task = {key: tables.pop(key) for key in ("agent", "judge", "data") if key in tables}
    tasks = tables.pop("tasks", {})
    if isinstance(tasks, dict):
        tasks = [task | of_task | tasks]
    return BASE | tables | {"tasks": [task | each for each in tasks]}


def _as_toml(tables: dict[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(tables)


def test_the_paths_that_a_page_names_are_there() -> None:
    missing = [
        f"{page.name}: {path}"
        for page in PAGES
        if page.name != "log.md"
        for path in re.findall(r"`((?:src|examples|recipes|tests)/[\w/.]+)`", page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    ]
    assert not missing


def test_the_tables_that_a_page_names_are_there() -> None:
    """In docs/where.md: "`NAME` in `src/...`", or "in the same file" as the path before it in its row."""
    page = ROOT / "docs" / "where.md"
    named = 0
    for row in page.read_text(encoding="utf-8").splitlines():
        for name, path in re.findall(r"`([A-Z_]{4,})` in (`src/[\w/.]+`|the same file)", row):
            file = path.strip("`") if path[0] == "`" else re.findall(r"`(src/[\w/]+\.py)`", row)[0]
            assert re.search(rf"^{name}\b", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), row
            named += 1
    assert named >= 8


def test_the_rows_of_the_design_are_those_that_are_checked() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", page, re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    [layers] = [entry["layers"] for entry in contracts["contracts"] if entry["type"] == "layers"]
    checked = [set(re.findall(r"forebay\.(\w+)", layer)) for layer in layers]
    assert [set(re.findall(r"`(\w+)`", modules)) for _, modules in rows] == checked
    assert [int(number) for number, _ in rows] == list(reversed(range(len(checked))))
    # A module that no row has may import anything.
    there = {path.stem for path in (ROOT / "src" / "forebay").iterdir() if path.stem[0] not in "_."}
    assert set().union(*checked) == there - {"py"}
