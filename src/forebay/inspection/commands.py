"""The work of ``forebay buffer`` and ``forebay ledger``: a buffer or a ledger on disk, on a console."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console, Group
from rich.text import Text

from forebay.inspection.source import (
    ALL_STATUSES,
    Digest,
    find_snapshot,
    hide_password,
    is_sql,
    open_sql,
    opened,
)
from forebay.inspection.views import (
    ages_table,
    balance_table,
    bias_table,
    counts_table,
    group_view,
    histogram,
    number,
    plain,
    rows_table,
    section,
    size,
    sizes_table,
)
from forebay.ledger import Ledger, compare_dropped
from forebay.replay import policies
from forebay.replay.format.snapshot import Snapshot, read_snapshot, write_snapshot
from forebay.replay.format.tables import JOINED_SCHEMA
from forebay.replay.format.values import damage_named
from forebay.replay.policies import FIFOReplayPolicy, ReplayPolicy
from forebay.replay.query import show_value
from forebay.replay.stores.contract import StorageItem

LEDGER_FILE = "ledger.jsonl"


async def inspect_buffer(path: str, console: Console) -> None:
    """Counts by task and status, staleness, ages, sizes, evictions, and the balance of a ledger nearby."""
    async with opened(path) as source:
        rows = await source.storage.get(ALL_STATUSES, rows_only=True)
        live = [row for row in rows if not row.is_archived]
        console.print(Text(source.location, "bold"), soft_wrap=True)
        on_disk = [] if source.num_bytes is None else [f"{size(source.num_bytes)} on disk"]
        console.print(Text("; ".join([source.kind, *on_disk]), "dim"))
        console.print(section("groups", counts_table(rows) if rows else Text("none")))
        if live:
            console.print(section("staleness of live groups", histogram([row.staleness for row in live])))
            steps = {row.task_name: await source.storage.get_train_step(row.task_name) for row in live}
            console.print(section("ages", ages_table(live, steps)))
        if rows:
            digests = await source.digests([row.uid for row in rows])
            console.print(section("sizes", sizes_table(still_there(rows, digests), digests)))
        if source.num_evicted:
            evicted = [f"{task} {number(count)}" for task, count in sorted(source.num_evicted.items())]
            console.print(section("evicted so far", plain(", ".join(evicted))))
        if "://" not in path:
            console.print(_ledger_section(Path(source.location), live))


async def show_group(path: str, uid: int, console: Console) -> None:
    """One group.

    Raises:
        ValueError: there is no such group.
    """
    async with opened(path) as source:
        rows = await source.storage.get({"uid": uid, **ALL_STATUSES}, rows_only=True)
        if not rows:
            raise ValueError(
                f"no group with uid {uid} in {source.location!r}; `forebay buffer query` lists those it has"
            )
        group = await source.group(uid)
        with damage_named(f"group {uid}"):
            console.print(group_view(rows[0], group))


async def query_buffer(path: str, text: str, order: str | None, limit: int, console: Console) -> None:
    """The groups that match, as a table.

    Raises:
        ValueError: the text is no JSON, or no query; the message names the wrong part.
    """
    query = parse_json_query(text)
    async with opened(path) as source:
        rows = await source.storage.get(query, order=order, limit=limit, rows_only=True)
        found = await source.storage.count(query)
        if rows:
            digests = await source.digests([row.uid for row in rows])
            console.print(rows_table(still_there(rows, digests), digests))
        more = f"; showing the first {len(rows)} (--limit)" if found > len(rows) else ""
        console.print(Text(f"{number(found)} group{'' if found == 1 else 's'}{more}", "dim"))


def still_there(rows: list[StorageItem], digests: Mapping[int, Digest]) -> list[StorageItem]:
    """Without those that another process took out of a database between two questions."""
    return [row for row in rows if row.uid in digests]


async def export_buffer(path: str, target: Path, text: str, overwrite: bool, console: Console) -> None:
    """A Parquet file, complete or absent.

    Raises:
        ValueError: the query is not one, or `target` is no Parquet file's name or exists.
    """
    query = parse_json_query(text)
    _check_target(target, overwrite)
    async with opened(path) as source:
        rows = await source.storage.get(query, rows_only=True)
        rollouts = pa.Table.from_batches(await source.joined(rows), JOINED_SCHEMA)
    num_bytes = _write_parquet(target, rollouts)
    written = f"{number(len(rows))} groups, {number(len(rollouts))} rollouts, {size(num_bytes)}"
    console.print(plain(f"{target}: {written}"), soft_wrap=True)


def _check_target(target: Path, overwrite: bool) -> None:
    if target.suffix != ".parquet":
        raise ValueError(f"the file is written as Parquet; let its name end in .parquet, got {str(target)!r}")
    if target.exists() and not overwrite:
        raise ValueError(f"{str(target)!r} exists; --overwrite replaces it")
    if not target.parent.is_dir():
        raise ValueError(
            f"there is no folder {str(target.parent)!r} to write {target.name!r} to; make it first"
        )


def _write_parquet(target: Path, rollouts: pa.Table) -> int:
    """Write the file under another name and rename it; return its size in bytes."""
    temporary = target.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        pq.write_table(rollouts, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target.stat().st_size


async def migrate_buffer(source: str, target: str, policy: str | None, console: Console) -> None:
    """Everything in `source`, in `target`.

    Raises:
        ValueError: `target` is not empty, or the policy is unknown or not to be chosen.
    """
    snapshot = _read_all(source, policy)
    if is_sql(target):
        await _fill_database(target, snapshot)
        if snapshot.policy_state:
            console.print(Text(f"the state of {snapshot.policy} (its random numbers) stays behind", "yellow"))
    else:
        _write_new_snapshot(Path(target), snapshot)
    items = snapshot.storage["items"]
    archived = sum(item.is_archived for item in items)
    moved = f"{number(len(items) - archived)} live and {number(archived)} archived groups"
    console.print(plain(f"{hide_password(target)}: {moved}"), soft_wrap=True)


def _write_new_snapshot(folder: Path, snapshot: Snapshot) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is there already; name a new folder, or an empty one")
    write_snapshot(folder, snapshot)


def _read_all(source: str, policy: str | None) -> Snapshot:
    if not is_sql(source):
        if policy is not None:
            raise ValueError(f"a snapshot keeps the policy it was taken with; leave out --policy {policy}")
        return read_snapshot(find_snapshot(Path(source)))
    known = {
        name: kind
        for name, kind in vars(policies).items()
        if isinstance(kind, type) and issubclass(kind, ReplayPolicy) and kind is not ReplayPolicy
    }
    chosen = FIFOReplayPolicy.__name__ if policy is None else policy
    if chosen not in known:
        raise ValueError(f"unknown policy {chosen!r}; known: {', '.join(known)}")
    store = open_sql(source)
    try:
        return Snapshot(store.state_dict(), chosen, known[chosen]().state_dict(), store.num_evicted)
    finally:
        store.close()


async def _fill_database(target: str, snapshot: Snapshot) -> None:
    store = open_sql(target, create=True)
    try:
        held = await store.count(ALL_STATUSES)
        if held:
            raise ValueError(f"{hide_password(target)!r} holds {held} groups already; name an empty database")
        store.load_state_dict(snapshot.storage)
        store.num_evicted = dict(snapshot.num_evicted)
    finally:
        store.close()


async def ledger_report(path: Path, task_name: str | None, console: Console) -> None:
    """The balance at the end of the file, the newest checkpoint's against its buffer, and the bias report.

    Raises:
        FileNotFoundError: there is no ledger at `path`.
        ValueError: the file is no ledger's, or there is no such task.
    """
    file = _ledger_file(path)
    ledger = Ledger.read(file)
    if task_name is not None and task_name not in ledger.task_names:
        raise ValueError(f"no task {task_name!r} in {str(file)!r}; tasks: {', '.join(ledger.task_names)}")
    console.print(Text(str(file), "bold"), soft_wrap=True)
    balance = balance_table(ledger.balance(ledger.count_live()))
    console.print(section("groups, by the ledger's own account", balance, *_losses(ledger)))
    await _check_checkpoint(file.parent, console)
    comparisons = compare_dropped(ledger, task_name)
    if comparisons["all"][0].trained.count == 0 or len(comparisons) == 1:
        console.print(section("bias", Text("nothing to compare: no group was dropped, or none trained")))
        return
    of = "all tasks" if task_name is None else f"task {task_name}"
    notes = ["difference: mean of the dropped minus mean of the trained; *: beyond 3 standard errors"]
    if task_name is None and len(ledger.task_names) > 1:
        notes.append("tasks differ by themselves; --task compares within one")
    title = f"bias: dropped against trained groups, {of}"
    console.print(section(title, bias_table(comparisons), *(Text(note, "dim") for note in notes)))


def _ledger_file(path: Path) -> Path:
    file = path / LEDGER_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"there is no ledger at {str(file)!r}; name a run folder or a {LEDGER_FILE}")
    return file


async def _check_checkpoint(folder: Path, console: Console) -> None:
    """Hold the newest checkpoint's ledger against its buffer."""
    try:
        buffer = find_snapshot(folder)
        near = _find_ledger(buffer)
    except ValueError:
        return
    if near is None or not near.is_same_moment:
        return
    async with opened(str(buffer)) as source:
        rows = await source.storage.get({}, rows_only=True)
    live = Counter(row.task_name for row in rows)
    console.print(section(f"newest checkpoint ({buffer.parents[1].name})", _verdict(near, live)))


