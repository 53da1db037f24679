"""Files that are there, whole, after a power cut, and folders that show whether they are what was written.

::

    replaced, write_text: name.tmp written -> fsync -> renamed to name -> folder fsynced
    sync:       what was written or renamed at a path reaches the disk
    seal:       checksums of all files of a folder -> FOLDER/checksums.json
    unfinished, publish: a folder that is there, sealed and durable, or not at all
    check:      the files are those that were sealed, or `DamagedError` names the one that is not
    disk_errors_named: a disk that takes no more becomes one sentence

A folder within a sealed folder may be sealed itself. Then the outer list names the inner list only, so that
no file is read twice and each of the two can be checked alone. CRC-32 finds accidents; nothing here guards
against deceit.
"""

import errno
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

CHECKSUMS = "checksums.json"
"""The list that `seal` writes into a folder."""
_READ_BYTES = 4 << 20

_DISK_ERRORS: Mapping[int, str] = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "allow larger files",
    errno.EIO: "look after the disk",
    errno.EROFS: "make it writable, or name another place",
    errno.EACCES: "allow it, or name another place",
    errno.EPERM: "allow it, or name another place",
    errno.ENOTDIR: "move what is there, or name another place",
    errno.EEXIST: "move what is there, or name another place",
    errno.ENAMETOOLONG: "name another place",
}
"""Errors of a disk or a path, and how a person can help. Others may be errors of a program or of a network,
and stay as they are."""


class DamagedError(ValueError):
    """A file is not what was written. The message is a sentence that names it."""


class DiskError(OSError):
    """A file cannot be written or read. The message is a sentence that names it and says what helps."""


def sync(path: Path) -> None:
    """Wait until the content of the file, or the entries of the folder, at `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` of everything under `folder`, and of `folder` itself last."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


@contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends, or is deleted if it fails; not synced."""
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        unfinished.chmod(0o755)  # mkdtemp makes it private.
        yield unfinished
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def replaced(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A file to write, which takes the place of the one at `path` when the block ends, or is deleted if it fails.

    Unless it is `durable`, a power cut may leave neither of the two whole.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        # The content is on the disk before it gets its name; then the folder, which holds the name.
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by one with `text` (UTF-8): whatever happens, the old one or the new one."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """`write_text` of `value` as JSON, encoded piece by piece: in a thread it holds up no other thread."""
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        # Not `dumps`: that does not let go of the interpreter before the last piece.
        json.dump(value, file)


def seal(folder: Path) -> None:
    """Write the size and the checksum of every file under `folder` into its `CHECKSUMS`.

    The files are not synced; `sync_tree` does that.
    """
    files: dict[str, list[int]] = {}
    for path, folders, names in os.walk(folder):
        # The list of a sealed folder within stands for all of its files.
        if CHECKSUMS in names and Path(path) != folder:
            names, folders[:] = [CHECKSUMS], []
        for name in names:
            file = Path(path, name)
            if file != folder / CHECKSUMS:
                files[file.relative_to(folder).as_posix()] = list(_measure(file))
    (folder / CHECKSUMS).write_bytes(_as_list(files))


@contextmanager
def unfinished(final: Path) -> Iterator[Path]:
    """An empty folder in which the content of `final` is written; the block ends with `publish`.

    If it raises, the folder is deleted: on a full disk, nothing half done takes the room.
    """
    temporary = final.with_name(f"{final.name}.tmp")
    # A process that died while it wrote may have left one.
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, final: Path) -> None:
    """Seal `temporary`, make all of it durable, rename it: a crash leaves nothing or the whole.

    An older folder at `final` is put aside for that instant, as ``NAME.replaced``.
    """
    seal(temporary)
    sync_tree(temporary)
    aside = final.with_name(f"{final.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    # A folder that has files cannot be replaced by renaming another onto it.
    if final.exists():
        final.rename(aside)
    temporary.rename(final)
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def check(folder: Path, *, deep: bool = False) -> None:
    """Read every file that `seal` found in `folder`; with `deep`, also those of sealed folders within.

    Raises:
        DamagedError: one is missing, or is not what it was.
    """
    for name, expected in _read_list(folder / CHECKSUMS).items():
        file = folder / name
        try:
            found = list(_measure(file))
        except FileNotFoundError:
            raise DamagedError(f"{str(file)!r} is missing") from None
        except OSError as error:
            raise DamagedError(f"{str(file)!r} cannot be read: {error.strerror}") from None
        if found[0] != expected[0]:
            raise DamagedError(f"{str(file)!r} is damaged: it has {found[0]} bytes instead of {expected[0]}")
        if found != expected:
            raise DamagedError(f"{str(file)!r} is damaged: its content is not what its checksum says")
        if deep and file.name == CHECKSUMS:
            check(file.parent, deep=True)


def _measure(file: Path) -> tuple[int, int]:
    """Bytes and CRC-32."""
    num_bytes = checksum = 0
    with file.open("rb") as opened:
        while data := opened.read(_READ_BYTES):
            num_bytes, checksum = num_bytes + len(data), zlib.crc32(data, checksum)
    return num_bytes, checksum


def _as_list(files: Mapping[str, list[int]]) -> bytes:
    listed = json.dumps(files, sort_keys=True)
    return f'{{"crc32": {zlib.crc32(listed.encode())}, "files": {listed}}}\n'.encode()


def _read_list(path: Path) -> dict[str, list[int]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    try:
        files: dict[str, list[int]] = json.loads(data)["files"]
        # To the byte: only `seal` writes this file, so no other form of it has to be understood.
        if _as_list(files) == data:
            return files
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise DamagedError(f"{str(path)!r} is damaged: its content is not what its checksum says")


def is_disk_error(error: BaseException | None) -> TypeGuard[OSError]:
    """Whether the operating system says of a disk, or of a path on it, that it cannot be used."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


@contextmanager
def disk_errors_named(use: str) -> Iterator[None]:
    """Turn what the operating system says of a full, read-only or failing disk into a `DiskError`.

    `use` is what the files are for: "the run in 'runs/a'".
    """
    try:
        yield
    # Named already, by a block inside this one.
    except DiskError:
        raise
    except Exception as error:
        # safetensors has an error of its own, whose text ends with the system's: "... (os error 28)".
        number = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
        said = error if number is None else OSError(int(number[1]), os.strerror(int(number[1])))
        if not is_disk_error(said):
            raise
        place = "" if said.filename is None else f": {str(said.filename)!r}"
        helps = _DISK_ERRORS[said.errno or 0]
        raise DiskError(f"{use} cannot be written or read{place}: {said.strerror}; {helps}") from error
