"""The run folder: what is where, and which of it is complete.

::

    runs/NAME/  run.toml            the resolved run file
                metrics.jsonl       every number of every step
                rollouts.jsonl      a few rollouts of every step
                ledger.jsonl        what became of every group
                warmup/             the model after the warm-up, if there was one
                checkpoints/step_N  trainer, manager, history; complete or absent
                model/              the trained model, Hugging Face format
                learning_curve.png
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from forebay.config import ConfigError, load_config
from forebay.runs.config import RunConfig, to_toml

RUN_FILE = "run.toml"


def saved_config(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of the run in `folder`, with `overrides`; the folder stays the run's own, even if moved.

    Raises:
        ConfigError: `folder` holds no run, or an override does not fit.
    """
    if not (folder / RUN_FILE).exists():
        raise ConfigError(f"no run in {str(folder)!r}: it has no {RUN_FILE}")
    config = load_config(RunConfig, folder / RUN_FILE, overrides)
    folder = folder.resolve()
    return config.model_copy(update={"output": folder.parent, "name": folder.name})


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    return sorted(path for path in (folder / "checkpoints").glob("step_*") if path.suffix != ".tmp")


def prepare(config: RunConfig, *, overwrite: bool) -> Path:
    """Make the folder of a new run and write its run file there.

    Raises:
        ConfigError: the folder holds an earlier run and `overwrite` is not set, or something that is no run.
    """
    folder = config.folder
    if folder.exists() and any(folder.iterdir()):
        if not (folder / RUN_FILE).exists():
            raise ConfigError(f"{str(folder)!r} holds files that are not a run's; choose another name=...")
        if not overwrite:
            steps = [path.name for path in list_checkpoints(folder)]
            state = f"with checkpoint {steps[-1]}" if steps else "without a checkpoint"
            raise ConfigError(
                f"{str(folder)!r} already holds a run {state}: go on with it (--resume {folder}), "
                f"replace it (--overwrite), or choose another name=..."
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).write_text(to_toml(config), encoding="utf-8")
    return folder


def publish(temporary: Path, final: Path) -> None:
    """Make every file under `temporary` durable, then rename it: a crash leaves nothing or the whole."""
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)
    temporary.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
