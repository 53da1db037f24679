"""Distillation against reward alone, for a student of fewer layers, at equal generated tokens.

    forebay train recipes/demo_tiny.toml output=runs                                  # the teacher
    python benchmarks/distillation.py cut TEACHER STUDENT 0,3                         # keeps these layers
    python benchmarks/distillation.py run ARM SEED TEACHER STUDENT [STEPS [RECIPE [KEY=VALUE ...]]] \\
        >> distillation.jsonl
    python benchmarks/distillation.py report distillation.jsonl                     # the table for results/

TEACHER and STUDENT are folders of models, RECIPE is a run file, the demo's unless told otherwise. An ARM is
``reward`` (the recipe as it is), ``teacher`` (reverse KL by token and no reward), ``top`` (the same over the
teacher's likeliest tokens) or ``both``. All arms begin with the same student (the demo's after the same
warm-up), and take as many rollouts a step; so far as they differ in tokens, accuracies are read off at equal
numbers, on the line between two evaluations.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import numpy as np

from forebay.metrics import read_jsonl

RECIPE = Path(__file__).parents[1] / "recipes" / "demo_tiny.toml"
ARMS = {
    "reward": {},
    "teacher": {"train.advantage": "none"},
    "top": {"train.advantage": "none", "train.kl_estimator": "top_8"},
    "both": {"train.kl_estimator": "top_8"},
}
POINTS = 4
"""Numbers of generated tokens at which runs are compared."""


def cut(teacher: str, student: str, layers: list[int]) -> None:
    """Write the model of these `layers` of the teacher, from 0; all else is the teacher's."""
    from torch import nn

    from forebay.models import load_model, load_tokenizer, resolve_model

    folder = resolve_model(teacher)
    model = load_model(folder)
    body = model.get_decoder()
    body.layers = nn.ModuleList(body.layers[place] for place in layers)
    for place, layer in enumerate(body.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = len(layers)
    model.save_pretrained(student)
    load_tokenizer(folder).save_pretrained(student)


def run(
    arm: str, seed: int, teacher: str, student: str, steps: int = 48, recipe: Path = RECIPE, keys: Sequence[str] = ()
) -> None:
    """One run; its evaluations, with what was generated until then. `keys` are the run file's."""
    changes = {
        "seed": seed,
        "steps": steps,
        "model.source": student,
        "evaluate.every": max(1, steps // POINTS),
        **({"warmup.steps": 4} if recipe == RECIPE else {}),
        "checkpoint_every": 0,
        "history_gb": 0,
        **({} if arm == "reward" else {"train.teacher": teacher}),
        **ARMS[arm],
    }
    with tempfile.TemporaryDirectory() as folder:
        program = "import forebay.cli; forebay.cli.main()"
        command = [sys.executable, "-c", program, "train", str(recipe), f"output={folder}"]
        command += [*(f"{name}={value}" for name, value in changes.items()), *keys]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(folder).glob("*/metrics.jsonl")
        tokens, curve, divergence = 0.0, [], []
        for row in read_jsonl(metrics):
            tokens += row.get("produce/tokens", 0.0)
            if "train/kl" in row:
                divergence.append(row["train/kl"])
            if "eval/accuracy" in row:
                curve.append((tokens, row["eval/accuracy"]))
    used = getrusage(RUSAGE_CHILDREN)
    ends = [round(statistics.mean(part), 4) for part in (divergence[:5], divergence[-5:]) if part]
    line = {"arm": arm, "seed": seed, "steps": steps, "curve": curve, "divergence": ends}
    print(json.dumps(line | {"cpu_s": round(used.ru_utime + used.ru_stime, 1)}))


def report(path: Path) -> None:
    """Accuracies at the same numbers of generated tokens, by arm."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    most = min(row["curve"][-1][0] for row in rows)
    points = [most * i / POINTS for i in range(POINTS + 1)]
    print("| arm | seed | " + " | ".join(f"{x / 1e3:.0f} k tokens" for x in points) + " | KL | CPU s |")
    print("|---" * (POINTS + 5) + "|")
    by_arm = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["arm"], row["seed"])):
        tokens, accuracies = zip(*row["curve"], strict=True)
        at = np.interp(points, tokens, accuracies)
        by_arm[row["arm"]].append(at)
        cells = " | ".join(f"{x:.3f}" for x in at)
        kl = " to ".join(map(str, row["divergence"]))
        print(f"| {row['arm']} | {row['seed']} | {cells} | {kl} | {row['cpu_s']:.0f} |")
    for arm, several in by_arm.items():
        means = [f"{statistics.mean(column):.3f}" for column in zip(*several, strict=True)]
        print(f"| {arm} | mean | " + " | ".join(means) + " | | |")


if __name__ == "__main__":
    command, *given = sys.argv[1:]
    if command == "cut":
        cut(given[0], given[1], [int(place) for place in given[2].split(",")])
    elif command == "run":
        recipe = Path(given[5]) if given[5:] else RECIPE
        run(given[0], int(given[1]), *given[2:4], *map(int, given[4:5]), recipe=recipe, keys=given[6:])
    else:
        report(Path(given[0]))
