"""The GPU benchmarks run, on a CPU with a toy model, and refuse to measure where there is no GPU."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
ROWS = {"training": 6, "packing": 4, "generation": 4, "handover": 5}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    # Their names are short; others may want them.
    for name in {*ROWS, "accelerator"} - before:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_measures_and_says_on_what(load, name, tmp_path, capsys):
    given = ["--tiny", "--device", "cpu", "--repeats", "1", "--record", str(tmp_path / "results.json")]
    load(name).main(given)
    (result,) = json.loads((tmp_path / "results.json").read_text())
    assert len(result["rows"]) == ROWS[name]
    assert result["machine"]["torch"] == torch.__version__
    assert f"## {result['title']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "reason"), [([], "sees no GPU"), (["--device", "cpu", "--size", "1.5b"], "too slow on a CPU")]
)
def test_without_a_gpu_it_says_so_and_measures_nothing(load, monkeypatch, capsys, given, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        load("training").main(given)
    assert reason in capsys.readouterr().err
