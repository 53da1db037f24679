"""The ``forebay buffer`` commands: looking into a replay buffer on disk, moving it, serving it.

::

    forebay buffer inspect PATH                  what is in it: counts, staleness, ages, sizes, ledger balance
    forebay buffer show    PATH UID              one group: prompt, responses, rewards, weights of every token
    forebay buffer query   PATH '{"staleness": {"$gte": 2}}'
    forebay buffer export  PATH out.parquet      one line per rollout, for pandas, Polars, DuckDB
    forebay buffer migrate FROM TO               to another store or a snapshot
    forebay buffer serve   ADDRESS               the buffer for other processes, until Ctrl-C or SIGTERM

PATH is a snapshot folder, a checkpoint, a run folder (its database, or newest checkpoint), or a database: an
SQLite file, a URL, or `postgresql` for that in the variable FOREBAY_REPLAY_URL. Of the commands that look, only
``export`` and ``migrate`` write, and only what they are told to.
"""

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.text import Text

from forebay.cli import views
from forebay.cli.errors import MARKUP, console, in_one_message
from forebay.cli.ledger import ledger_section
from forebay.cli.source import ALL_STATUSES, Digest, find_snapshot, is_sql, named_url, open_sql, opened, own_database
from forebay.io.address import hide_password
from forebay.io.safe_files import replaced
from forebay.replay.format.snapshot import Snapshot, read_snapshot, write_snapshot
from forebay.replay.format.tables import JOINED_SCHEMA
from forebay.replay.format.values import damage_named
from forebay.replay.policies import FIFOReplayPolicy, ReplayPolicy
from forebay.replay.query import show_value
from forebay.replay.stores.contract import StorageItem

app = typer.Typer(
    help="Look into a replay buffer on disk, move it, or serve it.", no_args_is_help=True, rich_markup_mode=MARKUP
)

BufferPath = Annotated[
    str, typer.Argument(metavar="PATH", help="A snapshot, checkpoint or run folder, or a database.")
]


@app.command()
@in_one_message
async def inspect(path: BufferPath) -> None:
    """Show what is in a buffer: counts, staleness, ages, sizes, and the ledger's balance."""
    out = console()
    async with opened(path) as source:
        rows = await source.storage.get(ALL_STATUSES, rows_only=True)
        live = [row for row in rows if not row.is_archived]
        out.print(Text(source.location, "bold"), soft_wrap=True)
        on_disk = [] if source.num_bytes is None else [f"{views.size(source.num_bytes)} on disk"]
        out.print(Text("; ".join([source.kind, *on_disk]), "dim"))
        out.print(views.section("groups", views.counts_table(rows) if rows else Text("none")))
        if live:
            ages = views.histogram([row.staleness for row in live])
            out.print(views.section("staleness of live groups", ages))
            steps = {row.task_name: await source.storage.get_train_step(row.task_name) for row in live}
            out.print(views.section("ages", views.ages_table(live, steps)))
        if rows:
            digests = await source.digests([row.uid for row in rows])
            out.print(views.section("sizes", views.sizes_table(still_there(rows, digests), digests)))
        if source.num_evicted:
            evicted = [f"{task} {views.number(count)}" for task, count in sorted(source.num_evicted.items())]
            out.print(views.section("evicted so far", views.plain(", ".join(evicted))))
        if source.near is not None:
            out.print(ledger_section(source.near, live))


@app.command()
@in_one_message
async def show(
    path: BufferPath, uid: Annotated[int, typer.Argument(metavar="UID", help="As `query` lists it.")]
) -> None:
    """Show one group: prompt, responses, rewards, and the weights that made each span of tokens."""
    async with opened(path) as source:
        rows = await source.storage.get({"uid": uid, **ALL_STATUSES}, rows_only=True)
        if not rows:
            raise ValueError(
                f"no group with uid {uid} in {source.location!r}; `forebay buffer query` lists those it has"
            )
        group = await source.group(uid)
        with damage_named(f"group {uid}"):
            console().print(views.group_view(rows[0], group))


@app.command()
@in_one_message
async def query(
    path: BufferPath,
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help='JSON, such as \'{"task_name": "math", "tags.level": 3}\'.')
    ] = "{}",
    order: Annotated[
        str | None, typer.Option(help="timestamp_id, staleness or priority; - in front: descending.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Groups to show at most.")] = 50,
) -> None:
    """List the groups that match a query."""
    asked = parse_json_query(query)
    async with opened(path) as source:
        rows = await source.storage.get(asked, order=order, limit=limit, rows_only=True)
        found = await source.storage.count(asked)
        if rows:
            digests = await source.digests([row.uid for row in rows])
            console().print(views.rows_table(still_there(rows, digests), digests))
    more = f"; showing the first {len(rows)} (--limit)" if found > len(rows) else ""
    console().print(Text(f"{views.number(found)} group{'' if found == 1 else 's'}{more}", "dim"))


