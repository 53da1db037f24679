"""The judges that run in child processes, and those processes."""

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from forebay.config import ConfigError
from forebay.extras import require_library
from forebay.judges import MathVerifyJudge, ReasoningGymJudge, libraries
from forebay.judges.libraries import JudgeProcessError, JudgeProcesses
from forebay.produce.prompts.dataset import DataConfig, load_prompts
from forebay.types import RolloutState, Status

pytestmark = pytest.mark.usefixtures("warm")


def completed(response: str, reward_model) -> RolloutState:
    return RolloutState([], response=response, reward_model=reward_model, status=Status.COMPLETED)


# The child processes


def make_commander():
    """A scorer that does what it is told, in place of what a response may provoke in a library."""

    def score(command: str):
        if command.startswith("hang"):
            if began := command.removeprefix("hang"):
                Path(began).write_text("began")
            # One call into C that keeps the interpreter lock: no thread of this process runs beside it.
            return len(str(9 ** (9**9)))
        if command == "exit":
            sys.exit("told to")
        if command == "die":
            os._exit(3)
        if command == "input":
            return input()
        if command == "print":
            print('{"verdict": "forged"}')
        if command == "memory":
            return len(bytearray(1 << 40))
        if command == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if command == "raise":
            raise LookupError("nothing there")
        return os.getpid()

    return score


@pytest.fixture
def commander():
    processes = JudgeProcesses(f"{__name__}:make_commander", timeout_s=1.0, num_processes=1)
    yield processes
    processes.close()


async def test_a_call_that_never_lets_go_of_the_interpreter_is_ended_and_judging_goes_on(commander) -> None:
    first_pid = await commander.run("pid")
    with pytest.raises(JudgeProcessError, match=r"no verdict within 1\.0 s; its process was ended"):
        await commander.run("hang")
    second_pid = await commander.run("pid")
    assert second_pid not in (first_pid, os.getpid())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("exit", "SystemExit: told to"),
        ("raise", "LookupError: nothing there"),
        ("memory", "MemoryError"),
        ("input", "EOFError"),
        ("die", "its process ended with code 3"),
    ],
)
async def test_whatever_a_call_does_is_its_own_error(commander, command, message) -> None:
    with pytest.raises(JudgeProcessError, match=message):
        await commander.run(command)
    assert isinstance(await commander.run("pid"), int)


async def test_a_frozen_child_is_ended_and_judging_goes_on(monkeypatch, commander) -> None:
    await commander.run("pid")
    monkeypatch.setattr(libraries, "START_LIMIT_S", 0.1)
    with pytest.raises(JudgeProcessError, match="its process was stopped"):
        await commander.run("stop")
    monkeypatch.undo()
    assert isinstance(await commander.run("pid"), int)


def test_a_child_that_is_started_while_all_are_ended_ends_too(monkeypatch) -> None:
    children = libraries._Children(f"{__name__}:make_commander", None, 1)
    children.end()
    with pytest.raises(JudgeProcessError, match=r"code -9"):
        children.ask('["hang"]')


async def test_printing_does_not_disturb_the_replies(commander) -> None:
    assert await commander.run("print") == await commander.run("pid")


def test_children_serve_one_event_loop_after_another(commander) -> None:
    assert asyncio.run(commander.run("pid")) == asyncio.run(commander.run("pid"))


async def test_a_cancelled_call_leaves_the_child_usable(commander) -> None:
    pid = await commander.run("pid")
    calls = [asyncio.create_task(commander.run("pid")) for _ in range(5)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert await commander.run("pid") == pid


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_children_end_on_close_and_when_nobody_needs_them() -> None:
    for end in ("close", "forget"):
        processes = JudgeProcesses(f"{__name__}:make_commander", timeout_s=5.0)
        pid = await processes.run("pid")
        assert is_running(pid)
        if end == "close":
            processes.close()
        del processes
        gc.collect()
        assert not is_running(pid)


async def test_close_ends_what_is_being_judged(tmp_path) -> None:
    processes = JudgeProcesses(f"{__name__}:make_commander", timeout_s=None, num_processes=1)
    # Opening a named pipe waits for the other side, so this goes on once the call is under way.
    began = tmp_path / "began"
    os.mkfifo(began)
    hanging = asyncio.create_task(processes.run(f"hang{began}"))
    await asyncio.to_thread(began.read_text)
    await asyncio.to_thread(processes.close)
    with pytest.raises(JudgeProcessError, match="ended with code -9"):
        await hanging


def test_a_missing_library_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"judge 'x' needs no_such_lib, .* pip install 'foreb"):
        require_library("no_such_lib", "judge 'x'")


