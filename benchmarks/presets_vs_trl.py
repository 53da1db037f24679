"""Final scores of the presets ``dapo`` and ``gspo`` beside those of TRL's GRPOTrainer, over three seeds.

Usage: python benchmarks/presets_vs_trl.py --preset dapo [--steps 30] [--group 16] [--trl-python PATH]
       python benchmarks/presets_vs_trl.py --preset dapo --pilot 2e-5,5e-5,1e-4

The model, the prompts and the two sides are those of ``train_vs_trl.py``::

    the same start --forebay_side.py, trl_side.py--> weights of each side and seed
        --transformers' generate--> responses to held-out problems --exact_match--> scores
        --over seeds, over problems--> mean, 95% intervals, do the sides' intervals overlap?

Over seeds the interval is the mean +- t s / sqrt(n), n the seeds, s the deviation of their scores, t the
0.975 quantile of Student's t with n - 1 degrees of freedom. Over problems it is the mean +- 1.96 s / sqrt(N),
N the problems, s the deviation of their scores, each the mean over the seeds.

TRL has no dynamic sampling: it is off on both sides. Both sides' weights are sampled and judged by the same
code. A check goes before: on equal rollouts and mini-batches both sides must move the weights the same way.
A side has learned a measure if its mean is above the start's by more than two standard errors of the start,
which are over problems. --pilot only prints Forebay's scores at each of these rates, with a seed that the
comparison does not use: a rate is chosen without TRL. --render only prints the table of the JSON file again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import train_vs_trl as base
from side_by_side import OPTIMIZER_STEPS, SIDES
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from forebay.judges import ExactMatchJudge
from forebay.types import RolloutState

HELD_OUT = 56
"""Problems of each length that no run trains on."""
SPARE_TOKENS = 7
"""Room in a response behind the longest right answer: DAPO's penalty begins there."""
SAMPLES = 4
"""Responses at temperature 1 to each problem; one more is greedy."""
MEASURES = ("greedy_exact", "greedy_score", "sampled_exact", "sampled_score")
"""Of greedy and of sampled responses: the share of right answers and that of right places, the reward."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""By the number of seeds: the 0.975 quantile of Student's t with one degree of freedom less."""

Problem = tuple[str, str]
"""A prompt and its answer."""
Scores = dict[str, torch.Tensor]
"""By measure, a value for each problem."""


def start_of(options: argparse.Namespace, work: Path) -> base.Bench:
    size = replace(base.SIZES[options.size], steps=options.steps, lr=options.lr, warmup_steps=options.warmup)
    bench = base.prepare(size, base.MIXED_LENGTHS, options, work)
    return replace(bench, max_tokens=base.MIXED_LENGTHS[1] + 1 + SPARE_TOKENS)


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The scores before training and of each side by seed, and the runs."""
    bench = start_of(options, work)
    size = bench.size
    replayed = base.replay(bench, preset=options.preset)
    problems = held_out(bench.model)
    start = score(bench, bench.model, problems)
    errors = {name: float(start[name].std()) / math.sqrt(len(problems)) for name in MEASURES}
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    scores: dict[str, list[Scores]] = {side: [] for side in SIDES}
    for seed in range(options.seeds):
        results = base.run_both(bench, "run", seed=seed, steps=size.steps, preset=options.preset)
        for side, result in results.items():
            runs[side].append(base.per_step(result))
            scores[side].append(score(bench, bench.folder / f"run-{side}-{seed}" / "trained", problems))
    return {
        "preset": options.preset,
        "steps": size.steps,
        "lr": size.lr,
        "warmup_steps": size.warmup_steps,
        "max_tokens": bench.max_tokens,
        "problems": len(problems),
        "replay": replayed,
        "start": {name: float(start[name].mean()) for name in MEASURES},
        "start_error": errors,
        "scores": {side: {name: summary(scores[side], name) for name in MEASURES} for side in SIDES},
        "runs": runs,
    }


def pilot(options: argparse.Namespace, work: Path) -> None:
    """Print the start's scores, and Forebay's after a run at each rate."""
    bench = start_of(options, work)
    problems = held_out(bench.model)
    score(bench, bench.model, problems)
    for lr in options.pilot:
        bench = replace(bench, size=replace(bench.size, lr=lr))
        label, seed = f"pilot-{lr:g}", options.seeds
        found = base.run_side(bench, "forebay", label, seed=seed, steps=options.steps, preset=options.preset)
        rewards = ", ".join(f"{value:.3f}" for value in found["reward"][:: max(1, options.steps // 6)])
        print(f"lr {lr:g}: {found['cpu_s'][-1]:.0f} CPU s, rewards on the way {rewards}", flush=True)
        score(bench, bench.folder / f"{label}-forebay-{seed}" / "trained", problems)


def summary(scores: Sequence[Scores], name: str) -> dict[str, Any]:
    """One measure by seed, and its interval's halves over seeds and over problems."""
    by_seed = [float(found[name].mean()) for found in scores]
    problems = torch.stack([found[name] for found in scores]).mean(0)
    over_problems = 1.96 * float(problems.std()) / math.sqrt(len(problems))
    over_seeds = T_95[len(by_seed)] * statistics.stdev(by_seed) / math.sqrt(len(by_seed))
    return {"by_seed": by_seed, "over_seeds": over_seeds, "over_problems": over_problems}


# Scores


