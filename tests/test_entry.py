"""A run from Python: with objects for names, in a script and in a running event loop, resumed, refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import forebay
from forebay.cli.commands import app
from forebay.config import ConfigError
from forebay.produce import Prompt

ROWS = [{"prompt": f"{letter}=", "level": number} for number, letter in enumerate("abcdefgh")]


def config(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "python",
        "steps": 2,
        "batch_size": 2,
        "rollouts_per_prompt": 2,
        "output": str(tmp_path),
        "model": {
            "source": "tiny",
            "max_context": 16,
            "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 1, "alphabet": "abcdefgh="},
        },
        "tasks": [{"name": "letters", "sample": {"max_tokens": 3}}],
        **changes,
    }


def judge(state: Any) -> float:
    assert state.extra_fields["level"] < len(ROWS)
    return float(len(state.response))


async def slow_judge(state: Any) -> float:
    await asyncio.sleep(0)
    return judge(state)


def test_a_run_takes_a_function_and_rows_and_goes_on_with_them(tmp_path: Path) -> None:
    result = forebay.run(config(tmp_path), "checkpoint_every=1", judge=judge, data=ROWS)
    assert result.folder == tmp_path / "python"
    assert result.model == result.folder / "model"
    assert not result.interrupted
    assert {row["train_step"] for row in result.metrics} >= {1, 2}

    # Its judge has no name that another process could look up.
    said = CliRunner().invoke(app, ["train", "--resume", str(result.folder), "steps=3"])
    assert said.exit_code == 2
    with pytest.raises(ConfigError, match=r"Python object .* forebay\.run\(resume=FOLDER, judge=\.\.\.\)"):
        forebay.run(None, "steps=3", resume=result.folder, data=ROWS)
    more = forebay.run(None, "steps=3", resume=result.folder, judge=judge, data=ROWS)
    assert max(row["train_step"] for row in more.metrics) == 3


async def test_a_notebook_has_a_running_event_loop(tmp_path: Path) -> None:
    assert forebay.run(config(tmp_path), judge=judge, data=ROWS).model is not None
    again = await forebay.run_async(config(tmp_path, name="again"), judge=slow_judge, data=ROWS)
    assert again.model is not None


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    for arguments, given, message in (
        ((None,), {}, "give either config or resume"),
        ((None,), {"resume": tmp_path, "overwrite": True}, "leave one of the two out"),
        ((config(tmp_path),), {"without_groups": True}, "without_groups is for resume"),
        ((config(tmp_path),), {"data": ROWS, "judge": {"numbers": judge}}, "judge is for task 'numbers'"),
        ((config(tmp_path),), {"data": ROWS}, "has no judge"),
        ((config(tmp_path),), {"data": 5, "judge": judge}, "data must be rows, as a list of mappings, got int"),
        ((config(tmp_path),), {"data": [None], "judge": judge}, "row 0: a row must be a mapping or a Prompt"),
        # Of the judge: the row was taken.
        ((config(tmp_path),), {"data": [Prompt(message=[])], "judge": judge}, "KeyError: 'level'"),
        ((config(tmp_path),), {"data": [*ROWS, {**ROWS[0], "answer": "b"}], "judge": judge}, "row 0 has no column"),
        ((config(tmp_path, cluster="ray"),), {"data": ROWS, "judge": judge}, "leave cluster out"),
        ((config(tmp_path), "stepps=3"), {"data": ROWS, "judge": judge}, "did you mean 'steps'"),
        (
            (config(tmp_path, tasks=[{"name": "a"}, {"name": "b"}]),),
            {"data": ROWS, "judge": judge},
            "there are 2 tasks: give judge as",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            forebay.run(*arguments, **given)


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, forebay; print(sorted(name for name in sys.modules if name.startswith('forebay')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['forebay']"
    runs = "import sys, forebay.runs; assert not {'torch', 'ray', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", runs], check=True)
