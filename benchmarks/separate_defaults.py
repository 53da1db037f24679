"""What the settings of separate mode do to long rollouts: who is trained, what is wasted, what is learned.

    OMP_NUM_THREADS=1 python benchmarks/separate_defaults.py lengths > lengths.jsonl
    OMP_NUM_THREADS=1 python benchmarks/separate_defaults.py tokens NAME SEED [STEPS] >> tokens.jsonl
    python benchmarks/separate_defaults.py report lengths.jsonl tokens.jsonl     # tables for results/

Both measurements run the real loop, manager, strategies and buffer on virtual time: a busy machine changes
nothing but the CPU seconds. `NAME` is one of `settings`, for example "correct 2 1 ratio".

    lengths   described devices (`forebay.simulation`), response lengths from several distributions. Training
              takes as long as full engines need for a batch, so a response of x times the mean length spans
              x train steps.
    tokens    a model, the real engine and the real trainer, on a sorting task in which every fifth prompt has
              an answer of 21 tokens, the others of 4. A token takes 0.5 s and a train step 2 s, so that a
              long answer spans five train steps.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
from rich.console import Console

from forebay.config import parse_config
from forebay.engines.base import request_seed
from forebay.evaluate import Evaluator
from forebay.metrics import PhaseTimer
from forebay.produce.prompts.demo_tasks import sorting
from forebay.runs.build import build_run
from forebay.runs.colocated import run_colocated
from forebay.runs.config import RunConfig
from forebay.runs.separate import run_separate
from forebay.runs.show.display import RunDisplay
from forebay.simulation import ClusterConfig, simulate
from forebay.simulation import world as simulated_world
from forebay.simulation.cluster import LengthConfig
from forebay.simulation.engine import ModeledEngine
from forebay.simulation.prediction import synchronous
from forebay.simulation.world import SimulationLoop, TimedThread, TimedTrainer

OLD_DEFAULTS = {
    "max_staleness": 0,
    "staleness_rule": "drop",
    "over_sample_threshold": 0.0,
    "enable_partial_rollout": False,
}

# -- Lengths

GROUPS, MEMBERS, LENGTH_STEPS, STEP_S = 32, 4, 40, 100.0
SEED_SPAN = float(1 << 63)
LONG_TAIL = LengthConfig(p50=500, p99=4000)
DISTRIBUTIONS = {
    # The lengths, and whether all responses to a prompt are equally long (length goes with difficulty).
    "light tail": (LengthConfig(p50=500, p99=1000), False),
    "long tail": (LONG_TAIL, False),
    "bimodal by prompt": (LengthConfig(values=[300] * 4 + [3000]), True),
    "long tail by prompt": (LONG_TAIL, True),
}
LONG_FROM = 0.85
"""Quantile from which a response counts as long: the longest 15%, of the bimodal lengths 20%."""


def engine_of(by_prompt):
    """What builds an engine whose lengths depend on the rollout, or on its prompt alone."""

    def make(cluster, *_):
        def length(request):
            seed = request.seed
            if by_prompt:
                seed = request_seed(0, "prompt", request.session_id.rpartition("/")[0])
            return cluster.lengths.quantile((seed + 0.5) / SEED_SPAN) - request.num_earlier

        return ModeledEngine(rate=cluster.decode_rate, slots=cluster.slots, length=length)

    return make


def quantiles(lengths):
    return np.array([lengths.quantile((i + 0.5) / 20_000) for i in range(20_000)])


def length_config(produce):
    return parse_config(
        RunConfig,
        {
            "name": "lengths",
            "steps": LENGTH_STEPS,
            "batch_size": GROUPS,
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
        },
    )


def measure_lengths(name, produce):
    """One row: step time over its bound, lengths and long responses against their share, waste, lag."""
    lengths, by_prompt = DISTRIBUTIONS[name]
    every = quantiles(lengths)
    slots = GROUPS * MEMBERS
    cluster = ClusterConfig(slots=slots, tokens_per_s=slots * every.mean() / STEP_S, lengths=lengths, train_s=STEP_S)
    config = length_config(produce)
    if produce.get("mode") == "colocated":
        config = synchronous(config)
    long_from, trained, fit = lengths.quantile(LONG_FROM), Counter(), TimedTrainer.fit

    def noting_fit(self, groups, **kwargs):
        for state in [state for group in groups for state in group]:
            trained["all"] += 1
            trained["long"] += len(state.response_ids) >= long_from
        return fit(self, groups, **kwargs)

    with (
        mock.patch.object(simulated_world, "_engine", engine_of(by_prompt)),
        mock.patch.object(TimedTrainer, "fit", noting_fit),
    ):
        result = simulate(config, cluster, steps=LENGTH_STEPS)
    counts, settings_ = result.token_staleness.counts, config.produce
    past = sum(count for lag, count in counts.items() if lag > settings_.max_staleness)
    return {
        "dist": name,
        "rule": settings_.staleness_rule if settings_.mode == "separate" else "sync",
        "ms": settings_.max_staleness,
        "over": settings_.over_sample_threshold,
        "step": result.step_s / STEP_S,
        "length": result.mean_tokens / every.mean(),
        "long": trained["long"] / trained["all"] / (every >= long_from).mean(),
        "wasted": result.wasted_share,
        "past": past / sum(counts.values()),
        "lag": result.token_staleness.mean,
        "maxlag": result.token_staleness.max,
    }


def lengths():
    """Every distribution under every setting; `mask` and `correct` produce alike."""
    for name in DISTRIBUTIONS:
        for produce in (
            {"mode": "colocated"},
            OLD_DEFAULTS,
            *(
                {
                    "max_staleness": stale,
                    "over_sample_threshold": over,
                    "staleness_rule": rule,
                    "enable_partial_rollout": True,
                }
                for stale, over in ((1, 0.25), (1, 0.5), (1, 1.0), (2, 0.25), (2, 0.5), (2, 1.0), (4, 1.0))
                for rule in ("drop", "admit", "requeue", "mask")
            ),
        ):
            print(json.dumps(measure_lengths(name, produce)), flush=True)


# -- Tokens

SHORT, LONG, EVERY = 3, 10, 5
"""Letters of a short and of a long prompt, of which each fifth is one."""
TOKEN_S, TRAIN_S = 0.5, 2.0
TOKEN_STEPS = 100


def settings():
    """``{name: ([produce], [train])}``: rule, max_staleness, over-sampling, and the correction if another."""
    named = {"synchronous": ({"mode": "colocated"}, {}), "old default": (OLD_DEFAULTS, {})}
    for stale, over in ((1, 0.25), (1, 0.5), (1, 1.0), (2, 0.25), (2, 0.5), (2, 1.0), (4, 1.0)):
        for rule in ("drop", "admit", "requeue", "mask", "correct"):
            produce = {
                "max_staleness": stale,
                "over_sample_threshold": over,
                "staleness_rule": rule,
                "enable_partial_rollout": True,
            }
            corrections = ("token_tis", "ratio") if rule == "correct" else ("none",)
            for correction in corrections:
                name = f"{rule} {stale} {over:g}" + (" ratio" if correction == "ratio" else "")
                named[name] = (produce, {"correction": correction})
    return named


def mixed_sorting():
    """Short prompts to sort; every fifth is long, and each letter of its answer is written twice."""
    short, long = sorting(length=SHORT, letters=26), sorting(length=LONG, letters=12)
    rows = [(long if i % EVERY == 0 else short)[i] for i in range(len(short))]
    for row in rows[::EVERY]:
        row["answer"] = "".join(2 * letter for letter in row["answer"])
    return rows


def is_long(group):
    return len(group[0].reward_model["ground_truth"]) > SHORT


class ByLength(Evaluator):
    """Adds the scores of the short and of the long prompts."""

    def evaluate(self, groups):
        values = super().evaluate(groups)
        for name, wanted in (("short", False), ("long", True)):
            part = [group for group in groups if is_long(group) == wanted]
            values[f"eval/score_{name}"] = super().evaluate(part)["eval/score"]
        return values


def token_config(output, produce, train, seed, steps):
    data = {"source": f"{Path(__file__).stem}:mixed_sorting"}
    alphabet = {"alphabet": "abcdefghijklmnopqrstuvwxyz="}
    return parse_config(
        RunConfig,
        {
            "name": "run",
            "seed": seed,
            "steps": steps,
            "batch_size": 16,
            "rollouts_per_prompt": 8,
            "output": str(output),
            "checkpoint_every": 0,
            "model": {
                "source": "tiny",
                "max_context": 48,
                "tiny": {"hidden_size": 96, "num_layers": 3, "num_heads": 4, **alphabet},
            },
            "engine": {"name": "transformers", "arguments": {"max_batch": 512}},
            "tasks": [
                {
                    "name": "sorting",
                    "data": {**data, "size": 15_000},
                    "eval_data": {**data, "start": 15_000, "size": 300},
                    "judge": {"name": "exact_match", "arguments": {"partial_credit": True}},
                    "sample": {"max_tokens": 24},
                }
            ],
            "produce": {"mode": "separate", **produce},
            "warmup": {"steps": 150, "lr": 3e-3},
            "train": {
                "lr": 4e-4,
                "schedule": ("linear", 5),
                "token_budget": 4096,
                "layout": "shared_prompt",
                "guard": "off",
                **train,
            },
            "evaluate": {"every": 20},
        },
    )


def time_devices(run, trained):
    """Let every decoding step and every train step take its virtual time; count tokens and long groups."""
    engine, made = run.controller.engines[0], Counter()
    engine._thread, work, batch = TimedThread(), engine._work, engine._batch
    step = batch.step

    def one_step(model_step):
        # There is news after every step, so the worker comes back to the loop and its time can pass.
        engine._news.set()
        made["tokens"] += batch.size
        return step(model_step)

    def timed_work(admitted, aborting):
        engine._news.clear()
        engine._thread.charged_s += TOKEN_S
        return work(admitted, aborting)

    batch.step, engine._work = one_step, timed_work
    run.compute_thread, fit = TimedThread(), run.trainer.fit

    def timed_fit(groups, **kwargs):
        trained.extend(map(is_long, groups))
        run.compute_thread.charged_s += TRAIN_S
        return fit(groups, **kwargs)

    run.trainer.fit = timed_fit
    return made


async def train(config):
    """Train and return the row of results."""
    clock = asyncio.get_running_loop().time
    warm = Path(tempfile.gettempdir()) / "forebay_separate_defaults" / f"seed_{config.seed}"
    if warm.exists():
        shutil.copytree(warm, config.folder / "warmup")
    config.folder.mkdir(parents=True, exist_ok=True)
    run = build_run(config, config.folder, RunDisplay(Console(quiet=True), clock=clock))
    if not warm.exists():
        shutil.copytree(config.folder / "warmup", warm)
    run.evaluator, run.timer = ByLength(), PhaseTimer(wall_clock=clock)
    trained = []
    made = time_devices(run, trained)
    started_s = time.process_time()
    await (run_colocated if config.produce.mode == "colocated" else run_separate)(run)
    balance = run.manager.ledger.balance(await run.manager.count_live())
    ends_s = np.cumsum([0.0, *(row["step_s"] for row in run.history)])
    shown = ("score", "accuracy", "score_short", "score_long")
    evaluations = [
        {
            "step": row["train_step"],
            "time_s": float(ends_s[int(row["train_step"])]),
            **{key: row[f"eval/{key}"] for key in shown},
        }
        for row in run.evaluations
    ]
    history = run.history
    # The engine made the evaluations' tokens too.
    tried = sum(row["eval/length"] * row["eval/rollouts"] for row in run.evaluations)
    return {
        "cpu_s": time.process_time() - started_s,
        "evals": evaluations,
        "long_share": sum(trained) / len(trained),
        "made_tokens": made["tokens"] - tried,
        "trained_tokens": sum(row["samples"] * row["response_tokens"] for row in history),
        "dropped": balance.dropped,
        "step_s": float(ends_s[-1] / len(history)),
        "staleness": float(np.mean([row["train/staleness_mean"] for row in history])),
        "stale_masked": float(np.mean([row["train/stale_masked"] for row in history])),
    }


def tokens(name, seed, steps=TOKEN_STEPS):
    """Train one setting with one seed; prints its row."""
    produce, train_table = settings()[name]
    with tempfile.TemporaryDirectory() as folder:
        config = token_config(folder, produce, train_table, int(seed), int(steps))
        with asyncio.Runner(loop_factory=SimulationLoop) as runner:
            result = runner.run(train(config))
    print(json.dumps({"name": name, "seed": int(seed), "steps": int(steps), **result}), flush=True)


# -- Tables


def report(lengths_file, tokens_file):
    """Markdown tables of what the two measurements printed."""
    rows = [json.loads(line) for line in Path(lengths_file).read_text(encoding="utf-8").splitlines()]
    for name in DISTRIBUTIONS:
        print(f"\n{name[0].upper()}{name[1:]}:\n")
        print("| rule | max_staleness | over-sampling | step / bound | length | long | wasted | past | lag |")
        print("|---|---|---|---|---|---|---|---|---|")
        for row in [row for row in rows if row["dist"] == name]:
            print(
                f"| {row['rule']} | {row['ms']} | {row['over']:g} | {row['step']:.2f} | {row['length']:.2f} "
                f"| {row['long']:.2f} | {row['wasted']:.0%} | {row['past']:.0%} "
                f"| {row['lag']:.1f} ({row['maxlag']}) |"
            )
    named = defaultdict(dict)
    for line in Path(tokens_file).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        named[row["name"]][row["seed"]] = row
    print("\n| setting | s/step | long | wasted | masked | lag | CPU s | score | of short | of long |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, by_seed in named.items():
        runs = [by_seed[seed] for seed in sorted(by_seed)]
        ends = [run["evals"][-1] for run in runs]
        cells = (
            " / ".join(f"{run['step_s']:.1f}" for run in runs),
            " / ".join(f"{run['long_share'] * EVERY:.2f}" for run in runs),
            " / ".join(f"{1 - run['trained_tokens'] / run['made_tokens']:.0%}" for run in runs),
            " / ".join(f"{run['stale_masked']:.0%}" for run in runs),
            " / ".join(f"{run['staleness']:.1f}" for run in runs),
            " / ".join(f"{run['cpu_s']:.0f}" for run in runs),
            *(" / ".join(f"{end[key]:.3f}" for end in ends) for key in ("score", "score_short", "score_long")),
        )
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    {"lengths": lengths, "tokens": tokens, "report": report}[sys.argv[1]](*sys.argv[2:])
