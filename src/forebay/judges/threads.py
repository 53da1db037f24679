"""Blocking calls off the event loop, in threads, each with a time limit.

For functions that need this process (they get the rollout itself). A thread cannot be stopped: a call that
overruns is given up and its thread runs on until it returns. What can run elsewhere belongs in
`forebay.judges.processes`, which can end it.

::

    run(f) -> waits for one of num_threads slots -> own daemon thread -> result
                                                      | timeout_s passes, or the caller is cancelled
                                                      v
                                  slot freed, thread counted as overrunning until it returns
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

# A few calls that hang are bad luck; more mean that the function hangs, and each holds a thread and a share
# of the interpreter's time.
MAX_OVERRUNNING = 8


class JudgeOverrunError(RuntimeError):
    """A judge's function did not return in time."""


class JudgeThreads:
    """Runs functions in daemon threads, at most `num_threads` at a time.

    Invariants: the clock of a call starts when it gets its slot, not while it waits for one; at most
    ``num_threads + MAX_OVERRUNNING`` threads exist; none of them keeps the program from ending.

    >>> threads = JudgeThreads(timeout_s=5.0)
    >>> verdict = await threads.run(slow_score, state)
    """

    def __init__(self, *, timeout_s: float | None, num_threads: int = 4) -> None:
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(num_threads)
        self._overrunning: list[Future[Any]] = []

    async def run(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """What ``function(*arguments)`` returns.

        Raises:
            JudgeOverrunError: it took longer than `timeout_s`, or too many earlier calls still hang.
            Exception: whatever the function raises.
        """
        async with self._slots:
            self._check_overrunning()
            call: Future[ResultT] = Future()
            call.set_running_or_notify_cancel()
            # A daemon thread of its own: threads of a pool would be waited for when the program ends.
            threading.Thread(target=_run_call, args=(call, function, arguments), daemon=True).start()
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    return await asyncio.wrap_future(call)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise JudgeOverrunError(
                    f"no verdict within {self.timeout_s} s; its thread cannot be stopped and runs on"
                ) from None
            finally:
                if not call.done():
                    self._overrunning.append(call)

    def _check_overrunning(self) -> None:
        self._overrunning = [call for call in self._overrunning if not call.done()]
        if len(self._overrunning) >= MAX_OVERRUNNING:
            raise JudgeOverrunError(
                f"not called: {len(self._overrunning)} earlier calls overran {self.timeout_s} s and have not "
                f"returned; give the function a time limit of its own"
            )


def _run_call(call: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments)
    except Exception as error:
        call.set_exception(error)
    # A SystemExit must neither end this thread, leaving the judger waiting, nor reach the event loop.
    except BaseException as error:
        call.set_exception(RuntimeError(f"the function raised {type(error).__name__}: {error}"))
    else:
        call.set_result(result)
