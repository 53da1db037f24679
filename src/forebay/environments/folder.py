"""The folder of a run in environments, and its checkpoints.

::

    runs/NAME/  run.toml            the resolved recipe
                metrics.jsonl       every number of every step
                checkpoints/step_N  complete or absent
                  arrays.npz        policy, optimiser, scales of observations, random numbers
                  run.json          counts, recent episodes, session
                  fragments/        a copy of the buffer
                buffer-*/           the buffer while the run goes on; made anew from a checkpoint
                learning_curve.png  episode.png

Nothing that is loaded is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w

from forebay import durable
from forebay.config import ConfigError, load_config
from forebay.environments.config import FragmentRunConfig

RUN_FILE = "run.toml"
NUM_CHECKPOINTS = 2
"""Kept: the newest, and the one before in case the newest turns out to be of a policy gone bad."""


class Checkpoint(NamedTuple):
    """What `load_checkpoint` found."""

    arrays: dict[str, np.ndarray[Any, Any]]
    counts: dict[str, Any]


def to_toml(config: FragmentRunConfig) -> str:
    """The resolved recipe, which `forebay train` reads back."""
    return tomli_w.dumps(config.model_dump(mode="json"))


def saved_config(folder: Path, overrides: Sequence[str] = ()) -> FragmentRunConfig:
    """The recipe of the run in `folder`, with `overrides`; the folder stays the run's own, even if moved.

    Raises:
        ConfigError: an override does not fit or would move the run.
    """
    for override in overrides:
        if override.partition("=")[0].strip() in ("name", "output"):
            raise ConfigError(
                f"{override!r} cannot be changed: the run stays in {str(folder)!r}; leave it out"
            )
    config = load_config(FragmentRunConfig, folder / RUN_FILE, overrides)
    folder = folder.resolve()
    return config.model_copy(update={"output": folder.parent, "name": folder.name})


def new_folder(config: FragmentRunConfig, *, overwrite: bool) -> Path:
    """The empty folder of a new run, with its recipe.

    Raises:
        ConfigError: there is an earlier run and `overwrite` is not set, or something that is no run.
    """
    folder = config.folder
    if folder.exists() and any(folder.iterdir()):
        if not (folder / RUN_FILE).exists():
            raise ConfigError(f"{str(folder)!r} holds files that are not a run's; choose another name=...")
        if not overwrite:
            raise ConfigError(
                f"{str(folder)!r} already holds a run: go on with it (--resume {folder}), replace it "
                f"(--overwrite), or choose another name=..."
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_run_file(config)
    return folder


def write_run_file(config: FragmentRunConfig) -> None:
    """Write the recipe into the run's folder, whole or not at all."""
    durable.write_text(config.folder / RUN_FILE, to_toml(config))


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete ones, oldest first."""
    found = [path for path in (folder / "checkpoints").glob("step_*") if path.suffix != ".tmp"]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


async def save_checkpoint(
    folder: Path,
    step: int,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    counts: Mapping[str, Any],
    save_buffer: Callable[[str], Awaitable[None]],
) -> None:
    """Write the checkpoint of `step`, unless it is there; then delete those before the last ones."""
    final = folder / "checkpoints" / f"step_{step}"
    if not final.exists():
        temporary = final.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        np.savez(temporary / "arrays.npz", **dict(arrays))  # type: ignore[arg-type]
        (temporary / "run.json").write_text(json.dumps(dict(counts), indent=2) + "\n", encoding="utf-8")
        await save_buffer(str(temporary / "fragments"))
        durable.sync_tree(temporary)
        temporary.rename(final)
        durable.sync(final.parent)
    for old in list_checkpoints(folder)[:-NUM_CHECKPOINTS]:
        # Under another name first: what has the name of a checkpoint is a whole one.
        shutil.rmtree(old.rename(old.with_suffix(".tmp")))


def load_checkpoint(path: Path) -> Checkpoint:
    """What `save_checkpoint` wrote there, but the buffer."""
    with np.load(path / "arrays.npz", allow_pickle=False) as arrays:
        return Checkpoint(dict(arrays), json.loads((path / "run.json").read_text(encoding="utf-8")))


@contextlib.contextmanager
def buffer_folder(folder: Path, checkpoint: Path | None) -> Iterator[Path]:
    """Where the buffer works inside the block: empty, or as it was at the checkpoint."""
    for left_over in folder.glob("buffer-*"):
        shutil.rmtree(left_over)
    # A name of its own: workers of a killed run may still hold the files of theirs.
    live = folder / f"buffer-{uuid.uuid4().hex[:8]}"
    if checkpoint is not None:
        shutil.copytree(checkpoint / "fragments", live)
    try:
        yield live
    finally:
        shutil.rmtree(live, ignore_errors=True)
