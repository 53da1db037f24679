"""The game of the recipe for Wordle."""

import asyncio
import sys
from pathlib import Path

import pytest

from forebay.config import load_config
from forebay.produce.prompts.dataset import load_prompts
from forebay.runs.config import RunConfig
from forebay.types import RolloutState

RECIPE = Path(__file__).parents[2] / "recipes" / "wordle"


@pytest.fixture
def game(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    import game

    yield game
    del sys.modules["game"]


def played(game, secret, turns):
    async def play():
        state, wordle = RolloutState([], reward_model={"ground_truth": secret}), game.Wordle()
        memory = await wordle.reset(state)
        return [await wordle.step(state, memory, turn) for turn in turns]

    return asyncio.run(play())


def test_a_game_ends_with_the_word_or_after_six_guesses(game):
    first, second = played(game, "caper", ["I try\nCrane", "it must be caper"])
    assert (first.says, first.done) == ("!??.?", False)
    assert (second.done, second.reward) == (True, 0.9)
    lost = played(game, "caper", ["no word here at all", *["eerie"] * 5])
    assert lost[0].says == "-----"
    assert [reply.done for reply in lost] == [False] * 5 + [True]
    assert lost[-1].reward == 0


def test_no_secret_is_both_trained_and_held_out():
    task = load_config(RunConfig, RECIPE / "run.toml").tasks[0]
    secrets = [
        {prompt.reward_model["ground_truth"] for prompt in load_prompts(data)} for data in (task.data, task.eval_data)
    ]
    assert [len(words) for words in secrets] == [400, 40]
    assert not secrets[0] & secrets[1]
