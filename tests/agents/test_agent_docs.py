"""The program in docs/agents.md runs and prints what the page says."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")


def test_the_environment_of_ones_own_runs_and_has_few_lines():
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    environment = program[program.index("class Guess") : program.index("tokenizer =")]
    assert len(environment.splitlines()) <= 30
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"It prints `{done.stdout.strip()}`." in PAGE, done.stderr
