"""The Python of README.md and of pages for newcomers runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def blocks(page: str, heading: str = "") -> list[str]:
    """The Python of a page, or of one section of it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


PROGRAMS = [
    *blocks("README.md"),
    *blocks("docs/judges.md", "From a row of data to a rollout"),
]


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 2


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_documentation_runs(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    # A comment beside a print says what it prints.
    for promised in re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE):
        assert promised in done.stdout
