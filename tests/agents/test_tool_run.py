"""Whole runs with tools: warm-up on conversations, real engine, pauses of a separate run, trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from forebay.config import load_config
from forebay.metrics import read_jsonl
from forebay.models.tiny import character_tokenizer
from forebay.produce import load_prompts
from forebay.runs.build import _examples
from forebay.runs.config import RunConfig
from forebay.runs.launch import launch
from forebay.tools.calculator import calculate
from forebay.tools.demo_task import chained_sums, small_calculator

ROOT = Path(__file__).parents[2]
SMALL = [
    "steps=2",
    "batch_size=2",
    "rollouts_per_prompt=4",
    "checkpoint_every=0",
    "show_every=0",
    "warmup.steps=4",
    "warmup.batch_size=16",
    "tasks.0.data.size=60",
    "tasks.0.eval_data.start=60",
    "tasks.0.eval_data.size=6",
    "evaluate.every=0",
    "model.tiny.hidden_size=32",
    "model.tiny.num_layers=1",
]


def recipe(output: Path, *overrides: str) -> RunConfig:
    return load_config(
        RunConfig, ROOT / "recipes" / "tool_calc.toml", [*SMALL, f"output={output}", *overrides]
    )


@pytest.mark.parametrize(
    "overrides",
    [(), ("produce.mode=separate", "produce.max_staleness=1", "produce.enable_partial_rollout=true")],
    ids=["colocated", "separate"],
)
def test_the_recipe_runs(tmp_path, overrides) -> None:
    assert asyncio.run(launch(recipe(tmp_path, *overrides))) is not None
    rows = list(read_jsonl(tmp_path / "tool_calc" / "metrics.jsonl"))
    steps = [row for row in rows if "produce/turns" in row]
    assert len(steps) == 2
    assert all(1 <= row["produce/turns"] <= 4 and row["produce/tool_calls"] >= 0 for row in steps)
    assert [row["eval/turns"] >= 1 for row in rows if "eval/turns" in row] == [True, True]


def test_problems_are_distinct_and_their_demonstrations_right() -> None:
    rows = chained_sums(size=500)
    assert len({row["prompt"] for row in rows}) == 500
    gives_up = [len(row["demonstration"]) == 1 for row in rows]
    assert 0.5 < np.mean(gives_up) < 0.9
    for row, gave_up in zip(rows, gives_up, strict=True):
        rest, first = row["prompt"].removesuffix(";").split(",")
        result = row["answer"]
        assert int(result) == calculate(f"({first}){rest}")
        half = f"{calculate(first):05}"
        calls = [f"[{first}]", f"={half};", f"[{half}{rest}]", f"={result};", f"#{result}"]
        texts = [message["content"] for message in row["demonstration"]]
        assert texts == (["?"] if gave_up else calls)


async def test_the_small_calculator_answers_in_its_alphabet() -> None:
    for expression, answer in (
        ("00095*4", "00380"),
        ("1+", "?"),
        ("9*99999", "?"),
        ("5*[", "?"),
        ("0", "00000"),
    ):
        assert await small_calculator(expression) == answer


def test_every_turn_of_a_demonstration_is_an_example() -> None:
    config = recipe(Path("unused"))
    tokenizer = character_tokenizer(config.model.tiny.alphabet)
    data = config.tasks[0].data.model_copy(update={"arguments": {"giving_up": 0.0}})
    prompt = load_prompts(data)[0]
    examples = [tuple(tokenizer.decode(ids) for ids in pair) for pair in _examples(prompt, tokenizer)]
    asked = prompt.message[0]["content"]
    called, result, again, told, answer = (part["content"] for part in prompt.extra["demonstration"])
    end = "<eos>"
    assert examples == [
        (f"<bos>{asked}", called + end),
        (f"<bos>{asked}{called}{end}{result}", again + end),
        (f"<bos>{asked}{called}{end}{result}{again}{end}{told}", answer + end),
    ]
