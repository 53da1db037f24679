"""A real run's rates as a cluster description, so that its other settings can be tried without running them.

::

    trace.json    rollouts -> tokens/s by how many ran at once, lengths; seconds to judge, train, sync
    ledger.jsonl  groups that the filter rejected                              --> ClusterConfig
    metrics.jsonl seconds of a step, staleness                                 --> Measured, to compare with

Everything is measured while generation and training ran beside each other, so what they cost each other is in
the rates. The first steps are left out, as in a simulation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forebay.config import ConfigError
from forebay.engines.arguments import DEFAULT_MAX_BATCH
from forebay.ledger import Ledger
from forebay.metrics import STEP_S, Row, read_jsonl
from forebay.runs.config import RunConfig
from forebay.simulation.cluster import ClusterConfig, LengthConfig
from forebay.simulation.prediction import WARM_UP_SHARE
from forebay.watching.activity import GENERATE, JUDGE, SYNC, TRAIN

_MAX_LENGTHS = 1000
"""Quantiles that are kept of the measured lengths: a file to read, and more than a tail needs."""
_MAX_PAIRS = 12
"""Levels of concurrency that get a rate of their own."""
_NOTE = re.compile(r"(\w+), (\d+) tokens")


class _Bar(NamedTuple):
    """One span of the trace."""

    stage: str
    name: str
    start_s: float
    end_s: float
    note: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures of a real run."""

    steps: int
    step_s: float
    staleness: float
    """Mean over train steps of the batch's stalest rollout."""


def calibrate(folder: Path, config: RunConfig) -> tuple[ClusterConfig, Measured]:
    """The rates and the step time of the finished run in `folder`, which is that of `config`.

    Raises:
        ConfigError: the run left no trace, or too little happened in it.
    """
    rows = _step_rows(folder)
    bars = list(_read_trace(folder / "trace.json"))
    start_s = _usual_from([bar for bar in bars if bar.stage == TRAIN], folder)
    rollouts, lengths = _rollouts(bars, start_s)
    if not rollouts or not lengths:
        raise ConfigError(f"the trace in {str(folder)!r} holds no generated rollouts after its first steps")
    slots = config.engine.arguments.get("max_batch", DEFAULT_MAX_BATCH)
    seconds = {stage: _mean_s(bars, stage, start_s) for stage in (TRAIN, SYNC, JUDGE)}
    cluster = ClusterConfig(
        slots=slots,
        tokens_per_s=measure_rates(rollouts, slots),
        lengths=LengthConfig(values=_quantiles(lengths)),
        train_s=seconds[TRAIN],
        sync_s=seconds[SYNC],
        judge_s=seconds[JUDGE],
        filtered_share=_filtered_share(folder),
    )
    return cluster, Measured(
        steps=len(rows),
        step_s=float(np.mean([row[STEP_S] for row in rows])),
        staleness=float(np.mean([row["staleness"] or 0.0 for row in rows])),
    )


def measure_rates(rollouts: Sequence[tuple[float, float, int]], slots: int) -> tuple[tuple[int, float], ...]:
    """Pairs (running requests, tokens/s), rising, from (start, end, tokens) of every request.

    A request's tokens are spread evenly over its time; between two starts or ends the tokens of all that run
    count for their number. Numbers over `slots`, where some only wait, count as `slots`.

    >>> measure_rates([(0, 10, 20), (0, 10, 20), (10, 20, 40)], slots=8)
    ((1, 4.0), (2, 4.0))
    """
    times = np.array([(start, end) for start, end, _ in rollouts], np.float64)
    speeds = np.array([tokens for _, _, tokens in rollouts]) / np.maximum(times[:, 1] - times[:, 0], 1e-9)
    moments = np.concatenate([times[:, 0], times[:, 1]])
    order = np.argsort(moments, kind="stable")
    running = np.cumsum(np.concatenate([np.ones(len(times)), -np.ones(len(times))])[order])[:-1]
    rates = np.cumsum(np.concatenate([speeds, -speeds])[order])[:-1]
    lasted_s = np.diff(moments[order])
    level = np.minimum(running, slots).astype(int)
    seconds = np.bincount(level, lasted_s, minlength=slots + 1)
    tokens = np.bincount(level, lasted_s * rates, minlength=slots + 1)
    pairs = []
    for levels in _shared_out(seconds[1:]):
        time_s, made = seconds[levels].sum(), tokens[levels].sum()
        if time_s > 0 and made > 0:
            pairs.append((round(float((levels * seconds[levels]).sum() / time_s)), float(made / time_s)))
    # Two neighbors may round to one number.
    return tuple(dict(pairs).items())


