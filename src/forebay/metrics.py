"""Where the numbers of a run go, and how the time of its phases is taken.

::

    PhaseTimer.consume() --+
    train, rollout, eval --+--> MetricsLogger.log(step, values) --> JsonlSink   metrics.jsonl, always
                                                               --> trackers     TensorBoard, trackio, wandb

It aggregates nothing: the code that measures also averages. Names end in their unit and may be grouped by
slashes; the constants below are those that the display and the pictures read, everything else is free. A
tracker that fails is reported once and left out: numbers about training never stop training.
"""

import contextlib
import contextvars
import importlib
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from forebay.config import StrictModel, checked_by, errors_about, look_up
from forebay.extras import needed_by
from forebay.io.safe_files import write_text

REWARD = "reward"
"""Mean score of the step's rollouts."""
RESPONSE_TOKENS = "response_tokens"
"""Mean response length, in tokens."""
SAMPLES = "samples"
"""Rollouts trained in the step."""
TOKENS_PER_S = "tokens_per_s"
"""Generated tokens per wall second of the whole step."""
STEP_S = "step_s"
"""Wall seconds of the whole step."""
TIME_PREFIX = "time/"
"""``time/<phase>_s``: wall seconds of one phase of the step."""
EVAL_SCORE = "eval/score"
"""Mean score over all held-out prompts."""

Row = dict[str, float | None]


