"""A real run's rates as a cluster description, so that its other settings can be tried without running them.

::

    history/      rollouts -> tokens/s by how many ran at once, lengths; seconds to judge, train, sync
    ledger.jsonl  groups that the filter rejected                              --> ClusterConfig
    metrics.jsonl seconds of a step, staleness                                 --> Measured, to compare with

Everything is measured while generation and training ran beside each other, so what they cost each other is in
the rates. The first steps are left out, as in a simulation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forebay.config import ConfigError
from forebay.engines.base import DEFAULT_MAX_BATCH
from forebay.ledger import Ledger
from forebay.metrics import STEP_S, read_jsonl
from forebay.runs.config import RunConfig
from forebay.runs.record.history import read_spans
from forebay.simulation.cluster import ClusterConfig, LengthConfig
from forebay.simulation.prediction import WARM_UP_SHARE
from forebay.watching.activity import GENERATE, JUDGE, SYNC, TRAIN, Span

_MAX_LENGTHS = 1000
"""Quantiles that are kept of the measured lengths: a file to read, and more than a tail needs."""
_MAX_PAIRS = 12
"""Levels of concurrency that get a rate of their own."""
_Call = tuple[float, float, int]
"""Start, end and tokens."""
_NOTE = re.compile(r"(\w+), (\d+) tokens")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures of a real run."""

    step_s: float
    staleness: float
    """Mean over train steps of the batch's stalest rollout."""


def calibrate(folder: Path, config: RunConfig) -> tuple[ClusterConfig, Measured]:
    """The rates and the step time of the finished run in `folder`, which is that of `config`.

    Raises:
        ConfigError: the run left no history, or too little happened in it.
    """
    try:
        rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row.get(STEP_S)]
    except FileNotFoundError:
        raise ConfigError(f"no run in {str(folder)!r}: it has no metrics.jsonl") from None
    bars = list(read_spans(folder))
    trained = [bar for bar in bars if bar.stage == TRAIN]
    if min(len(rows), len(trained)) < 3:
        raise ConfigError(
            f"the run in {str(folder)!r} has {len(rows)} train steps and {len(trained)} in its history; "
            f"at least 3 are needed"
        )
    rows = rows[max(1, int(len(rows) * WARM_UP_SHARE)) :]
    start_s = trained[max(1, int(len(trained) * WARM_UP_SHARE)) - 1].end_s
    rollouts, lengths = _rollouts(bars, start_s)
    if not rollouts or not lengths:
        raise ConfigError(f"the history in {str(folder)!r} holds no generated rollouts after its first steps")

    def mean_s(stage: str) -> float:
        seconds = [bar.end_s - bar.start_s for bar in bars if bar.stage == stage and bar.start_s >= start_s]
        return float(np.mean(seconds)) if seconds else 0.0

    filtered_share = 0.0
    if (folder / "ledger.jsonl").exists():
        balance = Ledger.read(folder / "ledger.jsonl").balance({})
        filtered_share = balance.dropped.get("filtered", 0) / max(1, balance.generated)
    given = {**config.engine.arguments, **(config.cluster.arguments if config.cluster else {})}
    slots = given.get("max_batch", DEFAULT_MAX_BATCH)
    engines = given.get("engines", 1) * given.get("num_engines", 1)
    num_kept = min(len(lengths), _MAX_LENGTHS)
    shares = (np.arange(num_kept) + 0.5) / num_kept
    cluster = ClusterConfig(
        engines=engines,
        slots=slots,
        tokens_per_s=measure_rates(rollouts, slots, engines),
        lengths=LengthConfig(values=np.quantile(lengths, shares, method="inverted_cdf").tolist()),
        train_s=mean_s(TRAIN),
        sync_s=mean_s(SYNC),
        judge_s=mean_s(JUDGE),
        filtered_share=filtered_share,
    )
    return cluster, Measured(
        step_s=float(np.mean([row[STEP_S] for row in rows])),
        staleness=float(np.mean([row["staleness"] or 0.0 for row in rows])),
    )


def measure_rates(rollouts: Sequence[_Call], slots: int, engines: int = 1) -> tuple[tuple[int, float], ...]:
    """Pairs (running requests, tokens/s) of one engine, rising, from (start, end, tokens) of every request.

    A request's tokens are spread evenly over its time; between two starts or ends the tokens of all that run
    count for their number. Requests are spread evenly over the engines, as a pool does it. Numbers over
    `slots`, where some only wait, count as `slots`.

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
    at_work = np.clip(running, 1, engines)
    level = np.minimum(np.rint(running / at_work), slots).astype(int)
    seconds = np.bincount(level, lasted_s, minlength=slots + 1)
    tokens = np.bincount(level, lasted_s * rates / at_work, minlength=slots + 1)
    # Parts of the levels, from 1 on, that saw about as much time each.
    shares = np.cumsum(seconds[1:]) / max(seconds[1:].sum(), 1e-9)
    part = np.minimum((shares * _MAX_PAIRS).astype(int), _MAX_PAIRS - 1)
    pairs = []
    for number in range(_MAX_PAIRS):
        levels = np.flatnonzero(part == number) + 1
        time_s, made = seconds[levels].sum(), tokens[levels].sum()
        # Less than a token is what rounding left of levels at which nothing was made.
        if time_s > 0 and made >= 1:
            pairs.append((round(float((levels * seconds[levels]).sum() / time_s)), float(made / time_s)))
    # Two neighbors may round to one number.
    return tuple(dict(pairs).items())


def _rollouts(bars: Sequence[Span], start_s: float) -> tuple[list[_Call], list[int]]:
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
