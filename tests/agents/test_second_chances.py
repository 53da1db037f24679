"""A model that is told when it is wrong, and what its tries are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_families import make_tokenizer

from forebay.agents import MultiTurnAgentLoop
from forebay.aio.virtual_time import run
from forebay.config import ConfigError, import_object
from forebay.engines import RolloutController, ScriptedEngine
from forebay.produce import DataConfig, load_prompts
from forebay.types import RolloutState, SampleParams, Status

TOKENIZER = make_tokenizer("tiny")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _in_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def SecondChances(**arguments: Any) -> Any:
    return import_object("environment", "second_chances:SecondChances")(**arguments)


async def play(tries: list[str], **options: Any) -> RolloutState:
    def script(request: Any) -> list[int]:
        number = TOKENIZER.decode(request.input_ids.tolist()).count("Try again.")
        return [*TOKENIZER.encode(tries[number], add_special_tokens=False), TOKENIZER.eos_token_id]

    judge = options.pop("judge", {"name": "exact_match"})
    loop = MultiTurnAgentLoop(
        RolloutController(ScriptedEngine(script)),
        None,
        TOKENIZER,
        sample_params=SampleParams(max_tokens=options.pop("max_tokens", 100)),
        environment=SecondChances(judge=judge, **options),
    )
    prompt = options.get("prompt", [{"role": "user", "content": "1+2="}])
    state = RolloutState(prompt, rollout_id="g/0", reward_model={"ground_truth": "3"})
    try:
        return (await loop.generate_group([state]))[0]
    finally:
        await loop.close()


@pytest.mark.parametrize(
    ("tries", "score", "num_turns"), [(["3"], 1.0, 1), (["4", "3"], 0.5, 2), (["4", "5", "6"], 0.0, 3)]
)
def test_a_later_success_is_worth_less(tries, score, num_turns) -> None:
    state = run(play(tries, discount=0.5))
    assert (state.reward, state.extra_fields["turns"]) == ({"score": score}, num_turns)
    assert state.finish_reason == "stop"


def test_the_best_try_counts() -> None:
    judge = {"name": "exact_match", "arguments": {"partial_credit": True}}
    state = run(play(["33", "4"], judge=judge, num_tries=2))
    assert state.reward == {"score": 0.5}


def test_the_best_try_counts_also_where_a_budget_ends_the_episode() -> None:
    judge = {"name": "exact_match", "arguments": {"partial_credit": True}}
    state = run(play(["33", "444444"], judge=judge, max_tokens=5))
    assert (state.reward, state.finish_reason) == ({"score": 0.5}, "length")


@pytest.mark.parametrize(("tries", "score"), [(["-2", "-1"], -1.0), (["-1", "-2"], -1.0), (["-1", "0.5"], 0.25)])
def test_negative_scores_count_too(tries, score) -> None:
    state = run(play(tries, judge={"name": f"{__name__}:number"}, num_tries=2, discount=0.5))
    assert state.reward == {"score": score}


def number(state: RolloutState) -> float:
    return float(state.response)


def test_a_judge_that_fails_fails_the_rollout() -> None:
    state = run(play(["3"], judge={"name": f"{__name__}:broken"}))
    assert state.status is Status.FAILED
    assert "environment SecondChances, turn 1: RuntimeError: rollout g/0: judge" in state.error_msg
    assert "the oracle is out" in state.error_msg


def broken(state: RolloutState) -> float:
    raise OSError("the oracle is out")


async def test_problems_of_reasoning_gym_are_played_in_several_turns() -> None:
    pytest.importorskip("reasoning_gym")
    (prompt,) = load_prompts(DataConfig(source="reasoning_gym:simple_equations", size=1))
    answers = iter(["<answer>-12345</answer>", f"<answer>{prompt.reward_model['ground_truth']}</answer>"])
    loop = MultiTurnAgentLoop(
        RolloutController(ScriptedEngine(lambda request: TOKENIZER.encode(next(answers), add_special_tokens=False))),
        None,
        TOKENIZER,
        sample_params=SampleParams(max_tokens=500),
        environment={"name": "second_chances:SecondChances", "arguments": {"judge": {"name": "reasoning_gym"}}},
    )
    state = RolloutState(prompt.message, rollout_id="g/0", reward_model=prompt.reward_model)
    try:
        (state,) = await loop.generate_group([state])
    finally:
        await loop.close()
    assert (state.reward, state.extra_fields["turns"], state.error_msg) == ({"score": 1.0}, 2, None)


def test_what_does_not_fit_is_said() -> None:
    for arguments, message in (
        ({"judge": {"name": "exact_matsh"}}, "did you mean 'exact_match'"),
        ({"judge": {"nam": "exact_match"}}, "did you mean 'name'"),
    ):
        with pytest.raises(ConfigError, match=message):
            SecondChances(**arguments)
    for arguments, message in (({"num_tries": 0}, "num_tries"), ({"discount": 0}, "discount")):
        with pytest.raises(ValueError, match=message):
            SecondChances(judge={"name": "exact_match"}, **arguments)
