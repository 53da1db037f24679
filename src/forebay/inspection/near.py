"""The ledger that belongs to a buffer or a run on disk, and which moment it is of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from forebay.ledger import Ledger

LEDGER_FILE = "ledger.jsonl"


@dataclass(frozen=True)
class NearLedger:
    """A ledger and how it came by: of the same moment as the buffer, or of the end of its file.

    >>> find_ledger(Path("runs/a/checkpoints/step_000010/manager/buffer")).is_same_moment
    True
    """

    ledger: Ledger
    location: str
    is_same_moment: bool
    """Saved together with the buffer. Otherwise the file may have gone on since."""


def find_ledger(buffer: Path) -> NearLedger | None:
    """The ledger saved beside the snapshot `buffer`, else the file near it; None if there is none.

    Raises:
        ValueError: there is one, but it cannot be read.
    """
    saved = buffer.parent / "manager.json"
    if saved.is_file():
        state = json.loads(saved.read_text(encoding="utf-8"))
        ledger = Ledger.read_checkpoint(state.get("ledger", {}), saved.parent)
        return NearLedger(ledger, str(saved), is_same_moment=True)
    for folder in (buffer, buffer.parent, buffer.parent.parent):
        if (folder / LEDGER_FILE).is_file():
            return NearLedger(
                Ledger.read(folder / LEDGER_FILE), str(folder / LEDGER_FILE), is_same_moment=False
            )
    return None


def ledger_file(path: Path) -> Path:
    """The ledger's file that `path` means: itself, or the one in a run folder.

    Raises:
        FileNotFoundError: there is none.
    """
    file = path / LEDGER_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"there is no ledger at {str(file)!r}; name a run folder or a {LEDGER_FILE}")
    return file
