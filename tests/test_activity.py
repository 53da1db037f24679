"""The register of what is in flight: what it holds, in which order, and whom it tells."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.aio.virtual_time import run
from forebay.watching.activity import Activities, Activity


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def began(self, activity: Activity) -> None:
        self.events.append(("began", activity.name))

    def ended(self, activity: Activity) -> None:
        self.events.append(("ended", activity.name))


def test_says_who_is_doing_what_for_how_long() -> None:
    async def main() -> None:
        activities = Activities()
        with activities.span("train", 7):
            await asyncio.sleep(5)
            with activities.span("generate", "a/0/1", task="a", group="a/0") as inner:
                await asyncio.sleep(2)
                assert [(a.stage, a.name, activities.age_s(a)) for a in activities.in_flight()] == [
                    ("train", 7, 7.0),
                    ("generate", "a/0/1", 2.0),
                ]
            assert (inner.start_s, inner.end_s, inner.task, inner.group) == (5.0, 7.0, "a", "a/0")
        assert activities.in_flight() == []

    run(main())


def test_what_raises_or_is_cancelled_has_ended_and_says_with_what() -> None:
    async def main() -> None:
        activities = Activities()
        with pytest.raises(KeyError), activities.span("judge", 1) as raised:
            raise KeyError("x")
        noted = activities.span("judge", 1)
        noted.note = "half"
        with pytest.raises(KeyError), noted:
            raise KeyError("x")

        async def hang() -> None:
            with activities.span("tool", 2):
                await asyncio.sleep(100)

        task = asyncio.create_task(hang())
        await asyncio.sleep(1)
        (cancelled,) = activities.in_flight()
        task.cancel()
        await asyncio.wait([task])
        assert [raised.note, noted.note, cancelled.note] == ["KeyError", "half", "CancelledError"]
        assert activities.in_flight() == []

    run(main())


def test_a_listener_hears_of_both_ends_also_of_what_was_in_flight_when_it_came() -> None:
    async def main() -> None:
        activities, early, late = Activities(), Recorder(), Recorder()
        activities.listen(early.began, early.ended)
        with activities.span("generate", 1):
            activities.listen(late.began, late.ended)
            with activities.span("generate", 2):
                pass
        both = [("began", 1), ("began", 2), ("ended", 2), ("ended", 1)]
        assert early.events == late.events == both

    run(main())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_whatever_overlaps_the_oldest_is_first_and_nothing_stays(times: list[tuple[int, int]]) -> None:
    async def one(activities: Activities, start_s: int, length_s: int) -> None:
        await asyncio.sleep(start_s)
        with activities.span("generate", start_s):
            starts = [activity.start_s for activity in activities.in_flight()]
            assert starts == sorted(starts)
            await asyncio.sleep(length_s)

    async def main() -> None:
        activities = Activities()
        await asyncio.gather(*(one(activities, *pair) for pair in times))
        assert activities.in_flight() == []

    run(main())
