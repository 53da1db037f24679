import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import ConfigError
from forebay.evaluate import Evaluator
from forebay.judges import ComposedJudge, FunctionJudge, GroupJudge, Judge, JudgeConfig, Part, build_judge
from forebay.produce.results import TaskResult, summarize
from forebay.train import TrainBatch
from forebay.types import RolloutState, Status


class Given(Judge):
    """Scores with what the rollout carries under `key`; fails where it carries nothing."""

    def __init__(self, key: str = "a", *, timeout_s: float | None = None) -> None:
        super().__init__(timeout_s=timeout_s)
        self.key = key
        self.closed = 0

    async def score(self, state: RolloutState) -> dict[str, object]:
        return {"score": state.extra_fields[self.key], "note": self.key}

    def close(self) -> None:
        self.closed += 1


class Rank(GroupJudge):
    def __init__(self, *, timeout_s: float | None = None) -> None:
        super().__init__(timeout_s=timeout_s)
        self.sizes: list[int] = []

    async def score_group(self, states):
        self.sizes.append(len(states))
        order = sorted(states, key=lambda state: state.extra_fields["a"])
        return [float(order.index(state)) for state in states]


def rollout(source: str = "x", **scores: float) -> RolloutState:
    return RolloutState([], data_source=source, extra_fields=scores, status=Status.COMPLETED)


scores = st.floats(-10, 10)
parts = st.lists(
    st.tuples(st.floats(-2, 2), st.none() | st.sets(st.sampled_from("xyz"), min_size=1)), min_size=1, max_size=4
)


@given(parts=parts, rollouts=st.lists(st.tuples(st.sampled_from("xyz"), scores, st.booleans()), max_size=4))
async def test_the_score_is_the_weighted_sum_of_the_parts_that_apply(parts, rollouts) -> None:
    judge = ComposedJudge(
        [
            Part(label=f"p{at}", judge=Given(f"k{at}"), weight=weight, only=only and tuple(only))
            for at, (weight, only) in enumerate(parts)
        ]
    )
    group = [
        rollout(source, **({} if fails else {f"k{at}": score + at for at in range(len(parts))}))
        for source, score, fails in rollouts
    ]
    await judge.judge(group)
    for state, (source, score, fails) in zip(group, rollouts, strict=True):
        applying = {at: weight for at, (weight, only) in enumerate(parts) if not only or source in only}
        if fails or not applying:
            assert (state.status, state.reward) == (Status.FAILED, None)
            continue
        expected = sum(weight * (score + at) for at, weight in applying.items())
        assert state.reward["score"] == pytest.approx(expected)
        assert {at: state.reward.get(f"p{at}") for at in applying} == {at: score + at for at in applying}
        assert state.reward.keys() == {"score"} | {name for at in applying for name in (f"p{at}", f"p{at}/note")}


async def test_one_part_that_fails_names_itself_and_fails_only_its_rollout() -> None:
    judge = ComposedJudge([Part(label="one", judge=Given("a")), Part(label="two", judge=Given("b"))])
    group = await judge.judge([rollout(a=1.0, b=2.0), rollout(a=1.0)])
    assert [state.status for state in group] == [Status.COMPLETED, Status.FAILED]
    assert group[0].reward["score"] == 3.0
    assert group[1].error_msg == "rollout None: judge one + two: part two: KeyError: 'b'"


async def test_a_part_that_judges_groups_gets_its_share_of_the_group() -> None:
    rank = Rank()
    judge = ComposedJudge(
        [Part(label="rank", judge=rank, only=("x",)), Part(label="value", judge=Given("a"), weight=0.0)]
    )
    assert judge.needs_whole_group
    group = await judge.judge([rollout(a=5.0), rollout("y", a=9.0), rollout(a=3.0)])
    assert rank.sizes == [2]
    assert [state.reward["score"] for state in group] == [1.0, 0.0, 0.0]
    assert group[1].reward == {"score": 0.0, "value": 9.0, "value/note": "a"}


class Turns(Judge):
    """Pays `paid` for the first two tokens, and `rest` at the end."""

    def __init__(self, paid: float, rest: float) -> None:
        super().__init__()
        self.paid, self.rest = paid, rest

    async def score(self, state: RolloutState) -> dict[str, object]:
        return {"score": self.paid + self.rest, "turn_rewards": [[2, self.paid]]}


async def test_rewards_by_turn_are_summed_with_the_weights_where_they_were_earned() -> None:
    judge = ComposedJudge(
        [
            Part(label="steps", judge=Turns(1.0, 0.5), weight=0.5),
            Part(label="more", judge=Turns(4.0, 0.0), weight=0.25),
            Part(label="answer", judge=Given("a")),
        ]
    )
    state = rollout(a=3.0)
    state.prompt_ids, state.response_ids = [1], [5, 6, 7, 8]
    await judge.judge(state)
    assert state.reward["score"] == 4.75
    assert [tuple(pair) for pair in state.reward["turn_rewards"]] == [(2, 0.5), (2, 1.0)]
    # Half of it is earned after two tokens, and the rest, with the answer, at the end.
    assert TrainBatch.from_groups([[state]]).token_rewards.tolist() == [0, 1.5, 0, 3.25]
    # Without a part that pays by turn there is none: those that an environment noted would not count.
    assert "turn_rewards" not in await ComposedJudge([Part(label="p", judge=Given("a"))]).score(rollout(a=1.0))


