"""Weights for servers that load them from a folder: written once per model step for all engines.

::

    write(weights, step) --> .step_...  --rename--> run-5f0c21aa/step_000007-1/       a whole model
    write, by another engine at the same time: the same folder                       older ones are deleted

    write(adapters, step, adapters=config): the same, with what peft writes, for the base below them:
        the last whole weights, which stay; before any, those that the servers began with
          | not known to have the base fingerprint in `config`: BaseDiffersError

    first write --> run-5f0c21aa/lock, held as long as the process lives
                    other run-.../ without a held lock: left by a run that was killed, deleted

The folder is whole as soon as it has its name. The one before the current one is kept: a server may still be
reading it. In a folder in memory (``/dev/shm``) this is a hand-over through shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import socket
import uuid
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.aio.changed import Changes
from forebay.config import ConfigError
from forebay.io.safe_files import made_whole
from forebay.io.shared import views
from forebay.models.config import Precision
from forebay.models.live_weights import LiveWeights, cast
from forebay.models.starting_weights import BASE_FINGERPRINT, AdapterConfig, BaseDiffersError, Weights, fingerprint

if TYPE_CHECKING:
    import torch

    from forebay.engines.weights.buckets import Buckets

    Given = dict[str, torch.Tensor] | LiveWeights

NUM_KEPT = 2
"""The current weights, and those that a slow server may still be reading; as many of adapters."""


@dataclass(eq=False)
class WeightFiles:
    """The weights that all servers of a run should have, as a model folder.

    Invariants: `current` is complete on disk; calls that overlap and have the same weights object and step
    write once; at most `NUM_KEPT` folders are kept, and as many of adapters; what the current adapters lie on
    is. Several of them may share one folder, also from several processes: each writes into its own part of
    it, and deletes the parts of processes of this machine that have died.

    ::

        files = WeightFiles(Path("/dev/shm/run"), model_folder=Path("model"))
        (await files.write(model.named_parameters(), 7)).folder
        # PosixPath('/dev/shm/run/run-5f0c21aa/step_000007-1')
    """

    folder: Path
    """Made with the first weights."""
    model_folder: Path
    """Its config and tokenizer are put beside the weights, for servers that want a whole model."""
    _: KW_ONLY
    written_out: Mapping[str, str] = field(default_factory=dict)
    """Weights that are another's under a second name, and are to be written all the same: see `shared_weights`."""
    starting_dtype: Precision | None = None
    """All servers begin with the weights in `model_folder`, held as this (``float32``, say); None: what they begin
    with is not known."""
    bucket_device: str | None = None
    """Where all servers find live weights (``cpu``: shared memory); None: these are written, too."""

    def __post_init__(self) -> None:
        # So that a server with weights of the same step of another run does not pass for up to date.
        self._name = uuid.uuid4().hex[:8]
        self._part: _Part | None = None
        self._num_written = 0
        self.num_users = 0
        """Engines that use it; the last one that is closed deletes everything."""
        self._start = WrittenWeights(0, self.model_folder, f"{self._name}-start", is_start=True)
        self._whole: list[WrittenWeights] = []
        self._adapters: list[WrittenWeights] = []
        self.current: WrittenWeights | None = None
        """The latest weights; None before the first."""
        self._fingerprints: dict[str, str] = {}
        """Fingerprints of whole weights by version, kept because computing one takes a while."""
        self._writing: asyncio.Task[WrittenWeights] | None = None
        """The last write that has begun, until its end; it follows the one before it."""
        self.changes = Changes()
        """Of the weights that are to be `current`."""
        self._given: tuple[object, int] = (None, 0)
        """The object that is written there, which says whose weights they are, and the step."""

    async def write(
        self, weights: Weights, model_step: int, *, adapters: AdapterConfig | None = None
    ) -> WrittenWeights:
        """Write these weights, unless another call is just writing them; return when they are `current`.

        The tensors are read before it returns. One of two that share their memory (tied weights) is left
        out, as in a saved model. With `adapters`, peft's config of them, `weights` are LoRA adapters. Live
        weights are not written where servers map buckets; else bucket by bucket, each a file.

        Raises:
            ConfigError: the folder cannot be written to, or there is no room left.
            BaseDiffersError: these adapters are not known to be for what servers have below adapters.
        """
        if isinstance(weights, LiveWeights) and self.bucket_device is not None:
            # It needs torch, which a server's client has no other use for.
            from forebay.engines.weights.buckets import Buckets

            now = self.current
            if now is None or now.model_step != model_step or not (now.live and now.live.weights is weights):
                self._num_written += 1
                version = f"{self._name}-step_{model_step:06d}-{self._num_written}"
                # A trainer in another process has its own.
                make: Any = getattr(weights, "buckets", Buckets)
                live = make(weights, self.bucket_device, written_out=self.written_out)
                now = self.current = WrittenWeights(model_step, self.folder, version, live=live)
            self.changes.note()
            return now
        if self._writing is None or self._given[0] is not weights or self._given[1] != model_step:
            self._given = weights, model_step
            given = weights if isinstance(weights, LiveWeights) else dict(weights)
            self._writing = asyncio.create_task(self._write(given, model_step, adapters, self._writing))
            self._writing.add_done_callback(self._note_written)
            self.changes.note()
        return await asyncio.shield(self._writing)

    def _note_written(self, task: asyncio.Task[WrittenWeights]) -> None:
        if task is self._writing:
            # A copy made for this hand-over must not stay in memory until the next one.
            self._writing, self._given = None, (None, 0)
        if not task.cancelled():
            # Told to the callers that wait; there may be none.
            task.exception()

    async def latest(self) -> WrittenWeights | None:
        """`current`, once nothing is being written any more; None before the first."""
        while self._writing is not None:
            await asyncio.wait([self._writing])
        return self.current

    async def _write(
        self,
        weights: Given,
        model_step: int,
        adapters: AdapterConfig | None,
        after: asyncio.Task[WrittenWeights] | None,
    ) -> WrittenWeights:
        from safetensors import SafetensorError

        if after is not None:
            # One write after the other, so that the weights that were given last are `current` at the end.
            await asyncio.wait([after])
        base = None if adapters is None else await asyncio.to_thread(self._base, adapters)
        self._num_written += 1
        name = f"step_{model_step:06d}-{self._num_written}"
        try:
            folder = await asyncio.to_thread(self._write_folder, weights, name, adapters)
        # safetensors reports a full disk as an error of its own.
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"the weights of step {model_step} cannot be written to {str(self.folder)!r}: {error}; make "
                f"room there, or set the engine's weights_folder to another folder"
            ) from error
        version = f"{self._name}-{name}" if base is None else f"{base.version}+{name}"
        self.current = WrittenWeights(model_step, folder, version, base)
        kept = self._whole if base is None else self._adapters
        kept.append(self.current)
        while len(kept) > NUM_KEPT:
            await asyncio.to_thread(shutil.rmtree, kept.pop(0).folder, ignore_errors=True)
        return self.current

    def _base(self, config: AdapterConfig) -> WrittenWeights:
        """The whole weights that these adapters are for."""
        base = self._whole[-1] if self._whole else self._start
        if base.is_start and self.starting_dtype is None:
            raise BaseDiffersError(
                "the weights that the servers began with are unknown; give them the starting weights first"
            )
        wanted = config.get(BASE_FINGERPRINT)
        if wanted is None:
            return base
        if (found := self._fingerprints.get(base.version)) is None:
            dtype = self.starting_dtype if base.is_start else None
            found = fingerprint(_stored(base.folder, dtype, leave_out=self.written_out))
            self._fingerprints[base.version] = found
        if wanted != found:
            raise BaseDiffersError(
                f"these adapters are for the starting weights {wanted[:12]}, but the servers hold "
                f"{found[:12]}; give them those first, or all weights"
            )
        return base

    def _write_folder(self, weights: Given, name: str, adapters: AdapterConfig | None) -> Path:
        from safetensors.torch import save_file

        if self._part is None:
            self._part = _Part(self.folder, self._name)
        with made_whole(self._part.folder / name) as unfinished:
            if adapters is not None:
                # Servers have no use for our own key, and their peft would warn of it.
                config = {key: value for key, value in adapters.items() if key != BASE_FINGERPRINT}
                text = json.dumps(config, indent=2)
                (unfinished / "adapter_config.json").write_text(text, encoding="utf-8")
            else:
                for found in itertools.chain.from_iterable(map(self.model_folder.glob, _SMALL_FILES)):
                    if not found.match(_WEIGHT_INDEX):
                        shutil.copyfile(found, unfinished / found.name)
            for file, part in self._parts(weights, is_whole=adapters is None):
                save_file(part, unfinished / file, metadata={"format": "pt"})
        return self._part.folder / name

    def _parts(self, weights: Given, *, is_whole: bool) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """The files to write, with what is in each: a bucket, or all adapters."""
        from forebay.engines.weights.buckets import Buckets, split

        if isinstance(weights, LiveWeights):
            buckets, memory = Buckets(weights, "cpu", written_out=self.written_out), None
            for number in range(len(buckets)):
                bucket = buckets.fill(number, memory)
                memory = bucket.memory
                yield f"model-{number:05}.safetensors", dict(views(bucket.layout, memory.data))
            return
        # Backwards, so that of several that share their memory the first stays.
        names = {tensor.data_ptr(): own for own, tensor in reversed(weights.items())}
        kept = {own: weights[own].detach().cpu().contiguous() for own in names.values()}
        if not is_whole:
            yield "adapter_model.safetensors", kept
            return
        kept |= {name: kept[source].clone() for name, source in self.written_out.items()}
        for number, layout in enumerate(split(kept.items())):
            file = f"model-{number:05}.safetensors" if number else "model.safetensors"
            yield file, {name: kept[name] for name, *_ in layout}

    def close(self) -> None:
        """Delete everything that was written."""
        if self._part is not None:
            self._part.close()
            self._part = None
        self._whole.clear()
        self._adapters.clear()
        self.current = None