class JsonlSink:
    """One JSON object a line: ``train_step``, ``unix_time_s`` and the values.

    Invariants: steps rise by line and no step has two lines (logging a step again adds to its line, also when
    later ones are there); after each `log` the file is complete on disk; a number that JSON does not have
    (NaN, infinity) is ``null``.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> sink = JsonlSink(path, clock=lambda: 0.0)
    >>> sink.log(1, {"reward": 0.25})
    >>> sink.close()
    >>> read_jsonl(path)
    [{'train_step': 1, 'unix_time_s': 0.0, 'reward': 0.25}]

    Raises:
        ValueError: a new run (`resume_step` None) would write into a file that already holds metrics.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None, clock: Callable[[], float] = time.time) -> None:
        """Open `path`; with `resume_step`, drop the lines of later steps, which will be trained again."""
        kept = read_jsonl(path) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is None and kept:
            raise ValueError(f"{str(path)!r} already holds the metrics of a run; resume it or choose another folder")
        self._clock, self._path = clock, path
        self._begin([row for row in kept if resume_step is None or _step(row) <= resume_step])

    def _begin(self, rows: Sequence[Row]) -> None:
        # Replaced in one move, so that a crash here, or a power cut, loses nothing.
        write_text(self._path, b"".join(map(_line, rows)).decode())
        # Without rows: a step below all others, so that the first `log` begins a line.
        self._row: Row = rows[-1] if rows else {"train_step": -1}
        # Not for appending: `log` writes the last line anew, in its place.
        self._file = self._path.open("r+b")
        end = self._file.seek(0, io.SEEK_END)
        self._row_start = end - (len(_line(self._row)) if rows else 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line, or add to that of the same step; an earlier step has the file written anew."""
        # Plain numbers: JSON cannot hold those of numpy or torch.
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
        known = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        if step < _step(self._row):
            rows = {_step(row): row for row in read_jsonl(self._path)}
            rows[step] = rows.get(step, self._new_row(step)) | known
            self._file.close()
            self._begin([rows[number] for number in sorted(rows)])
            return
        if step != _step(self._row):
            self._row = self._new_row(step)
            self._row_start = self._file.seek(0, io.SEEK_END)
        self._row |= known
        self._file.seek(self._row_start)
        self._file.write(_line(self._row))
        # A number that replaces an earlier one of this step may be shorter.
        self._file.truncate()
        self._file.flush()

    def _new_row(self, step: int) -> Row:
        return {"train_step": step, "unix_time_s": self._clock()}

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def nearest_rank(values: ArrayLike, percent: int, *, counts: Sequence[int] | None = None) -> float:
    """The least of `values` that `percent` of them do not exceed; 0 if there are none.

    It is always one of them. `counts` says how often each occurs; once if left out.

    >>> nearest_rank([4, 1, 3, 2], 50), nearest_rank([0, 7], 95, counts=[19, 1])
    (2.0, 0.0)
    """
    values_N = np.asarray(values)
    if not values_N.size:
        return 0.0
    order = np.argsort(values_N)
    ends_N = np.cumsum(np.ones_like(order) if counts is None else np.asarray(counts)[order])
    # In whole numbers: 0.07 * 100 is a little more than 7, and its ceiling is 8.
    rank = -(-percent * int(ends_N[-1]) // 100)
    return float(values_N[order[np.searchsorted(ends_N, rank)]])


class Sink(Protocol):
    """A place that numbers are written to."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` of train step `step` (0: before training)."""

    def close(self) -> None:
        """Write what is left and free the place; `log` is not called afterwards."""


def _line(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _step(row: Row) -> int:
    return int(row["train_step"] or 0)


def read_jsonl(path: Path) -> list[Row]:
    """The lines of a `JsonlSink`'s file as dicts; a last line that a crash cut short is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line other than the last is not a JSON object with a train step.
    """
    rows: list[Row] = []
    # Behind the last end of a line is what a crash cut short, or nothing.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or "train_step" not in row:
            raise ValueError(f"line {number} of {str(path)!r} is not a metrics line: {line[:80]!r}")
        rows.append(row)
    return rows


class TensorBoardSink:
    """Event files in ``<folder>/tensorboard``; ``tensorboard --logdir`` shows them.

    After a resume TensorBoard itself drops the steps that are trained again.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, folder: Path, *, project: str, resume_step: int | None = None) -> None:
        """Start an event file; `project` is not used, the folder names the run."""
        # First, so that the extra that is missing is that of the trackers.
        self._summary = _import_tracker("tensorboard.compat.proto.summary_pb2").Summary
        purge_step = None if resume_step is None else resume_step + 1
        summary_writer = _import_tracker("torch.utils.tensorboard").SummaryWriter
        self._writer = summary_writer(str(folder / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar for each value."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        # One event for all of them takes a tenth of the time of an `add_scalar` for each.
        self._writer.file_writer.add_summary(self._summary(value=scalars), step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class _RunOfTracker:
    """The sinks whose library gives them a run with ``log`` and ``finish``."""

    _run: Any
    _step = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over the values; the library's own thread or process writes them within a second.

        Those of an earlier step than the last are given to the last: wandb ignores a step that falls.
        """
        self._step = max(self._step, step)
        self._run.log(dict(values), step=self._step)

    def close(self) -> None:
        """Wait until everything is written."""
        with contextlib.redirect_stdout(io.StringIO()):  # a banner would break the progress display
            self._run.finish()


class TrackioSink(_RunOfTracker):
    """A run in trackio's local database (``TRACKIO_DIR``); ``trackio show --project NAME`` shows it.

    Nothing leaves the machine and no server starts, unless trackio's own variables (``TRACKIO_SPACE_ID``,
    ``TRACKIO_SERVER_URL``) ask for it. Steps that are trained again after a resume appear twice there.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, folder: Path, *, project: str, resume_step: int | None = None) -> None:
        """Open the run named like `folder` in `project`."""
        trackio = _import_tracker("trackio")
        with contextlib.redirect_stdout(io.StringIO()):
            # In a context of its own, so that a run the caller has open in trackio stays the current one.
            self._run = contextvars.copy_context().run(
                trackio.init,
                project=project,
                name=folder.name,
                resume="never" if resume_step is None else "allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )


class WandbSink(_RunOfTracker):
    """A Weights & Biases run in ``<folder>/wandb``, offline unless ``WANDB_MODE=online``.

    ``wandb sync`` uploads an offline run later. Steps that are trained again after a resume are ignored by
    wandb, whose steps never fall.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, folder: Path, *, project: str, resume_step: int | None = None) -> None:
        """Open the run named like `folder` in `project`; its id is kept in ``<folder>/wandb/id``."""
        wandb = _import_tracker("wandb")
        id_file = folder / "wandb" / "id"
        id_file.parent.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=id_file.read_text() if resume_step is not None and id_file.exists() else None,
            dir=str(folder),
            # Online by default would ask for a login, which no batch job can answer.
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        id_file.write_text(self._run.id)


def _import_tracker(module: str) -> Any:
    # A library may be there, but fail to load.
    sink = "the metrics sink"
    with errors_about(f"{sink} cannot import {module!r}", ImportError), needed_by(sink):
        return importlib.import_module(module)


TRACKERS: Mapping[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoardSink,
    "trackio": TrackioSink,
    "wandb": WandbSink,
}
"""The sinks a run file can name. Each is called ``(folder, project=..., resume_step=...)``."""


class MetricsLogger:
    """Hands every row to every sink; a sink that raises is reported once and left out from then on.

    >>> class Printer:
    ...     def log(self, step, values): print(step, dict(values))
    ...     def close(self): print("closed")
    >>> logger = MetricsLogger([Printer()])
    >>> logger.log(1, {"reward": 0.5})
    1 {'reward': 0.5}
    >>> logger.close()
    closed
    """

    def __init__(self, sinks: Sequence[Sink], *, report: Callable[[str], None] | None = None) -> None:
        """`report` is told about a failed sink; without it the module's logger is."""
        self._sinks = list(sinks)
        self._report = report or logging.getLogger(__name__).warning

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` of train step `step` to all sinks."""
        self._each(lambda sink: sink.log(step, values))

    def close(self) -> None:
        """Close all sinks; a second call does nothing."""
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, action: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:  # whatever a tracker's library raises, training goes on
                self._sinks.remove(sink)
                self._report(f"{type(sink).__name__} failed and gets no more metrics: {type(error).__name__}: {error}")


class MetricsConfig(StrictModel):
    """A run file's ``[metrics]`` table; ``metrics.jsonl`` is written in any case."""

    sinks: list[Annotated[str, checked_by(lambda name: look_up("metrics sink", name, TRACKERS))]] = Field(default=[])
    """Besides the JSONL file: ``tensorboard``, ``trackio``, ``wandb``, or ``"package.module:Class"``."""
    project: str = "forebay"
    """The project of trackio and wandb that the run belongs to."""

    def build(
        self, folder: Path, *, resume_step: int | None = None, report: Callable[[str], None] | None = None
    ) -> MetricsLogger:
        """The logger of the run in `folder`; `resume_step` is the train step it goes on from, None a new run.

        Raises:
            ConfigError: a tracker's package is missing.
            ValueError: a new run, but the folder holds the metrics of another.
        """
        sinks: list[Sink] = [JsonlSink(folder / "metrics.jsonl", resume_step=resume_step)]
        try:
            for name in self.sinks:
                make = look_up("metrics sink", name, TRACKERS)
                sinks.append(make(folder, project=self.project, resume_step=resume_step))
        except BaseException:
            # The run does not begin without this sink: those that are open already are closed.
            MetricsLogger(sinks, report=report).close()
            raise
        return MetricsLogger(sinks, report=report)


class PhaseSeconds(NamedTuple):
    """The cost of one phase."""

    wall_s: float
    cpu_s: float


class PhaseTimer:
    """Adds up wall and CPU seconds by phase until they are read.

    CPU seconds are those of all threads of this process: phases that run beside each other each count the
    other's. A phase counts when it ends, also when it ends with an exception.

    >>> ticks = iter([0.0, 2.0])
    >>> timer = PhaseTimer(wall_clock=lambda: next(ticks), cpu_clock=lambda: 0.0)
    >>> with timer.phase("generate"):
    ...     pass
    >>> timer.consume()
    {'generate': PhaseSeconds(wall_s=2.0, cpu_s=0.0)}
    """

    def __init__(
        self,
        *,
        wall_clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Clocks count seconds from any origin."""
        self._wall_clock = wall_clock
        self._cpu_clock = cpu_clock
        self._phases: dict[str, PhaseSeconds] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside as phase `name`."""
        wall, cpu = self._wall_clock(), self._cpu_clock()
        try:
            yield
        finally:
            wall_s, cpu_s = self._phases.get(name, PhaseSeconds(0.0, 0.0))
            wall_s += self._wall_clock() - wall
            cpu_s += self._cpu_clock() - cpu
            self._phases[name] = PhaseSeconds(wall_s, cpu_s)

    def consume(self) -> dict[str, PhaseSeconds]:
        """The seconds by phase since the last call, phases in the order they first ended; start again."""
        phases, self._phases = self._phases, {}
        return phases
