"""The loop on virtual time: jumps, order, threads, and waits that nothing can end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from forebay.aio.virtual_time import DeadlockError, run


def test_a_year_of_sleep_takes_no_time_and_ends_on_the_second() -> None:
    async def main() -> float:
        for _ in range(365):
            await asyncio.sleep(86400.1)
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(365 * 86400.1)


def test_timers_fire_in_the_order_of_their_times_and_the_same_way_every_time() -> None:
    async def main() -> list[str]:
        loop, seen = asyncio.get_running_loop(), []
        for name, delay in (("c", 2.0), ("b1", 1.0), ("b2", 1.0), ("b3", 1.0), ("a", 0.0)):
            loop.call_later(delay, seen.append, name)
        await asyncio.sleep(3)
        return seen

    first = run(main())
    assert [name[0] for name in first] == ["a", "b", "b", "b", "c"]
    assert run(main()) == first


def test_a_timeout_is_reached_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(50)


def test_a_wait_that_nothing_can_end_is_an_error_that_says_where() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait_for_nobody(), name="lonely")
            await asyncio.sleep(5)

    with pytest.raises(DeadlockError, match=r"at 5 s nothing can go on:.*lonely in .*wait_for_nobody"):
        run(main())


def test_work_for_threads_is_done_on_the_spot() -> None:
    async def main() -> tuple[float, int]:
        ident = await asyncio.to_thread(threading.get_ident)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return asyncio.get_running_loop().time(), ident

    assert run(main()) == (0.0, threading.get_ident())