@pytest.mark.parametrize(
    "part",
    [Turns(float("nan"), 0.0), FunctionJudge(lambda state: {"score": 1.0, "turn_rewards": [[2, float("nan")]]})],
)
async def test_a_reward_by_turn_that_is_not_finite_fails_the_rollout(part) -> None:
    for judge in (part, ComposedJudge([Part(label="part", judge=part)])):
        state = await judge.judge(rollout())
        assert state.status is Status.FAILED
        assert state.reward is None
        assert "must be finite" in state.error_msg


async def test_the_choice_may_go_by_any_field() -> None:
    part = Part(label="p", judge=Given("a"), only=("math",))
    for by, fields in {
        "task_name": {"task_name": "math"},
        "reward_model.style": {"reward_model": {"style": "math"}},
        "data_source.name": {"data_source": {"name": "math"}},
    }.items():
        state = RolloutState([], extra_fields={"a": 1.0}, status=Status.COMPLETED, **fields)
        assert (await ComposedJudge([part], by=by).judge(state)).reward["score"] == 1.0
        other = RolloutState([], extra_fields={"a": 1.0}, status=Status.COMPLETED)
        await ComposedJudge([part], by=by).judge(other)
        assert f"no part judges rollouts whose {by} is None" in other.error_msg


async def test_a_single_rollout_is_judged_and_closing_closes_the_parts() -> None:
    given_ = Given("a")
    judge = ComposedJudge([Part(label="p", judge=given_, weight=2.0)])
    assert (await judge.score(rollout(a=1.5)))["score"] == 3.0
    await judge.aclose()
    assert given_.closed == 1


async def test_a_run_file_composes_by_tables() -> None:
    judge = build_judge(
        JudgeConfig(
            name="composed",
            timeout_s=7.0,
            arguments={
                "by": "task_name",
                "parts": [
                    {"name": "exact_match", "arguments": {"extract": "last_number"}, "only": "sums"},
                    {"name": f"{__name__}:Given", "label": "extra", "weight": 0.5, "timeout_s": 2},
                ],
            },
        )
    )
    assert [(part.label, part.judge.timeout_s) for part in judge.parts] == [("exact_match", 7.0), ("extra", 2.0)]
    state = RolloutState(
        [],
        response="so 4",
        task_name="sums",
        reward_model={"ground_truth": "4"},
        extra_fields={"a": 3.0},
        status=Status.COMPLETED,
    )
    await judge.judge(state)
    assert state.reward == {"score": 2.5, "exact_match": 1.0, "extra": 3.0, "extra/note": "a"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": []}, "'parts' = \\[\\]: .*at least 1 item"),
        ({"parts": [{"name": "exact_mach"}]}, "did you mean 'exact_match'"),
        ({"parts": [{"name": "exact_match", "wait": 1}]}, "unknown key 'parts.0.wait'; did you mean 'weight'"),
        ({"parts": [{"name": "exact_match"}] * 2}, r"two parts are called \['exact_match'\]"),
        ({"parts": [{"name": "exact_match", "label": "score"}]}, "may not be called 'score'"),
        ({"parts": [{"name": "exact_match"}], "by": "source"}, "by = 'source' is not a field"),
        ({"part": []}, "did you mean 'parts'.* its arguments: parts, by"),
    ],
)
def test_parts_that_do_not_fit_are_one_clear_error(arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_judge(JudgeConfig(name="composed", arguments=arguments))


async def test_cancelling_reaches_the_parts() -> None:
    ends = []

    class Slow(Judge):
        async def score(self, state: RolloutState) -> float:
            try:
                await asyncio.Event().wait()
            finally:
                ends.append(1)
            return 1.0

    judge = ComposedJudge([Part(label=name, judge=Slow()) for name in "ab"])
    judging = asyncio.create_task(judge.judge([rollout(), rollout()]))
    for _ in range(5):
        await asyncio.sleep(0)
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    assert len(ends) == 4


async def test_parts_and_other_numbers_are_means_in_the_metrics_of_each_task():
    judge = ComposedJudge(
        [
            Part(label="answer", judge=FunctionJudge(lambda state: {"score": 1.0, "steps": 4, "why": "ok"})),
            Part(label="short", judge=FunctionJudge(lambda state: 0.5), weight=0.0, only=("b",)),
        ],
        by="task_name",
    )
    groups = {
        name: [await judge.judge([RolloutState([], task_name=name, status=Status.COMPLETED)])] for name in ("a", "b")
    }
    results = {name: TaskResult(rollout_states=part) for name, part in groups.items()}
    values = summarize(results, {}).metrics()
    values |= Evaluator().evaluate([*groups["a"], *groups["b"]])
    found = {name: value for name, value in values.items() if "judge/" in name}
    assert found == {
        f"{prefix}/{scope}judge/{key}": value
        for prefix in ("produce", "eval")
        for scope, keys in (
            ("", {"answer": 1.0, "answer/steps": 4.0, "short": 0.5}),
            ("a/", {"answer": 1.0, "answer/steps": 4.0}),
            ("b/", {"answer": 1.0, "answer/steps": 4.0, "short": 0.5}),
        )
        for key, value in keys.items()
    }
