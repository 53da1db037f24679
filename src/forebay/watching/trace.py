"""A run's timeline as a file that https://ui.perfetto.dev or chrome://tracing opens ("Open trace file").

It is the JSON array of Google's Trace Event Format: a begin and an end event for every activity, as they
happen. A killed run leaves an array without its closing bracket, which both programs accept; what was in
flight is then drawn to the end. Profilers that record Python calls (viztracer) or need protobuf were more
than two lines of JSON per activity are worth.

::

    activity began --> the first free lane of its track --> {"ph": "B", pid: track, tid: lane}
    activity ended -->            frees the lane        --> {"ph": "E"}
                                                              | buffer: 64 KiB or one second
                                                              v
                                                             file

A lane holds one activity at a time, so nothing in it overlaps: the viewers draw only what nests.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.watching.activity import STAGES, Activities, Activity

logger = logging.getLogger(__name__)

MAX_LANES = 512
"""Lanes of one track: more cannot be told apart on a screen. Activities without one are only counted."""

_BUFFER_BYTES = 1 << 16
_FLUSH_AFTER_S = 1.0
"""A kill costs at most so much: short against the stalls and steps that one looks for in a trace."""


# One for all events: `json.dumps` with a default would make an encoder for each.
_encode = json.JSONEncoder(default=str).encode


class TraceWriter:
    """Writes every activity of a run to a trace file.

    Invariants: activities in one lane of one track never overlap; the file is at every moment a trace that
    opens; a full disk ends the trace with a warning, never the run.

    >>> activities = Activities()                                                   # doctest: +SKIP
    >>> trace = TraceWriter(run_folder / "trace.json", activities)                  # doctest: +SKIP
    >>> ...                                                                         # doctest: +SKIP
    >>> trace.close()                                                               # doctest: +SKIP
    """

    def __init__(self, path: Path, activities: Activities, *, max_lanes: int = MAX_LANES) -> None:
        """Begin the trace at `path`, at the activities' present time, and listen.

        Raises:
            FileExistsError: there is a file already; a resumed run begins a trace of its own.
        """
        self.path = path
        self.num_left_out = 0
        """Activities for which no lane was free."""
        self._activities = activities
        self._max_lanes = max_lanes
        self._start_s = activities.clock()
        self._tracks: dict[str, _Track] = {}
        self._num_lanes = 0
        self._places: dict[Activity, tuple[_Track, int]] = {}
        """Track and lane of what is in flight."""
        self._separator = "[\n"
        self._timer: asyncio.TimerHandle | None = None
        self._file = path.open("x", encoding="ascii", buffering=_BUFFER_BYTES)
        for stage in STAGES.values():
            self._track(stage.track)
        self._stop_listening = activities.listen(self._began, self._ended)

    def _began(self, activity: Activity) -> None:
        """Open a bar in the first free lane of the stage's track; a stage of a program's own has its own."""
        stage = STAGES.get(activity.stage)
        track = self._track(stage.track if stage else activity.stage)
        if track.free:
            lane = heapq.heappop(track.free)
        elif track.num_lanes < self._max_lanes:
            track.num_lanes += 1
            self._num_lanes += 1
            # Unique in the file, as the thread ids that the format takes it for; 0 is a track as a whole.
            lane = self._num_lanes
            self._event("M", track, lane, name="thread_name", args={"name": f"lane {track.num_lanes}"})
        else:
            self.num_left_out += 1
            return
        self._places[activity] = track, lane
        what = {"task": activity.task, "group": activity.group}
        self._event(
            "B",
            track,
            lane,
            ts=self._microseconds(self._activities.clock()),
            name=f"{activity.stage} {activity.name}",
            cat=activity.stage,
            args={key: value for key, value in what.items() if value is not None},
        )

    def _ended(self, activity: Activity) -> None:
        """Close the bar and free its lane."""
        if activity not in self._places:
            return
        track, lane = self._places.pop(activity)
        args = {"note": activity.note} if activity.note else {}
        self._event("E", track, lane, ts=self._microseconds(activity.end_s), args=args)
        heapq.heappush(track.free, lane)

    def flush(self) -> None:
        """Write what is buffered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._attempt(self._file.flush)

    def _attempt(self, write: Callable[..., object], *arguments: str) -> None:
        if self._file.closed:
            return
        try:
            write(*arguments)
        except OSError as error:
            logger.warning("the trace %s ends here: %s", self.path, error)
            self._stop_listening()
            # A file that takes no more takes no more by closing either.
            with contextlib.suppress(OSError):
                self._file.close()

    def close(self) -> None:
        """Finish the file; what is still in flight is drawn to the end. May be called twice."""
        self._stop_listening()
        if self._file.closed:
            return
        self._attempt(self._file.write, "\n]\n")
        self.flush()
        self._file.close()
        if self.num_left_out:
            logger.warning("%d activities found no free lane in %s", self.num_left_out, self.path)

    def _track(self, name: str) -> _Track:
        if (track := self._tracks.get(name)) is None:
            track = self._tracks[name] = _Track(len(self._tracks) + 1)
            self._event("M", track, 0, name="process_name", args={"name": name})
            self._event("M", track, 0, name="process_sort_index", args={"sort_index": track.number})
        return track

    def _event(self, kind: str, track: _Track, lane: int, **fields: Any) -> None:
        event = {"ph": kind, "pid": track.number, "tid": lane, **fields}
        self._attempt(self._file.write, self._separator + _encode(event))
        self._separator = ",\n"
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_AFTER_S, self.flush)

    def _microseconds(self, time_s: float) -> float:
        # To the nanosecond: more digits would only be rounding errors of the clock's sums.
        return round((time_s - self._start_s) * 1e6, 3)


@dataclass
class _Track:
    """One track's lanes."""

    number: int
    free: list[int] = field(default_factory=list)
    """A heap: the first free lane comes first."""
    num_lanes: int = 0
