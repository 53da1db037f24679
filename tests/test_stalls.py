"""The stall watch: when it warns, when it fails, whom, and what it says. All on virtual time."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.aio.virtual_time import run
from forebay.watching.activity import Activities
from forebay.watching.stalls import StallError, StallWatch, answered

T = TypeVar("T")


async def watched(watch: StallWatch, awaitable: Awaitable[T]) -> T:
    async with watch.guard():
        return await awaitable


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_wait_without_progress_is_warned_of_once_then_fails_with_the_report(caplog) -> None:
    async def main() -> None:
        activities = Activities()
        watch = StallWatch(
            activities, warn_after_s=60, fail_after_s=600, describe=lambda activity: f"{activity.task} tokens"
        )

        async def rollout() -> None:
            with activities.span("generate", "math/0/17/3", task="412"):
                await asyncio.sleep(10_000)

        stuck = asyncio.create_task(rollout())
        await asyncio.sleep(1)
        with activities.span("wait_batch", "step 4"), pytest.raises(StallError) as caught:
            await watched(watch, asyncio.Event().wait())
        assert asyncio.get_running_loop().time() == 601
        assert str(caught.value) == (
            "no progress for 600 s; 2 in flight: rollout math/0/17/3 generating for 601 s (412 tokens), "
            "the trainer waiting for step 4 for 600 s (None tokens)"
        )
        stuck.cancel()
        await asyncio.wait([stuck])

    with caplog.at_level(logging.WARNING):
        run(main())
    first, second = messages(caplog)
    assert first.startswith("no progress for 60 s; 2 in flight: rollout math/0/17/3 generating for 61 s (412")
    assert second.startswith("no progress for 600 s")


def test_many_hang_few_are_named_as_is_what_is_away_and_nothing_hanging_is_said_too() -> None:
    async def main() -> None:
        activities = Activities()
        watch = StallWatch(activities)
        assert watch.report() == "no progress for 0 s; nothing is in flight"
        spans = [activities.span("probe", i) for i in range(9)]
        for span in spans:
            span.__enter__()
        assert watch.report().startswith("no progress for 0 s; 9 in flight: 0 in stage probe for 0 s, 1 in")
        assert watch.report().endswith("4 in stage probe for 0 s and 4 more")
        watch = StallWatch(Activities(), away=lambda: "engine 0, worker 1")
        assert watch.report() == "no progress for 0 s; engine 0, worker 1 not up; nothing is in flight"

    run(main())


def test_progress_starts_the_count_again_and_ends_a_stall_aloud(caplog) -> None:
    async def main() -> None:
        watch = StallWatch(Activities(), warn_after_s=10, fail_after_s=30)
        done = asyncio.Event()
        waiting = asyncio.create_task(watched(watch, done.wait()))
        for pause_s in (9, 9, 25, 12, 9):
            await asyncio.sleep(pause_s)
            watch.progressed()
        done.set()
        assert await waiting is True

    with caplog.at_level(logging.WARNING):
        run(main())
    assert messages(caplog) == [
        "no progress for 10 s; nothing is in flight",
        "progress again after 25 s",
        "no progress for 10 s; nothing is in flight",
        "progress again after 12 s",
    ]


def test_time_in_which_nobody_waits_does_not_count_and_leaves_no_timer(caplog) -> None:
    async def main() -> None:
        watch = StallWatch(Activities(), warn_after_s=10, fail_after_s=20)
        for _ in range(3):
            await watched(watch, asyncio.sleep(9))
            await asyncio.sleep(1000)
        assert watch.stalled_s == 0

    run(main())
    assert messages(caplog) == []


def test_all_who_wait_fail_and_the_watch_can_be_used_again() -> None:
    async def main() -> None:
        watch = StallWatch(Activities(), warn_after_s=10, fail_after_s=20)

        async def wait(start_s: float) -> float:
            await asyncio.sleep(start_s)
            with pytest.raises(StallError):
                await watched(watch, asyncio.Event().wait())
            return asyncio.get_running_loop().time()

        # The last comes when the others have just failed.
        assert await asyncio.gather(wait(0), wait(15), wait(20)) == [20, 20, 40]
        async with watch.guard():
            await asyncio.sleep(9)

    run(main())


def test_what_the_guarded_code_raises_passes_through() -> None:
    async def main() -> None:
        watch = StallWatch(Activities(), warn_after_s=10, fail_after_s=20_000)
        with pytest.raises(TimeoutError):
            async with watch.guard(), asyncio.timeout(5):
                await asyncio.Event().wait()
        with pytest.raises(KeyError):
            async with watch.guard():
                raise KeyError
        waiting = asyncio.create_task(watched(watch, asyncio.Event().wait()))
        # Until the limit it only warns.
        await asyncio.sleep(10_000)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(main())


@given(st.integers(0, 10_000))
def test_it_fails_exactly_when_no_progress_came_for_the_limit(seed: int) -> None:
    """Odd times, so that sums of seconds round; a timer set again for its own moment would never end."""
    rng = random.Random(seed)
    gaps = [rng.uniform(0.1, 12.0) for _ in range(20)]
    limit_s = rng.uniform(8.0, 12.0)

    async def main() -> float | None:
        loop = asyncio.get_running_loop()
        watch = StallWatch(Activities(), warn_after_s=limit_s / 3, fail_after_s=limit_s)
        done = asyncio.Event()

        async def progress() -> None:
            for gap in gaps:
                await asyncio.sleep(gap)
                watch.progressed()
            done.set()

        background = asyncio.create_task(progress())
        try:
            await watched(watch, done.wait())
        except StallError:
            return loop.time()
        finally:
            background.cancel()
            await asyncio.wait([background])
        return None

    expected, now_s = None, 0.0
    for gap in gaps:
        if gap > limit_s:
            expected = pytest.approx(now_s + limit_s)
            break
        now_s += gap
    assert run(main()) == expected


class Tokens:
    """A number that grows by 1 every `every_s` until `end_s`."""

    def __init__(self, every_s: float, end_s: float) -> None:
        self.every_s, self.end_s = every_s, end_s

    def __call__(self) -> int:
        return int(min(asyncio.get_running_loop().time(), self.end_s) / self.every_s)


def test_one_long_generation_is_no_stall_while_its_tokens_come(caplog) -> None:
    async def main() -> None:
        tokens = Tokens(every_s=1, end_s=5000)
        watch = StallWatch(Activities(), warn_after_s=60, fail_after_s=600, progress=tokens)
        with pytest.raises(StallError, match="no progress for 600 s"):
            await watched(watch, asyncio.Event().wait())
        assert 5600 <= asyncio.get_running_loop().time() <= 5600 + 60

    with caplog.at_level(logging.WARNING):
        run(main())
    first, second = messages(caplog)
    assert first.startswith("no progress for 60 s")
    assert second.startswith("no progress for 600 s")


def test_slow_tokens_end_a_stall_when_they_come_and_not_when_it_would_fail(caplog) -> None:
    async def main() -> None:
        tokens = Tokens(every_s=150, end_s=math.inf)
        watch = StallWatch(Activities(), warn_after_s=60, fail_after_s=600, progress=tokens)
        await watched(watch, asyncio.sleep(2000))

    with caplog.at_level(logging.WARNING):
        run(main())
    said = messages(caplog)
    assert said[:2] == ["no progress for 60 s; nothing is in flight", "progress again after 180 s"]
    assert not any("600 s" in message for message in said)


def test_what_was_made_before_anybody_waited_is_no_progress() -> None:
    async def main() -> None:
        tokens = Tokens(every_s=1, end_s=100)
        watch = StallWatch(Activities(), warn_after_s=60, fail_after_s=600, progress=tokens)
        for _ in range(2):
            await asyncio.sleep(100)
            started_s = asyncio.get_running_loop().time()
            with pytest.raises(StallError):
                await watched(watch, asyncio.Event().wait())
            assert asyncio.get_running_loop().time() == started_s + 600

    run(main())


def test_an_answer_that_is_due_comes_in_time_or_is_an_error_that_says_whose() -> None:
    async def main() -> None:
        assert await answered(asyncio.sleep(9, "done"), "engine 0 was asked to pause", 10) == "done"
        with pytest.raises(StallError, match="engine 0 was asked to pause: no answer within 10 s"):
            await answered(asyncio.sleep(11), "engine 0 was asked to pause", 10)
        assert asyncio.get_running_loop().time() == 19

        async def give_up() -> None:
            raise TimeoutError("of its own")

        with pytest.raises(TimeoutError, match="of its own"):
            await answered(give_up(), "engine 0")

    run(main())


@pytest.mark.parametrize("limits", [(0, 10), (-1, 10), (10, 10), (float("nan"), 3)])
def test_limits_that_make_no_sense_are_refused(limits) -> None:
    with pytest.raises(ValueError, match="warn_after_s must be positive and fail_after_s longer, got"):
        StallWatch(Activities(), warn_after_s=limits[0], fail_after_s=limits[1])