@app.command()
@in_one_message
async def export(
    path: BufferPath,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The Parquet file to write.")],
    query: Annotated[str, typer.Option(help="Only the groups that match, as in `query`.")] = "{}",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Write rows and rollouts to a Parquet file, one line per rollout."""
    asked = parse_json_query(query)
    if target.suffix != ".parquet":
        raise ValueError(f"the file is written as Parquet; let its name end in .parquet, got {str(target)!r}")
    if target.exists() and not overwrite:
        raise ValueError(f"{str(target)!r} exists; --overwrite replaces it")
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {str(target.parent)!r} to write {target.name!r} to; make it first")
    async with opened(path) as source:
        rows = await source.storage.get(asked, rows_only=True)
        rollouts = pa.Table.from_batches(await source.joined(rows), JOINED_SCHEMA)
    with replaced(target) as temporary:
        pq.write_table(rollouts, temporary)
    written = f"{views.number(len(rows))} groups, {views.number(len(rollouts))} rollouts"
    size = views.size(target.stat().st_size)
    console().print(views.plain(f"{target}: {written}, {size}"), soft_wrap=True)


@app.command()
@in_one_message
async def migrate(
    source: Annotated[str, typer.Argument(metavar="FROM", help="As PATH elsewhere.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="A new folder, or an empty database.")],
    policy: Annotated[
        str | None, typer.Option(help="Policy that a snapshot of a database is for; its class name.")
    ] = None,
) -> None:
    """Copy everything: a snapshot to a database, a database to a snapshot, or like to like."""
    snapshot, out = _read_all(own_database(source), policy), console()
    if is_sql(target := named_url(target)):
        await _fill_database(target, snapshot)
        if snapshot.policy_state:
            out.print(Text(f"the state of {snapshot.policy} (its random numbers) stays behind", "yellow"))
    else:
        _write_new_snapshot(Path(target), snapshot)
    items = snapshot.storage["items"]
    archived = sum(item.is_archived for item in items)
    moved = f"{views.number(len(items) - archived)} live and {views.number(archived)} archived groups"
    out.print(views.plain(f"{hide_password(target)}: {moved}"), soft_wrap=True)


@app.command()
@in_one_message
async def serve(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="A path, for a Unix socket, or tcp://HOST:PORT (port 0: any).")
    ],
    store: Annotated[str, typer.Option(help="`memory`, an SQLite file, a URL, or `postgresql`.")] = "memory",
    policy: Annotated[
        str, typer.Option(help="`staleness`, `fifo` or `prioritized`: the order in which groups are taken.")
    ] = "staleness",
    max_live: Annotated[int | None, typer.Option(min=1, help="Puts wait while there are so many live groups.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Instead: what arrived first is evicted above so many.")
    ] = None,
    max_clients: Annotated[
        int | None, typer.Option(min=1, help="Connections at a time (900); a further client is refused.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the token; else the variable FOREBAY_BUFFER_TOKEN. Needed off loopback.")
    ] = None,
) -> None:
    """Serve a replay buffer to other processes, for `RemoteReplayBuffer.connect(ADDRESS)`.

    Prints where it listens. Ctrl-C or SIGTERM ends it: running calls are finished, waiting ones get an error.
    """
    # The first statement: so far the locals are the arguments, which are the fields of `ServeOptions`.
    given = locals() | {"store": named_url(store)}
    # Here, because it loads the server, which no other command needs.
    from forebay.replay.remote.server import ServeOptions, serve_buffer

    await serve_buffer(ServeOptions(**given), typer.echo)


def still_there(rows: list[StorageItem], digests: Mapping[int, Digest]) -> list[StorageItem]:
    """The rows without those that another process took out of the database between two queries."""
    return [row for row in rows if row.uid in digests]


def _read_all(source: str, policy: str | None) -> Snapshot:
    if not is_sql(source):
        if policy is not None:
            raise ValueError(f"a snapshot keeps the policy it was taken with; leave out --policy {policy}")
        return read_snapshot(find_snapshot(Path(source)))
    known = {kind.__name__: kind for kind in ReplayPolicy.__subclasses__()}
    chosen = FIFOReplayPolicy.__name__ if policy is None else policy
    if chosen not in known:
        raise ValueError(f"unknown policy {chosen!r}; known: {', '.join(known)}")
    with closing(open_sql(source)) as store:
        # A database keeps no state of a policy: the snapshot begins with that of a new one.
        return Snapshot(store.state_dict(), chosen, known[chosen]().state_dict(), store.num_evicted)


def _write_new_snapshot(folder: Path, snapshot: Snapshot) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is there already; name a new folder, or an empty one")
    write_snapshot(folder, snapshot)


async def _fill_database(target: str, snapshot: Snapshot) -> None:
    with closing(open_sql(target, create=True)) as store:
        held = await store.count(ALL_STATUSES)
        if held:
            raise ValueError(f"{hide_password(target)!r} holds {held} groups already; name an empty database")
        store.load_state_dict(snapshot.storage)
        store.num_evicted = dict(snapshot.num_evicted)


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
        raise ValueError(f'a query is a JSON object such as {{"status": "completed"}}, got {show_value(text)}')
    return query
