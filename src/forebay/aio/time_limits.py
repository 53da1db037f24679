"""Time limits: asyncio's, and those of calls whose clock starts when they get a thread or a sandbox.

Not a pool: each blocking call has a daemon thread of its own, and one that hangs takes no thread of asyncio.

::

    timeout(10 s), timeout_at(when): asyncio's, also right on Python 3.11.0 to 3.11.3

    time_limit(10 s) -> call -> not_counted(): waits for its slot -> runs, the clock runs with it -> result
                                   the clock stands still              | the limit passes: TimeoutError

    CallThreads.run(f) -> not_counted(): one of num_threads slots -> own daemon thread -> result
                             ^                                         | the limit passes: OverrunError
                             '--- slot freed: f returned, or overran and is counted until it returns

A thread cannot be stopped: a call that overruns is given up, and its thread runs on until it returns.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

# A few calls that hang are bad luck; more mean that the function hangs, and each holds a thread and a share
# of the interpreter's time.
MAX_OVERRUNNING = 8


class OverrunError(RuntimeError):
    """A function did not return in time."""


class TooManyOverrunsError(OverrunError):
    """The function was not called: too many earlier calls still hang."""


class CallThreads:
    """Runs functions in daemon threads, at most `num_threads` at a time.

    Invariants: the clock of a call starts when it gets its slot, not while it waits for one; the slot is free
    when the function has returned or its time has passed, also where the caller was cancelled; so at most
    ``num_threads + MAX_OVERRUNNING`` threads exist, and none of them keeps the program from ending.

    >>> async def example():
    ...     threads = CallThreads(timeout_s=5.0)
    ...     return await threads.run(pow, 2, 10)
    >>> asyncio.run(example())
    1024

    Args:
        timeout_s: for each call; None: what the `time_limit` around it leaves.
        num_threads: calls that run at once.
        result: what is waited for, for messages.
    """

    def __init__(self, *, timeout_s: float | None, num_threads: int = 4, result: str = "result") -> None:
        self.timeout_s = timeout_s
        self._result = result
        self._slots = asyncio.Semaphore(num_threads)
        self._overrunning: list[Future[Any]] = []
        self._held: set[asyncio.Task[Any]] = set()

    async def run(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """The result of ``function(*arguments)``.

        Raises:
            OverrunError: it took longer than its time.
            TooManyOverrunsError: too many earlier calls still hang.
            Exception: whatever the function raises.
        """
        with not_counted():
            await self._slots.acquire()
        try:
            self._overrunning = [call for call in self._overrunning if not call.done()]
            if len(self._overrunning) >= MAX_OVERRUNNING:
                raise TooManyOverrunsError(
                    f"not called: {len(self._overrunning)} earlier calls took longer than they may and have "
                    f"not returned; give the function a time limit of its own"
                )
            clock = _CLOCK.get()
            # Asked after the slot was acquired: until then the clock stood still.
            limit_s = clock.left_s if self.timeout_s is None and clock is not None else self.timeout_s
            call = start_thread(function, *arguments)
        except BaseException:
            self._slots.release()
            raise
        # Its own task: the slot stays taken although the caller may be cancelled.
        held = asyncio.create_task(self._hold(call, limit_s))
        self._held.add(held)
        held.add_done_callback(self._forget)
        return await asyncio.shield(held)

    async def _hold(self, call: Future[ResultT], limit_s: float | None) -> ResultT:
        """The result of `call`; the slot is given back with it, or when its time has passed."""

        def late() -> OverrunError:
            # A clock leaves a little less than the limit that people know.
            shown_s = math.ceil((limit_s or 0.0) * 1000) / 1000
            return OverrunError(f"no {self._result} within {shown_s:g} s; its thread cannot be stopped and runs on")

        try:
            async with timeout(limit_s, late):
                return await asyncio.wrap_future(call)
        finally:
            if not call.done():
                self._overrunning.append(call)
            self._slots.release()

    def _forget(self, held: asyncio.Task[Any]) -> None:
        self._held.discard(held)
        if not held.cancelled():
            # Retrieved: asyncio would warn of it where the caller was cancelled.
            held.exception()


class CallClock:
    """The time that one call may take; it stands still while the call waits for a slot.

    Args:
        timeout: an entered one, without a deadline.
        limit_s: how long it may take.
        outer: of the call that this one is a part of; it stands still with this one.
    """

    def __init__(self, timeout: asyncio.Timeout, limit_s: float, outer: "CallClock | None" = None) -> None:
        self._timeout = timeout
        self._outer = outer
        self._left_s = limit_s
        self._num_waiting = 0
        self._is_over = False
        self._go_on()

    @property
    def left_s(self) -> float:
        """The time that is left."""
        deadline = self._timeout.when()
        return self._left_s if deadline is None else deadline - asyncio.get_running_loop().time()

    def wait(self) -> None:
        """Stop the clock."""
        if self._outer is not None:
            self._outer.wait()
        self._num_waiting += 1
        if self._num_waiting == 1 and not (self._is_over or self._timeout.expired()):
            self._left_s = self.left_s
            self._timeout.reschedule(None)

    def go_on(self) -> None:
        """Run, once nothing waits any more: a call may do several things at once."""
        if self._outer is not None:
            self._outer.go_on()
        self._num_waiting -= 1
        self._go_on()

    def end(self) -> None:
        """The call is over, whatever it left running."""
        self._is_over = True

    def _go_on(self) -> None:
        # asyncio refuses to move a limit that has passed, or whose block was left.
        if not (self._num_waiting or self._is_over or self._timeout.expired()):
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_s)


_CLOCK: ContextVar[CallClock | None] = ContextVar("forebay_call_clock", default=None)


@contextlib.asynccontextmanager
async def time_limit(
    limit_s: float | None, late: Callable[[], Exception] = TimeoutError
) -> AsyncIterator[asyncio.Timeout]:
    """As ``timeout(limit_s, late)``, but time within `not_counted` does not count.

    >>> async def example():
    ...     async with time_limit(10.0), timeout(0.01):
    ...         with not_counted():
    ...             return await asyncio.sleep(0, "a result")
    >>> asyncio.run(example())
    'a result'
    """
    async with timeout(None, late) as limit:
        if limit_s is None:
            yield limit
            return
        clock = CallClock(limit, limit_s, _CLOCK.get())
        token = _CLOCK.set(clock)
        try:
            yield limit
        finally:
            clock.end()
            _CLOCK.reset(token)


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """Around a wait for a slot: the call's clock stands still. Without a limit it does nothing."""
    clock = _CLOCK.get()
    if clock is None:
        yield
        return
    clock.wait()
    try:
        yield
    finally:
        clock.go_on()


