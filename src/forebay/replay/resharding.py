"""Snapshots of several shards in one folder, and how they come back into another number of them.

::

    path/
      shards.json             which generation, how many shards
      generation-<random>/    0/ 1/ ...: a snapshot of each shard (`snapshot`)

    same number:  shard i <-- resume -- snapshot i
    another one:  all rows --> their shards by group id --> new snapshots in a temporary folder --> resume

A new generation is written beside the old one, and `shards.json` is replaced in one step: whatever happens,
the folder holds one whole generation. The shards read and write for themselves, so the folder is on a disk
that all of them see.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cancelling import finish
from forebay.durable import sync
from forebay.replay.storage import STATE_VERSION, StorageItem, copy_row
from forebay.types import RolloutState

if TYPE_CHECKING:
    from forebay.replay.snapshot import Snapshot

MANIFEST = "shards.json"
FORMAT = "forebay-replay-shards"
FORMAT_VERSION = 1
_GENERATION = "generation-"

OnShards = Callable[[Mapping[int, Awaitable[None]]], Awaitable[object]]
"""Awaits a call for each shard and names the one that fails."""
ShardOf = Callable[[Sequence[RolloutState]], int]


async def save_shards(path: Path, saves: Sequence[Callable[[Path], Awaitable[None]]], on: OnShards) -> None:
    """Make the folder `path` hold a snapshot of every shard instead of what it held.

    Raises:
        ValueError: `path` holds something else.
    """
    await asyncio.to_thread(_claim, path)
    generation = f"{_GENERATION}{secrets.token_hex(8)}"
    await on({number: save(path / generation / str(number)) for number, save in enumerate(saves)})
    await asyncio.to_thread(_publish, path, generation, len(saves))


async def restore_shards(
    path: Path,
    resumes: Sequence[Callable[[Path], Awaitable[None]]],
    on: OnShards,
    *,
    policy: str,
    shard_of: ShardOf,
) -> None:
    """Make the shards hold what was saved at `path`, by as many shards, by others, or by a single buffer.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: it is no snapshot, or one of another policy or format.
    """
    folders = await asyncio.to_thread(find_shards, path)
    if len(folders) == len(resumes):
        await on({number: resume(folders[number]) for number, resume in enumerate(resumes)})
        return
    temporary = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=".resharded-", dir=path.parent))
    try:
        # A thread cannot be stopped: a cancelled call waits for it before it deletes what it writes.
        await finish(asyncio.to_thread(_reshard, folders, temporary, len(resumes), policy, shard_of))
        await on({number: resume(temporary / str(number)) for number, resume in enumerate(resumes)})
    finally:
        await finish(asyncio.to_thread(shutil.rmtree, temporary))


def _claim(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{str(path)!r} is a file; a snapshot is a folder, name another path")
    path.mkdir(parents=True, exist_ok=True)
    foreign = [name for name in os.listdir(path) if name != MANIFEST and not name.startswith(_GENERATION)]
    if foreign:
        raise ValueError(
            f"{str(path)!r} holds {sorted(foreign)[0]!r}, which is not part of a snapshot of shards; "
            f"name an empty folder"
        )


def _publish(path: Path, generation: str, num_shards: int) -> None:
    content = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "generation": generation,
        "num_shards": num_shards,
    }
    # In the generation's folder, so that what a crash leaves is found to be ours.
    temporary = path / generation / MANIFEST
    temporary.write_text(json.dumps(content), encoding="utf-8")
    sync(temporary)
    sync(path / generation)
    os.replace(temporary, path / MANIFEST)
    sync(path)
    for name in os.listdir(path):
        if name.startswith(_GENERATION) and name != generation:
            shutil.rmtree(path / name)


def find_shards(path: Path) -> list[Path]:
    """The folder of each shard's snapshot; `path` itself if it is that of a single buffer.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: it does not say which they are.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no replay snapshot at {str(path)!r}")
    manifest = path / MANIFEST
    if not manifest.exists():
        return [path]
    try:
        content = json.loads(manifest.read_bytes())
        known = content["format"] == FORMAT and content["version"] == FORMAT_VERSION
        generation, number = path / Path(content["generation"]).name, int(content["num_shards"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{str(manifest)!r} is damaged: {error!r}") from None
    if not known or number < 1:
        raise ValueError(f"{str(manifest)!r} is not a {FORMAT} of version {FORMAT_VERSION}")
    return [generation / str(shard) for shard in range(number)]


def _reshard(folders: Sequence[Path], target: Path, number: int, policy: str, shard_of: ShardOf) -> None:
    """Write the snapshots of `number` shards, with the content of these."""
    from forebay.replay.snapshot import Snapshot, read_snapshot, write_snapshot

    snapshots = [read_snapshot(folder, policy=policy) for folder in folders]
    whole = merge_states([snapshot.storage for snapshot in snapshots])
    rows: list[list[StorageItem]] = [[] for _ in range(number)]
    for row in whole["items"]:
        rows[shard_of(row.item)].append(row)
    for shard, items in enumerate(rows):
        # Which shard counts them makes no difference: they are read as sums.
        evicted = _sum_evicted(snapshots) if shard == 0 else {}
        part = Snapshot(whole | {"items": items}, policy, snapshots[0].policy_state, evicted)
        write_snapshot(target / str(shard), part)


def read_shards(path: Path, *, policy: str | None = None) -> Snapshot:
    """The snapshot at `path` as that of one buffer, whether it is one of shards or not.

    Raises:
        FileNotFoundError, ValueError: as `read_snapshot`.
    """
    from forebay.replay.snapshot import Snapshot, read_snapshot

    snapshots = [read_snapshot(folder, policy=policy) for folder in find_shards(path)]
    first = snapshots[0]
    if len(snapshots) == 1:
        return first
    whole = merge_states([snapshot.storage for snapshot in snapshots])
    return Snapshot(whole, first.policy, first.policy_state, _sum_evicted(snapshots))


def _sum_evicted(snapshots: Sequence[Snapshot]) -> dict[str, int]:
    evicted: Counter[str] = Counter()
    for snapshot in snapshots:
        evicted.update(snapshot.num_evicted)
    return dict(evicted)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What one store of all these rows would be (`StorageBackend.state_dict`).

    A row's uid is ``uid there * stores + number of the store``.
    """
    steps: dict[str, int] = {}
    for state in states:
        for task, step in state["train_steps"].items():
            steps[task] = max(step, steps.get(task, step))
    return {
        "version": STATE_VERSION,
        "items": _renumbered([state["items"] for state in states]),
        # Room for the uids of all, and for the arrivals that move up by one where two are the same.
        "next_uid": max(state["next_uid"] for state in states) * len(states),
        "next_timestamp_id": max(state["next_timestamp_id"] for state in states)
        + sum(len(state["items"]) for state in states),
        "train_steps": steps,
    }


def _renumbered(of_stores: Sequence[Sequence[StorageItem]]) -> list[StorageItem]:
    """All rows in order of arrival, under ids that no two of them share."""
    found = [(row.timestamp_id, number, row) for number, rows in enumerate(of_stores) for row in rows]
    found.sort(key=lambda entry: entry[:2])
    rows, last = [], -1
    for timestamp_id, number, row in found:
        last = max(timestamp_id, last + 1)
        rows.append(copy_row(row, uid=row.uid * len(of_stores) + number, timestamp_id=last))
    return rows
