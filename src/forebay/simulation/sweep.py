"""Many simulations that differ in a few settings, and which of them is best.

::

    "max_staleness=0,1,2"  "over_sample_threshold=0,0.5"  "split=4:4,6:2"
        --> every combination --> simulate, several at once --> Outcome, with the synchronous run beside it
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, product, repeat
from pathlib import Path
from typing import Any

from forebay.config import ConfigError, apply_overrides, parse_config
from forebay.produce import ProductionError
from forebay.runs.config import ProduceConfig, RunConfig
from forebay.simulation.cluster import ClusterConfig, changed_cluster
from forebay.simulation.prediction import SimulationResult, simulate, synchronous

CLUSTER = "cluster."
"""Begins the keys that are the cluster's, in overrides and sweeps."""
SPLIT = "split"
"""The key that shares devices out: ENGINES:TRAINERS."""
NEAR_BEST = 0.01
"""Speeds this close are equal: what is fresher wins."""
Answer = tuple[SimulationResult | None, str]
"""The result of a simulation; or none, and why it cannot run."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One simulation to do."""

    settings: Mapping[str, str]
    """Its value on each axis."""
    config: RunConfig
    cluster: ClusterConfig


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The findings of a case."""

    case: Case
    result: SimulationResult | None
    """None: it cannot run."""
    problem: str
    synchronous: SimulationResult | None

    @property
    def speed_up(self) -> float:
        """Steps per hour over those of the synchronous run; NaN if either cannot run."""
        if self.result is None or self.synchronous is None:
            return float("nan")
        return self.synchronous.step_s / self.result.step_s


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """``KEY=VALUE,VALUE,...``; a key without a dot that ``[produce]`` has is that table's.

    Raises:
        ConfigError: no key, or no values.

    >>> parse_axis("max_staleness=0,1")
    ('produce.max_staleness', ('0', '1'))
    """
    key, separator, values = text.partition("=")
    parts = tuple(value.strip() for value in values.split(",") if value.strip())
    if not separator or not key.strip() or not parts:
        raise ConfigError(f"sweep {text!r} is not of the form key=value,value, such as max_staleness=0,1,2")
    key = key.strip()
    return f"produce.{key}" if key in ProduceConfig.model_fields else key, parts


def combine(
    run_table: Mapping[str, Any],
    overrides: Sequence[str],
    cluster: ClusterConfig,
    axes: Mapping[str, Sequence[str]],
    *,
    beside: Path | None = None,
) -> Iterator[Case]:
    """Every combination of the axes' values, on top of `overrides`; one case if there are no axes.

    `beside` is the folder of the run file.

    Raises:
        ConfigError: a value does not fit.
    """
    for values in product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        changes = [f"{key}={value}" for key, value in settings.items() if key != SPLIT]
        of_cluster, of_run = split_overrides(changes)
        table = apply_overrides(run_table, [*overrides, *of_run])
        changed = changed_cluster(cluster, of_cluster)
        if (split := settings.get(SPLIT)) is not None:
            if (devices := re.fullmatch(r"([1-9]\d*):([1-9]\d*)", split)) is None:
                raise ConfigError(f"split {split!r} is not of the form ENGINES:TRAINERS, such as 6:2")
            changed = changed.split(int(devices[1]), int(devices[2]))
        config = parse_config(RunConfig, table, source="run file", beside=beside)
        yield Case(settings=settings, config=config, cluster=changed)


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides of the cluster, without its prefix, and those of the run file."""
    of_cluster = [each.removeprefix(CLUSTER) for each in overrides if each.startswith(CLUSTER)]
    return of_cluster, [each for each in overrides if not each.startswith(CLUSTER)]


def run_cases(
    cases: Sequence[Case],
    steps: int,
    *,
    jobs: int | None = None,
    trace: Path | None = None,
    shown: Callable[..., Iterable[Answer]] = lambda answers, total: answers,
) -> list[Outcome]:
    """Simulate all cases, and the synchronous run of every workload once; in `jobs` processes.

    Order is that of `cases`. The timeline of the first is written to `trace`. `shown` passes the simulations
    on as they end, as `rich.progress.track` does.
    """
    pairs = [(case.config, case.cluster) for case in cases]
    pairs += [(synchronous(case.config), case.cluster) for case in cases]
    # Many cases share a synchronous run, and a case may be one itself: each is simulated once.
    work = {_key(config, cluster): (config, cluster) for config, cluster in pairs}
    jobs = min(jobs or os.cpu_count() or 1, len(work))
    # One at a time needs no other process.
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        # The first of the work is the first case.
        traces = chain([trace], repeat(None))
        answers = (pool.map if pool else map)(_try, *zip(*work.values(), strict=True), repeat(steps), traces)
        found = dict(zip(work, shown(answers, total=len(work)), strict=True))
    outcomes = []
    for case in cases:
        result, problem = found[_key(case.config, case.cluster)]
        other, _ = found[_key(synchronous(case.config), case.cluster)]
        outcomes.append(Outcome(case=case, result=result, problem=problem, synchronous=other))
    return outcomes


def rank(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The best first: the fastest, but what is about as fast and fresher comes before it."""

    def by_speed(outcome: Outcome) -> float:
        return float("inf") if outcome.result is None else outcome.result.step_s

    ordered = sorted(outcomes, key=by_speed)
    limit_s = by_speed(ordered[0]) * (1 + NEAR_BEST)
    near = [o for o in ordered if o.result is not None and o.result.step_s <= limit_s]
    near.sort(key=lambda o: o.result.token_staleness.mean if o.result is not None else 0.0)
    return [*near, *ordered[len(near) :]]


def _try(config: RunConfig, cluster: ClusterConfig, steps: int, trace: Path | None) -> Answer:
    try:
        return simulate(config, cluster, steps=steps, trace=trace), ""
    except (ProductionError, ValueError) as error:
        return None, str(error)


def _key(config: RunConfig, cluster: ClusterConfig) -> str:
    return config.model_dump_json() + cluster.model_dump_json()
