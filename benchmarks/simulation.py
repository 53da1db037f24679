"""How near production comes to the fastest step that is possible, and how it compares with taking turns.

    OMP_NUM_THREADS=1 python benchmarks/simulation.py [--steps 30] [--write]

The real manager, strategies, buffer and loops of a run on virtual time (`forebay simulate`), so the numbers
are the same on every machine. Three rows, each with its target; exits with 1 if one is missed.

    long-tailed   log-normal lengths, p99/p50 = 8; generation and training take equally long
                  step time / max(T_gen, T_train), T_gen: the step's trained tokens over the full-batch rate
    asynchronous over synchronous steps per hour, same cluster and lengths
    adverse       generation-bound, all responses equally long, a weight sync that takes 20% of a step:
                  the slowest of many settings against synchronous
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

from forebay.config import parse_config
from forebay.runs.config import RunConfig
from forebay.simulation import ClusterConfig, simulate
from forebay.simulation.prediction import synchronous

RESULTS = Path(__file__).parent / "results" / "simulation.md"
GROUPS, MEMBERS = 64, 8
MAX_OVER_BOUND, MIN_SPEED_UP, MIN_ADVERSE = 1.03, 2.5, 0.98
P50, P99 = 500, 4000
MEAN = P50 * math.exp((math.log(P99 / P50) / 2.3263478740408408) ** 2 / 2)
"""Of the log-normal."""
ENGINE_RATE, SLOTS = 2400.0, 64


def run_config(groups=GROUPS, **produce):
    """A run of `groups` groups of `MEMBERS`, separate unless said otherwise."""
    table = {
        "name": "benchmark",
        "steps": 100,
        "batch_size": groups,
        "rollouts_per_prompt": MEMBERS,
        "model": {"source": "tiny"},
        "tasks": [
            {
                "name": "t",
                "data": {"source": "sorting", "arguments": {"length": 3, "letters": 5}},
                "judge": {"name": "exact_match"},
                "sample": {"max_tokens": 1 << 17},
            }
        ],
        "produce": {"mode": "separate", **produce},
    }
    return parse_config(RunConfig, table)


def long_tailed_cluster(engines, sync_share):
    """Training takes as long as generating a step's tokens does without an empty slot."""
    generation_s = GROUPS * MEMBERS * MEAN / (engines * ENGINE_RATE)
    return ClusterConfig(
        engines=engines,
        slots=SLOTS,
        tokens_per_s=ENGINE_RATE,
        lengths={"p50": P50, "p99": P99},
        train_s=generation_s,
        sync_s=sync_share * generation_s,
    )


def adverse_cluster(rounds, groups):
    """A step's responses fill the slots `rounds` times; a step takes 64 s to generate, 2 s to train."""
    rollouts, generation_s, tokens = groups * MEMBERS, 64.0, 400
    return ClusterConfig(
        slots=max(1, int(rollouts / rounds)),
        tokens_per_s=rollouts * tokens / generation_s,
        lengths={"constant": tokens},
        train_s=2.0,
        sync_s=0.2 * (generation_s + 2.0) / 0.8,
    )


def measure_long_tailed(steps):
    """Rows of (engines, sync share, staleness, over-sampling, in flight), and the results beside them."""
    rows = []
    cases = [
        (1, 0.0, 1, 0.5, False),
        (1, 0.0, 2, 0.5, False),
        (1, 0.0, 3, 0.5, False),
        (2, 0.0, 2, 1.0, False),
        (2, 0.0, 3, 1.0, False),
        (2, 0.0, 4, 1.0, False),
        (2, 0.01, 4, 1.0, False),
        (2, 0.05, 4, 1.0, True),
    ]
    turns = {}
    for engines, sync_share, staleness, over, in_flight in cases:
        cluster = long_tailed_cluster(engines, sync_share)
        config = run_config(
            max_staleness=staleness,
            over_sample_threshold=over,
            enable_partial_rollout=True,
            in_flight_update=in_flight,
        )
        if (engines, sync_share) not in turns:
            turns[engines, sync_share] = simulate(synchronous(config), cluster, steps=steps)
        result, other = simulate(config, cluster, steps=steps), turns[engines, sync_share]
        rows.append(((engines, sync_share, staleness, over, in_flight), result, other))
        print(*rows[-1][0], f"{result.over_bound:.3f} {other.step_s / result.step_s:.2f}", flush=True)
    return rows


