"""The store of a run's groups: which it is, and how it is opened for a run that begins or goes on.

::

    [replay] store --> memory
                   --> SQLite file: RUN/buffer.db, or another; on a local disk
                   --> PostgreSQL: the URL in FOREBAY_REPLAY_URL, which is written down nowhere

A durable store belongs to one run at a time: it has the id that is in the run's folder, fences off every
earlier owner, and is emptied for a new run in the same folder.
"""

import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from forebay import replay
from forebay.config import ConfigError
from forebay.extras import needed_by
from forebay.io.safe_files import DiskError, write_text
from forebay.runs.config import RunConfig
from forebay.runs.folder import ID_FILE

if TYPE_CHECKING:
    from sqlalchemy import URL

STORE_FILE = "buffer.db"
URL_VARIABLE = "FOREBAY_REPLAY_URL"
REACH_LIMIT_S, REACH_EVERY_S = 60.0, 0.3
_NETWORK = re.compile(
    r"nfs\d?|cifs|smb.*|lustre|ceph|glusterfs|gpfs|beegfs.*|9p|afs|wekafs|panfs|orangefs|virtiofs|davfs"
    r"|fuse\.(?!fuse-overlayfs|overlayfs).*"
)
"""File systems that other machines can write to; FUSE has too many to name, and few of them lock files.

A plain ``fuse`` does not say which it is, and may be a local disk: it passes.
"""


def store_of(config: RunConfig, *, is_new: bool = False) -> str:
    """The kind of store that a run has: ``memory``, ``sqlite`` or ``postgresql``.

    Of one that `is_new`, and about to begin, an earlier run may still be in the folder.
    """
    if config.replay.kind is not None:
        return config.replay.kind
    return "sqlite" if would_outlive(config, is_new=is_new) and network_mount(config.folder) is None else "memory"


def would_outlive(config: RunConfig, *, is_new: bool) -> bool:
    """Whether the run names no store, and its groups are in an SQLite file where its folder is on a local disk."""
    # A run that goes on in another mode has the store that it had.
    had_one = not is_new and (config.folder / STORE_FILE).exists()
    # A record can be repeated with groups in memory only.
    has_one = had_one or config.cluster is not None or config.produce.mode == "separate"
    return config.replay.kind is None and not config.record and has_one


def check_partial_saves(config: RunConfig, *, is_new: bool) -> None:
    """Refuse to save unfinished rollouts where the run's folder and mode give it no durable store.

    Raises:
        ConfigError: that is so.
    """
    if config.produce.save_partial_every_s is not None and store_of(config, is_new=is_new) == "memory":
        raise ConfigError("produce.save_partial_every_s needs replay.store = 'sqlite' or 'postgresql'")


def keeps_consumed(config: RunConfig) -> bool:
    """Whether consumed groups stay ARCHIVED until a checkpoint covers the step that consumed them.

    Where a run ends as a whole, and its groups with it, nothing could ask for them again.
    """
    # It loads torch, without which the commands that read a store start.
    from forebay.runs.placement import is_apart

    loses_trainer = is_apart(config) and not config.record
    return config.checkpoint_every > 0 and (loses_trainer or store_of(config) != "memory")


def open_storage(config: RunConfig, folder: Path, *, is_new: bool) -> replay.StorageBackend:
    """The store of the run in `folder`; if the run `is_new`, `begin_anew` empties it.

    Raises:
        ConfigError: the file is on a network file system, the database cannot be opened, or it holds the
            groups of another run.
    """
    kind = store_of(config)
    if kind == "memory":
        return replay.IndexedStorage()
    with needed_by("replay.store"):
        from sqlalchemy.exc import SQLAlchemyError
    url: str | URL = database_url() if kind == "postgresql" else _local_file(config, folder)
    try:
        storage = replay.SQLStorage(url)
    except (SQLAlchemyError, ValueError) as error:
        named = kind if kind == "postgresql" else url
        raise ConfigError(f"replay.store = '{named}' cannot be opened: {plain_reason(error)}") from None
    try:
        # A file in the run's folder moves with it.
        is_in_folder = kind == "sqlite" and config.replay.path is None
        _take_over(storage, folder, is_new=is_new, is_in_folder=is_in_folder)
    except BaseException:
        storage.close()
        raise
    return storage


def holder_name(folder: Path) -> str:
    """How a store names the run in `folder`: by the id in the folder, made if need be, and by its path.

    The path alone may be that of a run on another machine.
    """
    file = folder / ID_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, uuid.uuid4().hex)
    return f"{file.read_text('ascii')}:{folder.resolve()}"


