"""Sinks, the fan-out over them, and the phase timer."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import ConfigError, parse_config
from forebay.metrics import (
    JsonlSink,
    MetricsConfig,
    MetricsLogger,
    PhaseTimer,
    TensorBoardSink,
    nearest_rank,
    read_jsonl,
)
from forebay.produce.results import ProduceBatchResult


class Recorder:
    """A sink in memory that fails from step `fail_at` on."""

    def __init__(self, fail_at: float = math.inf) -> None:
        self.fail_at = fail_at
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self.fail_at:
            raise OSError("disk full")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


def test_each_step_is_one_line_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonlSink(path, clock=lambda: 12.5)
    sink.log(0, {"eval/score": 0.125})
    sink.log(1, {"reward": 0.5, "tokens": 7})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"train_step": 0, "unix_time_s": 12.5, "eval/score": 0.125},
        {"train_step": 1, "unix_time_s": 12.5, "reward": 0.5, "tokens": 7},
    ]
    sink.close()


def test_a_step_logged_again_adds_to_its_line(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m", clock=lambda: 0.0)
    sink.log(1, {"reward": 0.5, "loss": 1.2345678})
    sink.log(1, {"eval/score": 1.0, "loss": 1})
    sink.log(2, {"reward": 0.75})
    sink.close()
    assert read_jsonl(tmp_path / "m") == [
        {"train_step": 1, "unix_time_s": 0.0, "reward": 0.5, "loss": 1, "eval/score": 1.0},
        {"train_step": 2, "unix_time_s": 0.0, "reward": 0.75},
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_number_json_does_not_have_is_null(tmp_path: Path, value: float) -> None:
    sink = JsonlSink(tmp_path / "m")
    sink.log(1, {"loss": value, "reward": np.float32(0.5)})
    sink.close()
    row = read_jsonl(tmp_path / "m")[0]
    assert (row["loss"], row["reward"]) == (None, 0.5)


def test_an_earlier_step_is_logged_in_its_own_row(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m", clock=lambda: 0.0)
    sink.log(2, {"reward": 0.5})
    sink.log(3, {"reward": 0.75})
    sink.log(2, {"eval/score": 1.0})
    sink.log(0, {"eval/score": 0.25})
    sink.log(3, {"loss": 2})
    sink.close()
    assert read_jsonl(tmp_path / "m") == [
        {"train_step": 0, "unix_time_s": 0.0, "eval/score": 0.25},
        {"train_step": 2, "unix_time_s": 0.0, "reward": 0.5, "eval/score": 1.0},
        {"train_step": 3, "unix_time_s": 0.0, "reward": 0.75, "loss": 2},
    ]


def test_a_new_run_does_not_overwrite_another(tmp_path: Path) -> None:
    first = JsonlSink(tmp_path / "m")
    first.log(1, {})
    first.close()
    with pytest.raises(ValueError, match="already holds the metrics of a run; resume it or choose another"):
        JsonlSink(tmp_path / "m")


@given(
    steps=st.lists(st.integers(0, 9), unique=True).map(sorted),
    resume_step=st.integers(0, 10),
    torn=st.sampled_from([b"", b'{"train_st']),
)
def test_after_a_resume_there_is_one_line_for_each_step(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], resume_step: int, torn: bytes
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    before = JsonlSink(path)
    for step in steps:
        before.log(step, {"run": 1})
    before.close()
    path.write_bytes(path.read_bytes() + torn)

    after = JsonlSink(path, resume_step=resume_step)
    kept = [step for step in steps if step <= resume_step]
    assert [row["train_step"] for row in read_jsonl(path)] == kept
    for step in range(resume_step, 12):
        after.log(step, {"again": 1})
    after.close()
    rows = read_jsonl(path)
    assert [row["train_step"] for row in rows] == [s for s in kept if s < resume_step] + [*range(resume_step, 12)]
    assert [row["train_step"] for row in rows if "run" in row] == kept


def test_resuming_a_run_that_has_no_metrics_yet_starts_them(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m", resume_step=3)
    sink.log(4, {"reward": 1.0})
    sink.close()
    assert [row["train_step"] for row in read_jsonl(tmp_path / "m")] == [4]


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b'{"reward": 1}'])
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"train_step": 1}\n' + line + b'\n{"train_step": 3}\n')
    with pytest.raises(ValueError, match=r"line 2 of .* is not a metrics line"):
        read_jsonl(path)


def test_a_sink_that_fails_is_reported_once_and_the_others_go_on() -> None:
    good, bad = Recorder(), Recorder(fail_at=2)
    reports: list[str] = []
    logger = MetricsLogger([bad, good], report=reports.append)
    for step in (1, 2, 3):
        logger.log(step, {"reward": step / 10})
    logger.close()
    logger.close()
    assert bad.rows == [(1, {"reward": 0.1})]
    assert good.rows == [(1, {"reward": 0.1}), (2, {"reward": 0.2}), (3, {"reward": 0.3})]
    assert reports == ["Recorder failed and gets no more metrics: OSError: disk full"]
    assert good.closed == 1


def test_without_a_reporter_the_failure_goes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    MetricsLogger([Recorder(fail_at=0)]).log(0, {})
    assert "disk full" in caplog.text


def test_an_interrupt_is_not_taken_for_a_failure() -> None:
    class Interrupted(Recorder):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MetricsLogger([Interrupted()]).log(1, {})


class OwnSink(Recorder):
    """What a run file may name as ``test_metrics:OwnSink``."""

    made: list[OwnSink] = []  # noqa: RUF012

    def __init__(self, folder: Path, *, project: str, resume_step: int | None) -> None:
        super().__init__()
        self.arguments = (folder, project, resume_step)
        OwnSink.made.append(self)


def test_the_jsonl_file_is_always_written_and_a_sink_can_be_named_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "own_sinks", sys.modules[__name__])
    config = parse_config(MetricsConfig, {"sinks": ["own_sinks:OwnSink"], "project": "p"})
    logger = config.build(tmp_path, resume_step=4)
    logger.log(5, {"reward": 1.0})
    logger.close()
    (own,) = OwnSink.made
    assert own.arguments == (tmp_path, "p", 4)
    assert own.rows == [(5, {"reward": 1.0})]
    assert own.closed == 1
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["reward"] == 1.0


def test_an_unknown_sink_is_found_before_the_run_starts() -> None:
    with pytest.raises(ConfigError, match="unknown metrics sink 'tensorbord'; did you mean 'tensorboard'"):
        parse_config(MetricsConfig, {"sinks": ["tensorbord"]})


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"needs {name}.*pip install 'forebay\[trackers\]'"):
        MetricsConfig(sinks=[name]).build(tmp_path)


def test_tensorboard_reads_what_was_logged_and_drops_the_steps_before_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    before = TensorBoardSink(tmp_path, project="p")
    for step in (1, 2, 3):
        before.log(step, {"reward": step / 8})
    before.close()
    after = TensorBoardSink(tmp_path, project="p", resume_step=1)
    after.log(2, {"reward": 0.5, "eval/score": 1.0})
    after.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert points == {"reward": [(1, 0.125), (2, 0.5)], "eval/score": [(2, 1.0)]}


_TRACK = """
import pathlib, sys
from forebay.metrics import MetricsConfig
folder, sink = pathlib.Path(sys.argv[1]), sys.argv[2]
for resume_step in (None, 2):
    logger = MetricsConfig(sinks=[sink], project="waterworks").build(folder, resume_step=resume_step)
    logger.log(1 + (resume_step or 0), {"reward": 0.25, "loss": float("nan")})
    logger.close()
