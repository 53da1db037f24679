import asyncio

import pytest

from forebay.judges import (
    FunctionJudge,
    GroupJudge,
    Judge,
    JudgeConfig,
    ShuffledJudge,
    TransientJudgeError,
    build_judge,
    judges_group,
)
from forebay.types import RolloutState, Status


def completed(response: str) -> RolloutState:
    return RolloutState([], response=response, status=Status.COMPLETED)


class Share(GroupJudge):
    """The rollout's share of the group's letters; an exception for an empty response."""

    async def score_group(self, states):
        total = sum(len(state.response) for state in states)
        return [len(state.response) / total if state.response else LookupError("it is empty") for state in states]


@judges_group
def share(states):
    return [len(state.response) / sum(len(other.response) for other in states) for state in states]


@judges_group
async def async_share(states):
    await asyncio.sleep(0)
    return share(states)


@pytest.mark.parametrize("make", [Share, lambda: FunctionJudge(share), lambda: FunctionJudge(async_share)])
async def test_the_completed_members_are_judged_together(make) -> None:
    group = [completed("abc"), completed("b"), RolloutState([], status=Status.ABORTED)]
    judge = make()
    assert judge.needs_whole_group
    await judge.judge(group)
    assert [state.reward for state in group] == [{"score": 0.75}, {"score": 0.25}, None]
    assert group[2].status is Status.ABORTED
    single = await judge.judge(completed("abc"))
    assert single.reward == {"score": 1.0}


async def test_a_member_without_a_verdict_fails_alone() -> None:
    group = await Share().judge([completed("abc"), completed("")])
    assert group[0].reward == {"score": 1.0}
    assert group[1].error_msg == "rollout None: judge Share: LookupError: it is empty"
    alone = await Share().judge(completed(""))
    assert alone.status is Status.FAILED


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda states: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda states: [1.0], "1 verdicts for the 2 rollouts of the group"),
    ],
)
async def test_a_judge_that_fails_fails_the_whole_group(function, reason) -> None:
    group = await FunctionJudge(judges_group(function), name="f").judge([completed("a"), completed("b")])
    assert [state.status for state in group] == [Status.FAILED] * 2
    assert [state.error_msg for state in group] == [f"rollout None: judge f: {reason}"] * 2


async def test_time_outs_are_for_the_group() -> None:
    @judges_group
    async def hang(states):
        await asyncio.Event().wait()

    group = await FunctionJudge(hang, timeout_s=0.01).judge([completed("a"), completed("b")])
    assert all("no verdict within 0.01 s" in state.error_msg for state in group)


async def test_what_a_judge_says_of_its_own_cancellation_is_no_verdict() -> None:
    async def zero(state: RolloutState) -> float:
        try:
            await asyncio.Event().wait()
        except BaseException:  # as a bare except
            return 0.0
        return 1.0

    state = await FunctionJudge(zero, timeout_s=0.01).judge(completed("a"))
    assert (state.status, state.reward) == (Status.FAILED, None)
    assert "no verdict within 0.01 s" in state.error_msg


async def test_a_group_function_of_a_run_file_gets_its_arguments() -> None:
    judge = build_judge(JudgeConfig(name=f"{__name__}:share"))
    group = await judge.judge([completed("a"), completed("b")])
    assert [state.reward for state in group] == [{"score": 0.5}] * 2
    assert ShuffledJudge(judge, seed=0).needs_whole_group
    assert not build_judge(JudgeConfig(name="exact_match")).needs_whole_group


# Retries, for all judges alike


class Flaky(Judge):
    def __init__(self, failures: int, **options) -> None:
        super().__init__(**options)
        self.failures = failures

    async def score(self, state: RolloutState) -> float:
        self.failures -= 1
        if self.failures >= 0:
            raise TransientJudgeError("not now", after_s=0.0)
        return 1.0


async def test_transient_failures_are_tried_again_and_then_fail_the_rollout() -> None:
    assert (await Flaky(3, max_retries=3).judge(completed(""))).reward == {"score": 1.0}
    state = await Flaky(4, max_retries=3).judge(completed(""))
    assert state.status is Status.FAILED
    assert state.error_msg.endswith("judge Flaky: not now (tried 4 times)")
    with pytest.raises(ValueError, match="max_retries must not be negative"):
        Flaky(0, max_retries=-1)


async def test_the_time_for_a_rollout_includes_its_retries() -> None:
    async def busy(state: RolloutState) -> float:
        raise TransientJudgeError("busy", after_s=1000.0)

    state = await FunctionJudge(busy, timeout_s=0.01).judge(completed(""))
    assert "no verdict within 0.01 s" in state.error_msg


async def test_plain_functions_may_ask_to_be_called_again() -> None:
    calls = []

    def flaky(state: RolloutState) -> float:
        calls.append(state)
        if len(calls) < 3:
            raise TransientJudgeError("again", after_s=0.0)
        return 0.5

    assert (await FunctionJudge(flaky).judge(completed(""))).reward == {"score": 0.5}
    assert len(calls) == 3