def measure_adverse(steps, groups=16):
    """Rows of (rounds, staleness, over-sampling, partial) and steps per hour over synchronous."""
    rows = []
    for rounds in (1, 2.5, 4):
        cluster = adverse_cluster(rounds, groups)
        other = simulate(synchronous(run_config(groups)), cluster, steps=steps)
        for staleness, over, partial in itertools.product((0, 1, 2), (0.0, 0.5), (False, True)):
            config = run_config(
                groups, max_staleness=staleness, over_sample_threshold=over, enable_partial_rollout=partial
            )
            result = simulate(config, cluster, steps=steps)
            rows.append(((rounds, staleness, over, partial), result, other))
            print(*rows[-1][0], f"{other.step_s / result.step_s:.3f}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="replace benchmarks/results/simulation.md")
    options = parser.parse_args()
    tailed, adverse = measure_long_tailed(options.steps), measure_adverse(options.steps // 2)
    # The promise is about the settings that `forebay simulate --sweep` finds best, without a sync in the way.
    _, best, turns = min((row for row in tailed if row[0][1] == 0), key=lambda row: row[1].over_bound)
    speed_up = turns.step_s / best.step_s
    settings, slowest, other = min(adverse, key=lambda row: row[2].step_s / row[1].step_s)
    worst = other.step_s / slowest.step_s
    targets = [
        ("long-tailed: step time / max(T_gen, T_train)", f"<= {MAX_OVER_BOUND}", f"{best.over_bound:.3f}"),
        ("long-tailed: asynchronous over synchronous", f">= {MIN_SPEED_UP} x", f"{speed_up:.2f} x"),
        ("adverse: slowest of all settings over synchronous", f">= {MIN_ADVERSE} x", f"{worst:.3f} x"),
    ]
    text = report(options.steps, targets, tailed, adverse, settings)
    print(text)
    if options.write:
        RESULTS.write_text(text, encoding="utf-8")
    reached = best.over_bound <= MAX_OVER_BOUND and speed_up >= MIN_SPEED_UP and worst >= MIN_ADVERSE
    raise SystemExit(0 if reached else 1)


def report(steps, targets, tailed, adverse, slowest):
    """The results page."""
    lines = [
        "# Production on virtual time",
        "",
        f"    OMP_NUM_THREADS=1 python benchmarks/simulation.py --steps {steps} --write",
        "",
        "The real manager, strategies, buffer, controller, agent loop and run loop; engines and trainer",
        f"only take (virtual) time. {steps} train steps of {GROUPS} groups x {MEMBERS} rollouts, the first",
        "fifth left out. The numbers do not depend on the machine.",
        "",
        "| what | target | measured |",
        "|---|---|---|",
        *(f"| {what} | {target} | {measured} |" for what, target, measured in targets),
        "",
        "## Long-tailed",
        "",
        f"Log-normal lengths, p50 = {P50}, p99 = {P99}; {SLOTS} slots an engine, each always equally fast;",
        "training takes T_gen. Synchronous: generation and training take turns on the same engines and",
        "trainer. Partial rollouts are on; the staleness rule is `drop`.",
        "",
        "| engines | sync / T_gen | max_staleness | over-sampling | in flight | step / bound | x synchronous "
        "| engines idle | lag mean (max) | dropped | wasted |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (engines, sync, staleness, over, in_flight), result, turns in tailed:
        lag = result.token_staleness
        lines.append(
            f"| {engines} | {sync:.0%} | {staleness} | {over:.0%} | {'yes' if in_flight else 'no'} "
            f"| {result.over_bound:.3f} | {turns.step_s / result.step_s:.2f} | {result.engine_idle:.1%} "
            f"| {lag.mean:.2f} ({lag.max}) | {result.dropped_share:.1%} "
            f"| {result.wasted_share:.1%} |"
        )
    lines += [
        "",
        "## Adverse",
        "",
        "All responses equally long, training 2 s, generation 64 s, a weight sync of 20% of a step after",
        f"every step; {steps // 2} steps of 16 groups. Rounds: how often the batch fills the slots.",
        "",
        "| rounds | max_staleness | over-sampling | partial rollouts | x synchronous | wasted |",
        "|---|---|---|---|---|---|",
    ]
    for (rounds, staleness, over, partial), result, turns in adverse:
        mark = " (slowest)" if (rounds, staleness, over, partial) == slowest else ""
        lines.append(
            f"| {rounds} | {staleness} | {over:.0%} | {'yes' if partial else 'no'} "
            f"| {turns.step_s / result.step_s:.3f}{mark} | {result.wasted_share:.1%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