# math-verify


@pytest.fixture(scope="module")
def math_judge():
    judge = MathVerifyJudge(timeout_s=20.0, num_processes=1)
    yield judge
    judge.close()


@pytest.mark.parametrize(
    ("truth", "response", "expected"),
    [
        ("1/2", r"so it is \boxed{0.5}", 1),
        (r"\frac{1}{2}", "0.5", 1),
        (r"$\frac{1}{2}$", r"$\frac{2}{4}$", 1),
        ("x^2+1", r"\boxed{1+x^2}", 1),
        ("46", "12 + 34 = 46", 1),
        ("46", r"\boxed{47}", 0),
        ("46", "I do not know", 0),
        ("46", "", 0),
    ],
)
async def test_equal_expressions_are_one_answer(math_judge, truth, response, expected) -> None:
    state = await math_judge.judge(completed(response, {"ground_truth": truth}))
    assert state.reward == {"score": expected}, state.error_msg


async def test_an_unreadable_truth_is_a_failure_and_not_a_zero(math_judge) -> None:
    state = await math_judge.judge(completed("46", {"ground_truth": "$ $"}))
    assert state.status is Status.FAILED
    assert "cannot read the ground truth '$ $'" in state.error_msg


async def test_a_response_that_would_compute_for_hours_fails_alone() -> None:
    judge = MathVerifyJudge(timeout_s=2.0, num_processes=2)
    truth = {"ground_truth": "46"}
    group = [completed(r"\boxed{9^{9^9}}", truth), completed("46", truth)]
    await judge.judge(group)
    judge.close()
    assert [state.status for state in group] == [Status.FAILED, Status.COMPLETED]
    assert "no verdict within 2.0 s" in group[0].error_msg


# reasoning-gym


@pytest.fixture(scope="module")
def gym_judge():
    judge = ReasoningGymJudge(num_processes=1)
    yield judge
    judge.close()


# rearc's records hold tuples: after JSON made them lists, its scorer gave 0.05 for a right answer.
@pytest.mark.parametrize("name", ["simple_equations", "countdown", "rearc"])
async def test_the_generator_judges_its_own_problems(gym_judge, name) -> None:
    prompts = load_prompts(DataConfig(source=f"reasoning_gym:{name}", arguments={"seed": 3}, size=2))
    for prompt in prompts:
        right = prompt.reward_model["ground_truth"]
        for response in (right, f"  {right}\n", f"I think\n<answer>{right}</answer>"):
            state = await gym_judge.judge(completed(response, prompt.reward_model))
            assert state.reward == {"score": 1.0}, state.error_msg
        state = await gym_judge.judge(completed(f"{right} <answer>no</answer>", prompt.reward_model))
        assert state.reward["score"] < 0.5


async def test_other_prompts_are_refused(gym_judge) -> None:
    state = await gym_judge.judge(completed("4", {"ground_truth": "4"}))
    assert state.status is Status.FAILED
    assert "source must be reasoning_gym:NAME" in state.error_msg


async def test_a_wrong_generator_name_is_a_failure(gym_judge) -> None:
    problem = {"name": "gone", "arguments": {"size": 1}, "index": 0}
    state = await gym_judge.judge(completed("4", {"reasoning_gym": problem}))
    assert state.status is Status.FAILED
    assert "Dataset 'gone' not registered" in state.error_msg
