"""Weights for servers that load them from a folder: written once per model step, whoever asks for them.

::

    write(weights, step) --> .writing-... --rename--> run-5f0c21aa/step_000007-1/     a whole model
    write, by another engine at the same time: the same folder                       older ones are deleted

    first write --> run-5f0c21aa/lock, held as long as the process lives
                    other run-.../ whose lock nobody holds: left by a run that was killed, deleted

The folder is whole as soon as it has its name. The one before the current one is kept: a server may still be
reading it. In a folder in memory (``/dev/shm``) this is a hand-over through shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import uuid
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.config import ConfigError

if TYPE_CHECKING:
    import torch

NUM_KEPT = 2
"""The current weights, and those that a slow server may still be reading."""

_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""What a model folder holds besides weights."""
_WEIGHT_INDEX = "*.index.json"
"""Says which file has which tensor; there is only one file here."""
_RUN_PREFIX, _LOCK = "run-", "lock"


@dataclass(frozen=True)
class WrittenWeights:
    """Weights that servers can load."""

    model_step: int
    folder: Path
    version: str
    """What servers are told to call them: no other weights, of this run or another, have this name."""


class WeightFiles:
    """The weights that all servers of a run should have, as a model folder.

    Invariants: `current` is complete on disk; calls that overlap and have the same weights object and step
    write once; at most `NUM_KEPT` folders are kept. Several of them may share one folder, also from several
    processes: each writes into its own part of it, and deletes the parts of processes of this machine that
    have died.

    >>> files = WeightFiles(Path("/dev/shm/run"), model_folder=Path("model"))          # doctest: +SKIP
    >>> (await files.write(model.named_parameters(), 7)).folder                        # doctest: +SKIP
    PosixPath('/dev/shm/run/run-5f0c21aa/step_000007-1')
    """

    def __init__(
        self, folder: Path, model_folder: Path | None = None, *, written_out: Mapping[str, str] | None = None
    ) -> None:
        """Write into `folder`, which is made with the first weights; config and tokenizer of `model_folder`
        are put beside them, for servers that want a whole model.

        `written_out` names weights that are another's under a second name, and are to be written all the
        same: see `forebay.engines.untied`.
        """
        self._written_out = dict(written_out or {})
        self._folder = folder
        self._model_folder = model_folder
        # So that a server with weights of the same step of another run does not pass for up to date.
        self._name = uuid.uuid4().hex[:8]
        self._part: _Part | None = None
        self._num_written = 0
        self.num_users = 0
        """Engines that use it; the last one that is closed deletes everything."""
        self._written: list[WrittenWeights] = []
        self._writing: _Writing | None = None

    @property
    def folder(self) -> Path:
        """Where everything is written; servers must see it, too."""
        return self._folder

    @property
    def current(self) -> WrittenWeights | None:
        """The latest weights; None before the first."""
        return self._written[-1] if self._written else None

    async def write(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> WrittenWeights:
        """Write them, unless somebody is just doing so; return when they are `current`.

        The tensors are read before it returns. One of two that share their memory (tied weights) is left
        out, as in a saved model.

        Raises:
            ConfigError: the folder cannot be written to, or there is no room left.
        """
        earlier = self._writing
        if earlier is not None and earlier.weights is weights and earlier.model_step == model_step:
            return await asyncio.shield(earlier.task)
        after = None if earlier is None else earlier.task
        task = asyncio.create_task(self._write(dict(weights), model_step, after))
        self._writing = _Writing(weights, model_step, task)
        task.add_done_callback(self._note_written)
        return await asyncio.shield(task)

    async def latest(self) -> WrittenWeights | None:
        """`current`, once nothing is being written any more; None before the first."""
        while self._writing is not None:
            await asyncio.wait([self._writing.task])
        return self.current

    def _note_written(self, task: asyncio.Task[WrittenWeights]) -> None:
        if self._writing is not None and self._writing.task is task:
            self._writing = None
        if not task.cancelled():
            # Told to those who wait; there may be none.
            task.exception()

    async def _write(
        self, weights: dict[str, torch.Tensor], model_step: int, after: asyncio.Task[WrittenWeights] | None
    ) -> WrittenWeights:
        from safetensors import SafetensorError

        if after is not None:
            # In the order they were given, so that the last ones are current.
            await asyncio.wait([after])
        self._num_written += 1
        name = f"step_{model_step:06d}-{self._num_written}"
        try:
            folder = await asyncio.to_thread(self._write_folder, weights, name)
        # A full disk is the latter's.
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"the weights of step {model_step} cannot be written to {str(self._folder)!r}: {error}; make "
                f"room there, or set the engine's weights_folder to another folder"
            ) from error
        written = WrittenWeights(model_step, folder, f"{self._name}-{name}")
        self._written.append(written)
        outdated, self._written = self._written[:-NUM_KEPT], self._written[-NUM_KEPT:]
        for old in outdated:
            await asyncio.to_thread(shutil.rmtree, old.folder, ignore_errors=True)
        return written

    def _write_folder(self, weights: dict[str, torch.Tensor], name: str) -> Path:
        from safetensors.torch import save_file

        if self._part is None:
            self._part = _Part(self._folder, self._name)
        unfinished = Path(tempfile.mkdtemp(prefix=".writing-", dir=self._part.folder))
        try:
            # mkdtemp makes it private; a server may run as somebody else.
            unfinished.chmod(0o755)
            if self._model_folder is not None:
                _copy_small_files(self._model_folder, unfinished)
            kept = _without_shared(weights)
            kept.update({name: kept[source].clone() for name, source in self._written_out.items()})
            save_file(kept, unfinished / "model.safetensors", metadata={"format": "pt"})
            return unfinished.rename(self._part.folder / name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def close(self) -> None:
        """Delete everything that was written."""
        if self._part is not None:
            self._part.close()
            self._part = None
        self._written.clear()


@dataclass(frozen=True, eq=False)
class _Writing:
    weights: Iterable[tuple[str, torch.Tensor]]
    """The object itself says whose they are."""
    model_step: int
    task: asyncio.Task[WrittenWeights]


class _Part:
    """A subfolder that is this process's own as long as it lives; made after those of dead ones are deleted.

    Only those of this machine: file systems that several machines share do not always share the locks.
    """

    def __init__(self, parent: Path, name: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        for other in parent.glob(f"{_RUN_PREFIX}*/{_LOCK}"):
            _delete_if_dead(other)
        self.folder = parent / f"{_RUN_PREFIX}{name}"
        # Under its name only with its lock, or it would pass for a dead one's.
        unnamed = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
        unnamed.chmod(0o755)
        lock = os.open(unnamed / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        self._unlock = weakref.finalize(self, os.close, lock)
        os.write(lock, socket.gethostname().encode())
        # A file system without locks: nobody will take it for dead either.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.folder)

    def close(self) -> None:
        """Delete it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()


def _delete_if_dead(lock: Path) -> None:
    with contextlib.suppress(OSError), lock.open("rb") as file:
        if file.read() == socket.gethostname().encode():
            # Refused while its process lives.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _copy_small_files(source: Path, target: Path) -> None:
    for pattern in _SMALL_FILES:
        for file in source.glob(pattern):
            if not file.match(_WEIGHT_INDEX):
                shutil.copyfile(file, target / file.name)


def _without_shared(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kept: dict[int, str] = {}
    for name, tensor in weights.items():
        kept.setdefault(tensor.data_ptr(), name)
    return {name: weights[name].detach().cpu().contiguous() for name in kept.values()}
