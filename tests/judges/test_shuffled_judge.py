import asyncio

from hypothesis import given
from hypothesis import strategies as st

from forebay.judges import ComposedJudge, FunctionJudge, Judge, Part, ShuffledJudge
from forebay.types import RolloutState, Status


class Number(Judge):
    async def score(self, state: RolloutState) -> float:
        return float(state.response)


def group_of(scores: list[int], group_id: str) -> list[RolloutState]:
    return [RolloutState([], response=str(score), group_id=group_id, status=Status.COMPLETED) for score in scores]


async def shuffled_scores(scores: list[int], *, seed: int = 0, group_id: str = "g") -> list[float]:
    group = await ShuffledJudge(Number(), seed=seed).judge(group_of(scores, group_id))
    return [state.reward["score"] for state in group]


@given(scores=st.lists(st.integers(0, 3), max_size=8), seed=st.integers(0, 5), name=st.text(max_size=3))
async def test_the_rewards_of_a_group_stay_the_same_as_a_whole(scores, seed, name) -> None:
    first = await shuffled_scores(scores, seed=seed, group_id=name)
    assert sorted(first) == sorted(scores)
    assert await shuffled_scores(scores, seed=seed, group_id=name) == first


async def test_seed_and_group_each_change_the_permutation() -> None:
    scores = list(range(8))
    orders = await asyncio.gather(
        shuffled_scores(scores), shuffled_scores(scores, seed=1), shuffled_scores(scores, group_id="h")
    )
    assert len({tuple(order) for order in orders}) == 3


async def test_the_reward_says_nothing_about_the_response() -> None:
    num_groups, at_right_place = 2000, 0
    for number in range(num_groups):
        at_right_place += (await shuffled_scores([1, 0, 0, 0], group_id=str(number)))[0] == 1
    # By chance a quarter stays: 500 +- 19.4; the groups are fixed.
    assert 440 < at_right_place < 560


async def test_failures_stay_where_they_are_and_single_rollouts_pass() -> None:
    group = group_of([1, 2, 3], "g")
    group[1].response = "no number"
    await ShuffledJudge(Number(), seed=0).judge(group)
    assert [state.status for state in group] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert group[1].reward is None
    assert "judge shuffled Number" in group[1].error_msg
    single = group_of([5], "g")[0]
    judge = ShuffledJudge(FunctionJudge(lambda state: 5.0, name="five"), seed=0)
    await judge.judge(single)
    assert single.reward == {"score": 5.0}
    assert judge.name == "shuffled five"


async def test_as_a_part_of_another_judge_it_permutes_as_it_does_alone() -> None:
    scores = list(range(8))
    shuffled = ShuffledJudge(Number(), seed=0)
    parts = [Part(label="true", judge=Number(), weight=0.0), Part(label="shuffled", judge=shuffled)]
    group = await ComposedJudge(parts).judge(group_of(scores, "g"))
    assert [state.reward["true"] for state in group] == scores
    found = [state.reward["score"] for state in group]
    assert found == await shuffled_scores(scores) != scores
