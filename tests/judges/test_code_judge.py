import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.judges import CodeJudge
from forebay.judges.code import read_tests
from forebay.sandbox import Isolation, Sandbox, SandboxError, SandboxResult, SandboxUnavailableError
from forebay.types import RolloutState, Status

SUMS = [{"input": "1 2", "output": "3"}, {"input": "10 -4\n", "output": "6\n"}]
ADD = "print(sum(map(int, input().split())))"


def rollout(response: str, tests: object) -> RolloutState:
    return RolloutState([], response=response, reward_model={"tests": tests}, status=Status.COMPLETED)


async def judged(response: str, tests: object, **options) -> RolloutState:
    judge = CodeJudge(**options)
    try:
        await judge._sandbox.isolation()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    return await judge.judge(rollout(response, tests))


async def score(response: str, tests: object, **options) -> dict[str, float]:
    state = await judged(response, tests, **options)
    assert state.status is Status.COMPLETED, state.error_msg
    return state.reward


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (f"Add them:\n```python\n{ADD}\n```\nDone.", 1.0),
        (f"```\nprint(0)\n```\nNo:\n```py\n{ADD}\n```", 1.0),
        (ADD, 1.0),
        (f"```python\n{ADD}", 1.0),
        ("```python\nprint(input())\n```", 0.0),
        ("```python\nprint(\n```", 0.0),
        (f"```python\n{ADD}\nimport sys; sys.exit(1)\n```", 0.0),
        ("I do not know.", 0.0),
        ("", 0.0),
    ],
)
async def test_programs_are_run_on_each_input(response, expected) -> None:
    assert await score(response, SUMS) == {"score": expected, "passed": expected}


async def test_part_of_the_tests_pays_only_if_asked() -> None:
    always_three = "```python\nprint(3)\n```"
    assert await score(always_three, SUMS) == {"score": 0.0, "passed": 0.5}
    assert await score(always_three, SUMS, partial_credit=True) == {"score": 0.5, "passed": 0.5}


async def test_code_tests_see_the_programs_names() -> None:
    tests = ["assert double(2) == 4", "import math\nassert double(math.pi) == 2 * math.pi"]
    right = "def double(x):\n    return 2 * x\nif __name__ == '__main__':\n    1 / 0"
    assert (await score(right, tests))["score"] == 1.0
    half = "def double(x):\n    assert isinstance(x, int)\n    return 2 * x"
    assert (await score(half, tests, partial_credit=True))["score"] == 0.5
    # Both kinds together.
    both = [*tests, {"input": "", "output": "hi"}]
    assert (await score("def double(x): return 2 * x\nprint('hi')", both))["score"] == 1.0
    assert (await score("print('hi')", both, partial_credit=True))["passed"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "double = lambda x: __import__('os')._exit(0)",
        "double = lambda x: exit()",
        "import sys; print(sys.stdin.read()); print(open(0).read()); double = None",
        "def double(x): raise SystemExit(0)",
        "class Any:\n    def __eq__(self, other): return False\ndouble = lambda x: Any()",
        "import builtins; builtins.AssertionError = None",
    ],
)
async def test_leaving_early_or_printing_passes_no_code_test(program) -> None:
    assert (await score(program, ["assert double(2) == 4"], partial_credit=True))["score"] == 0.0


async def test_a_slow_program_fails_the_tests_that_it_does_not_reach() -> None:
    slow = "import sys, time\nif input() == 'slow': time.sleep(1000)\nprint('ok')"
    tests = [{"input": text, "output": "ok"} for text in ("fast", "slow", "fast")]
    verdict = await score(slow, tests, partial_credit=True, limits={"wall_s": 6.0}, timeout_s=5.0)
    assert verdict["score"] == pytest.approx(1 / 3)


async def test_a_failure_of_the_sandbox_is_not_the_programs(monkeypatch) -> None:
    calls = []

    async def fail_once(self, source, **options) -> SandboxResult:
        calls.append(source)
        if len(calls) == 1:
            raise SandboxError("no more processes")
        return SandboxResult(
            stdout="3",
            stderr="",
            returncode=0,
            reason="exit",
            truncated=False,
            wall_s=0.1,
            isolation=Isolation.LANDLOCK,
        )

    async def pass_at_once(_) -> None:
        pass

    monkeypatch.setattr(Sandbox, "run_python", fail_once)
    monkeypatch.setattr("forebay.judges.base.asyncio.sleep", pass_at_once)
    state = await CodeJudge().judge(rollout(ADD, SUMS[:1]))
    assert (state.reward, len(calls)) == ({"score": 1.0, "passed": 1.0}, 2)


async def test_without_a_sandbox_every_rollout_fails(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    state = await CodeJudge(levels=["bubblewrap"]).judge(rollout(ADD, SUMS))
    assert state.status is Status.FAILED
    assert state.reward is None
    assert "no sandbox works here: bubblewrap (not installed: bwrap" in state.error_msg


texts = st.text("ab \n", max_size=5)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_every_usual_form_of_tests_is_read_the_same(pairs) -> None:
    expected = [{"input": given, "output": wanted} for given, wanted in pairs]
    columns = {"inputs": [given for given, _ in pairs], "outputs": [wanted for _, wanted in pairs]}
    for form in (expected, json.dumps(expected), columns, json.dumps(columns)):
        assert read_tests(rollout("", form)) == expected


@pytest.mark.parametrize("tests", [None, [], "[]", {}, [3], [{"input": "1"}], {"inputs": ["1"], "outputs": []}])
async def test_prompts_without_usable_tests_fail(tests) -> None:
    state = await CodeJudge().judge(rollout(ADD, tests))
    assert state.status is Status.FAILED
    assert state.reward is None
