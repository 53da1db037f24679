"""The snippets that open a buffer in other tools run and give what the page says."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from replay_factory import make_group
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.replay import SyncReplayBufferConfig

DOCS = Path(__file__).parents[2] / "docs"


def function_of(name):
    """The function that a block of the page defines."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "replay.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if f"def {name}(" in block]
    scope = {}
    exec(block, scope)
    return scope[name]


@pytest.fixture
def snapshot(tmp_path):
    async def save():
        buffer = SyncReplayBufferConfig().build()
        await buffer.put(make_group("a", num_tokens=3), "math")
        await buffer.put(make_group("b", 1, num_tokens=5), "code")
        await buffer.save(tmp_path / "snapshot")

    asyncio.run(save())
    return tmp_path / "snapshot"


def test_polars(snapshot):
    pytest.importorskip("polars")
    assert function_of("mean_score_by_task")(snapshot).rows() == [("code", 1.0), ("math", 1.0)]


def test_duckdb(snapshot, tmp_path):
    pytest.importorskip("duckdb")
    assert function_of("longest_by_status")(snapshot) == [("completed", 5)]
    CliRunner().invoke(app, ["buffer", "export", str(snapshot), str(tmp_path / "out.parquet")])
    assert function_of("longest_by_status_in")(tmp_path / "out.parquet") == [("completed", 5)]


def test_the_ledger_example_prints_what_it_says():
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "ledger.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    assert done.stdout.split() == re.findall(r"\)  # (.*)$", example, re.MULTILINE)