def held_out(model: Path) -> list[Problem]:
    """Problems that are not trained on, the chat template applied, in alphabetical order."""
    ordered = sorted({*base.problems(base.MIXED_LENGTHS, HELD_OUT)}.difference(base.problems(base.MIXED_LENGTHS)))
    texts = base.load_tokenizer(model).apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt, _ in ordered], tokenize=False, add_generation_prompt=True
    )
    return [(text, answer) for text, (_, answer) in zip(texts, ordered, strict=True)]


def score(bench: base.Bench, model: Path, problems: Sequence[Problem]) -> Scores:
    torch.manual_seed(0)
    scores = {}
    for way, samples in (("greedy", 1), ("sampled", SAMPLES)):
        texts = respond(bench, model, [prompt for prompt, _ in problems], samples)
        verdicts = asyncio.run(judge(texts, [answer for _, answer in problems for _ in range(samples)]))
        for name in ("exact", "score"):
            values = torch.tensor([float(verdict[name]) for verdict in verdicts])
            scores[f"{way}_{name}"] = values.view(-1, samples).mean(1)
    print(f"  {model}: " + ", ".join(f"{name} {scores[name].mean():.3f}" for name in MEASURES), flush=True)
    return scores


@torch.inference_mode()
def respond(bench: base.Bench, model: Path, prompts: list[str], samples: int) -> list[str]:
    """`samples` responses to each prompt; with one they are greedy."""
    # That of the start: Forebay's side saves weights alone.
    tokenizer = AutoTokenizer.from_pretrained(bench.model, padding_side="left")
    settings = GenerationConfig(
        do_sample=samples > 1,
        num_return_sequences=samples,
        max_new_tokens=bench.max_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if samples > 1 else {}),
    )
    given = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    language_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    made = language_model.generate(**given, generation_config=settings)
    responses = made[:, given["input_ids"].shape[1] :]
    texts: list[str] = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return texts


async def judge(texts: Sequence[str], answers: Sequence[str]) -> list[Any]:
    exact_match = ExactMatchJudge(partial_credit=True)
    states = [
        RolloutState([], response=text, reward_model={"ground_truth": answer})
        for text, answer in zip(texts, answers, strict=True)
    ]
    return [await exact_match.score(state) for state in states]


# The table


def table(found: dict[str, Any]) -> str:
    """By measure and side the scores with their intervals, what was learned, and whether sides overlap."""
    heads = ["preset", "measure", "start", "side", "seeds 0, 1, ...", "mean", "over seeds", "over problems"]
    heads += ["learned", "overlap"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in MEASURES:
        both = [found["scores"][side][name] for side in SIDES]
        first, second = (statistics.mean(one["by_seed"]) for one in both)
        overlaps = [
            "yes" if abs(first - second) <= sum(one[over] for one in both) else "no"
            for over in ("over_seeds", "over_problems")
        ]
        start, error = found["start"][name], found["start_error"][name]
        for side, one in zip(SIDES, both, strict=True):
            cells = [f"`{found['preset']}`", name.replace("_", " "), f"{start:.3f} +- {error:.3f}", side]
            cells.append(", ".join(f"{value:.3f}" for value in one["by_seed"]))
            cells.append(f"{statistics.mean(one['by_seed']):.3f}")
            cells += [f"+- {one[over]:.3f}" for over in ("over_seeds", "over_problems")]
            cells.append("yes" if statistics.mean(one["by_seed"]) > start + 2 * error else "no")
            lines.append(f"| {' | '.join([*cells, ', '.join(overlaps)])} |")
    return "\n".join(lines)


# The command


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(OPTIMIZER_STEPS), required=True)
    parser.add_argument("--size", choices=list(base.SIZES), default="1m")
    parser.add_argument("--seeds", type=int, choices=list(T_95), default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--pilot", type=lambda text: [*map(float, text.split(","))], help="rates to try, without TRL")
    parser.add_argument("--warmup", type=int, default=120, help="supervised steps before")
    parser.add_argument("--prompts", type=int, default=16, help="per step")
    parser.add_argument("--group", type=int, default=16, help="samples per prompt")
    parser.add_argument("--trl-python", type=Path, help=f"a Python with TRL {base.TRL_VERSION}")
    parser.add_argument("--results", type=Path, help="JSON file")
    parser.add_argument("--work", type=Path, help="keep models, jobs and logs in this new folder")
    parser.add_argument("--render", action="store_true", help="only print the table again")
    options = parser.parse_args(arguments)
    options.results = options.results or base.RESULTS.with_name(f"{options.preset}_vs_trl.json")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if options.pilot:
        with tempfile.TemporaryDirectory(prefix="presets_vs_trl-") as folder:
            options.trl_python = None
            pilot(options, Path(folder))
        return
    if not options.render:
        options.trl_python = base.trl_python(options.trl_python)
        work = options.work or Path(tempfile.mkdtemp(prefix="presets_vs_trl-"))
        try:
            found = {
                "command": shlex.join(["python", *sys.argv]),
                "machine": base.machine() | {"load_average": os.getloadavg()[0]},
                "versions": {"forebay": base.versions(sys.executable), "trl": base.versions(options.trl_python)},
                "prompts_per_step": options.prompts,
                "group_size": options.group,
            } | measure(options, work)
        finally:
            if options.work is None:
                shutil.rmtree(work, ignore_errors=True)
        options.results.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(table(json.loads(options.results.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
