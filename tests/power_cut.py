"""A disk whose power can be cut: a file system on a loop file, shut down without its unsynced writes.

::

    tmpfs (as large as the image may grow) / image --loop device--> ext4 --mounted at--> Disk.folder
    cut:     the file system stops at once: what was not synced is gone, every later call fails
    restore: unmounted, mounted again: its journal is replayed, as after a power cut
    starve:  the device has no room for new blocks: writes that reach it, and `fsync`, fail
    feed:    it has room again; what failed is not written again by itself

How much of what was not synced had reached the disk differs by mount options, which `Disk` draws: without
delayed allocation and with data written back after its names, a file may have its length and no content.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_SHUTDOWN = 0x8004587D
"""``EXT4_IOC_SHUTDOWN``, XFS's ``GOINGDOWN``."""
_WITH_JOURNAL, _WITHOUT = 1, 2
"""Whether the names and lengths that wait in memory are written first; content never is."""

OPTIONS = ("data=ordered", "data=writeback", "data=writeback,nodelalloc", "data=ordered,nodelalloc")


class Disk:
    """An ext4 of 256 MiB; `folder` is where it is mounted.

    A `server` with its files there (`postgres_server.Server`) ends with the power and starts with it again.
    """

    server: Any = None

    def __init__(self, place: Path, rng: random.Random, *options: str) -> None:
        self._rng, self._host = rng, place / "host"
        self.folder = place / "disk"
        self.options = ",".join(["noatime", "noauto_da_alloc", "commit=1", rng.choice(OPTIONS), *options])
        self.num_cuts, self.is_cut = 0, False
        for folder in (self._host, self.folder):
            folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", "size=320m", "tmpfs", self._host)
        self._image = self._host / "image"
        with self._image.open("wb") as file:
            file.truncate(256 << 20)
        _run(
            "mkfs.ext4", "-q", "-b", 4096, "-E", "lazy_itable_init=0,lazy_journal_init=0", "-J", "size=8", self._image
        )
        self._fill_journal()
        self._mount()

    def _fill_journal(self) -> None:
        """Have the device have room for it: without a journal the file system would be read-only."""
        asked = ["debugfs", "-R", "blocks <8>", str(self._image)]
        blocks = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
        with self._image.open("r+b") as file:
            for block in map(int, blocks):
                file.seek(4096 * block)
                content = file.read(4096)
                file.seek(4096 * block)
                file.write(content)

    def _mount(self) -> None:
        _run("mount", "-o", f"loop,{self.options}", self._image, self.folder)
        device = os.stat(self.folder).st_dev
        self._queue = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/max_sectors_kb").resolve()
        self._most_kb = self._queue.read_text()

    def cut(self) -> None:
        """Cut the power."""
        if self.server is not None and self._rng.random() < 0.5:
            self.server.kill()
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            how = self._rng.choice((_WITH_JOURNAL, _WITHOUT))
            fcntl.ioctl(handle, _SHUTDOWN, struct.pack("I", how))
        finally:
            os.close(handle)
        self.num_cuts, self.is_cut = self.num_cuts + 1, True
        if self.server is not None:
            # It may have met the disk's errors by then.
            time.sleep(self._rng.choice((0, 0.1)))
            self.server.kill()

    def restore(self) -> None:
        """The machine starts again; nobody has a file of the disk open."""
        _unmount(self.folder)
        self.feed()
        self._mount()
        self.is_cut = False
        if self.server is not None:
            self.server.start()

    def starve(self) -> None:
        """Leave the device no room for blocks that it has not."""
        # One at a time: a loop device says that a request was done of which the first block was.
        self._queue.write_text("4")
        with contextlib.suppress(OSError), (self._host / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))

    def feed(self) -> None:
        """Give it room again."""
        (self._host / "filler").unlink(missing_ok=True)
        self._queue.write_text(self._most_kb)

    def close(self) -> None:
        """Give back devices and memory."""
        if self.server is not None:
            self.server.kill()
        for folder in (self.folder, self._host):
            _unmount(folder)


def _unmount(folder: Path) -> None:
    # A process that was killed may hold it for an instant yet.
    for _ in range(100):
        if subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.05)
    _run("umount", folder)


def halt(pid: int) -> str:
    """Stop a process, and wait until it does nothing more; Linux's letter: T stopped, Z or X ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    while (state := _state_of(pid)) not in "TZX":
        time.sleep(0.001)
    return state


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")


@contextlib.contextmanager
def disk(rng: random.Random, *options: str) -> Iterator[Disk]:
    """A new disk, with more mount options; the test that asks is skipped where none can be mounted."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        pytest.skip("needs root, loop devices and mkfs.ext4")
    # Not in the folder of a test, which is its user's alone: a database's server has another user.
    with tempfile.TemporaryDirectory(prefix="forebay-disk-", dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        try:
            made = Disk(place, rng, *options)
        except OSError as error:
            for folder in ("disk", "host"):
                subprocess.run(["umount", str(place / folder)], capture_output=True, check=False)
            pytest.skip(f"no disk can be mounted here: {error}")
        try:
            yield made
        finally:
            made.close()
