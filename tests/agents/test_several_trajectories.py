"""Attempts with several trajectories: how they are named, judged, kept and made again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from forebay.agents import AgentLoop
from forebay.agents.base import split_attempts
from forebay.aio.virtual_time import run
from forebay.engines import RolloutController, ScriptedEngine
from forebay.evaluate import Evaluator
from forebay.judges.base import Judge
from forebay.types import TRAJECTORY_OF_KEY, RolloutState, Status, get_group_status


class Notes(AgentLoop):
    """Answers, and returns as many notes beside as the member's number says."""

    change: Callable[[RolloutState, list[RolloutState]], Any] = staticmethod(lambda state, notes: None)

    async def generate_sample(self, state: RolloutState) -> list[RolloutState]:
        await self.rollout_controller.generate_sample(state)
        notes = []
        for number in range(int(state.rollout_id[-1])):
            note = RolloutState([], prompt_ids=[9, number])
            await self.rollout_controller.generate_sample(note)
            notes.append(note)
        self.change(state, notes)
        return [state, *notes]


class Length(Judge):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    async def score(self, state: RolloutState) -> float:
        self.seen.append(state.rollout_id)
        if state.rollout_id == "g/broken":
            raise KeyError
        return float(state.rollout_id[-1])


def make_loop(change: Callable[..., Any] | None = None) -> Notes:
    loop = Notes(RolloutController(ScriptedEngine(lambda request: [7, 8])), Length())
    if change is not None:
        loop.change = change
    return loop


def make_group() -> list[RolloutState]:
    return [
        RolloutState([], prompt_ids=[5], rollout_id=f"g/{i}", group_id="g", task_name="t", session_id="s")
        for i in range(3)
    ]


def names(group: list[RolloutState]) -> list[Any]:
    return [state.rollout_id for state in group]


WHOLE = ["g/0", "g/1", "g/1/1", "g/2", "g/2/1", "g/2/2"]


def test_further_trajectories_join_the_group_and_have_the_verdict_of_the_first() -> None:
    loop = make_loop()
    group = run(loop.generate_group(make_group()))
    assert names(group) == WHOLE
    assert loop.judge.seen == ["g/0", "g/1", "g/2"]
    assert [state.reward["score"] for state in group] == [0, 1, 1, 2, 2, 2]
    assert {(state.group_id, state.task_name, state.session_id) for state in group} == {("g", "t", "s")}
    assert [state.extra_fields.get(TRAJECTORY_OF_KEY) for state in group] == [*(None, None, "g/1", None, "g/2", "g/2")]
    assert [len(attempt) for attempt in split_attempts(group)] == [1, 2, 3]
    assert group[1].reward is not group[2].reward
    # A finished group is returned as it is.
    assert run(loop.generate_group(group)) == group
    assert len(loop.judge.seen) == 3
    # And an evaluation counts attempts.
    assert Evaluator().evaluate([group])["eval/rollouts"] == 3


def test_a_trajectory_may_bring_its_own_reward() -> None:
    def reward_first(state: RolloutState, notes: list[RolloutState]) -> None:
        if notes:
            notes[0].reward = {"score": 0.5}

    group = run(make_loop(reward_first).generate_group(make_group()))
    assert [state.reward["score"] for state in group] == [0, 1, 0.5, 2, 0.5, 2]


@pytest.mark.parametrize("member", [0, 1, 2])
@pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED])
def test_an_attempt_is_kept_only_whole(member, status) -> None:
    """A trajectory of the third attempt is lost: that attempt is made again, the others are kept."""
    group = run(make_loop().generate_group(make_group()))
    lost = split_attempts(group)[2][member]
    lost.status = status
    kept = group[:3]
    again = run(make_loop().generate_group(group))
    assert names(again) == WHOLE
    assert again[:3] == kept
    assert again[3] is group[3]
    assert get_group_status(again) is Status.COMPLETED
    assert not {*group[4:]} & {*again[4:]}


def test_a_trajectory_that_failed_fails_its_attempt() -> None:
    def fail(state: RolloutState, notes: list[RolloutState]) -> None:
        if len(notes) == 2:
            notes[1].status, notes[1].error_msg = Status.FAILED, "no memory"

    group = run(make_loop(fail).generate_group(make_group()))
    assert [state.status for state in group] == [Status.COMPLETED] * 3 + [Status.FAILED] * 3
    assert {state.error_msg for state in group[3:]} == {"no memory"}


def test_a_judge_that_fails_fails_all_trajectories_of_the_attempt() -> None:
    states = make_group()
    states[1].rollout_id = "g/broken"
    loop = make_loop()
    loop.generate_sample = lambda state: with_one_note(loop, state)
    group = run(loop.generate_group(states))
    assert [state.status for state in group] == [
        *[Status.COMPLETED] * 2,
        *[Status.FAILED] * 2,
        *[Status.COMPLETED] * 2,
    ]


async def returning(loop: Notes, result: Callable[..., Any], state: RolloutState) -> Any:
    await loop.rollout_controller.generate_sample(state)
    return result(state) if state.rollout_id == "g/1" else state


async def with_one_note(loop: Notes, state: RolloutState) -> list[RolloutState]:
    await loop.rollout_controller.generate_sample(state)
    return [state, await loop.rollout_controller.generate_sample(RolloutState([], prompt_ids=[9]))]


def test_what_is_not_an_attempt_is_a_failure() -> None:
    for result, reason in (
        (lambda state: [RolloutState([], rollout_id="x"), state], "must return the given rollout 'g/1' first"),
        (lambda state: [state, RolloutState([])], "left the rollout without a status"),
    ):
        loop = make_loop()
        loop.generate_sample = partial(returning, loop, result)
        group = run(loop.generate_group(make_group()))
        assert names(group) == ["g/0", "g/1", "g/2"]
        assert [state.status for state in group] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
        assert reason in group[1].error_msg
