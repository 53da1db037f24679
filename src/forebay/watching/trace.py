"""A run's timeline as a file that https://ui.perfetto.dev or chrome://tracing opens ("Open trace file").

It is the JSON array of Google's Trace Event Format with a complete event for every activity. A run keeps its
activities in its history (`forebay.runs.record.history.read_spans`), a simulation in memory.

::

    span --> the first free lane of its stage's track --> {"ph": "X", pid: track, tid: lane, ts, dur}

A lane holds one activity at a time, so nothing in it overlaps: the viewers draw only what nests.
"""

import heapq
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from forebay.io.safe_files import replaced
from forebay.watching.activity import STAGES, Span

MAX_LANES = 512
"""Lanes of one track: more cannot be told apart on a screen. Activities without one are left out."""


def write_trace(path: Path, spans: Iterable[Span]) -> None:
    """Write `spans`, which come in the order of their beginnings, to `path`.

    ::

        write_trace(Path("trace.json"), read_spans(Path("runs/a")))
    """
    with replaced(path) as temporary, temporary.open("w", encoding="ascii") as file:
        separators = itertools.chain("[", itertools.repeat(","))
        for separator, event in zip(separators, _events(spans), strict=False):
            file.write(f"{separator}\n{json.dumps(event)}")
        file.write("\n]\n")


def _events(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    names = dict.fromkeys(stage.track for stage in STAGES.values())
    tracks = {name: number for number, name in enumerate(names, start=1)}
    # By track, as heaps: the lanes that nothing is in, and when the others will be free.
    free: defaultdict[str, list[int]] = defaultdict(list)
    busy: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    # Unique in the file, as the thread ids that the format takes them for.
    lanes = itertools.count(1)
    start_s = None
    for span in spans:
        start_s = span.start_s if start_s is None else start_s
        name = STAGES[span.stage].track if span.stage in STAGES else span.stage
        track = tracks.setdefault(name, len(tracks) + 1)
        while busy[name] and busy[name][0][0] <= span.start_s:
            heapq.heappush(free[name], heapq.heappop(busy[name])[1])
        if not free[name] and len(busy[name]) == MAX_LANES:
            continue
        lane = heapq.heappop(free[name]) if free[name] else next(lanes)
        heapq.heappush(busy[name], (span.end_s, lane))
        told = {"task": span.task, "group": span.group_id, "note": span.note}
        yield {
            "ph": "X",
            "pid": track,
            "tid": lane,
            # Microseconds, to the nanosecond: more digits would only be rounding errors of sums.
            "ts": round((span.start_s - start_s) * 1e6, 3),
            "dur": round((span.end_s - span.start_s) * 1e6, 3),
            "name": f"{span.stage} {span.name}",
            "cat": span.stage,
            "args": {key: value for key, value in told.items() if value},
        }
    for name, track in tracks.items():
        yield {"ph": "M", "pid": track, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": track, "tid": 0, "name": "process_sort_index", "args": {"sort_index": track}}
