"""Weights for servers that load them from a folder: written once per model step, whoever asks for them.

::

    write(weights, step) --> .writing-... --rename--> step_000007-1/   model.safetensors + config, tokenizer
    write, by another engine at the same time: the same folder          older ones are deleted

The folder is whole as soon as it has its name. The one before the current one is kept: a server may still be
reading it. In a folder in memory (``/dev/shm``) this is a hand-over through shared memory.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NUM_KEPT = 2
"""The current weights, and those that a slow server may still be reading."""

_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""What a model folder holds besides weights."""
_WEIGHT_INDEX = "*.index.json"
"""Says which file has which tensor; there is only one file here."""


@dataclass(frozen=True)
class WrittenWeights:
    """Weights that servers can load."""

    model_step: int
    folder: Path
    version: str
    """What servers are told to call them: no other weights, of this run or another, have this name."""


class WeightFiles:
    """The weights that all servers of a run should have, as a model folder.

    Invariants: `current` is complete on disk; calls for one step that overlap write once; at most `NUM_KEPT`
    folders are kept.

    >>> files = WeightFiles(Path("/dev/shm/run"), model_folder=Path("model"))          # doctest: +SKIP
    >>> (await files.write(model.named_parameters(), 7)).folder                        # doctest: +SKIP
    PosixPath('/dev/shm/run/step_000007-1')
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
        self._num_written = 0
        self.num_users = 0
        """Engines that use it; the last one that is closed deletes everything."""
        self._written: list[WrittenWeights] = []
        self._writing: tuple[int, asyncio.Task[WrittenWeights]] | None = None

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
        """
        if self._writing is None or self._writing[0] != model_step:
            self._writing = (model_step, asyncio.create_task(self._write(dict(weights), model_step)))
        task = self._writing[1]
        try:
            return await asyncio.shield(task)
        finally:
            if self._writing is not None and self._writing[1] is task and task.done():
                self._writing = None

    async def _write(self, weights: dict[str, torch.Tensor], model_step: int) -> WrittenWeights:
        self._num_written += 1
        name = f"step_{model_step:06d}-{self._num_written}"
        await asyncio.to_thread(self._write_folder, weights, name)
        written = WrittenWeights(model_step, self._folder / name, f"{self._name}-{name}")
        self._written.append(written)
        outdated, self._written = self._written[:-NUM_KEPT], self._written[-NUM_KEPT:]
        for old in outdated:
            await asyncio.to_thread(shutil.rmtree, old.folder, ignore_errors=True)
        return written

    def _write_folder(self, weights: dict[str, torch.Tensor], name: str) -> None:
        from safetensors.torch import save_file

        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".writing-", dir=self._folder))
        try:
            # mkdtemp makes it private; a server may run as somebody else.
            unfinished.chmod(0o755)
            if self._model_folder is not None:
                _copy_small_files(self._model_folder, unfinished)
            kept = _without_shared(weights)
            kept.update({name: kept[source].clone() for name, source in self._written_out.items()})
            save_file(kept, unfinished / "model.safetensors", metadata={"format": "pt"})
            unfinished.rename(self._folder / name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def close(self) -> None:
        """Delete everything that was written."""
        for written in self._written:
            shutil.rmtree(written.folder, ignore_errors=True)
        self._written.clear()


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
