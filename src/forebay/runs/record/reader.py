"""Reads the record of a run: which segments count, and their events with the groups that were put.

::

    segment_000: 1 2 3 4 5* 6 7      killed after step 7; the last checkpoint (*) is that of step 5
    segment_001: 6                   resumed from 5, killed before it saved anything
    segment_002: 6 7 8 9             resumed from 5
    history:     segment_000 up to the checkpoint of step 5, then segment_002

A last line that a killed process did not finish is left out with a message; anything
else that is not as it was written is a ValueError that names the place.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from forebay.replay.format.values import damage_named
from forebay.replay.groups import StoredGroup
from forebay.runs.record.writer import EVENTS, FOLDER, FORMAT, ROLLOUTS

logger = logging.getLogger(__name__)

Facts = dict[str, Any]


class Segment(NamedTuple):
    """The part that counts of one start of the run."""

    folder: Path
    resumed_from: int | None
    """The train step whose checkpoint it went on from; None for a new run."""
    until: int | None
    """It counts up to its checkpoint of this train step; None: to its end."""


class Event(NamedTuple):
    """One line of a journal."""

    facts: Facts
    """As noted: ``event``, ``number``, ``time_s``, and what the kind of event has."""
    group: StoredGroup | None
    """Of a ``put``: the group as it was given."""


def read_history(run_folder: Path) -> list[Segment]:
    """The segments that led to where the run is, oldest first.

    Raises:
        ValueError: nothing was recorded, or part of it is missing or damaged.
    """
    folders = sorted((run_folder / FOLDER).glob("segment_*"))
    if not folders:
        raise ValueError(
            f"{str(run_folder)!r} has no record: set record = true in the run file, before the run starts"
        )
    history: list[Segment] = []
    until: int | None = None
    for folder in reversed(folders):
        if until is not None and until not in _checkpoints(folder):
            continue
        history.append(Segment(folder, _resumed_from(folder), until))
        until = history[-1].resumed_from
        if until is None:
            return history[::-1]
    raise ValueError(
        f"the record in {str(run_folder)!r} begins at train step {until}: what led there was not recorded; "
        f"record a run from its start"
    )


def read_events(segment: Segment) -> Iterator[Event]:
    """The events of a segment that count, in order.

    Raises:
        ValueError: the journal or the rollouts are damaged.
    """
    groups: dict[int, StoredGroup] = {}
    for facts in _read_lines(segment.folder / EVENTS):
        if facts["event"] == "rollouts":
            groups |= _read_piece(segment.folder / ROLLOUTS, facts["offset"], facts["bytes"])
            continue
        group = None
        if facts["event"] == "put":
            if facts["number"] not in groups:
                raise ValueError(
                    f"{str(segment.folder / ROLLOUTS)!r} is damaged: it does not hold the group of event "
                    f"{facts['number']}"
                )
            group = groups.pop(facts["number"])
        yield Event(facts, group)
        if segment.until is not None and _is_checkpoint(facts, segment.until):
            return


def read_seeds(history: list[Segment], rollout_ids: set[str]) -> dict[str, int]:
    """The seed that each of these rollouts was generated with last."""
    seeds: dict[str, int] = {}
    for segment in history:
        for facts in _read_lines(segment.folder / EVENTS, {"generate", "checkpoint"}):
            if facts["event"] == "generate":
                # The controller names a request "rollout:try:tokens before it".
                rollout_id = facts["request"].rsplit(":", 2)[0]
                if rollout_id in rollout_ids:
                    seeds[rollout_id] = facts["seed"]
            elif segment.until == facts["train_step"]:
                break
    return seeds


def _checkpoints(folder: Path) -> set[int]:
    return {facts["train_step"] for facts in _read_lines(folder / EVENTS, {"checkpoint"})}


def _is_checkpoint(facts: Facts, train_step: int) -> bool:
    return bool(facts["event"] == "checkpoint" and facts["train_step"] == train_step)


def _resumed_from(folder: Path) -> int | None:
    first = next(_read_lines(folder / EVENTS, {"segment"}), None)
    if first is None or first.get("format") != FORMAT:
        raise ValueError(f"{str(folder / EVENTS)!r} is not a record that this release reads ({FORMAT})")
    resumed_from: int | None = first.get("resumed_from")
    return resumed_from


def _read_lines(path: Path, events: Collection[str] | None = None) -> Iterator[Facts]:
    """The whole lines, of these kinds of events only if given; without the choice, numbers are checked."""
    if not path.is_file():
        raise ValueError(f"the record is damaged: {str(path)!r} is missing")
    wanted = None if events is None else [f'"event":"{event}"'.encode() for event in events]
    number = 0
    with path.open("rb") as file:
        for place, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                if wanted is None:
                    logger.warning("%s: the last line was not finished; it is left out", path)
                return
            if wanted is not None and not any(text in line for text in wanted):
                continue
            with damage_named(f"{str(path)!r} line {place}"):
                facts = json.loads(line)
                if wanted is None and facts["event"] != "rollouts":
                    number += 1
                    if facts["number"] != number:
                        raise ValueError(f"it has number {facts['number']}, but {number} comes next")
            if events is None or facts["event"] in events:
                yield facts


def _read_piece(path: Path, offset: int, num_bytes: int) -> dict[int, StoredGroup]:
    """The groups in one piece of the rollouts, by the number of their event."""
    import pyarrow as pa

    from forebay.replay.format.tables import ROLLOUTS_SCHEMA, read_groups

    with damage_named(f"{str(path)!r} at byte {offset}"):
        with path.open("rb") as file:
            data = os.pread(file.fileno(), num_bytes, offset)
        if len(data) != num_bytes:
            raise ValueError(f"it ends after {len(data)} of {num_bytes} bytes")
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(data), ROLLOUTS_SCHEMA)
        # Before anything is read from it: wrong offsets would be followed outside of the data.
        batch.validate(full=True)
        return dict(read_groups(batch))
