"""Ctrl-C while the command still loads its libraries, some of which swallow an interrupt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import signal, sys

class InterruptsAndSwallows:
    def find_spec(name, *_):
        if name == library:
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                pass

library = sys.argv.pop()
sys.meta_path.insert(0, InterruptsAndSwallows)
from forebay.cli import main
main()
"""


@pytest.mark.parametrize("library", ["pydantic", "torch"])
def test_it_ends_the_command_with_one_line(library: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "train", "recipes/demo_tiny.toml", f"output={tmp_path}", library]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "stopped\n", "")
    assert not list(tmp_path.iterdir())
