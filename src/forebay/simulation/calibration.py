"""A real run's rates as a cluster description, so that its other settings can be tried without running them.

::

    history/      rollouts -> seconds to start, tokens/s by how many ran at once, lengths
                  seconds to judge, train, sync, save, and of a step beside them
    ledger.jsonl  groups that the filter rejected                              --> ClusterConfig
    metrics.jsonl seconds of a step, staleness                                 --> Measured, to compare with

Everything is measured while generation and training ran beside each other, so what they cost each other is in
the rates. The first steps are left out, as in a simulation, and so are evaluations and steps that were made
again after a way back to a checkpoint.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forebay.config import ConfigError
from forebay.engines.base import DEFAULT_MAX_BATCH
from forebay.ledger import Ledger
from forebay.metrics import STEP_S, Row, read_jsonl
from forebay.runs.config import RunConfig
from forebay.runs.placement import num_engines
from forebay.runs.record.history import read_spans
from forebay.simulation.cluster import ClusterConfig, LengthConfig
from forebay.simulation.prediction import WARM_UP_SHARE
from forebay.watching.activity import CHECKPOINT, EVALUATE, GENERATE, JUDGE, SYNC, TRAIN, Span

_MAX_LENGTHS = 1000
"""Quantiles that are kept of the measured lengths: a file to read, and more than a tail needs."""
_MAX_PAIRS = 12
"""Levels of concurrency that get a rate of their own."""
_LEAST_SPREAD = 0.1
"""Standard deviation of the lengths over their mean: of less, a line's beginning is chance."""
_Call = tuple[float, float, int]
"""Start, end and tokens."""
_OF_STEPS = (TRAIN, SYNC, CHECKPOINT)
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
    # While held-out prompts are tried, they have the engines to themselves.
    tries = [bar for bar in bars if bar.stage == EVALUATE]
    bars = [bar for bar in bars if not any(each.start_s <= bar.start_s < each.end_s for each in tries)]
    # Of a step that was made again the last time counts. Groups may have been kept: they count by their ids.
    of_steps = {(bar.stage, bar.name): bar for bar in bars if bar.stage in _OF_STEPS}
    bars = [bar for bar in bars if of_steps.get((bar.stage, bar.name), bar) is bar]
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
    engines, slots = num_engines(config, of_production=True), given.get("max_batch", DEFAULT_MAX_BATCH)
    begin_s = measure_start(rollouts)
    decoding = [(min(start + begin_s, end), end, tokens) for start, end, tokens in rollouts]
    per_step, in_turns = config.batch_size / (1 - filtered_share), config.produce.mode == "colocated"
    num_kept = min(len(lengths), _MAX_LENGTHS)
    shares = (np.arange(num_kept) + 0.5) / num_kept
    cluster = ClusterConfig(
        engines=engines,
        slots=slots,
        tokens_per_s=measure_rates(decoding, slots, engines),
        start_s=begin_s,
        lengths=LengthConfig(values=np.quantile(lengths, shares, method="inverted_cdf").tolist()),
        train_s=mean_s(TRAIN) + _overhead_s(bars, rows, per_step, in_turns=in_turns),
        sync_s=mean_s(SYNC),
        judge_s=mean_s(JUDGE),
        checkpoint_s=mean_s(CHECKPOINT),
        filtered_share=filtered_share,
    )
    return cluster, Measured(
        # A checkpoint is not part of a row's step, and it is of a simulated one.
        step_s=float(np.mean([(row[STEP_S] or 0) + (row.get("time/checkpoint_s") or 0) for row in rows])),
        staleness=float(np.mean([row["staleness"] or 0.0 for row in rows])),
    )


def measure_start(rollouts: Sequence[_Call]) -> float:
    """Seconds of a request before its first token: where a line through (tokens, seconds) begins.

    At most the shortest request; 0 where they are about equally long, which tells a start from no speed.

    >>> round(measure_start([(0, 3, 10), (0, 4, 20), (1, 6, 30)]), 6)
    2.0
    """
    start_s, end_s, tokens = np.array([call for call in rollouts if call[2]], np.float64).T
    seconds = end_s - start_s
    if tokens.std() < _LEAST_SPREAD * tokens.mean():
        return 0.0
    _, begin_s = np.polyfit(tokens, seconds, 1)
    return float(np.clip(begin_s, 0.0, seconds.min()))


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


def _overhead_s(bars: Sequence[Span], rows: Sequence[Row], per_step: float, *, in_turns: bool) -> float:
    """Seconds of a step, on average, in which production is waited for and no rollout of the batch is made.

    Prompts are drawn, groups stored, the batch taken. A batch counts as made when the last of its `per_step`
    groups, in their order, is.
    """
    trained = [(bar.start_s, bar.end_s) for bar in bars if bar.stage == TRAIN]
    rows = rows[1 - len(trained) :]
    numbers = np.arange(len(trained) - len(rows), len(trained))
    seconds = np.array([row.get("time/generate_s" if in_turns else "time/wait_s") or 0.0 for row in rows])
    begun = np.array(trained)[numbers, 0] - seconds
    made = sorted((bar for bar in bars if bar.stage in (GENERATE, JUDGE)), key=lambda bar: bar.end_s)
    if in_turns:
        requests = np.sort([*(bar.start_s for bar in made), np.inf])
        begun = requests[np.searchsorted(requests, np.array(trained)[numbers - 1, 1])]
    # The last bar of each group is its last verdict.
    ended = np.sort([*{bar.group_id: bar.end_s for bar in made}.values()])
    ready = ended[np.minimum((numbers + 1) * per_step, len(ended)).astype(int) - 1]
    return float(np.mean(seconds - np.clip(ready - begun, 0.0, seconds)))


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
