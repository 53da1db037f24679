"""The command ``forebay buffer serve``: build a buffer, serve it until told to stop, leave nothing behind.

::

    store, snapshot --> buffer --> serve --SIGTERM, Ctrl-C--> what runs ends --> snapshot, close
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forebay.replay.buffer import ReplayBuffer
from forebay.replay.policies import (
    FIFOReplayPolicy,
    PrioritizedReplayPolicy,
    ReplayPolicy,
    StalenessReplayPolicy,
)
from forebay.replay.remote.calls import MAX_CLIENTS
from forebay.replay.remote.server import serve
from forebay.replay.stores.contract import StorageBackend
from forebay.replay.stores.indexed import IndexedStorage

TOKEN_VARIABLE = "FOREBAY_BUFFER_TOKEN"
"""Where the token is looked for when no file is named; a command line would show it to everybody."""

IN_MEMORY = "memory"

KEPT_BYTES = 256 << 20
"""Free memory at most that is not given back: some thousand groups of 1,000 tokens each."""

APART_BYTES = 32 << 20
"""Larger pieces get pages of their own, which go back at once; the C library allows no more."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

POLICIES: dict[str, Callable[[], ReplayPolicy]] = {
    "fifo": FIFOReplayPolicy,
    "staleness": StalenessReplayPolicy,
    "prioritized": PrioritizedReplayPolicy,
}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of the command line.

    >>> ServeOptions(address="run/buffer.sock", store="run/buffer.db", max_live=4096).policy
    'staleness'
    """

    address: str
    store: str = IN_MEMORY
    """`IN_MEMORY`, the path of a SQLite file, or the URL of a database."""
    policy: str = "staleness"
    limit: int | None = None
    max_live: int | None = None
    max_clients: int | None = None
    """Connections at a time; None: `MAX_CLIENTS` of the server."""
    keep_consumed: bool = False
    snapshot: Path | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}; known: {', '.join(POLICIES)}")
        if self.max_live is not None and self.limit is not None:
            raise ValueError(
                f"give max_live or limit, not both; got {self.max_live} and {self.limit}: leave one out"
            )


async def serve_buffer(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; `say` is told where, and what was saved.

    Raises:
        ValueError: the options contradict each other, or a snapshot is of another policy or damaged.
        OSError: a file cannot be read or written, or the address is taken.
    """
    stop = _stop_signal()
    keep_freed_memory()
    buffer = await open_buffer(options)
    try:
        token = read_token(options.token_file)
        serving = serve(
            buffer,
            options.address,
            token=token,
            max_live=options.max_live,
            max_clients=options.max_clients or MAX_CLIENTS,
        )
        async with serving as server:
            held = await buffer.storage.count({})
            say(f"listening on {server.address}")
            say(f"{held} live groups, store {_plain_store(options.store)}, policy {options.policy}")
            await stop.wait()
            say("closing")
        if options.snapshot is not None:
            await buffer.save(options.snapshot)
            say(f"saved {await buffer.storage.count({})} live groups to {options.snapshot}")
    finally:
        await buffer.close()


def read_token(file: Path | None) -> str | None:
    """The token of that file, or of the environment; None if there is none.

    Raises:
        ValueError: the file is empty; a server without a token is asked for by naming none.
    """
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip() or None
    token = file.read_text(encoding="utf-8").strip()
    if not token:
        raise ValueError(f"the token file {str(file)!r} is empty; write a token into it, or name no file")
    return token


def _stop_signal() -> asyncio.Event:
    """Set by the first SIGTERM or Ctrl-C; the second one has its usual effect."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def note() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, note)
    return stop


async def open_buffer(options: ServeOptions) -> ReplayBuffer:
    """The buffer of these options, with what its store or its snapshot holds.

    Raises:
        ValueError: the options contradict each other, or a snapshot is of another policy or damaged.
        OSError: a file cannot be read.
    """
    if options.snapshot is not None and options.store != IN_MEMORY:
        raise ValueError(
            f"a snapshot is for a store in memory; {_plain_store(options.store)} keeps its groups itself"
        )
    buffer = ReplayBuffer(
        POLICIES[options.policy](),
        _open_store(options.store),
        limit=options.limit,
        keep_consumed=options.keep_consumed,
    )
    if options.snapshot is not None and await asyncio.to_thread(_holds_something, options.snapshot):
        await buffer.resume(options.snapshot)
    return buffer


def _holds_something(snapshot: Path) -> bool:
    """False for a missing or empty folder, where the first snapshot will be."""
    return snapshot.exists() and not (snapshot.is_dir() and not any(snapshot.iterdir()))


def _open_store(store: str) -> StorageBackend:
    if store == IN_MEMORY:
        return IndexedStorage()
    try:
        from forebay.replay.stores.sql.store import SQLStorage
    except ModuleNotFoundError as error:
        raise ValueError(f"a database needs the extra forebay[sql]: {error}") from None
    return SQLStorage(store)


def _plain_store(store: str) -> str:
    """Without user and password."""
    scheme, found, rest = store.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if found else store


def keep_freed_memory() -> bool:
    """Keep freed memory in this process from now on, up to `KEPT_BYTES`; False if the C library has no way.

    By default it gives freed memory back at once, and each group that comes next has the system find and
    clear its pages anew: a fifth of the time of a put. For processes that were started for a buffer, not for
    a program that serves one beside other work.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_M_TRIM_THRESHOLD, KEPT_BYTES) and set_option(_M_MMAP_THRESHOLD, APART_BYTES))
