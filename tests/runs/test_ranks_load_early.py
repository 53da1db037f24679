"""The ranks of a run load their libraries beside its own process."""

import subprocess
import sys

import pytest

from forebay.runs import config
from forebay.runs.config import RunConfig, load_ranks, to_toml

TABLES = {
    "name": "run",
    "steps": 1,
    "batch_size": 1,
    "rollouts_per_prompt": 2,
    "model": {"source": "tiny"},
    "tasks": [{"name": "task", "data": {"source": "sorting"}, "judge": {"name": "exact_match"}}],
}
SEPARATE = {"mode": "separate"}
SCRIPT = """
import sys
from forebay.runs import config
from forebay.cli import main
config.start_loading = lambda: sys.exit("torch" in sys.modules and "it is late" or "it is early")
main()
"""


@pytest.mark.parametrize(
    ("tables", "gpu", "begins"),
    [
        ({}, False, False),
        ({"train": {"ranks": 2}}, True, True),
        ({"produce": SEPARATE}, False, True),
        ({"produce": SEPARATE}, True, False),
        ({"produce": SEPARATE, "device": "cpu"}, True, True),
        ({"produce": SEPARATE, "cluster": {"name": "ray"}}, False, False),
    ],
)
def test_it_begins_where_the_trainer_is_not_in_the_process_of_the_run(tables, gpu, begins, monkeypatch):
    begun = []
    monkeypatch.setattr(config, "start_loading", lambda: begun.append(True))
    monkeypatch.setattr(config, "_GPUS", ("/",) if gpu else ())
    load_ranks(RunConfig.model_validate(TABLES | tables))
    assert bool(begun) is begins


def test_it_begins_before_the_process_of_the_run_loads_torch(tmp_path):
    apart = RunConfig.model_validate(TABLES | {"produce": SEPARATE, "device": "cpu"})
    (tmp_path / "run.toml").write_text(to_toml(apart))
    command = [sys.executable, "-c", SCRIPT, "train", str(tmp_path / "run.toml")]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stderr == "it is early\n"