def _take_over(storage: "replay.SQLStorage", folder: Path, *, is_new: bool, is_in_folder: bool) -> None:
    name = holder_name(folder)
    run_id, _, path = (storage.holder or name).partition(":")
    here, there = folder / ID_FILE, Path(path) / ID_FILE
    # A copy of a run has its id, too, and the original may be at work.
    is_copy = there.exists() and not there.samefile(here) and there.read_bytes() == here.read_bytes()
    is_own = name.startswith(f"{run_id}:") and not is_copy
    if not is_own and (len(storage) if is_new else not is_in_folder):
        another = "another one (or another schema of it: ?options=-csearch_path%3DNAME), or delete its tables"
        raise ConfigError(
            f"replay.store: the database holds {len(storage)} groups of another run, in {path!r}; "
            f"name {another if is_new else 'the database of this run'}"
        )
    storage.claim_now()


def begin_anew(storage: replay.StorageBackend, folder: Path) -> None:
    """Have a durable store be that of the new run in `folder`; groups of an earlier run there, which it replaces, go.

    Until this they stay: a start that fails puts the earlier run back.
    """
    if storage.is_durable:
        storage.load_state_dict(replay.IndexedStorage().state_dict())
        storage.holder = holder_name(folder)


def database_url() -> str:
    """The URL of the run's PostgreSQL database, from the environment.

    Raises:
        ConfigError: there is none.
    """
    url = os.environ.get(URL_VARIABLE, "").strip()
    if not re.match(r"postgres(ql)?://", url):
        state = "is not set" if not url else "holds something else"
        raise ConfigError(
            f"replay.store = 'postgresql' needs the environment variable {URL_VARIABLE} with a URL such as "
            f"postgresql://user:password@host/name, and it {state}"
        )
    return url


def _local_file(config: RunConfig, folder: Path) -> "URL":
    path = config.replay.path or folder / STORE_FILE
    if mount := network_mount(path):
        raise ConfigError(
            f"replay.store = 'sqlite' needs a local disk, since locks of a network file system do not hold, "
            f"and {str(path)!r} is on {mount}: set replay.store = 'sqlite:///PATH' to a local file, or 'postgresql'"
        )
    # Not a text: a path may hold any character.
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(path), query={"synchronous": config.replay.synchronous})


def network_mount(path: Path) -> str | None:
    """The network file system that `path` is on, as ``nfs4 at /mnt``; None: a local one, or unknown."""
    import psutil

    path = path.resolve()
    holding = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    # Of two mounts at one place the later one counts.
    inner = max(reversed(holding), key=lambda mount: len(Path(mount.mountpoint).parts), default=None)
    is_network = inner is not None and _NETWORK.fullmatch(inner.fstype)
    return f"{inner.fstype} at {inner.mountpoint}" if inner and is_network else None


def wait_for_database(config: RunConfig) -> None:
    """Return once the run's database answers; it may be starting again.

    Raises:
        ConfigError: it does not within `REACH_LIMIT_S`.
    """
    if store_of(config) != "postgresql":
        return
    from sqlalchemy.exc import OperationalError

    deadline_s = time.monotonic() + REACH_LIMIT_S
    while True:
        try:
            return replay.SQLStorage(database_url(), create=False).close()
        except OperationalError as error:
            if time.monotonic() > deadline_s:
                raise ConfigError(f"replay.store: no answer, {plain_reason(error)}") from None
            time.sleep(REACH_EVERY_S)


@contextmanager
def file_errors_named(config: RunConfig) -> Iterator[None]:
    """An error of the run's SQLite file (full, locked, damaged) becomes a `DiskError` that names it."""
    try:
        yield
    except Exception as error:
        # A ConfigError names it already.
        if isinstance(error, ConfigError) or store_of(config) != "sqlite" or not (lost := lost_database(error)):
            raise
        file = config.replay.path or config.folder / STORE_FILE
        raise DiskError(f"the replay buffer {str(file)!r} cannot be written or read: {lost}") from error


def lost_database(error: BaseException | None) -> str | None:
    """Why the database of a run is lost, if that is what `error` comes from; None if it is not."""
    from sqlalchemy.exc import DatabaseError, InterfaceError, OperationalError

    while error is not None:
        # The base of all is what SQLite raises of a damaged file.
        if isinstance(error, InterfaceError | OperationalError | replay.StoreBusy) or type(error) is DatabaseError:
            return plain_reason(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def plain_reason(error: BaseException) -> str:
    """The first line of what the database said, without the password."""
    said = str(getattr(error, "orig", None) or error).strip().split("\n")[0]
    from forebay.replay.stores.sql.connections import parsed_url

    # A URL that cannot be read was asked nothing, and no message has anything of it.
    with suppress(ValueError):
        url = parsed_url(os.environ.get(URL_VARIABLE, ""))
        for secret in filter(None, (url.password, url.query.get("password"), url.query.get("sslpassword"))):
            said = said.replace(str(secret), "***")
    return said
