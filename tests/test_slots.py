"""Calls in threads, and clocks that stand still while a call waits for its slot."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from forebay.aio.time_limits import (
    MAX_OVERRUNNING,
    CallThreads,
    OverrunError,
    TooManyOverrunsError,
    not_counted,
    start_thread,
    time_limit,
)
from forebay.aio.virtual_time import run


async def test_a_time_out_of_the_functions_own_is_told_from_an_overrun() -> None:
    def socket_like() -> float:
        raise TimeoutError("the service is slow")

    with pytest.raises(TimeoutError, match="the service is slow"):
        await CallThreads(timeout_s=30.0).run(socket_like)


async def test_hanging_calls_are_bounded() -> None:
    release = threading.Event()
    threads = CallThreads(timeout_s=0.01, num_threads=2, result="verdict")
    for _ in range(MAX_OVERRUNNING):
        with pytest.raises(OverrunError, match=r"no verdict within 0\.01 s; its thread cannot be stopped"):
            await threads.run(release.wait)
    with pytest.raises(TooManyOverrunsError, match=f"not called: {MAX_OVERRUNNING} earlier calls"):
        await threads.run(len, "abc")
    # Once they return, there is room again.
    release.set()
    await asyncio.gather(*(asyncio.wrap_future(call) for call in threads._overrunning))
    threads.timeout_s = None
    assert await threads.run(len, "abc") == 3


async def test_a_cancelled_call_keeps_its_slot_until_it_returns_or_its_time_is_over() -> None:
    release = threading.Event()
    for timeout_s in (None, 0.05):
        threads = CallThreads(timeout_s=timeout_s, num_threads=1)
        waiting = asyncio.create_task(threads.run(release.wait))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert threads._slots.locked()
        if timeout_s is None:
            # An interruption is no overrun: nothing is refused because of it.
            asyncio.get_running_loop().call_soon(release.set)
        assert await threads.run(len, "abc") == 3
        release.clear()
    release.set()


async def test_a_thread_that_would_end_is_an_error() -> None:
    def leave() -> None:
        raise SystemExit(1)

    call: Future[None] = start_thread(leave)
    with pytest.raises(RuntimeError, match="SystemExit: 1"):
        await asyncio.wrap_future(call)


def test_what_is_waited_for_a_slot_does_not_count() -> None:
    async def work(wait_s: float, work_s: float) -> None:
        with not_counted():
            await asyncio.sleep(wait_s)
        await asyncio.sleep(work_s)

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        async with time_limit(2.0):
            await asyncio.sleep(0.5)
            await asyncio.gather(work(60, 1), work(30, 1), work(90, 1))
        assert clock() == 91.5
        async with time_limit(2.0):
            # A limit inside another one has a clock of its own, and the outer one goes on.
            with pytest.raises(TimeoutError):
                async with time_limit(1.0) as inner:
                    await work(60, 1.5)
            assert inner.expired()
            left_running = asyncio.create_task(work(5, 0))
            await asyncio.sleep(0)
        await left_running
        with pytest.raises(TimeoutError):
            async with time_limit(2.0):
                await work(60, 3)

    run(main())
