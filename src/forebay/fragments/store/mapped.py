"""A memory-mapped database (LMDB) that processes of one machine share.

It knows keys and values, not fragments.

::

    writer (any process): write() --one at a time--> commit: pages go to the map, never onto pages in use
    reader (any process): read() --> get() --> memory in the map, for as long as that snapshot is held

Why LMDB: it is the only embedded store measured that reads without a copy, and the fastest writer (docs).

* A killed process loses nothing that it committed and leaves no lock behind. The disk may lag behind the map,
  so a power cut can lose or damage it: what must outlive one is copied (`Environment.copy`).
* The file grows in steps that are reserved on the disk first. Writing to a mapped page that the full disk
  cannot give would end the process by a signal; a reservation fails with an error instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

from forebay.extras import needed_by
from forebay.io import safe_files

if TYPE_CHECKING:
    import lmdb

PAGE_BYTES = 4096
RESERVE_STEP_BYTES = (1 << 20, 64 << 20)
"""Reserved beyond the need: half of it again, within these bounds."""
MAX_READERS = 4096
"""Snapshots of all processes at a time."""


class Environment:
    """One database folder, opened once in a process however many use it (LMDB asks for that).

    It closes when no user refers to it.

    >>> import tempfile
    >>> environment = Environment.open(Path(tempfile.mkdtemp()), max_bytes=1 << 20)
    >>> table = environment.table("rows")
    >>> with environment.write() as transaction:
    ...     transaction.put(b"key", b"value", db=table)
    True
    """

    _opened: ClassVar[WeakValueDictionary[tuple[int, ...], Environment]] = WeakValueDictionary()
    _opening: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, max_bytes: int) -> Environment:
        """The database in the folder `path`, made if it is missing; its file stays below `max_bytes`."""
        path.mkdir(parents=True, exist_ok=True)
        stat = path.stat()
        # A forked child may not use what its parent opened.
        key = (os.getpid(), stat.st_dev, stat.st_ino)
        with cls._opening:
            environment = cls._opened.get(key)
            # A deleted folder's number may be given to a new one while the old file is still open here.
            if environment is None or not environment._is_at(path):
                environment = cls._opened[key] = cls(path, max_bytes)
        return environment

    def __init__(self, path: Path, max_bytes: int) -> None:
        # Here, so that the package can be imported without it.
        with needed_by("forebay.fragments"):
            import lmdb
        self._full_error = lmdb.MapFullError
        # Not synchronized with the disk, and written in the map: see the module.
        self._lmdb = lmdb.open(
            str(path),
            map_size=max_bytes,
            max_dbs=4,
            max_readers=MAX_READERS,
            sync=False,
            writemap=True,
            map_async=True,
            readahead=False,
        )
        # One process waits for another inside LMDB, but its own threads would wait there with the
        # interpreter.
        self._writing = threading.Lock()
        self._tables: dict[str, Any] = {}
        self._file = path / "data.mdb"
        self._file_number = self._file.stat().st_ino
        self._reserved_bytes = 0
        self._lmdb.reader_check()

    def _is_at(self, path: Path) -> bool:
        file = path / "data.mdb"
        return file.exists() and file.stat().st_ino == self._file_number

    def table(self, name: str) -> Any:
        """The named table, made if it is missing."""
        if name not in self._tables:
            with self._writing:
                self._tables[name] = self._lmdb.open_db(name.encode())
        return self._tables[name]

    def read(self) -> lmdb.Transaction[memoryview]:
        """The database as it is now, for as long as the result is held; what it gives is for that time, too.

        Pages that are freed meanwhile cannot be used again before, so one kept for long makes the file grow.
        """
        return self._lmdb.begin(buffers=True)

    @contextmanager
    def write(self, num_bytes: int = 0) -> Iterator[lmdb.Transaction[memoryview]]:
        """All that is put and deleted inside, or nothing; `num_bytes` of values are to be put.

        Raises:
            StoreFullError: they do not fit.
        """
        with self._writing:
            try:
                with self._lmdb.begin(write=True, buffers=True) as transaction:
                    self._reserve(num_bytes)
                    yield transaction
            except self._full_error:
                # Readers that were killed hold pages until a look at the table of readers.
                self._lmdb.reader_check()
                raise StoreFullError(
                    f"{str(self._file)!r} has reached {self._lmdb.info()['map_size']} bytes: raise max_bytes"
                ) from None

    def _reserve(self, num_bytes: int) -> None:
        # The tree, the list of free pages, and the partly filled last page of each value.
        used = (self._lmdb.info()["last_pgno"] + 1) * PAGE_BYTES
        needed = used + 2 * num_bytes + (1 << 20)
        if needed <= self._reserved_bytes:
            return
        least, most = RESERVE_STEP_BYTES
        size = min(needed + max(least, min(needed // 2, most)), self._lmdb.info()["map_size"])
        descriptor = os.open(self._file, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise StoreFullError(f"no room on the disk for {size} bytes of {str(self._file)!r}: {error}") from error
        finally:
            os.close(descriptor)
        self._reserved_bytes = size

    def copy(self, path: Path) -> None:
        """A copy in the folder `path`, without free pages, that has reached the disk."""
        path.mkdir(parents=True)
        self._lmdb.copy(str(path), compact=True)
        safe_files.sync(path / "data.mdb")
        safe_files.sync(path)


class StoreFullError(RuntimeError):
    """There is no room for what was to be written; nothing of it was."""
