"""Busy shares against the plain definition, on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.aio.virtual_time import run
from forebay.watching.activity import WINDOW_S, Activities, BusyShare


async def busy_for(activities: Activities, stage: str, start_s: float, length_s: float) -> None:
    await asyncio.sleep(start_s)
    with activities.span(stage, start_s):
        await asyncio.sleep(length_s)


def test_shares_of_both_sides_over_window_and_run() -> None:
    async def main() -> None:
        activities = Activities()
        busy = BusyShare(activities)
        assert busy.share("trainer") == 0
        await asyncio.gather(
            busy_for(activities, "train", 0, 12),
            busy_for(activities, "sync", 36, 9),
            busy_for(activities, "wait_batch", 12, 24),
            *(busy_for(activities, "generate", 0, 60) for _ in range(2)),
            *(busy_for(activities, "judge", 30, 30) for _ in range(8)),
        )
        assert busy.share("trainer") == pytest.approx(0.3, abs=1 / 32)
        assert busy.busy_s("trainer") == 21
        assert busy.share("producer") == pytest.approx(1.0, abs=1 / 32)
        assert busy.busy_s("producer") == 60
        await asyncio.sleep(90)
        assert busy.share("trainer") == busy.share("producer") == 0
        with pytest.raises(KeyError):
            busy.share("judge")

    run(main())


@given(st.integers(0, 10_000), st.booleans())
def test_any_overlap_gives_the_share_of_the_definition(seed: int, read_often: bool) -> None:
    rng = random.Random(seed)
    spans = [(rng.uniform(0, 40), rng.expovariate(0.3)) for _ in range(rng.randrange(30))]
    end_s = 50.0

    async def main() -> tuple[float, float, int]:
        activities = Activities()
        busy = BusyShare(activities)
        tasks = [asyncio.create_task(busy_for(activities, "train", *span)) for span in spans]
        for _ in range(500 if read_often else 1):
            await asyncio.sleep(end_s / (500 if read_often else 1))
            assert 0 <= busy.share("trainer") <= 1
        share, total = busy.share("trainer"), busy.busy_s("trainer")
        remembered = len(busy._past)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return share, total, remembered

    def busy_between(start_s: float, end_s: float) -> float:
        edges = sorted({start_s, end_s, *(t for a, b in spans for t in (a, a + b) if start_s < t < end_s)})
        return sum(
            (right - left) * any(a <= left and right <= a + b for a, b in spans)
            for left, right in itertools.pairwise(edges)
        )

    share, total, remembered = run(main())
    assert total == pytest.approx(busy_between(0, end_s), abs=1e-6)
    assert share == pytest.approx(busy_between(end_s - WINDOW_S, end_s) / WINDOW_S, abs=1.01 / 32)
    assert remembered <= 35
