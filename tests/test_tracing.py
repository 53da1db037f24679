"""Trace files: that they parse, that lanes do not overlap, and what a kill or a full disk leaves."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.aio.virtual_time import run
from forebay.watching.activity import Activities
from forebay.watching.trace import TraceWriter


def read(text: str) -> list[dict[str, Any]]:
    """As the viewers do: the closing bracket may be missing."""
    return json.loads(text if text.rstrip().endswith("]") else text + "]")


def bars(events: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    """(track, name, start, end) in microseconds; fails if two bars of one lane overlap."""
    tracks = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert len({tid for _, tid in lanes}) == len(lanes), "thread ids are unique in the file"
    open_bars: dict[tuple[int, int], dict[str, Any]] = {}
    found, latest = [], 0.0
    for event in events:
        if event["ph"] == "M":
            continue
        lane = event["pid"], event["tid"]
        assert lane in lanes
        assert event["ts"] >= latest
        latest = event["ts"]
        if event["ph"] == "B":
            assert lane not in open_bars, "two bars in one lane"
            open_bars[lane] = event
        else:
            start = open_bars.pop(lane)
            found.append((tracks[lane[0]], start["name"], start["ts"], event["ts"]))
    return found + [(tracks[pid], e["name"], e["ts"], float("inf")) for (pid, _), e in open_bars.items()]


async def do(activities: Activities, stage: str, name: Any, start_s: float, length_s: float) -> None:
    await asyncio.sleep(start_s)
    with activities.span(stage, name, task="math") as activity:
        await asyncio.sleep(length_s)
        activity.note = "done"


def test_a_run_becomes_bars_on_tracks(tmp_path: Path) -> None:
    async def main() -> None:
        activities = Activities()
        await asyncio.sleep(100)
        trace = TraceWriter(tmp_path / "trace.json", activities)
        await asyncio.gather(
            do(activities, "generate", "a", 0, 2),
            do(activities, "generate", "b", 1, 2),
            do(activities, "generate", "c", 2.5, 1),
            do(activities, "train", 1, 3, 0.25),
            do(activities, "of one's own", "x", 3, 1),
        )
        trace.close()
        trace.close()
        assert activities._listeners == ()

    run(main())
    events = json.loads((tmp_path / "trace.json").read_text())
    second = 1e6
    assert sorted(bars(events)) == [
        ("of one's own", "of one's own x", 3 * second, 4 * second),
        ("rollouts", "generate a", 0, 2 * second),
        ("rollouts", "generate b", second, 3 * second),
        ("rollouts", "generate c", 2.5 * second, 3.5 * second),
        ("trainer", "train 1", 3 * second, 3.25 * second),
    ]
    # c takes the lane that a has left.
    assert len({e["tid"] for e in events if e["ph"] == "B" and e["cat"] == "generate"}) == 2
    assert [e["args"] for e in events if e["ph"] == "B" and e["cat"] == "train"] == [{"task": "math"}]
    assert {e["args"]["note"] for e in events if e["ph"] == "E"} == {"done"}


@given(st.integers(0, 10_000))
def test_lanes_never_overlap_and_are_as_many_as_are_needed(tmp_path_factory, seed: int) -> None:
    rng = random.Random(seed)
    spans = [
        (rng.choice(["generate", "judge", "put"]), i, rng.uniform(0, 20), rng.expovariate(0.5))
        for i in range(rng.randrange(1, 40))
    ]
    path = tmp_path_factory.mktemp("trace") / "trace.json"

    async def main() -> int:
        activities = Activities()
        trace = TraceWriter(path, activities, max_lanes=4)
        await asyncio.gather(*(do(activities, *span) for span in spans))
        trace.close()
        return trace.num_left_out

    left_out = run(main())
    found = bars(json.loads(path.read_text()))
    assert len(found) + left_out == len(spans)
    most_at_once = max(
        sum(s[0] == stage and s[2] <= start <= s[2] + s[3] for s in spans) for stage, _, start, _ in spans
    )
    assert (left_out > 0) == (most_at_once > 4)
    assert all(start <= end for _, _, start, end in found)


def test_a_killed_run_leaves_a_trace_with_what_was_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = f"""
import asyncio, os, signal
from pathlib import Path
from forebay.watching.activity import Activities
from forebay.watching.trace import TraceWriter
async def main():
    activities = Activities()
    trace = TraceWriter(Path({str(path)!r}), activities)
    with activities.span("train", 1):
        pass
    with activities.span("generate", "stuck"):
        trace.flush()
        with activities.span("judge", "lost in the buffer"):
            os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    text = path.read_text()
    assert not text.rstrip().endswith("]")
    (train, stuck) = bars(read(text))
    assert train[:2] == ("trainer", "train 1")
    assert (stuck[1], stuck[3]) == ("generate stuck", float("inf"))


def test_what_is_buffered_is_written_after_a_second_or_many_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        activities, path = Activities(), tmp_path / "trace.json"
        trace = TraceWriter(path, activities)
        with activities.span("train", 1):
            await asyncio.sleep(0.5)
            assert path.read_text() == ""
            await asyncio.sleep(0.6)
            assert len(bars(read(path.read_text()))) == 1
        for name in range(1000):
            with activities.span("put", name):
                pass
        assert len(bars(read(path.read_text()))) > 500
        trace.close()
        assert len(bars(read(path.read_text()))) == 1001

    run(main())


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path, caplog) -> None:
    async def main() -> None:
        activities = Activities()
        path = tmp_path / "trace.json"
        trace = TraceWriter(path, activities)
        # The device that is always full takes the place of the file.
        trace._file.close()
        trace._file = open("/dev/full", "w", encoding="ascii")  # noqa: SIM115
        with activities.span("train", 1):
            trace.flush()
        with activities.span("train", 2):
            await asyncio.sleep(5)
        trace.close()

    run(main())
    (record,) = caplog.records
    assert "trace.json ends here" in record.getMessage()


def test_an_earlier_trace_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[]")
    with pytest.raises(FileExistsError):
        TraceWriter(tmp_path / "trace.json", Activities(clock=lambda: 0.0))
