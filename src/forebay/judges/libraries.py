"""Judges that leave the verdict to a library, math-verify or reasoning-gym, in child processes.

Both libraries compute with text that a model wrote. A response such as ``9^{9^9}`` sends a big-number routine
off for hours without ever letting another thread run: in the trainer's own process that would freeze the
whole run. Several scorers also ``eval`` the response, and math-verify's own time limits work by signals, in
the main thread only. A child process keeps its hangs, its memory and its exits to itself. It is not a
sandbox: the child may read files and use the network.

::

    run(args) -> waits for one of num_processes threads -> its child: JSON line in, JSON line out -> verdict
                                                              | timer (set by the child, per call) fires
                                                              v
                                         kernel ends the child; the next call starts another one

The timer is the child's own, so it also fires when the parent is gone; a child whose input ends, exits. One
that is stopped, or never begins, is ended from here, two minutes later.
"""

import asyncio
import contextlib
import functools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import Field

from forebay.config import StrictModel, import_object, parse_config
from forebay.extras import require_library
from forebay.judges.answers import compile_pattern, find_answer, ground_truth
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judge
from forebay.types import RolloutState


class ReasoningGymJudge(Judge):
    """The generator's own score of the answer, from 0.0 to 1.0; many generators give partial credit.

    Invariants: the answer is the last match of `extract`, or the whole response, stripped, where there is no
    match. Prompts must come from a ``reasoning_gym:NAME`` source.

    The problem ``Solve for e: 56 - 98*e = -1218`` and the response ``... <answer>13</answer>`` give 1.0.

    Args:
        timeout_s: for one answer.
        arguments: those of `Arguments`, by name.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """

    class Arguments(StrictModel, strict=True):
        """The arguments of the judge ``reasoning_gym`` in a run file."""

        extract: str = "answer_tag"
        """``answer_tag``, ``last_number`` or a regular expression with one group, whose last match is the
        answer."""
        num_processes: int = Field(default=2, ge=1)
        """How many answers are judged at once, each in a process."""

    def __init__(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **arguments: Any) -> None:
        # As above, the child keeps the time.
        super().__init__(timeout_s=None)
        settings = parse_config(self.Arguments, arguments, source="judge 'reasoning_gym'")
        require_library("reasoning_gym", "judge 'reasoning_gym'")
        self._pattern = compile_pattern(settings.extract)
        self._processes = JudgeProcesses(f"{__name__}:make_gym_scorer", timeout_s, settings.num_processes)

    async def score(self, state: RolloutState) -> float:
        """The generator's score."""
        problem = (state.reward_model or {}).get("reasoning_gym")
        if problem is None:
            raise ValueError("the prompt names no reasoning-gym problem; its source must be reasoning_gym:NAME")
        answer = find_answer(self._pattern, state.response)
        if answer is None:
            answer = state.response.strip()
        return float(await self._processes.run(problem["name"], problem["arguments"], problem["index"], answer))

    def close(self) -> None:
        """End the child processes."""
        self._processes.close()


# Text with one of these is LaTeX with its delimiters.


class MathVerifyJudge(Judge):
    """Score 1.0 if the response's final expression equals the ground truth mathematically, else 0.0.

    Invariants: the ground truth may be plain or LaTeX, with or without delimiters; in the response, an answer
    in ``\\boxed{}`` or ``$ $`` counts before a bare number. A ground truth that cannot be read is an error.

    A ground truth of ``1/2`` and the response ``so it is \\boxed{0.5}`` give 1.0.

    Raises:
        ConfigError: math-verify is not installed.
    """

    class Arguments(StrictModel, strict=True):
        """The arguments of the judge ``math_verify`` in a run file."""

        num_processes: int = Field(default=2, ge=1)
        """How many answers are judged at once, each in a process."""

    def __init__(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **arguments: Any) -> None:
        # The child keeps the time; here a wait for a free child would count too.
        super().__init__(timeout_s=None)
        settings = parse_config(self.Arguments, arguments, source="judge 'math_verify'")
        require_library("math_verify", "judge 'math_verify'")
        self._processes = JudgeProcesses(f"{__name__}:make_math_scorer", timeout_s, settings.num_processes)

    async def score(self, state: RolloutState) -> float:
        """1.0 if the answer equals the ground truth mathematically, else 0.0."""
        return float(await self._processes.run(ground_truth(state), state.response))

    def close(self) -> None:
        """End the child processes."""
        self._processes.close()