@dataclass(frozen=True)
class _NearLedger:
    """The ledger of a buffer on disk."""

    ledger: Ledger
    location: str
    is_same_moment: bool
    """Saved together with the buffer. Otherwise it is of the end of its file, which may have gone on."""


def _find_ledger(buffer: Path) -> _NearLedger | None:
    """The ledger saved beside the snapshot `buffer`, else the file near it; None if there is none.

    Raises:
        ValueError: there is one, but it cannot be read.
    """
    saved = buffer.parent / "manager.json"
    if saved.is_file():
        state = json.loads(saved.read_text(encoding="utf-8"))
        return _NearLedger(Ledger.read_checkpoint(state.get("ledger", {}), saved.parent), str(saved), True)
    for folder in (buffer, buffer.parent, buffer.parent.parent):
        if (file := folder / LEDGER_FILE).is_file():
            return _NearLedger(Ledger.read(file), str(file), False)
    return None


def _ledger_section(buffer: Path, live: list[StorageItem]) -> Group:
    try:
        near = _find_ledger(buffer)
    except ValueError as error:
        # The buffer was asked for; a ledger that cannot be read must not hide it.
        return section("ledger", Text("not readable: ", "yellow") + plain(error))
    if near is None:
        return Group()
    counts = Counter(row.task_name for row in live)
    balance = balance_table(near.ledger.balance(counts))
    return section(f"ledger ({near.location})", balance, _verdict(near, counts))


