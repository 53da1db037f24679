"""What a sandbox needs of files and processes: streams in memory, a folder, and the end of a tree."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from forebay.aio.cancellation import finish

logger = logging.getLogger(__name__)

Text = str | bytes


@contextlib.contextmanager
def in_memory(content: Text) -> Iterator[int]:
    """A descriptor of a file in memory that holds `content`, at its beginning."""
    descriptor = os.memfd_create("sandbox")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(_as_bytes(content))
        os.lseek(descriptor, 0, os.SEEK_SET)
        # Two processes that write must not overwrite each other.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def temporary_folder(files: Mapping[str, Text]) -> Iterator[str]:
    """A temporary folder with `files`."""
    folder = tempfile.mkdtemp(prefix="forebay_sandbox_")
    try:
        for name, content in files.items():
            Path(folder, name).write_bytes(_as_bytes(content))
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except (OSError, RecursionError) as error:
            logger.warning("a program's folder could not be removed: %s (%s)", folder, error)


def _as_bytes(content: Text) -> bytes:
    # JSON can hold halves of surrogate pairs, and models write JSON: the program gets what is no UTF-8 then.
    return content.encode(errors="surrogatepass") if isinstance(content, str) else content


async def until_end(process: subprocess.Popen[bytes], wall_s: float, *, tree: bool) -> bool:
    """Wait for the end of `process` and of all that it started; True if `wall_s` ran out."""
    overran = False
    try:
        try:
            async with asyncio.timeout(wall_s):
                await until_exit(process.pid)
        except TimeoutError:
            overran = True
    finally:
        await finish(_end(process, tree))
    return overran


async def _end(process: subprocess.Popen[bytes], tree: bool) -> None:
    # Not reaped yet, so the number cannot be anybody else's.
    _kill(process.pid, tree=tree)
    await until_exit(process.pid)
    process.wait()


async def until_exit(pid: int) -> None:
    """Wait for the end of a child that is not reaped before; woken by the kernel."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    descriptor = os.pidfd_open(pid)
    # May be called again before it is removed.
    loop.add_reader(descriptor, lambda: None if ended.done() else ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _kill(pid: int, *, tree: bool) -> None:
    """Kill the process group of `pid`; for a `tree` in a namespace, its first process, and so all of them.

    bwrap itself then ends when the kernel has ended the namespace: afterwards nothing is left.
    """
    children: list[int] = []
    if tree:
        # Gone if it ended just now.
        with contextlib.suppress(OSError):
            children = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    if not children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