def _shared_out(seconds: Any) -> Iterator[Any]:
    """Ranges of levels (counted from 1) that saw about as much time each."""
    share = np.cumsum(seconds) / max(seconds.sum(), 1e-9)
    part = np.minimum((share * _MAX_PAIRS).astype(int), _MAX_PAIRS - 1)
    for number in range(_MAX_PAIRS):
        levels = np.flatnonzero(part == number) + 1
        if len(levels):
            yield levels


def _step_rows(folder: Path) -> list[Row]:
    try:
        rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row.get(STEP_S)]
    except FileNotFoundError:
        raise ConfigError(f"no run in {str(folder)!r}: it has no metrics.jsonl") from None
    if len(rows) < 3:
        raise ConfigError(f"the run in {str(folder)!r} has {len(rows)} train steps; at least 3 are needed")
    return rows[max(1, int(len(rows) * WARM_UP_SHARE)) :]


def _read_trace(path: Path) -> Iterator[_Bar]:
    if not path.exists():
        raise ConfigError(f"no {path.name} in {str(path.parent)!r}: train the run with trace=true")
    open_bars: dict[tuple[int, int], dict[str, Any]] = {}
    # A killed run leaves an array without its end, so lines are read, not the array.
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("{"):
            continue
        try:
            event = json.loads(line.rstrip().rstrip(","))
        except ValueError:
            continue  # The last line of a killed run.
        place = event["pid"], event["tid"]
        if event["ph"] == "B":
            open_bars[place] = event
        elif event["ph"] == "E" and place in open_bars:
            began = open_bars.pop(place)
            name = began["name"].removeprefix(f"{began['cat']} ")
            yield _Bar(
                began["cat"], name, began["ts"] / 1e6, event["ts"] / 1e6, event["args"].get("note", "")
            )


def _usual_from(train: Sequence[_Bar], folder: Path) -> float:
    if len(train) < 3:
        raise ConfigError(f"the trace in {str(folder)!r} has {len(train)} train steps; at least 3 are needed")
    return train[max(1, int(len(train) * WARM_UP_SHARE)) - 1].end_s


def _rollouts(bars: Sequence[_Bar], start_s: float) -> tuple[list[tuple[float, float, int]], list[int]]:
    """Start, end and tokens of calls that began after `start_s`; lengths of responses completed after it."""
    calls, lengths, so_far = [], [], dict[str, int]()
    for bar in bars:
        found = _NOTE.fullmatch(bar.note) if bar.stage == GENERATE else None
        if found is None:
            continue
        status, length = found[1], int(found[2])
        added = length - so_far.get(bar.name, 0)
        # A rollout that starts over has fewer tokens than before.
        so_far[bar.name] = length
        if bar.start_s >= start_s:
            calls.append((bar.start_s, bar.end_s, added if added >= 0 else length))
        if bar.end_s >= start_s and status == "completed" and length:
            lengths.append(length)
    return calls, lengths


def _mean_s(bars: Sequence[_Bar], stage: str, start_s: float) -> float:
    seconds = [bar.end_s - bar.start_s for bar in bars if bar.stage == stage and bar.start_s >= start_s]
    return float(np.mean(seconds)) if seconds else 0.0


def _quantiles(lengths: Sequence[int]) -> tuple[int, ...]:
    ordered = np.sort(lengths)
    if len(ordered) > _MAX_LENGTHS:
        ordered = ordered[((np.arange(_MAX_LENGTHS) + 0.5) / _MAX_LENGTHS * len(ordered)).astype(int)]
    return tuple(int(length) for length in ordered)


def _filtered_share(folder: Path) -> float:
    try:
        balance = Ledger.read(folder / "ledger.jsonl").balance({})
    except FileNotFoundError:
        return 0.0
    return balance.dropped.get("filtered", 0) / max(1, balance.generated)