_LATEX_MARKS = ("$", "\\boxed", "\\(", "\\[")
# A group's rollouts are judged close together; a few hundred groups are the most that are under way at once.
_NUM_CACHED_PROBLEMS = 512


def make_math_scorer() -> Callable[[str, str], float]:
    """The scoring function ``(ground truth, response) -> 1.0 | 0.0``; imports math-verify."""
    import math_verify
    import math_verify.grader
    import math_verify.parser

    # It warns once that without its time limits one must keep the time oneself, as is done here.
    math_verify.parser.TIMEOUT_WARNING_SHOWN = True
    math_verify.grader.TIMEOUT_WARNING_SHOWN = True

    def score(truth: str, response: str) -> float:
        # Bare "x^2+1" is not recognized as an expression; inside \boxed it is.
        marked = truth if any(mark in truth for mark in _LATEX_MARKS) else f"\\boxed{{{truth}}}"
        gold = math_verify.parse(marked, parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify cannot read the ground truth {truth!r}")
        answer = math_verify.parse(response, parsing_timeout=None)
        return float(math_verify.verify(gold, answer, timeout_seconds=None))

    return score


def make_gym_scorer() -> Callable[[str, dict[str, Any], int, str], float]:
    """The scoring function ``(name, arguments, index, answer) -> score``; imports reasoning-gym."""
    from reasoning_gym.factory import create_dataset

    @functools.lru_cache(maxsize=64)
    def dataset(name: str, arguments: str) -> Any:
        return create_dataset(name, **json.loads(arguments))

    @functools.lru_cache(maxsize=_NUM_CACHED_PROBLEMS)
    def problem(name: str, arguments: str, index: int) -> dict[str, Any]:
        made: dict[str, Any] = dataset(name, arguments)[index]
        return made

    def score(name: str, arguments: dict[str, Any], index: int, answer: str) -> float:
        key = json.dumps(arguments, sort_keys=True)
        return float(dataset(name, key).score_answer(answer, problem(name, key, index)))

    return score


# Enough for any scorer here, far below what would make a training machine swap.
_MEMORY_LIMIT_BYTES = 4 << 30
START_LIMIT_S = 120.0
"""The time that a child gets for its imports, beside that of the call that it was started for."""
_CHILD_CODE = "from forebay.judges.libraries import serve; serve()"


class JudgeProcessError(RuntimeError):
    """A scoring function raised, took too long, or took its process down."""


class JudgeProcesses:
    """Calls one scoring function in up to `num_processes` child processes, which start when needed.

    Invariants: a call ends at most `timeout_s` after its child began it; the time to start a child and to
    import libraries, and the wait for a free one, do not count. May be used from any event loop.

    >>> processes = JudgeProcesses("forebay.judges.libraries:make_math_scorer", timeout_s=30.0)
    >>> asyncio.run(processes.run("1/2", "it is 0.5"))
    1.0
    >>> processes.close()

    Args:
        factory: ``package.module:function`` that imports what it needs and returns the scoring function,
            which takes and returns JSON values.
        timeout_s: for one call; None waits for ever.
        num_processes: how many calls run at once.
        arguments: of the factory, JSON values.
        memory_bytes: the address space of each child, once it has its function; 0: without a limit, as a GPU
            needs it.
    """

    def __init__(
        self,
        factory: str,
        timeout_s: float | None,
        num_processes: int = 2,
        *,
        arguments: Sequence[Any] = (),
        memory_bytes: int = _MEMORY_LIMIT_BYTES,
    ) -> None:
        command = [factory, str(timeout_s or 0.0), json.dumps(arguments), str(memory_bytes)]
        self._children = _Children(command, timeout_s, num_processes)
        # Neither this nor the threads hold `self`: they must not keep it from being finalized.
        self._finalizer = weakref.finalize(self, self._children.end)

    async def run(self, *arguments: Any) -> Any:
        """The answer of the scoring function to these JSON values.

        Raises:
            JudgeProcessError: it raised, took too long or ended its process; the message says which.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._children.threads, self._children.ask, json.dumps(arguments))

    def close(self) -> None:
        """End the child processes and what they are at. Also done when the object goes, and
        as the program ends, after the calls that run."""
        self._finalizer()


class _Children:
    """The running children; the idle ones wait in a queue. Called from several threads."""

    def __init__(self, command: list[str], timeout_s: float | None, num_processes: int) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self.threads = ThreadPoolExecutor(num_processes, thread_name_prefix="judge")
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._running: set[_Child] = set()
        self._is_closed = False

    def ask(self, request: str) -> Any:
        """The verdict on `request`, from an idle child or a new one."""
        try:
            child = self._idle.get_nowait()
        except queue.Empty:
            child = _Child(self._command, self._timeout_s)
            self._running.add(child)
            # `end` may have killed the children before this one was among them.
            if self._is_closed:
                child.process.kill()
        line = child.ask(request)
        if not line:
            self._running.discard(child)
            raise JudgeProcessError(child.cause_of_end())
        self._idle.put(child)
        reply = json.loads(line)
        if "error" in reply:
            raise JudgeProcessError(reply["error"])
        return reply["verdict"]

    def end(self) -> None:
        """End every child, busy or not, and those that a thread is about to start."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self._is_closed = True
        for child in self._running.copy():
            child.process.kill()
        self.threads.shutdown(wait=True)
        # Their sockets only now, when no thread asks any more.
        while self._running:
            self._running.pop().close()


class _Child:
    """One child process and the socket to it."""

    def __init__(self, command: list[str], timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._is_frozen = False
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CHILD_CODE, str(theirs.fileno()), *command],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C at the terminal is for the run, which still judges what it has before it ends.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            )

    def ask(self, request: str) -> str:
        """The reply line; empty if the process ended instead."""
        # The child ends itself in time, unless it is stopped, or hangs before its first call.
        self._socket.settimeout(None if self._timeout_s is None else self._timeout_s + START_LIMIT_S)
        try:
            self._lines.write(f"{request}\n")
            self._lines.flush()
            return self._lines.readline()
        except TimeoutError:
            self._is_frozen = True
            self.process.kill()
        # The process ended with a part of the request unread.
        except OSError:
            pass
        return ""

    def cause_of_end(self) -> str:
        """Why there was no reply."""
        code = self.close()
        if self._is_frozen:
            return "its process was stopped, or hung while it started; it was ended"
        if code == -signal.SIGALRM:
            return f"no verdict within {self._timeout_s} s; its process was ended"
        return f"its process ended with code {code}; its last words are on the standard error output"

    def close(self) -> int:
        """Let the process end, and return its exit code, negative for the signal that ended it."""
        # A request that it has not read cannot be sent any more.
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()
        return self.process.wait()


def serve() -> None:
    """The child's side: answer requests until the socket ends."""
    import resource

    # The standard streams have nothing to do with it, so that a response can neither read requests nor forge
    # replies by accident (input(), print()).
    lines = socket.socket(fileno=int(sys.argv[1])).makefile("rw", encoding="utf-8")
    os.dup2(2, 1)
    # The default action ends the process from the kernel; a Python handler would wait for the interpreter.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    timeout_s, arguments, memory_bytes = float(sys.argv[3]), json.loads(sys.argv[4]), int(sys.argv[5])
    score = import_object("scorer", sys.argv[2])(*arguments)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for line in lines:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            reply = {"verdict": score(*json.loads(line))}
        # Anything that a response provokes, exit() included, is this call's error and not the process's end.
        except (Exception, SystemExit) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        lines.write(json.dumps(reply) + "\n")
        lines.flush()
