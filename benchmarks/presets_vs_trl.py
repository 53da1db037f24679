"""Final scores of the presets ``dapo`` and ``gspo`` beside those of TRL's GRPOTrainer, over three seeds.

Usage: python benchmarks/presets_vs_trl.py --preset dapo [--steps 30] [--group 16] [--trl-python PATH]

The model, the prompts and the two sides are those of ``train_vs_trl.py``::

    the same start --forebay_side.py, trl_side.py--> weights of each side and seed
        --transformers' generate--> responses to held-out problems --exact_match--> scores
        --over seeds--> mean, 95% interval (Student's t), do the sides' intervals overlap?

TRL has no dynamic sampling: it is off on both sides, and where the preset has it a third arm shows Forebay's
runs with it. Both sides' weights are sampled and judged by the same code. --render only prints the table of
the JSON file again.
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
from side_by_side import OPTIMIZER_STEPS
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from forebay.judges import ExactMatchJudge
from forebay.train.presets import DYNAMIC_SAMPLING
from forebay.types import RolloutState

HELD_OUT = 56
"""Problems of each length that no run trains on."""
SPARE_TOKENS = 7
"""Room in a response behind the longest right answer: DAPO's penalty begins there."""
SAMPLES = 4
"""Responses at temperature 1 to each problem; one more is greedy."""
MEASURES = ("greedy_score", "greedy_exact", "sampled_score", "sampled_exact")
"""Share of right places and share of right answers."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""By the number of seeds: the 0.975 quantile of Student's t with one degree of freedom less."""

Problem = tuple[str, str]
"""A prompt and its answer."""


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The scores before training, and by arm (``forebay``, ``trl``, ``dynamic``) the runs with theirs."""
    size = replace(base.SIZES[options.size], steps=options.steps, lr=options.lr)
    bench = base.prepare(size, base.MIXED_LENGTHS, options, work)
    bench = replace(bench, max_tokens=base.MIXED_LENGTHS[1] + 1 + SPARE_TOKENS)
    if options.replay:
        return {"preset": options.preset, "replay": base.replay(bench, preset=options.preset)}
    problems = held_out(bench.model)
    start = score(bench, bench.model, problems)
    print(f"{options.preset}, before training: {start}", flush=True)
    job = {"steps": size.steps, "preset": options.preset}
    arms: dict[str, list[dict[str, Any]]] = {}

    def keep(arm: str, label: str, result: dict[str, Any]) -> None:
        scores = score(bench, bench.folder / label / "trained", problems)
        print(f"  {label}: {scores}", flush=True)
        arms.setdefault(arm, []).append(base.per_step(result) | {"scores": scores})

    for seed in range(options.seeds):
        for side, result in base.run_both(bench, "run", seed=seed, **job).items():
            keep(side, f"run-{side}-{seed}", result)
    for seed in range(options.seeds if options.preset in DYNAMIC_SAMPLING else 0):
        result = base.run_side(bench, "forebay", "dynamic", seed=seed, dynamic_sampling=True, **job)
        keep("dynamic", f"dynamic-forebay-{seed}", {"seed": seed} | result)
    return {
        "preset": options.preset,
        "steps": size.steps,
        "lr": size.lr,
        "max_tokens": bench.max_tokens,
        "problems": len(problems),
        "start": start,
        "arms": arms,
    }


# Scores


def held_out(model: Path) -> list[Problem]:
    """Problems that are not trained on, the chat template applied, in alphabetical order."""
    ordered = sorted(
        {*base.problems(base.MIXED_LENGTHS, HELD_OUT)}.difference(base.problems(base.MIXED_LENGTHS))
    )
    texts = base.load_tokenizer(model).apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt, _ in ordered],
        tokenize=False,
        add_generation_prompt=True,
    )
    return [(text, answer) for text, (_, answer) in zip(texts, ordered, strict=True)]


def score(bench: base.Bench, model: Path, problems: Sequence[Problem]) -> dict[str, float]:
    """The means of `MEASURES`, and their standard errors over problems as ``NAME_error``."""
    torch.manual_seed(0)
    scores: dict[str, float] = {}
    for way, samples in (("greedy", 1), ("sampled", SAMPLES)):
        texts = respond(bench, model, [prompt for prompt, _ in problems], samples)
        verdicts = asyncio.run(judge(texts, [answer for _, answer in problems for _ in range(samples)]))
        for name in ("score", "exact"):
            values = torch.tensor([verdict[name] for verdict in verdicts]).view(-1, samples).mean(1)
            scores[f"{way}_{name}"] = float(values.mean())
            scores[f"{way}_{name}_error"] = float(values.std()) / math.sqrt(len(values))
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


# Over the seeds


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its 95% interval."""
    return statistics.mean(values), T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def table(found: dict[str, Any]) -> str:
    """For each measure the mean and the interval of each arm, and the difference to TRL's."""
    lines = [
        "| preset | measure | arm | by seed | 95% interval | minus TRL, seed by seed | overlap |",
        "|---|---|---|---|---|---|---|",
    ]
    for measure in MEASURES:
        values = {arm: [run["scores"][measure] for run in runs] for arm, runs in found["arms"].items()}
        for arm, own in values.items():
            cells = ["", ""] if arm == "trl" else compare(own, values["trl"])
            mean, half = interval(own)
            seeds = ", ".join(f"{value:.3f}" for value in own)
            row = [f"`{found['preset']}`", measure.replace("_", " "), arm, seeds, f"{mean:.3f} +- {half:.3f}"]
            lines.append(f"| {' | '.join(row + cells)} |")
    return "\n".join(lines)


def compare(own: Sequence[float], other: Sequence[float]) -> list[str]:
    """The difference by seed with its interval, and whether the means' intervals have a common value."""
    (mean, half), (other_mean, other_half) = interval(own), interval(other)
    gap, gap_half = interval([a - b for a, b in zip(own, other, strict=True)])
    return [f"{gap:+.3f} +- {gap_half:.3f}", "yes" if abs(mean - other_mean) <= half + other_half else "no"]


# The command


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(OPTIMIZER_STEPS), required=True)
    parser.add_argument("--size", choices=list(base.SIZES), default="1m")
    parser.add_argument("--seeds", type=int, choices=list(T_95), default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--prompts", type=int, default=16, help="per step")
    parser.add_argument("--group", type=int, default=16, help="samples per prompt")
    parser.add_argument("--trl-python", type=Path, help=f"a Python with TRL {base.TRL_VERSION}")
    parser.add_argument("--results", type=Path, help="JSON file")
    parser.add_argument("--work", type=Path, help="keep models, jobs and logs in this new folder")
    parser.add_argument("--replay", action="store_true", help="only train both sides on the same rollouts")
    parser.add_argument("--render", action="store_true", help="only print the table again")
    options = parser.parse_args(arguments)
    options.results = options.results or base.RESULTS.with_name(f"{options.preset}_vs_trl.json")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if not options.render:
        options.trl_python = base.trl_python(options.trl_python)
        work = options.work or Path(tempfile.mkdtemp(prefix="presets_vs_trl-"))
        try:
            found = {
                "command": shlex.join(["python", *sys.argv]),
                "machine": base.machine() | {"load_average": os.getloadavg()[0]},
                "versions": {
                    "forebay": base.versions(sys.executable),
                    "trl": base.versions(options.trl_python),
                },
                "prompts_per_step": options.prompts,
                "group_size": options.group,
            } | measure(options, work)
        finally:
            if options.work is None:
                shutil.rmtree(work, ignore_errors=True)
        options.results.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if not options.replay:
        print(table(json.loads(options.results.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
