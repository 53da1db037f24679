"""Scoring functions in child processes that end themselves when they take too long.

For libraries that compute with text that a model wrote. A response such as ``9^{9^9}`` sends a big-number
routine off for hours without ever letting another thread run: in the trainer's own process that would freeze
the whole run. Some scorers also ``eval`` the response. A child process keeps its hangs, its memory and its
exits to itself. It is not a sandbox: the child may read files and use the network.

::

    run(args) -> waits for one of num_processes threads -> its child: JSON line in, JSON line out -> verdict
                                                              | timer (set by the child, per call) fires
                                                              v
                                         kernel ends the child; the next call starts another one

The timer is the child's own, so it also fires when the parent is gone; a child whose input ends, exits. One
that is stopped, or never begins, is ended from here, two minutes later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forebay.config import import_object

# Enough for any scorer here, far below what would make a training machine swap.
_MEMORY_LIMIT_BYTES = 4 << 30
START_LIMIT_S = 120.0
"""For a child to import what it needs, beside the time of the call that it was started for."""
_CHILD_CODE = "from forebay.judges.processes import serve; serve()"


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
    """

    def __init__(self, factory: str, timeout_s: float | None, num_processes: int = 2) -> None:
        self._children = _Children(factory, timeout_s)
        self._executor = ThreadPoolExecutor(num_processes, thread_name_prefix="judge")
        self._finalizer = weakref.finalize(self, _close, self._executor, self._children)

    async def run(self, *arguments: Any) -> Any:
        """The answer of the scoring function to these JSON values.

        Raises:
            JudgeProcessError: it raised, took too long or ended its process; the message says which.
        """
        loop = asyncio.get_running_loop()
        # The thread gets the children, not self: it must not be the one that finalizes self.
        return await loop.run_in_executor(self._executor, self._children.ask, json.dumps(arguments))

    def close(self) -> None:
        """End the child processes and what they are at. Also done when the object, or the program, goes."""
        self._finalizer()


def _close(executor: ThreadPoolExecutor, children: _Children) -> None:
    executor.shutdown(wait=False, cancel_futures=True)
    children.kill()
    executor.shutdown(wait=True)
    children.close()


class _Children:
    """The running children; the idle ones wait in a queue. Called from several threads."""

    def __init__(self, factory: str, timeout_s: float | None) -> None:
        self._factory = factory
        self._timeout_s = timeout_s
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._running: set[_Child] = set()
        self._is_closed = False

    def ask(self, request: str) -> Any:
        """The verdict on `request`, from an idle child or a new one."""
        try:
            child = self._idle.get_nowait()
        except queue.Empty:
            child = _Child(self._factory, self._timeout_s)
            self._running.add(child)
            # `kill` may have looked before it was there.
            if self._is_closed:
                child.kill()
        line = child.ask(request)
        if not line:
            self._running.discard(child)
            raise JudgeProcessError(child.cause_of_end())
        self._idle.put(child)
        reply = json.loads(line)
        if "error" in reply:
            raise JudgeProcessError(reply["error"])
        return reply["verdict"]

    def kill(self) -> None:
        """End every child now, busy or not, and those that a thread is about to start."""
        self._is_closed = True
        for child in self._running.copy():
            child.kill()

    def close(self) -> None:
        """Give back the sockets of the children; no thread may be asking."""
        while self._running:
            self._running.pop().close()


class _Child:
    """One child process and the socket to it."""

    def __init__(self, factory: str, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._is_frozen = False
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD_CODE, factory, str(timeout_s or 0.0), str(theirs.fileno())],
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
            self.kill()
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

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()

    def close(self) -> int:
        """End the process and return its exit code, negative for the signal that ended it."""
        # A request that it has not read cannot be sent any more.
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()
        return self._process.wait()


def serve() -> None:
    """The child's side: answer requests until the socket ends."""
    import resource

    # The standard streams have nothing to do with it, so that a response can neither read requests nor forge
    # replies by accident (input(), print()).
    lines = socket.socket(fileno=int(sys.argv[3])).makefile("rw", encoding="utf-8")
    os.dup2(2, 1)
    # The default action ends the process from the kernel; a Python handler would wait for the interpreter.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    timeout_s = float(sys.argv[2])
    score = import_object("scorer", sys.argv[1])()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
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
