"""What a simulation found: the numbers of a run once it is under way, and its timeline.

::

    engines' segments, trained steps, spans of the run's activities, ledger --> SimulationResult

The first steps, in which the pipeline fills, are left out of times and shares; what became of groups and
tokens is counted over the whole run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from forebay.metrics import nearest_rank
from forebay.simulation.cluster import ClusterConfig
from forebay.simulation.engine import Segment
from forebay.watching.activity import Activity

WARM_UP_SHARE = 0.2
"""Of the steps: a run has its usual rhythm a few steps after the producer has its full lead."""

PAUSE = "pause"
"""The stage of a `Span`: production is asked to stop, and stops."""


class Span(NamedTuple):
    """The run did something."""

    stage: str
    start_s: float
    end_s: float


class SpanRecorder:
    """A listener that keeps what ended of some stages."""

    def __init__(self, stages: Sequence[str]) -> None:
        self._stages = frozenset(stages)
        self.spans: list[Span] = []

    def began(self, activity: Activity) -> None:
        """Nothing yet."""

    def ended(self, activity: Activity) -> None:
        """Keep it."""
        if activity.stage in self._stages:
            self.spans.append(Span(activity.stage, activity.start_s, activity.end_s))


@dataclass(frozen=True, kw_only=True)
class Lag:
    """How stale what was trained on was."""

    counts: Mapping[int, int]
    """How many tokens, or groups, by staleness."""

    @property
    def mean(self) -> float:
        """0 if there are none."""
        total = sum(self.counts.values())
        return sum(lag * count for lag, count in self.counts.items()) / total if total else 0.0

    @property
    def p95(self) -> int:
        """The least staleness that 95% do not exceed."""
        return int(nearest_rank(list(self.counts), 95, counts=list(self.counts.values())))

    @property
    def max(self) -> int:
        """The most stale."""
        return max(self.counts, default=0)


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """The numbers of one simulated run; times in (virtual) seconds."""

    steps: int
    step_s: float
    """From the end of a step to the end of the next, on average."""
    generation_s: float
    """The step's trained tokens over the engines' full-batch rate: T_gen."""
    training_s: float
    engine_idle: float
    """Share of the slots that were empty."""
    trainer_idle: float
    """Share of the time in which it did not train."""
    sync_share: float
    """Share of the time in which weights were handed over."""
    mean_tokens: float
    """Of a trained response."""
    token_lag: Lag
    group_lag: Lag
    stalest_mean: float
    """Mean over train steps of the stalest group."""
    generated: int
    """Groups taken up."""
    dropped: Mapping[str, int]
    """Groups, by reason."""
    made_tokens: int
    trained_tokens: int
    kept_tokens: int
    """Made and still there at the end, in the buffer or in flight."""
    slots: int
    """Of one engine."""
    step_ends_s: Sequence[float] = field(repr=False)
    segments: Sequence[Segment] = field(repr=False)
    spans: Sequence[Span] = field(repr=False)

    @property
    def steps_per_hour(self) -> float:
        """Train steps."""
        return 3600 / self.step_s

    @property
    def bound_s(self) -> float:
        """No schedule makes a step faster: the slower of generation and training."""
        return max(self.generation_s, self.training_s)

    @property
    def over_bound(self) -> float:
        """Step time over its lower bound."""
        return self.step_s / self.bound_s

    @property
    def wasted_share(self) -> float:
        """Share of the tokens made that nothing will train on."""
        if not self.made_tokens:
            return 0.0
        return max(0.0, 1 - (self.trained_tokens + self.kept_tokens) / self.made_tokens)

    @property
    def dropped_share(self) -> float:
        """Share of the groups taken up that were dropped."""
        return sum(self.dropped.values()) / self.generated if self.generated else 0.0

    def numbers(self) -> dict[str, Any]:
        """Everything but the timeline, as JSON values."""
        return {
            "steps": self.steps,
            "step_s": self.step_s,
            "steps_per_hour": self.steps_per_hour,
            "bound_s": self.bound_s,
            "generation_s": self.generation_s,
            "training_s": self.training_s,
            "over_bound": self.over_bound,
            "engine_idle": self.engine_idle,
            "trainer_idle": self.trainer_idle,
            "sync_share": self.sync_share,
            "mean_tokens": self.mean_tokens,
            "token_staleness": _lag_numbers(self.token_lag),
            "group_staleness": _lag_numbers(self.group_lag),
            "groups": self.generated,
            "dropped": dict(self.dropped),
            "made_tokens": self.made_tokens,
            "trained_tokens": self.trained_tokens,
            "wasted_share": self.wasted_share,
        }


def _lag_numbers(lag: Lag) -> dict[str, Any]:
    counts = {str(key): lag.counts[key] for key in sorted(lag.counts)}
    return {"mean": lag.mean, "p95": lag.p95, "max": lag.max, "counts": counts}


def add_up(counters: Sequence[Counter[int]]) -> Lag:
    """The sum of several counts."""
    total: Counter[int] = Counter()
    for counter in counters:
        total.update(counter)
    return Lag(counts=dict(total))


def busy_s(intervals: Sequence[Span] | Sequence[Segment], start_s: float, end_s: float) -> float:
    """The seconds of all `intervals` together that lie between the two times."""
    if not intervals:
        return 0.0
    times = np.array([(interval.start_s, interval.end_s) for interval in intervals])
    clipped = np.clip(times, start_s, end_s)
    return float((clipped[:, 1] - clipped[:, 0]).sum())


def idle_slots(segments: Sequence[Segment], cluster: ClusterConfig, start_s: float, end_s: float) -> float:
    """Share of the cluster's slots that were empty between the two times."""
    share = busy_s(segments, start_s, end_s) / (cluster.engines * cluster.slots * (end_s - start_s))
    return max(0.0, 1 - share)
