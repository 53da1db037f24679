"""Calls in threads, and clocks that stand still while a call waits for its slot."""

from __future__ import annotations

import asyncio
import threading

import pytest

from forebay.aio.time_limits import (
    MAX_OVERRUNNING,
    CallThreads,
    OverrunError,
    TooManyOverrunsError,
    in_thread,
    not_counted,
    time_limit,
    timeout,
    timeout_at,
)
from forebay.aio.virtual_time import run
from forebay.tracebacks import raised_at


@pytest.mark.parametrize("limited", [timeout, lambda s: timeout_at(asyncio.get_running_loop().time() + s)])
async def test_a_limit_in_a_task_that_was_cancelled_and_went_on_is_a_timeout(limited) -> None:
    outlived = asyncio.Event()

    async def outlive_a_cancellation() -> bool:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            outlived.set()
        with pytest.raises(TimeoutError):
            async with limited(0.01) as limit:
                await asyncio.Event().wait()
        assert asyncio.current_task().cancelling() == 1
        return limit.expired()

    task = asyncio.create_task(outlive_a_cancellation())
    await asyncio.sleep(0)
    task.cancel()
    await outlived.wait()
    assert await task


async def test_a_cancellation_beside_an_expired_limit_stays_a_cancellation() -> None:
    async def cancelled_as_the_limit_passes() -> None:
        async with timeout(None) as limit:
            limit.reschedule(asyncio.get_running_loop().time() - 1.0)
            asyncio.current_task().cancel()
            # Both requests are there before the task is told of either.
            await asyncio.Event().wait()

    task = asyncio.create_task(cancelled_as_the_limit_passes())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_in_a_block_whose_limit_passes_stays_that_error() -> None:
    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError

    with pytest.raises(KeyError):
        async with timeout(0.01):
            await fail_when_cancelled()


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


@pytest.mark.parametrize("error", [SystemExit(1), StopIteration(1), asyncio.CancelledError(1)], ids=repr)
async def test_what_a_future_does_not_take_is_an_error_that_says_where(error: BaseException) -> None:
    def leave() -> None:
        raise error

    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: 1") as caught:
        await asyncio.wait_for(in_thread(leave), 5.0)
    assert __file__ in str(raised_at(caught.value))


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
