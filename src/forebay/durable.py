"""Files that are there, whole, after a power cut: write under another name, fsync, rename, fsync the folder.

::

    write_text: name.tmp written -> fsync -> renamed to name -> folder fsynced
    sync:       what was written or renamed at a path reaches the disk
"""

from __future__ import annotations

import os
from pathlib import Path


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


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by one with `text` (UTF-8): whatever happens, the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
