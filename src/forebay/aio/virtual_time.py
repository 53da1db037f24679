"""An event loop whose clock jumps: hours of waiting in a moment, and the same schedule every time.

Not a mock: it runs unchanged asyncio code, as long as that takes its time from the loop
(``asyncio.sleep``, ``asyncio.timeout``, ``loop.call_later``, ``loop.time()``).

::

    nothing is ready -> is there a timer?  yes: the clock jumps to it
                                           no: `DeadlockError`, which lists what waits

Work for threads (``run_in_executor``, ``asyncio.to_thread``) is done at once, on the loop's own thread: it
takes no virtual time, and nothing depends on the scheduler of the operating system.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeadlockError(RuntimeError):
    """Every task waits for another and no timer runs; the message says what each waits in."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time that starts at 0 s.

    Invariants: the clock moves only when nothing else can be done, and then to the next timer; equal programs
    run equal schedules. A wait that nothing can end is an error, never a hang.

    >>> loop = VirtualTimeLoop()
    >>> loop.run_until_complete(asyncio.sleep(3600))
    >>> loop.time()
    3600.0
    >>> loop.close()
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_JumpingSelector(self))
        # Timers this close count as due. That of the real clock (1 ns) is less than the rounding of a sum of
        # a month's seconds, and a timer that is due only after rounding would never be.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Call `func` now; return a future that has its result or its exception already."""
        done: asyncio.Future[Result] = self.create_future()
        try:
            done.set_result(func(*args))
        # Any exception belongs to the task that awaits the future.
        except Exception as error:
            done.set_exception(error)
        return done


class _JumpingSelector(selectors.DefaultSelector):
    """Moves the clock to the next timer in place of waiting for it."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # Something real may be there all the same, such as Ctrl-C on the loop's own pipe.
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise DeadlockError(_describe_waits(self._loop))
        self._loop.now_s += timeout
        return []


def _describe_waits(loop: asyncio.AbstractEventLoop) -> str:
    lines = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        frames = task.get_stack(limit=1)
        place = f"{frames[0].f_code.co_qualname}, line {frames[0].f_lineno}" if frames else "unknown"
        lines.append(f"{task.get_name()} in {place}")
    return f"at {loop.time():g} s nothing can go on: " + "; ".join(lines)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on a `VirtualTimeLoop`.

    Raises:
        DeadlockError: nothing could go on before `main` ended.

    >>> async def clock_after_a_day():
    ...     await asyncio.sleep(86400)
    ...     return asyncio.get_running_loop().time()
    >>> run(clock_after_a_day())
    86400.0
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
