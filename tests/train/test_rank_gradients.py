"""The table of docs/scale.md as `benchmarks/rank_gradients.py` finds it: four ranks, or two, against one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("dense", "tied", "LoRA", "experts", "images", "hybrid attention")
LIMIT = 1e-5
"""Of the difference of a gradient, over its largest entry."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def on_page(kind: str) -> list[str]:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in page if line.startswith(f"| {kind}")]
    return cells(row)[1:]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_find_the_gradients_of_one_or_refuse(kind: str, layout: str, num_ranks: int) -> None:
    script = ROOT / "benchmarks" / "rank_gradients.py"
    command = [sys.executable, script, "--ranks", str(num_ranks), "--layout", layout, "--kinds", kind]
    done = subprocess.run(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout)
    head, _, row, *rest = done.stdout.splitlines()
    found, said = cells(row)[1:], on_page(kind)
    assert len(found) == len(said) == len(cells(head)) - 1
    is_refused = [cell.startswith("refused: ") for cell in found]
    assert all(refused or float(cell) <= LIMIT for cell, refused in zip(found, is_refused, strict=True))
    if layout == "padded" and num_ranks == 4:
        assert is_refused == [cell == "refused" for cell in said]
    if kind == "dense":
        # Saved on all, and resumed on all, on half of them and on one: the script compares the bits.
        losses = ast.literal_eval(rest[0].rpartition("next losses ")[2])
        assert losses == pytest.approx(losses[:1] * (num_ranks // 2 + 1), rel=1e-6)