def _verdict(near: _NearLedger, live: Mapping[str, int]) -> Text:
    if losses := _losses(near.ledger):
        return losses[0]
    if near.ledger.balance(live).ok:
        return Text("balanced: every group is in exactly one place", "green")
    if not near.is_same_moment:
        return Text("the ledger's file may have gone on since the buffer was saved, or before it", "yellow")
    return Text("NOT balanced: groups are missing (difference > 0), too many (< 0), or repeated", "bold red")


def _losses(ledger: Ledger) -> list[Text]:
    """A line about events that are missing in the ledger's file; nothing if none are."""
    if not ledger.lost_events:
        return []
    said = (
        f"{number(ledger.lost_events)} events are missing in the file: a power cut or the disk took them. "
        "The groups that they were about may be missing here, or stand where they were before"
    )
    return [Text(said, "bold red")]


def parse_json_query(text: str) -> dict[str, Any]:
    """The query in `text`.

    Raises:
        ValueError: it is no JSON object; the message says where it goes wrong.
    """
    try:
        query = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the query is no JSON: {error.msg} at character {error.pos + 1} of {show_value(text)}"
        ) from None
    except (RecursionError, ValueError) as error:
        # Nested deeper, or with a longer number, than Python reads.
        raise ValueError(f"the query cannot be read: {error}, in {show_value(text)}") from None
    if not isinstance(query, dict):
        raise ValueError(
            f'a query is a JSON object such as {{"status": "completed"}}, got {show_value(text)}'
        )
    return query
