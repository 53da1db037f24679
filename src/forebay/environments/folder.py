"""The folder of a run in environments, and its checkpoints.

::

    runs/NAME/  run.toml            the resolved recipe
                metrics.jsonl       every number of every step
                checkpoints/step_N  complete or absent, with checksums of all
                  arrays.npz        policy, optimizer, scales of observations, random numbers
                  run.json          counts, recent episodes, session
                  fragments/        a copy of the buffer
                buffer-*/           the buffer while the run goes on; made anew from a checkpoint
                learning_curve.png  episode.png

What is the same for every kind of run is in `forebay.runs.folder`. Nothing that is loaded is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forebay.config import ConfigError
from forebay.environments.config import FragmentRunConfig
from forebay.io.durable import write_json
from forebay.runs.folder import (
    check_checkpoint,
    checkpoint_path,
    list_checkpoints,
    prune_checkpoints,
    publish,
    saved_as,
    unfinished,
)

NUM_CHECKPOINTS = 2
"""Kept: the newest, and the one before in case the newest turns out to be of a policy gone bad."""


class Checkpoint(NamedTuple):
    """What `load_checkpoint` found."""

    arrays: dict[str, np.ndarray[Any, Any]]
    counts: dict[str, Any]
    fragments: Path
    """The copy of the buffer."""


def saved_config(folder: Path, overrides: Sequence[str] = ()) -> FragmentRunConfig:
    """`saved_as` for a run in environments."""
    return saved_as(FragmentRunConfig, folder, overrides)


def newest_checkpoint(folder: Path) -> Path:
    """Of the run in `folder`.

    Raises:
        ConfigError: there is none.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise ConfigError(f"nothing to go on from in {str(folder)!r}: it has no complete checkpoint")
    return checkpoints[-1]


async def save_checkpoint(
    folder: Path,
    step: int,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    counts: Mapping[str, Any],
    save_buffer: Callable[[str], Awaitable[None]],
) -> None:
    """Write the checkpoint of `step`, unless it is there; then delete those before the last ones."""
    final = checkpoint_path(folder, step)
    if not final.exists():
        with unfinished(final) as temporary:
            np.savez(temporary / "arrays.npz", **dict(arrays))  # type: ignore[arg-type]
            write_json(temporary / "run.json", dict(counts))
            await save_buffer(str(temporary / "fragments"))
            # In a thread: workers are answered meanwhile.
            await asyncio.to_thread(publish, temporary, final)
    prune_checkpoints(folder, NUM_CHECKPOINTS)


def load_checkpoint(path: Path) -> Checkpoint:
    """What `save_checkpoint` wrote there.

    Raises:
        ConfigError: it is damaged.
    """
    check_checkpoint(path)
    counts = json.loads((path / "run.json").read_text(encoding="utf-8"))
    with np.load(path / "arrays.npz", allow_pickle=False) as arrays:
        return Checkpoint(dict(arrays), counts, path / "fragments")


@contextlib.contextmanager
def buffer_folder(folder: Path, fragments: Path | None) -> Iterator[Path]:
    """Where the buffer works inside the block: empty, or a copy of the one in `fragments`."""
    for left_over in folder.glob("buffer-*"):
        shutil.rmtree(left_over)
    # A name of its own: workers of a killed run may still hold the files of theirs.
    live = folder / f"buffer-{uuid.uuid4().hex[:8]}"
    if fragments is not None:
        shutil.copytree(fragments, live)
    try:
        yield live
    finally:
        shutil.rmtree(live, ignore_errors=True)
