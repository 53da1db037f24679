"""What every agent loop does around `generate_sample`: stages, failures of one rollout, judging once."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from forebay.agents import AgentLoop
from forebay.agents.build import with_max_context
from forebay.aio.virtual_time import run
from forebay.config import Component
from forebay.engines import RolloutController, ScriptedEngine
from forebay.judges.base import Judge
from forebay.types import RolloutState, SampleParams, Status
from forebay.watching.activity import JUDGE, Activities, Activity
from forebay.watching.stalls import StallError, StallWatch


class Plain(AgentLoop):
    """As little as a user has to write."""

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        return await self.rollout_controller.generate_sample(state)


class OwnConstructor(AgentLoop):
    """Takes its arguments itself."""

    def __init__(self, rollout_controller, judge, tokenizer, *, max_context: int | None = None, **given) -> None:
        super().__init__(rollout_controller, judge, tokenizer, **given)
        self.max_context = max_context


class Score(Judge):
    """Scores by member number, after a second; members may hang or raise."""

    def __init__(self, *, hanging: tuple[int, ...] = (), raising: tuple[int, ...] = ()) -> None:
        super().__init__(timeout_s=30)
        self.hanging, self.raising, self.seen = hanging, raising, []

    async def score(self, state: RolloutState) -> float:
        member = int(state.rollout_id[-1])
        self.seen.append(member)
        await asyncio.sleep(math.inf if member in self.hanging else 1)
        if member in self.raising:
            raise KeyError("no ground truth")
        return float(member)


class Log:
    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, float, float, str]] = []

    def began(self, activity: Activity) -> None:
        pass

    def ended(self, a: Activity) -> None:
        assert (a.task, a.group) == ("math", "math/0")
        self.spans.append((a.stage, a.name, a.start_s, a.end_s, a.note))


def make_group(size: int = 4) -> list[RolloutState]:
    params = SampleParams(max_tokens=8)
    return [
        RolloutState(
            [], prompt_ids=[5], rollout_id=f"math/0/{i}", group_id="math/0", task_name="math", sample_params=params
        )
        for i in range(size)
    ]


def controller(**arguments: Any) -> RolloutController:
    """Member i makes i + 1 tokens, one a second."""
    limit = arguments.pop("time_limit_s", None)
    engine = ScriptedEngine(
        lambda request: range(int(request.request_id.partition(":")[0][-1]) + 1), token_latency_s=1.0, **arguments
    )
    return RolloutController(engine, time_limit_s=limit)


def test_stages_are_marked_without_the_users_help() -> None:
    async def main() -> None:
        activities, log = Activities(), Log()
        activities.listen(log.began, log.ended)
        group = await Plain(controller(), Score(), activities=activities).generate_group(make_group(2))
        assert [state.reward for state in group] == [{"score": 0.0}, {"score": 1.0}]
        assert log.spans == [
            ("generate", "math/0/0", 0.0, 1.0, "completed, 1 tokens"),
            ("generate", "math/0/1", 0.0, 2.0, "completed, 2 tokens"),
            ("judge", "math/0", 2.0, 3.0, ""),
        ]

    run(main())


def test_tokens_of_tools_are_none_that_were_generated() -> None:
    class WithTool(Plain):
        async def generate_sample(self, state: RolloutState) -> RolloutState:
            await super().generate_sample(state)
            state.append([7, 7, 7], mask=0)
            return state

    async def main() -> None:
        activities, log = Activities(), Log()
        activities.listen(log.began, log.ended)
        await WithTool(controller(), activities=activities).generate_group(make_group(1))
        assert [span[-1] for span in log.spans] == ["completed, 1 tokens"]

    run(main())


class Picky(Plain):
    """Does with member 1 what it is told."""

    def __init__(self, act: Callable[[RolloutState], Any], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.act = act

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        await super().generate_sample(state)
        return self.act(state) if state.rollout_id == "math/0/1" else state


def raise_error(state: RolloutState) -> RolloutState:
    raise ValueError("the game is over")


def cancel_itself(state: RolloutState) -> RolloutState:
    raise asyncio.CancelledError


def call_exit(state: RolloutState) -> RolloutState:
    sys.exit(3)


def forget_status(state: RolloutState) -> RolloutState:
    state.status = Status.INIT
    return state


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (raise_error, "rollout math/0/1: Picky: ValueError: the game is over"),
        (cancel_itself, "rollout math/0/1: Picky: CancelledError: "),
        (call_exit, "rollout math/0/1: Picky: SystemExit: 3"),
        (forget_status, "rollout math/0/1: Picky: RuntimeError: generate_sample left the rollout without a status"),
    ],
)
def test_an_agent_that_raises_fails_its_rollout_and_no_sibling(act, reason) -> None:
    group = run(Picky(act, controller(), Score()).generate_group(make_group()))
    statuses = [Status.COMPLETED, Status.FAILED, Status.COMPLETED, Status.COMPLETED]
    assert [state.status for state in group] == statuses
    assert [state.reward and state.reward["score"] for state in group] == [0.0, None, 2.0, 3.0]
    assert group[1].error_msg == reason


def test_an_agent_may_return_another_state_or_nothing() -> None:
    def another(state: RolloutState) -> RolloutState:
        return RolloutState([], rollout_id="other/1", response_ids=[1], status=Status.COMPLETED)

    group = run(Picky(another, controller(), Score()).generate_group(make_group(2)))
    assert [(state.rollout_id, state.reward) for state in group] == [
        ("math/0/0", {"score": 0.0}),
        ("other/1", {"score": 1.0}),
    ]
    group = run(Picky(lambda state: None, controller(), Score()).generate_group(make_group(2)))
    assert [state.reward for state in group] == [{"score": 0.0}, {"score": 1.0}]


def test_a_judge_that_hangs_or_raises_fails_its_rollout_and_no_sibling() -> None:
    group = run(Plain(controller(), Score(hanging=(1,), raising=(2,))).generate_group(make_group()))
    assert [state.reward and state.reward["score"] for state in group] == [0.0, None, None, 3.0]
    assert [state.error_msg for state in group] == [
        None,
        "rollout math/0/1: judge Score: no verdict within 30 s",
        "rollout math/0/2: judge Score: KeyError: 'no ground truth'",
        None,
    ]


def test_a_judge_of_ones_own_that_raises_fails_those_without_a_verdict() -> None:
    class Own:
        async def judge(self, target: list[RolloutState]) -> list[RolloutState]:
            target[0].reward = {"score": 1.0}
            raise ConnectionError("the judge's server is gone")

    async def main() -> tuple[list[RolloutState], set[str]]:
        loop, notes = Plain(controller(), Own()), set[str]()
        loop.activities.listen(lambda _: None, lambda ended: notes.add(ended.note) if ended.stage == JUDGE else None)
        return await loop.generate_group(make_group(2)), notes

    group, notes = run(main())
    assert [state.status for state in group] == [Status.COMPLETED, Status.FAILED]
    assert group[1].error_msg == "rollout math/0/1: judge Own: ConnectionError: the judge's server is gone"
    assert notes == {group[1].error_msg}


def test_an_engines_error_names_the_rollout() -> None:
    def script(request: Any) -> Any:
        return RuntimeError("out of memory") if "/1:" in request.request_id else [1]

    group = run(Plain(RolloutController(ScriptedEngine(script)), Score()).generate_group(make_group(2)))
    assert [state.status for state in group] == [Status.COMPLETED, Status.FAILED]
    assert group[1].error_msg == "rollout math/0/1: RuntimeError: out of memory"


def test_a_straggler_is_cut_at_the_time_limit_and_continued_and_nobody_is_judged_twice() -> None:
    async def main() -> None:
        judge = Score()
        agent_loop = Plain(controller(time_limit_s=2.5), judge)
        group = await agent_loop.generate_group(make_group(4))
        assert [state.status for state in group] == [Status.COMPLETED] * 2 + [Status.ABORTED] * 2
        assert group[3].error_msg == "rollout math/0/3: aborted after its time limit of 2.5 s"
        assert [len(state.response_ids) for state in group] == [1, 2, 2, 2]
        first = group[0].reward
        group = await agent_loop.generate_group(group, enable_partial_rollout=True)
        assert [len(state.response_ids) for state in group][:2] == [1, 2]
        assert group[0].reward is first
        assert sorted(judge.seen)[:2] == [0, 1]
        assert len(judge.seen) == len(set(judge.seen))

    run(main())


def test_time_in_the_queue_does_not_count_for_the_time_limit() -> None:
    group = run(Plain(controller(time_limit_s=4.5, max_running=1)).generate_group(make_group(4)))
    assert [len(state.response_ids) for state in group] == [1, 2, 3, 4]
    assert {state.status for state in group} == {Status.COMPLETED}


def test_cancelling_a_group_ends_all_of_it() -> None:
    async def main() -> None:
        activities = Activities()
        agent_loop = Plain(controller(), Score(hanging=(0,)), activities=activities)
        for after_s in (0.0, 0.5, 4.5):
            task = asyncio.create_task(agent_loop.generate_group(make_group()))
            await asyncio.sleep(after_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert activities.in_flight() == []
            assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_a_stalled_engine_is_reported_with_rollout_stage_age_and_tokens() -> None:
    async def main() -> str:
        activities = Activities()
        engine = ScriptedEngine(lambda request: range(8), token_latency_s=100.0)
        rollouts = RolloutController(engine)
        watch = StallWatch(activities, warn_after_s=60, fail_after_s=250, describe=rollouts.describe)
        with pytest.raises(StallError) as caught:
            async with watch.guard():
                await Plain(rollouts, activities=activities).generate_group(make_group(2))
        return str(caught.value)

    assert run(main()) == (
        "no progress for 250 s; 2 in flight: rollout math/0/0 generating for 250 s (2 tokens), "
        "rollout math/0/1 generating for 250 s (2 tokens)"
    )


def test_an_agent_with_a_constructor_of_its_own_is_told_the_context_if_it_asks_for_it() -> None:
    own, plain = (Component(name=f"{__name__}:{kind.__name__}") for kind in (OwnConstructor, Plain))
    assert with_max_context(own, 40, packed=99).arguments == {"max_context": 40}
    assert with_max_context(plain, 40, packed=99) == plain
