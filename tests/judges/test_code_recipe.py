"""The tasks of the recipe for code."""

import asyncio
import re
from pathlib import Path

import pytest

from forebay.config import load_config
from forebay.judges import build_judge
from forebay.produce.prompts.dataset import hold_out, load_prompts
from forebay.runs.config import RunConfig
from forebay.sandbox import SandboxUnavailableError
from forebay.types import RolloutState, Status

RECIPE = Path(__file__).parents[2] / "recipes" / "code"
PROGRAMS = {
    r"a times (\d+) plus b": "a * {} + b",
    r"True if a is divisible by (\d+)": "a % {} == 0",
    r"the list s without its first (\d+) items": "s[{}:]",
    r"how often the letter (\w) is in the text s": "s.count('{}')",
}


def test_right_programs_pass_their_tests_and_constants_do_not(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    task = load_config(RunConfig, RECIPE / "run.toml").tasks[0]
    train, held_out = load_prompts(task.data), load_prompts(task.eval_data)
    assert (len(hold_out(train, held_out)), len(held_out)) == (208, 100)
    judge = build_judge(task.judge)

    async def score(prompt, returned):
        head = re.search(r"function (f\(.*?\))", prompt.message[-1]["content"])[1]
        response = f"```python\ndef {head}:\n    return {returned}\n```\n\nThis"
        state = RolloutState([], response=response, reward_model=prompt.reward_model, status=Status.COMPLETED)
        state = await judge.judge(state)
        assert state.status is Status.COMPLETED, state.error_msg
        return state.reward["score"]

    async def scores():
        try:
            await judge._sandbox.isolation()
        except SandboxUnavailableError as error:
            pytest.skip(str(error))
        for sentence, program in PROGRAMS.items():
            prompt, found = next(
                (prompt, found) for prompt in held_out if (found := re.search(sentence, prompt.message[-1]["content"]))
            )
            assert await score(prompt, program.format(found[1])) == 1, sentence
            assert await score(prompt, prompt.reward_model["tests"][0].split(" == ")[1]) == 0

    asyncio.run(scores())