def contained(function: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """`function`, which others wrote, for any thread: what it raises is an error that ends the call alone.

    A StopIteration, which no future of asyncio takes, so that its caller would wait for ever, and whatever is no
    Exception (a SystemExit would end the program or the thread) are RuntimeErrors.
    """

    def call(*arguments: Any) -> ResultT:
        try:
            return function(*arguments)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            said = RuntimeError(f"the function raised {type(error).__name__}: {error}")
            raise said.with_traceback(error.__traceback__) from None

    return call


def start_thread(function: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]:
    """``function(*arguments)``, `contained`, in a daemon thread of its own; those of a pool would be waited for at
    exit."""
    call: Future[ResultT] = Future()
    call.set_running_or_notify_cancel()

    def run() -> None:
        try:
            call.set_result(contained(function)(*arguments))
        # Each of them has to end the call: its caller would go on waiting.
        except BaseException as error:
            call.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return call


def in_thread(function: Callable[..., ResultT], *arguments: Any) -> asyncio.Future[ResultT]:
    """`start_thread` for the event loop: `asyncio.to_thread` for functions that others wrote."""
    return asyncio.wrap_future(start_thread(function, *arguments))


class _Timeout(asyncio.Timeout):  # type: ignore[misc]  # final, but every use of one would have to be written anew
    """asyncio's own; before Python 3.11.4 that one raises CancelledError where the task was cancelled before.

    It takes every request for the task's cancellation for one that is still to come. A task that went on, as
    one that waits for the end of its work does, would get no `TimeoutError` any more.

    Args:
        when_s: the deadline, of the event loop's clock; None: there is none yet.
        late: makes the error that is raised after it. Errors of the block itself pass as they are.
    """

    def __init__(self, when_s: float | None, late: Callable[[], Exception] = TimeoutError) -> None:
        super().__init__(when_s)
        self._late = late

    async def __aenter__(self) -> asyncio.Timeout:
        self._entered_by = asyncio.current_task()
        self._num_before = 0 if self._entered_by is None else self._entered_by.cancelling()
        return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # This takes back the cancellation that the limit asked for. Its verdict is dropped, and made below.
        with contextlib.suppress(TimeoutError):
            await super().__aexit__(kind, error, trace)
        if self.expired() and kind is asyncio.CancelledError and self._entered_by is not None:
            has_other_requests = self._entered_by.cancelling() > self._num_before
            if not has_other_requests:
                raise self._late() from error


def timeout(limit_s: float | None, late: Callable[[], Exception] = TimeoutError) -> asyncio.Timeout:
    """`asyncio.timeout`, right also in a task that was cancelled before; `late` makes its error."""
    return _Timeout(None if limit_s is None else asyncio.get_running_loop().time() + limit_s, late)


def timeout_at(when_s: float | None) -> asyncio.Timeout:
    """`asyncio.timeout_at`, right also in a task that was cancelled before."""
    return _Timeout(when_s)
