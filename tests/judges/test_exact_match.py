import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.judges import ExactMatchJudge
from forebay.testing import run_in_virtual_time
from forebay.types import RolloutState, Status


async def reward(response: str, truth: object, **options):
    state = RolloutState([], response=response, reward_model={"ground_truth": truth}, status=Status.COMPLETED)
    await ExactMatchJudge(**options).judge(state)
    assert state.status is Status.COMPLETED, state.error_msg
    return state.reward


async def score(response: str, truth: object, **options) -> float:
    return (await reward(response, truth, **options))["score"]


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [("46", "46", 1), (" 46\n", "46 ", 1), ("46", 46, 1), ("47", "46", 0), ("it is 46", "46", 0), ("", "46", 0)],
)
async def test_the_whole_response_is_compared_stripped(response, truth, expected) -> None:
    assert await score(response, truth) == expected


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("12 + 34 = 46.", "46", 1),
        ("first 46, no, 47", "46", 0),
        ("it costs 1,234.50", "1234.5", 1),
        ("x = -4", "-4", 1),
        ("10-4", "4", 1),
        ("(3)-4", "-4", 0),
        ("none", "46", 0),
        ("46", "forty-six", 0),
    ],
)
async def test_the_last_number_is_compared_by_value(response, truth, expected) -> None:
    assert await score(response, truth, extract="last_number") == expected


async def test_tags_and_own_patterns_take_the_last_match() -> None:
    thinking = "<answer>5</answer> no:\n<answer>\n 6 </answer>"
    assert await score(thinking, "6", extract="answer_tag") == 1
    assert await score(thinking, "5", extract="answer_tag") == 0
    assert await score("6", "6", extract="answer_tag") == 0
    assert await score("a#### 72", "72", extract=r"#### (\d+)") == 1


async def test_partial_credit_is_the_share_of_right_places() -> None:
    assert await reward("abdc", "abcd", partial_credit=True) == {"score": 0.5, "exact": 0.0}
    assert await reward("abcd", "abcd", partial_credit=True) == {"score": 1.0, "exact": 1.0}
    assert await reward("", "abcd", partial_credit=True) == {"score": 0.0, "exact": 0.0}
    assert await reward("abcdefgh", "abcd", partial_credit=True) == {"score": 0.5, "exact": 0.0}


@given(response=st.text("abc", max_size=6), truth=st.text("abc", min_size=1, max_size=6))
async def test_only_the_exact_answer_gets_full_credit(response, truth) -> None:
    verdict = await reward(response, truth, partial_credit=True)
    assert 0 <= verdict["score"] <= 1
    assert (verdict["score"] == 1) == (response == truth) == bool(verdict["exact"])


async def test_a_prompt_without_an_answer_fails_the_rollout() -> None:
    state = RolloutState([], response="46", status=Status.COMPLETED)
    await ExactMatchJudge().judge(state)
    assert state.status is Status.FAILED
    assert "no reward_model['ground_truth']; set columns.answer" in state.error_msg


@pytest.mark.parametrize("extract", ["([", "no group", "(two)(groups)"])
def test_a_bad_pattern_is_refused_at_once(extract) -> None:
    with pytest.raises(ValueError, match="extract = "):
        ExactMatchJudge(extract=extract)


async def test_a_group_is_judged_without_tasks_and_a_judge_made_of_it_may_wait_again() -> None:
    class Waiting(ExactMatchJudge):
        async def score(self, state):
            await asyncio.sleep(0)
            tasks.append(asyncio.current_task())
            return await super().score(state)

    class Noting(ExactMatchJudge):
        waits = False

        async def score(self, state):
            tasks.append(asyncio.current_task())
            return await super().score(state)

    for judge, num_tasks in ((Noting(), 1), (Waiting(), 4)):
        tasks: list[asyncio.Task[None] | None] = []
        group = [
            RolloutState([], response=text, reward_model={"ground_truth": "1"}, status=Status.COMPLETED)
            for text in "1213"
        ]
        await judge.judge(group)
        assert [state.reward for state in group] == [{"score": float(text == "1")} for text in "1213"]
        assert len({id(task) for task in tasks}) == num_tasks
    assert not ExactMatchJudge.waits
    assert Waiting.waits


@pytest.mark.parametrize("method", ["score", "score_group"])
def test_a_subclass_that_waits_for_something_has_a_time_limit_again(method) -> None:
    """The judge itself waits for nothing, and is asked without a clock."""

    async def wait(self, judged):
        await asyncio.sleep(1000.0)

    judge = type("Asking", (ExactMatchJudge,), {method: wait})(timeout_s=5.0)
    states = [RolloutState([], response="46", status=Status.COMPLETED) for _ in range(2)]
    seconds = []

    async def main() -> None:
        start = asyncio.get_running_loop().time()
        await judge.judge(states)
        seconds.append(asyncio.get_running_loop().time() - start)

    run_in_virtual_time(main())
    assert seconds == [5.0], "both wait at the same time"
    assert all("no verdict within 5.0 s" in state.error_msg for state in states)
