"""Every example runs as its first lines say, and prints what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SMALL_RUN = [
    "steps=2",
    "batch_size=2",
    "rollouts_per_prompt=4",
    "warmup.steps=2",
    "model.tiny.hidden_size=32",
    "model.tiny.num_layers=1",
    "tasks.0.data.size=50",
    "tasks.0.eval_data.start=50",
    "tasks.0.eval_data.size=4",
]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("command", "promised"),
    [
        (["own_agent_loop.py"], "trained [1, 1, 0, 0, 0, 1, 1]"),
        (["agent_program.py"], "trained tokens"),
        (["own_staleness_rule.py"], "BackOff:"),
        (["second_chances.py"], "3 Reply(says='', done=True, reward=0.8)"),
        (["buffer_alone.py"], "chance of the action that pays: 1.00"),
        (["low_level_loop.py", "recipes/demo_tiny.toml", *SMALL_RUN], "step 2: reward"),
        (["async_loop.py", "recipes/demo_separate.toml", *SMALL_RUN], "the books:"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_example_runs(command: list[str], promised: str, tmp_path: Path) -> None:
    script, *arguments = command
    paths = [str(ROOT / part) if part.startswith("recipes/") else part for part in arguments]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *paths],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert promised in done.stdout
    # The bars of transformers are none of ours.
    assert "Loading weights" not in done.stderr