@dataclass(frozen=True)
class WrittenWeights:
    """Weights that servers can load."""

    model_step: int
    folder: Path
    version: str
    """The name that servers are told: no other weights, of this run or another, have it.

    That of adapters is that of their base, a plus sign, and more.
    """
    base: WrittenWeights | None = None
    """The whole weights below adapters; None: these are whole."""
    is_start: bool = False
    """Whether servers have them from their start, without a load."""
    live: Buckets | None = None
    """The place to read the weights from: nothing is in the folder."""


_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of a model folder besides weights."""

_WEIGHT_INDEX = "*.index.json"
"""Says which file has which tensor; servers read all files that are here."""

_RUN_PREFIX, _LOCK = "run-", "lock"


class _Part:
    """A subfolder that is this process's own as long as it lives; made after those of dead ones are deleted.

    Only those of this machine: file systems that several machines share do not always share the locks.
    """

    def __init__(self, parent: Path, name: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        for other in parent.glob(f"{_RUN_PREFIX}*/{_LOCK}"):
            with contextlib.suppress(OSError), other.open("rb") as file:
                if file.read() == socket.gethostname().encode():
                    # Refused while its process lives.
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(other.parent, ignore_errors=True)
        self.folder = parent / f"{_RUN_PREFIX}{name}"
        # Under its name only with its lock, or it would pass for a dead one's.
        with made_whole(self.folder) as unnamed:
            lock = os.open(unnamed / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            self._unlock = weakref.finalize(self, os.close, lock)
            os.write(lock, socket.gethostname().encode())
            # A file system without locks: then no run takes another's part for a dead one's.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Delete the folder and all weights in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()


_WEIGHT_FILES = "*.safetensors"


def _stored(folder: Path, dtype: Precision | None, *, leave_out: Collection[str] = ()) -> Weights:
    """The weights in a model folder, one after another, those of floating point as `dtype`."""
    from safetensors import safe_open

    for path in sorted(folder.glob(_WEIGHT_FILES)):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name not in leave_out]  # noqa: SIM118 - it is no mapping.
            yield from cast(((name, file.get_tensor(name)) for name in names), dtype)


def shared_weights(model_folder: Path) -> dict[str, str]:
    """Which weights of the model in `model_folder` are another's under a second name; {}: none.

    vLLM on a CPU packs the output layer when it starts, and a reload does not pack a shared one again: it
    would go on with the old one, and sample from a mixture of two models. With weights of its own it is
    reloaded like all others. On a GPU nothing is packed, and sharing saves memory.
    """
    import torch
    from transformers import AutoConfig

    from forebay.models.loading import auto_class

    config = AutoConfig.from_pretrained(model_folder, local_files_only=True)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return dict(model.all_tied_weights_keys)


def write_untied(model_folder: Path, target: Path, shared: dict[str, str]) -> Path:
    """Copy the model to `target` with the `shared` weights written out; return `target`."""
    from safetensors.torch import save_file

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model_folder, target, ignore=shutil.ignore_patterns(_WEIGHT_FILES, _WEIGHT_INDEX))
    weights = dict(_stored(model_folder, None))
    weights.update({name: weights[source].clone() for name, source in shared.items()})
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return target
