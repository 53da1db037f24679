"""Timelines: bars on the tracks of their stages, in lanes that never overlap."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.watching import trace
from forebay.watching.activity import Span
from forebay.watching.trace import write_trace


def span(stage: str, name: str, start_s: float, length_s: float) -> Span:
    return Span(start_s, start_s + length_s, stage, name, "math", "", "done")


def bars(path: Path) -> list[tuple[str, str, float, float]]:
    """(track, name, start, end) in microseconds; fails if two bars of one lane overlap."""
    events = json.loads(path.read_text())
    tracks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(set(tracks.values())) == len(tracks)
    found, ends, track_of = [], dict[int, float](), dict[int, int]()
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= ends.get(event["tid"], 0.0) - 1e-3, "two bars in one lane"
            assert track_of.setdefault(event["tid"], event["pid"]) == event["pid"], "a lane of two tracks"
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append((tracks[event["pid"]], event["name"], event["ts"], ends[event["tid"]]))
    return found


def test_activities_become_bars_on_tracks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    spans = [
        span("generate", "a", 100, 2),
        span("generate", "b", 101, 2),
        span("generate", "c", 102.5, 1),
        span("train", "1", 103, 0.25),
        span("of one's own", "x", 103, 1),
    ]
    write_trace(path, spans)
    second = 1e6
    assert sorted(bars(path)) == [
        ("of one's own", "of one's own x", 3 * second, 4 * second),
        ("rollouts", "generate a", 0, 2 * second),
        ("rollouts", "generate b", second, 3 * second),
        ("rollouts", "generate c", 2.5 * second, 3.5 * second),
        ("trainer", "train 1", 3 * second, 3.25 * second),
    ]
    events = json.loads(path.read_text())
    # c takes the lane that a has left.
    assert len({e["tid"] for e in events if e.get("cat") == "generate"}) == 2
    assert [e["args"] for e in events if e.get("cat") == "train"] == [{"task": "math", "note": "done"}]
    write_trace(path, [])
    assert bars(path) == []


def test_a_timeline_that_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [span("train", "1", 0, 1)])
    before = path.read_text()

    def spans() -> Iterator[Span]:
        yield span("train", "2", 0, 1)
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        write_trace(path, spans())
    assert path.read_text() == before


@given(st.integers(0, 10_000))
def test_lanes_never_overlap_and_are_as_many_as_are_needed(tmp_path_factory, seed: int) -> None:
    rng = random.Random(seed)
    spans = [
        span(rng.choice(["generate", "judge", "put"]), str(i), rng.uniform(0, 20), rng.expovariate(0.5))
        for i in range(rng.randrange(1, 40))
    ]
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with patch.object(trace, "MAX_LANES", 4):
        write_trace(path, sorted(spans))
    found = bars(path)
    most_at_once = max(
        sum(other.stage == one.stage and other.start_s <= one.start_s < other.end_s for other in spans)
        for one in spans
    )
    assert (len(found) == len(spans)) == (most_at_once <= 4)
