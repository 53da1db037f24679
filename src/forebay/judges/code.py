"""Code execution: the program in the response is run against the tests of its prompt, in a sandbox.

::

    response --extract--> program --+-- {"input", "output"} tests: one run each, outputs compared here
                                    '-- code tests: one run of program and tests together
    wrong, crashing, too slow, too big --> the test is failed        sandbox failed --> rollout FAILED

The expected outputs never enter the sandbox. Code tests (``assert f(2) == 4``) run in the program's
own process: that they passed is said in words which the program cannot guess and does not get to see by
ordinary means, so leaving early gains nothing; a program made to search its own process could forge them.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from forebay.config import StrictModel, parse_config
from forebay.judges.answers import compile_pattern, find_answer
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judge, JudgeError, TransientJudgeError
from forebay.sandbox import CONFINED, Limits, Sandbox, SandboxError, SandboxUnavailableError
from forebay.types import RolloutState

# Run beside solution.py. The program reads and prints nothing, and has run to its end before the tests
# and the word are read.
_CODE_TESTS = """
import json, os
replies, orders, null = os.dup(1), os.dup(0), os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0)
os.dup2(null, 1)
with open("solution.py", encoding="utf-8") as file:
    source = file.read()
# Not __main__: what a program does when it is started is not what its functions are tested for.
scope = {"__name__": "solution"}
exec(compile(source, "solution.py", "exec"), scope)
with open(orders, encoding="utf-8") as file:
    job = json.load(file)
for number, test in enumerate(job["tests"]):
    try:
        exec(compile(test, f"test {number}", "exec"), dict(scope))
    except BaseException:
        continue
    os.write(replies, f"{job['word']} {number}\\n".encode())
"""


class CodeJudge(Judge):
    """Score 1.0 if the response's Python program passes all tests of its prompt, else 0.0.

    Invariants: the prompt's ``reward_model["tests"]`` is a list, or JSON text of one, of
    ``{"input": ..., "output": ...}`` (standard input and what must be printed; white space at the ends of
    lines does not count) and of Python code (``"assert double(2) == 4"``); ``{"inputs": [...],
    "outputs": [...]}`` is taken too. A program that is wrong, crashes or is too slow fails its tests; only a
    failure of the sandbox fails the rollout. The verdict also says what share of the tests was ``passed``.

    With `partial_credit`, a program that passes one of two tests gets ``{"score": 0.5, "passed": 0.5}``.

    Args:
        timeout_s: for all tests of one program; those that it does not get to are failed.
        arguments: those of `Arguments`, by name.
    """

    class Arguments(StrictModel, strict=True):
        """The arguments of the judge ``code`` in a run file."""

        extract: str | None = "code_block"
        """``code_block`` or a regular expression with one group, whose last match is the program; where
        nothing matches, and with None, the whole response is."""
        partial_credit: bool = False
        """Score the share of passed tests. Without it the first failed test is the last."""
        limits: Limits | None = None
        """Time, memory and files of each run of the program; None: the defaults of `Limits`."""
        levels: Sequence[str] = tuple(level.value for level in CONFINED)
        """Isolation that may be used, the best first: ``bubblewrap``, ``landlock``, and ``limits`` for
        programs that you trust."""
        readable: Sequence[str] = ()
        """Further files and folders that programs may read."""
        max_concurrent: int | None = Field(default=None, ge=1)
        """Programs that run at once; None: one for each CPU."""

    def __init__(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **arguments: Any) -> None:
        # The time for a rollout is the run time of its programs; a wait for a free slot would count too.
        super().__init__(timeout_s=None)
        settings = parse_config(self.Arguments, arguments, source="judge 'code'")
        self._pattern = None if settings.extract is None else compile_pattern(settings.extract)
        self._partial_credit = settings.partial_credit
        self._program_s = float("inf") if timeout_s is None else timeout_s
        self._sandbox = Sandbox(
            settings.limits, levels=settings.levels, readable=settings.readable, max_concurrent=settings.max_concurrent
        )

    async def score(self, state: RolloutState) -> dict[str, float]:
        """1.0 or 0.0, or the share of passed tests."""
        tests = read_tests(state)
        found = None if self._pattern is None else find_answer(self._pattern, state.response)
        program = state.response if found is None else found
        try:
            num_passed = await self._count_passed(program, tests)
        # A machine without isolation has none at the next try either.
        except SandboxUnavailableError as error:
            raise JudgeError(str(error)) from error
        except SandboxError as error:
            raise TransientJudgeError(str(error)) from error
        passed = num_passed / len(tests)
        return {"score": passed if self._partial_credit else float(passed == 1), "passed": passed}

    async def _count_passed(self, program: str, tests: Sequence[Any]) -> int:
        """How many tests the program passes; without partial credit the first failure ends the count."""
        # All code tests share one run, so that a program that is slow to start is started once.
        codes = [test for test in tests if isinstance(test, str)]
        num_passed, spent_s = 0, 0.0
        if codes:
            word = secrets.token_hex(16)
            orders = json.dumps({"word": word, "tests": codes})
            result = await self._sandbox.run_python(_CODE_TESTS, stdin=orders, files={"solution.py": program})
            spent_s, said = result.wall_s, set(result.stdout.splitlines())
            num_passed = sum(f"{word} {number}" in said for number in range(len(codes)))
            if num_passed < len(codes) and not self._partial_credit:
                return num_passed
        for test in (test for test in tests if not isinstance(test, str)):
            if spent_s >= self._program_s:
                break
            result = await self._sandbox.run_python(program, stdin=test["input"])
            spent_s += result.wall_s
            if result.ok and _lines(result.stdout) == _lines(test["output"]):
                num_passed += 1
            elif not self._partial_credit:
                break
        return num_passed


def read_tests(state: RolloutState) -> list[str | dict[str, str]]:
    """The tests of the rollout's prompt: Python code, or ``{"input": ..., "output": ...}``.

    Raises:
        ValueError: it brought none, or they have another form.
    """
    tests = (state.reward_model or {}).get("tests")
    if isinstance(tests, str):
        tests = json.loads(tests)
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs") or (), tests.get("outputs") or ()
        tests = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    if not tests:
        raise ValueError(
            "the prompt has no reward_model['tests']; give a list of {'input': ..., 'output': ...} or of code"
        )
    read: list[str | dict[str, str]] = []
    for test in tests:
        if isinstance(test, str):
            read.append(test)
        elif isinstance(test, Mapping) and "output" in test:
            read.append({"input": str(test.get("input", "")), "output": str(test["output"])})
        else:
            raise ValueError(f"a test is Python code or {{'input': ..., 'output': ...}}; got {test!r}")
    return read


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