"""


def _track(folder: Path, sink: str) -> None:
    """Log and resume in a process of its own, offline: trackers leave threads and settings."""
    settings = {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_MODE": "offline", "HOME": str(folder)}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", _TRACK, str(folder / "run-7"), sink],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_trackio_stores_the_numbers_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    _track(tmp_path, "trackio")
    database = sqlite3.connect(tmp_path / "trackio" / "waterworks.db")
    rows = database.execute("select run_name, step, json_extract(metrics, '$.reward') from metrics").fetchall()
    database.close()
    assert rows == [("run-7", 1, 0.25), ("run-7", 3, 0.25)]


def test_wandb_stores_an_offline_run_and_goes_on_with_it(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    _track(tmp_path, "wandb")
    folder = tmp_path / "run-7" / "wandb"
    run_id = (folder / "id").read_text()
    stored = [path for path in folder.rglob("*.wandb") if path.parent.name != "latest-run"]
    assert {path.name for path in stored} == {f"run-{run_id}.wandb"}
    assert all(b"reward" in path.read_bytes() for path in stored)


def test_phases_add_up_until_they_are_read() -> None:
    wall, cpu = iter([0.0, 2.0, 10.0, 10.5, 20.0, 21.0]), iter([0.0, 1.0, 5.0, 5.25, 9.0, 9.5])
    timer = PhaseTimer(wall_clock=lambda: next(wall), cpu_clock=lambda: next(cpu))
    with timer.phase("generate"):
        pass
    with timer.phase("train"):
        pass
    with pytest.raises(RuntimeError), timer.phase("generate"):
        raise RuntimeError
    assert timer.consume() == {"generate": (3.0, 1.5), "train": (0.5, 0.25)}
    assert timer.consume() == {}


def test_phases_may_lie_inside_each_other() -> None:
    now = iter([0.0, 1.0, 3.0, 10.0])
    timer = PhaseTimer(wall_clock=lambda: next(now), cpu_clock=lambda: 0.0)
    with timer.phase("generate"), timer.phase("judge"):
        pass
    assert timer.consume() == {"judge": (2.0, 0.0), "generate": (10.0, 0.0)}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.sampled_from([1, 7, 50, 95, 99, 100]))
def test_a_percentile_is_the_value_of_the_nearest_rank(values: list[int], percent: int) -> None:
    expected = sorted(values)[max(1, -(-percent * len(values) // 100)) - 1]
    assert nearest_rank(values, percent) == expected
    counts = Counter(values)
    assert nearest_rank(list(counts), percent, counts=list(counts.values())) == expected


def test_percentiles_are_never_in_between() -> None:
    assert nearest_rank([1.0, 2.0, 3.0, 4.0], 50) == 2.0
    assert nearest_rank(range(1, 101), 7) == 7.0
    assert nearest_rank([], 50) == 0.0
    metrics = ProduceBatchResult(group_gen_times_s=[4.0, 2.0, 1.0, 3.0]).metrics()
    assert (metrics["produce/group_p50_s"], metrics["produce/group_p99_s"]) == (2.0, 4.0)
