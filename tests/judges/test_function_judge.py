import asyncio
import functools
import sys
import threading

import pytest

from forebay.judges import FunctionJudge
from forebay.judges.base import mean_parts
from forebay.types import RolloutState, Status


def completed(response: str = "abc") -> RolloutState:
    return RolloutState([], response=response, status=Status.COMPLETED)


def length(state: RolloutState) -> float:
    return len(state.response)


def explained(state: RolloutState) -> dict[str, object]:
    return {"score": 1, "why": state.response}


async def async_length(state: RolloutState) -> float:
    await asyncio.sleep(0)
    return len(state.response)


class AsyncCallable:
    async def __call__(self, state: RolloutState) -> float:
        return len(state.response)


def scaled_length(state: RolloutState, *, factor: float) -> float:
    return factor * len(state.response)


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (length, {"score": 3.0}),
        (explained, {"score": 1.0, "why": "abc"}),
        (async_length, {"score": 3.0}),
        (AsyncCallable(), {"score": 3.0}),
        (functools.partial(scaled_length, factor=2), {"score": 6.0}),
    ],
)
async def test_functions_of_every_kind_give_the_reward(function, reward) -> None:
    state = completed()
    await FunctionJudge(function).judge(state)
    assert (state.reward, state.status) == (reward, Status.COMPLETED)


async def test_a_plain_function_runs_off_the_event_loop() -> None:
    threads = []

    def note_thread(state: RolloutState) -> float:
        threads.append(threading.current_thread())
        return 0.0

    await FunctionJudge(note_thread).judge(completed())
    assert threads[0] is not threading.current_thread()


def picky(state: RolloutState) -> float:
    if state.response == "bad":
        raise KeyError("no such thing")
    if state.response == "exit":
        sys.exit(3)
    return 1.0


async def async_picky(state: RolloutState) -> float:
    return picky(state)


@pytest.mark.parametrize("function", [picky, async_picky])
async def test_a_raising_judge_fails_its_rollout_and_no_other(function) -> None:
    group = [completed("good"), completed("bad"), completed("good")]
    await FunctionJudge(function).judge(group)
    assert [state.status for state in group] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert group[1].reward is None
    assert group[1].error_msg == f"rollout None: judge {function.__name__}: KeyError: 'no such thing'"
    assert group[0].reward == {"score": 1.0}


@pytest.mark.parametrize("function", [picky, async_picky])
async def test_a_judge_that_exits_fails_its_rollout_and_not_the_run(function) -> None:
    group = [completed("exit"), completed("good")]
    await FunctionJudge(function).judge(group)
    assert [state.status for state in group] == [Status.FAILED, Status.COMPLETED]
    assert "SystemExit" in group[0].error_msg


@pytest.mark.parametrize("verdict", [float("nan"), "much", "0.5", b"1", {"score": "1"}, {"scores": 1}, None])
async def test_a_verdict_that_is_no_finite_score_fails_the_rollout(verdict) -> None:
    state = completed()
    await FunctionJudge(lambda state: verdict).judge(state)
    assert state.status is Status.FAILED
    assert state.reward is None


async def test_a_function_that_overruns_is_left_behind_and_those_that_waited_have_their_full_time() -> None:
    release = threading.Event()

    def hang_on_bad(state: RolloutState) -> float:
        if state.response == "bad":
            release.wait()
        return 1.0

    group = [completed("bad"), completed("good")]
    await FunctionJudge(hang_on_bad, timeout_s=0.5, num_threads=1).judge(group)
    assert [state.status for state in group] == [Status.FAILED, Status.COMPLETED]
    assert "no verdict within 0.5 s; its thread cannot be stopped" in group[0].error_msg
    release.set()


async def test_an_async_function_that_overruns_is_cancelled() -> None:
    ends = []

    async def hang(state: RolloutState) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")
        return 1.0

    state = completed()
    await FunctionJudge(hang, timeout_s=0.01).judge(state)
    assert (state.status, ends) == (Status.FAILED, ["cancelled"])
    assert "no verdict within 0.01 s" in state.error_msg


async def test_at_most_num_threads_calls_run_at_once() -> None:
    lock = threading.Lock()
    running = 0
    most = 0
    everyone_in = threading.Barrier(2)

    def count(state: RolloutState) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        everyone_in.wait()
        with lock:
            running -= 1
        return 0.0

    await FunctionJudge(count, num_threads=2).judge([completed() for _ in range(8)])
    assert most == 2


def test_numbers_beside_the_score_that_no_float_holds_are_left_out_of_their_mean() -> None:
    parts = [{"score": 1.0, "size": size} for size in (10**400, 3, float("inf"), 5)]
    assert mean_parts(parts) == {"judge/size": 4.0}
    assert mean_parts(parts[:1]) == {}
