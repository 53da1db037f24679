"""The run folder: what is where, and which of it is complete.

::

    runs/NAME/  run.toml            the resolved run file
                metrics.jsonl       every number of every step
                history/            every rollout that was trained, dropped or evaluated; every activity
                live.json           where the run stands; replaced once a second
                notes.jsonl         its warnings and messages
                run_id              whose groups a durable store holds
                ledger.jsonl        what became of every group
                books/              the same as of the last checkpoint, made anew where it is not
                warmup/             the model after the warm-up, if there was one; losses.json of its steps
                checkpoints/step_N  trainer, manager, history; complete or absent, with checksums of all
                model/              the trained model, Hugging Face format
    runs/.NAME.lock     held while a process is at work in runs/NAME
"""

import contextlib
import errno
import fcntl
import filecmp
import logging
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from forebay.config import ConfigError, ModelT, load_config
from forebay.io.safe_files import DamagedError, DiskError, check, disk_errors_named, write_text
from forebay.runs.config import RunConfig, RunFile, to_toml

RUN_FILE = "run.toml"
ID_FILE = "run_id"

logger = logging.getLogger(__name__)


def saved_config(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """`saved_as` for a run that trains a language model."""
    return saved_as(RunConfig, folder, overrides)


def saved_as(model: type[ModelT], folder: Path, overrides: Sequence[str] = ()) -> ModelT:
    """The config of the run in `folder`, with `overrides`; the folder stays the run's own, even if moved.

    Raises:
        ConfigError: `folder` holds no run, or an override does not fit or would move the run.
    """
    for override in overrides:
        if override.partition("=")[0].strip() in ("name", "output"):
            raise ConfigError(f"{override!r} cannot be changed: the run stays in {str(folder)!r}; leave it out")
    if folder.is_file():
        raise ConfigError(f"{str(folder)!r} is a file; name the folder of a run, for example runs/NAME")
    if not (folder / RUN_FILE).exists():
        raise ConfigError(f"no run in {str(folder)!r}: it has no {RUN_FILE}")
    config = load_config(model, folder / RUN_FILE, overrides)
    folder = folder.resolve()
    return config.model_copy(update={"output": folder.parent, "name": folder.name})


def is_finished(folder: Path, checkpoint: Path) -> bool:
    """Whether the published model of the run in `folder` is that of its last `checkpoint`."""
    saved, published = checkpoint / "trainer" / "model", folder / "model"
    names = [path.name for path in saved.glob("*.safetensors")]
    # By size and time, which the copy keeps: only files that differ in these are read.
    return bool(names) and filecmp.cmpfiles(saved, published, names)[0] == names


def finished_line(folder: Path, num_steps: int) -> str:
    """The message for a resumed run that has nothing left to do."""
    place = shlex.quote(str(folder))
    return (
        f"the run in {place} is finished: all {num_steps} train steps are done; to go on, add steps=N, for "
        f"example forebay train --resume {place} steps={2 * max(1, num_steps)}"
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first; whether one is damaged, `check` tells."""
    found = (folder / "checkpoints").glob("step_*")
    return sorted((path for path in found if path.name.removeprefix("step_").isdecimal()), key=step_of)


def check_checkpoint(path: Path) -> None:
    """Read every file of the checkpoint at `path` and hold it against its checksum.

    Raises:
        ConfigError: one is damaged; it is named, and so is the newest older checkpoint that is whole.
    """
    try:
        check(path, deep=True)
    except DamagedError as error:
        older = [other for other in list_checkpoints(path.parents[1]) if step_of(other) < step_of(path)]
        advice = f"neither is an older one whole ({len(older)} looked at)" if older else "there is no older one"
        advice += ": start again with --overwrite, or under another name=..."
        for other in reversed(older):
            with contextlib.suppress(DamagedError):
                check(other, deep=True)
                advice = f"{other.name} is whole: delete {str(path)!r} and resume again, to go on from there"
                break
        raise ConfigError(f"cannot go on from {path.name}: {error}; {advice}") from None


@contextlib.contextmanager
def disk_errors_of_run(folder: Path) -> Iterator[None]:
    """A disk that fails the run in `folder` becomes a `DiskError` that says how to go on."""
    try:
        with disk_errors_named(f"the run in {str(folder)!r}"):
            yield
    except DiskError as error:
        advice = ""
        # The disk may refuse this, too.
        with contextlib.suppress(OSError):
            if checkpoints := list_checkpoints(folder):
                advice = f"; {checkpoints[-1].name} is saved, go on from it with --resume {folder}"
        raise DiskError(f"{error}{advice}") from error.__cause__


def checkpoint_path(folder: Path, train_step: int) -> Path:
    """Where the checkpoint after `train_step` is in the run folder."""
    return folder / "checkpoints" / f"step_{train_step:06d}"


def step_of(checkpoint: Path) -> int:
    """The finished train steps of the checkpoint at that path."""
    return int(checkpoint.name.removeprefix("step_"))


def prune_checkpoints(folder: Path, keep: int, spared: Sequence[int | None] = ()) -> None:
    """Delete complete checkpoints but the last `keep` and those of the `spared` steps, and what is half done."""
    for old in list_checkpoints(folder)[:-keep]:
        if step_of(old) not in spared:
            # Under another name first: whenever this ends, what has the name of a checkpoint is a whole one.
            old.rename(old.with_name(f"{old.name}.tmp"))
    for left_over in (folder / "checkpoints").glob("step_*.tmp"):
        shutil.rmtree(left_over)


@contextlib.contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """No other run works in the run folder meanwhile; the death of this process frees it.

    The lock is beside the folder, which a new run may replace.

    Raises:
        ConfigError: another run does, of this process or of another.
    """
    # Whichever link leads there.
    folder = folder.resolve()
    # The lock is the process's: it lets a second run of this one in, whose end would free the folder for others.
    if folder in _AT_WORK:
        raise _at_work(folder, str(os.getpid()))
    with _locked(folder) as file:
        _AT_WORK.add(folder)
        try:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield
        finally:
            _AT_WORK.discard(folder)
            # While it is still held: a process that opened it before finds that it is gone.
            # A disk that refuses it hides no other error: a left-over lock does no harm.
            with contextlib.suppress(OSError):
                Path(file.name).unlink()


_AT_WORK = set[Path]()
"""The folders of the runs of this process."""


def _at_work(folder: Path, holder: str) -> ConfigError:
    return ConfigError(
        f"a run is at work in {str(folder)!r} (process {holder}): stop that, wait for its end, or "
        f"choose another name=..."
    )


def try_folder(folder: Path, say: Callable[[str], None]) -> None:
    """Say whether the folder is free for a new run.

    Raises:
        ConfigError: another process works in it.
    """
    with occupied(folder):
        is_used = (folder / RUN_FILE).exists()
        state = "holds a run: --overwrite replaces it" if is_used else "is free"
        say(f"folder  {folder} {state}")


def _locked(folder: Path) -> TextIO:
    """The lock file beside `folder`, opened and locked."""
    while True:
        file = _open_lock(folder)
        try:
            # Unlike `flock`, it does not pass to processes that are forked from this one.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                # Some network file systems lock nothing; that is no reason not to run there.
                logger.warning("%r cannot be locked (%s): start no second run in it", str(folder), error)
                return file
            with file:
                file.seek(0)
                holder = file.read().strip() or "unknown"
            raise _at_work(folder, holder) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
                return file
        # A run ended, and removed it, between opening and locking.
        file.close()


def _open_lock(folder: Path) -> TextIO:
    """The lock file beside `folder`, opened.

    Raises:
        OSError: nothing can be written there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    try:
        return open(folder.with_name(f".{folder.name}.lock"), "a+", encoding="ascii")
    except FileNotFoundError as error:
        # The folder is there; this is how file systems such as /proc say that they make no files.
        raise PermissionError(errno.EPERM, "no file can be made there", str(folder.parent)) from error


@contextlib.contextmanager
def new_folder(config: RunFile, *, overwrite: bool) -> Iterator[Path]:
    """The folder of a new run, with its run file, while the run's components are built.

    An earlier run is put aside as ``NAME.old`` and deleted at the end of the block. If the block
    raises, the earlier run is put back and nothing is left of the new one.

    Raises:
        ConfigError: the folder holds an earlier run and `overwrite` is not set, or something that is no run.
    """
    folder = config.folder
    # A run that replaces another one takes over its database, too.
    run_id = (folder / ID_FILE).read_text("ascii") if (folder / ID_FILE).exists() else None
    aside = _make_free(folder, overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_run_file(config, folder)
        if run_id is not None:
            write_text(folder / ID_FILE, run_id)
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if aside is not None:
            aside.rename(folder)
        raise
    if aside is not None:
        shutil.rmtree(aside)


def write_run_file(config: RunFile, folder: Path) -> None:
    """Write `config` as the run file of `folder`, whole or not at all."""
    write_text(folder / RUN_FILE, to_toml(config))


def _make_free(folder: Path, overwrite: bool) -> Path | None:
    """Where the earlier run in `folder` was put; None if there was none."""
    aside = folder.with_name(f"{folder.name}.old")
    is_empty = not folder.exists() or not any(folder.iterdir())
    if not is_empty and not (folder / RUN_FILE).exists():
        raise ConfigError(f"{str(folder)!r} holds files that are not a run's; choose another name=...")
    checkpoints, metrics = list_checkpoints(folder), folder / "metrics.jsonl"
    if is_empty or not (checkpoints or (metrics.exists() and metrics.stat().st_size)):
        # Nothing, or a start that was cut off: nothing was trained, and its warm-up may have had other settings.
        if not is_empty:
            shutil.rmtree(folder)
        # If it was to replace a run, that is put back.
        return _make_free(aside.rename(folder), overwrite) if (aside / _ASIDE).exists() else None
    (folder / _ASIDE).unlink(missing_ok=True)
    if not overwrite:
        state = f"with {checkpoints[-1].name}: go on (--resume {folder})," if checkpoints else "without a checkpoint:"
        raise ConfigError(f"'{folder}' already holds a run {state} replace it (--overwrite), or choose another name")
    if aside.exists():
        raise ConfigError(f"{str(aside)!r} is in the way: an earlier run is put there; move or delete it")
    (folder / _ASIDE).touch()
    return folder.rename(aside)


_ASIDE = ".aside"
"""A file in a run that a start has put aside; another folder of that name is left alone."""
