"""The recipe for search: its register, its questions and its run files."""

import asyncio
import json
import runpy
from pathlib import Path

import pytest

from forebay.config import load_config
from forebay.produce.prompts.dataset import hold_out, load_prompts
from forebay.runs.config import RunConfig
from forebay.runs.launch import launch
from forebay.tools import ToolError
from forebay.tools.search import Search

RECIPE = Path(__file__).parents[2] / "recipes" / "search"
TASK = runpy.run_path(str(RECIPE / "register.py"))
SMALL = [
    "steps=2",
    "batch_size=2",
    "rollouts_per_prompt=4",
    "checkpoint_every=0",
    "warmup.steps=4",
    "warmup.batch_size=16",
    "tasks.0.eval_data.size=6",
    "evaluate.every=0",
    "model.tiny.hidden_size=32",
    "model.tiny.num_layers=1",
]


def names(part: str) -> set[str]:
    """All names and words that the questions of one part come upon."""
    rows = TASK["questions"](part=part, mistakes=0)
    people = {row["prompt"].rstrip(";").split()[-1] for row in rows}
    return people | {
        message["content"].rstrip(";").split()[-1]
        for row in rows
        for message in row["demonstration"]
        if "the boss of" in message["content"]
    }


def test_the_register_is_that_of_the_questions(tmp_path) -> None:
    TASK["write_register"](tmp_path / "register.jsonl")
    assert (tmp_path / "register.jsonl").read_text() == (RECIPE / "register.jsonl").read_text()


def test_no_held_out_name_comes_up_in_training() -> None:
    assert [len(names("train")), len(names("held_out"))] == [1100, 100]
    assert not names("train") & names("held_out")


@pytest.mark.parametrize("mistakes", [0, 1])
def test_demonstrations_read_what_the_tool_says_and_answer_right_without_mistakes(mistakes) -> None:
    rows = TASK["questions"](part="held_out", mistakes=mistakes)
    right = [row["demonstration"][-1]["content"] == f"it is {row['answer']}" for row in rows]
    # A guess, or the home of the wrong person, is right now and then.
    assert all(right) if not mistakes else sum(right) < 0.1 * len(rows)

    async def check() -> None:
        tool = Search(str(RECIPE / "register.jsonl"), num_results=1)
        for row in rows:
            *searches, _ = (message["content"] for message in row["demonstration"])
            for call, result in zip(searches[::2], searches[1::2], strict=True):
                assert await tool.call({"query": call.strip("[]")}) + ";" == result
        tool.close()

    asyncio.run(check())


def test_the_alphabet_has_what_the_tool_may_say() -> None:
    alphabet = load_config(RunConfig, RECIPE / "run.toml").model.tiny.alphabet

    async def check() -> None:
        tool = Search(str(RECIPE / "register.jsonl"))
        signs = "".join(sign for sign in alphabet if not sign.isalnum())
        for query in (signs, "'", '"'):
            with pytest.raises(ToolError) as error:
                await tool.call({"query": query})
            assert set(f"Error: {error.value}") <= set(alphabet)
        assert set(await tool.call({"query": "qqqq"})) <= set(alphabet)
        assert set("Error: no result within 10 s") <= set(alphabet)
        tool.close()

    asyncio.run(check())


def test_the_recipe_runs(tmp_path) -> None:
    config = load_config(RunConfig, RECIPE / "run.toml", [*SMALL, f"output={tmp_path}"])
    assert asyncio.run(launch(config)) is not None
    lines = (tmp_path / "search" / "metrics.jsonl").read_text().splitlines()
    assert sum("produce/tool_calls" in json.loads(line) for line in lines) == 2


def test_the_run_for_a_gpu_asks_the_same_in_words(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    small, large = (load_config(RunConfig, RECIPE / name).tasks[0] for name in ("run.toml", "gpu.toml"))
    for part in ("data", "eval_data"):
        short, long = load_prompts(getattr(small, part)), load_prompts(getattr(large, part))
        assert [prompt.reward_model for prompt in short] == [prompt.reward_model for prompt in long]
        assert "home of the boss of" in " ".join(prompt.message[-1]["content"] for prompt in long)
    assert len(hold_out(load_prompts(large.data), long)) == 4400
