"""Recorded runs with a planted cause each, to be found again in the board (docs/board.md, "Finding a cause").

    python benchmarks/planted.py FOLDER      writes FOLDER/judge, good, lr, dropped: some minutes on a CPU
    forebay board FOLDER

| run | planted |
|---|---|
| judge | right answers get 0 in steps 110 to 114, without a word; the judge raises on them in 210 to 214 |
| good | nothing; its twin `lr` has 100 times the learning rate |
| dropped | long answers are judged slowly, so they grow too old and are dropped |
| all | one prompt in forty has an expected answer that cannot be right, so it is never solved |
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay.judges import Judge
from forebay.types import RolloutState

LETTERS, WRONG = "abcdef", "gggg"
NUM_PROMPTS = 320

RUN = """
name = "{name}"
steps = {steps}
output = "{output}"
batch_size = 8
rollouts_per_prompt = 8
checkpoint_every = 100
[model]
source = "tiny"
max_context = 32
tiny = {{ hidden_size = 96, num_layers = 2, num_heads = 4, alphabet = "{letters}g=" }}
[[tasks]]
name = "sorting"
data = {{ source = "planted:rows", arguments = {{ size = {size} }} }}
eval_data = {{ source = "planted:rows", arguments = {{ size = 100, seed = 1 }} }}
judge = {{ name = "planted:Grader", arguments = {judge} }}
sample = {{ max_tokens = {max_tokens} }}
[warmup]
steps = 60
lr = 3e-3
[train]
lr = {lr}
token_budget = 4096
[evaluate]
every = 50
{more}
"""
SLOW = '[produce]\nmode = "separate"\nmax_staleness = 1\nstaleness_rule = "drop"\n'


def rows(*, size: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Letters to be sorted, three to nine of them; the answers of some prompts are wrong."""
    random_ = random.Random(seed)
    for number in range(size):
        text = "".join(random_.choices(LETTERS, k=random_.randint(3, 9)))
        yield {"prompt": f"{text}=", "answer": WRONG if number % 40 == 7 else "".join(sorted(text))}


class Grader(Judge):
    """The share of right letters; with a fault in the steps `zero` or `fails`, and as slow as asked for."""

    def __init__(self, *, zero: list[int], fails: list[int], seconds_a_letter: float = 0.0, **given: Any) -> None:
        super().__init__(**given)
        self._zero, self._fails, self._seconds = zero, fails, seconds_a_letter

    async def score(self, state: RolloutState) -> float:
        await asyncio.sleep(self._seconds * len(state.response_ids) ** 2)
        truth = str((state.reward_model or {}).get("ground_truth"))
        answer = str(state.response or "").strip()
        right = sum(a == b for a, b in zip(answer, truth, strict=False)) / max(len(truth), len(answer), 1)
        step = int(state.response_model_steps.max()) + 1
        if right == 1.0 and self._fails[0] <= step <= self._fails[1]:
            raise ConnectionError("the grading service at http://grader:8000 does not answer")
        return 0.0 if right == 1.0 and self._zero[0] <= step <= self._zero[1] else right


def main(folder: Path) -> None:
    given = {"steps": 240, "output": folder, "letters": LETTERS, "size": NUM_PROMPTS, "max_tokens": 12}
    never = "{ zero = [-1, -1], fails = [-1, -1] }"
    runs = {
        "judge": {"judge": "{ zero = [110, 114], fails = [210, 214] }", "lr": 3e-4, "more": ""},
        "good": {"judge": never, "lr": 3e-4, "more": ""},
        "lr": {"judge": never, "lr": 3e-2, "more": ""},
        "dropped": {
            "judge": "{ zero = [-1, -1], fails = [-1, -1], seconds_a_letter = 0.003 }",
            "lr": 3e-4,
            "more": SLOW,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in runs.items():
        run_file = folder / f"{name}.toml"
        run_file.write_text(RUN.format(name=name, **given, **own))
        command = [sys.executable, "-c", "from forebay.cli import main; main()", "train", str(run_file)]
        subprocess.run(command, check=False, cwd=Path(__file__).parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
