"""The recipe for rewards by step: lines, differences, and one batch for the judge of the beginnings."""

import asyncio
from pathlib import Path

import pytest

from forebay.config import load_config
from forebay.judges import JudgeConfig, build_judge
from forebay.models import load_tokenizer, resolve_model
from forebay.models.config import ModelConfig, TinyConfig
from forebay.runs.config import RunConfig
from forebay.train import TrainBatch
from forebay.types import RolloutState, Status

RECIPE = Path(__file__).parents[2] / "recipes" / "process_rewards"
asked = []


def vowels(state):
    """An eighth for each vowel."""
    asked.append((state.response, len(state.response_ids), len(state.logprobs)))
    return {"score": sum(letter in "aeiou" for letter in state.response) / 8, "length": len(state.response)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose tokens are letters, and the end of a line."""
    tiny = TinyConfig(hidden_size=16, num_layers=1, num_heads=2, alphabet="abcdefghijklmnopqrstuvwxyz .\n")
    return str(resolve_model(ModelConfig(source="tiny", tiny=tiny), cache_dir=tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def judge(model, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    asked.clear()

    def make(name="test_step_rewards:vowels", **arguments):
        given = {"judge": {"name": name}, "tokenizer": model, **arguments}
        return build_judge(JudgeConfig(name="steps:StepRewards", arguments=given))

    return make


def written(model, text):
    tokenizer = load_tokenizer(Path(model))
    ids = tokenizer.encode(text, add_special_tokens=False)
    state = RolloutState([], prompt_ids=[3], response=text, status=Status.COMPLETED)
    state.append([*ids, tokenizer.eos_token_id], logprobs=[-1.0] * (len(ids) + 1))
    return state


def judged(judge, state):
    asyncio.run(judge.judge(state))
    assert state.status is Status.COMPLETED, state.error_msg
    return state.reward


def test_each_line_earns_what_it_added(judge, model):
    state = written(model, "aa\n\nxx\nab\n e")
    reward = judged(judge(), state)
    assert reward["score"] == 0.5
    # The empty line belongs to the step after it.
    assert reward["turn_rewards"] == [(3, 0.25), (7, 0.0), (10, 0.125)]
    assert (reward["steps"], reward["length"]) == (4, 12)
    assert sorted(asked) == [
        ("aa\n", 3, 3),
        ("aa\n\nxx\n", 7, 7),
        ("aa\n\nxx\nab\n", 10, 10),
        ("aa\n\nxx\nab\n e", 13, 13),
    ]
    rewards = TrainBatch.from_groups([[state]]).token_rewards.tolist()
    assert rewards == [0, 0, 0.25, 0, 0, 0, 0, 0, 0, 0.125, 0, 0, 0.125]


def test_the_sum_is_the_score_also_where_steps_are_bounded_or_there_is_one(judge, model):
    reward = judged(judge(most_steps=2), written(model, "a\nb\ne\ni"))
    assert (reward["turn_rewards"], reward["score"], reward["steps"]) == ([(2, 0.125)], 0.375, 2)
    reward = judged(judge(), written(model, "aa"))
    assert (reward["turn_rewards"], reward["score"], reward["steps"]) == ([], 0.25, 1)
    # The last line ends the response: what is behind it is no step.
    assert judged(judge(), written(model, "a\ne"))["steps"] == 2


def refuses_short(state):
    if len(state.response) < 4:
        raise KeyError("too short")
    return 1.0


def test_a_beginning_that_cannot_be_judged_fails_the_rollout(judge, model):
    state = written(model, "a\nbcde")
    asyncio.run(judge("test_step_rewards:refuses_short").judge(state))
    assert state.status is Status.FAILED
    assert "too short" in state.error_msg


def test_beginnings_are_one_batch_of_a_reward_model(judge, model):
    steps, batches = judge(), []

    class Batched(type(steps.inner)):
        async def verdicts(self, states):
            batches.append(len(states))
            return await super().verdicts(states)

    steps.inner.__class__ = Batched
    judged(steps, written(model, "a\nb\nc"))
    assert batches == [3]


def test_the_run_file_is_whole(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    config = load_config(RunConfig, RECIPE / "run.toml")
    assert config.train.credit == "token"
