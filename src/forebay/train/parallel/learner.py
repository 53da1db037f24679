"""`RankedLearner`: a `Learner` whose model is split over ranks, seen from the process of the trainer.

::

    folder of the model --its name--> RankWorker of each rank: reads its own slices
    batch --Ranks.call--> the passes of its own packs --> joined by response token
    weights: every rank writes its own blocks into memory that engines map, or the first one all
    a checkpoint: every rank writes its own files, beside whatever comes next

It has the methods of `Learner` that `TrainController` uses, and no model: that lives with the ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from forebay.io.shared import Layout, MemoryFile, lay_out, views
from forebay.models.config import Precision
from forebay.train.batch import TrainBatch
from forebay.train.config import TrainConfig
from forebay.train.learner import Update
from forebay.train.parallel.ranks import Ranks
from forebay.train.parallel.sharding import no_progress_bars
from forebay.types import FloatArray


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A causal language model in Hugging Face format, where every rank can read it; none is loaded here."""

    folder: Path
    dtype: Precision | None = "float32"
    """The precision of the weights in memory; None: that of the passes, wherever these are."""


class RankedLearner:
    """Trains one model on the ranks of `ranks`, which read it from its folder and keep it.

    `models` and `settings` are the other arguments of `Learner`, by name. A model given as an object is saved
    first, to a folder that is gone once the ranks have read it.

    Invariants: results are in the order of the batch, whatever rank computed them; the gradient is that of
    one rank, up to rounding.
    """

    def __init__(
        self,
        ranks: Ranks,
        models: Mapping[str, nn.Module | ModelFolder | None],
        config: TrainConfig,
        settings: Mapping[str, Any],
    ) -> None:
        self._ranks, self._config = ranks, config
        with TemporaryDirectory(prefix="forebay-model-") as scratch:
            sources = {
                name: source_of(model, Path(scratch, name)) for name, model in models.items() if model is not None
            }
            # Each waits for the slowest rank before the next: a collective would give its disk minutes.
            self._call("meet", config.model_dump())
            self._call("load", sources, torch.get_rng_state())
            built = self._call("build", dict(settings))
        self._sizes: Layout
        self.adapter_config: dict[str, Any] | None
        # Every rank says the same.
        self.adapter_config, self._sizes, self.even_length = built[0]
        """As `Learner.adapter_config`; and as `Packer.even_length`."""

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """The same arguments for every rank."""
        return self._ranks.call(method, [arguments] * self._ranks.num_ranks)

    def _call_data(self, method: str, batch: TrainBatch, *arguments: Any) -> list[Any]:
        """Each rank gets the images that it passes besides; one result of those that see the same sequences.

        Raises:
            ConfigError: the ranks share out the tokens of sequences with images.
        """
        if batch.images:
            self._config.parallel.check_images()
        same = self._config.parallel.same_sequences
        images = [batch.images_for(rank) for rank in range(self._ranks.num_ranks // same)]
        return self._ranks.call(method, [(*arguments, own) for own in images for _ in range(same)])[::same]

    def token_values(self, name: str, batch: TrainBatch) -> FloatArray:
        """The named values of all tokens; each rank computes those of its sequences."""
        # Each rank gives 0 for the sequences of the others.
        parts: list[FloatArray] = self._call_data("token_values", batch, name, batch.to_plain())
        return reduce(np.add, parts)

    def update(self, batch: TrainBatch, train_step: int) -> Update:
        """Make the optimizer's steps on all ranks; columns are joined in the batch's order."""
        parts = [Update(**part) for part in self._call_data("update", batch, batch.to_plain(), train_step)]
        columns = {
            # Epoch by epoch, as of one rank: every epoch goes through the same tokens.
            name: np.concatenate([part.columns[name].reshape(self._config.epochs, -1) for part in parts], axis=1)
            for name in parts[0].columns
        }
        # Norms are of the whole gradient, so every rank has the same.
        return parts[0]._replace(columns={name: values.ravel() for name, values in columns.items()})

    def sizes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by name as a tensor without content, of the whole shape."""
        for name, dtype, shape, *_ in self._sizes:
            yield name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by name, whole: a copy on the CPU, adapters merged if asked for."""
        layout, num_bytes = lay_out(self.sizes())
        memory = MemoryFile(num_bytes)
        self._ranks.copy_weights(layout, memory, merged=merged)
        yield from views(layout, memory.data)

    def copy_weights(self, layout: Layout, memory: MemoryFile) -> None:
        """Put these weights into memory, adapters merged: no process has all of them beside it."""
        # Servers get buckets, in memory that is given back after each hand-over: mapped on, it would stay.
        self._ranks.copy_weights(layout, memory, merged=True, again=len(layout) == len(self._sizes))

    def adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every adapter weight by name: a copy on the CPU."""
        return iter(self._call("adapters")[0].items())

    def offload(self, weights: bool) -> None:
        """Move every rank's moments to the host's memory."""
        assert not weights, "they are slices that FSDP holds; a run file that asks for it is refused"
        self._call("offload", weights)

    def onload(self) -> None:
        """Move back to the devices what `offload` moved."""
        self._call("onload")

    def begin_save(self, folder: Path, train_step: int) -> None:
        """As `Learner.begin_save`; every rank writes its own files, and must see the folder."""
        self._call("begin_save", str(folder.absolute()), train_step)

    def finish_save(self) -> None:
        """Wait until every rank has written its files."""
        self._call("finish_save")

    def resume(self, folder: Path) -> int:
        """As `Learner.resume`; every rank reads its own slices, for as long as its disk takes."""
        self._call("begin_resume", str(folder.absolute()))
        return int(self._call("finish_resume")[0])


def source_of(model: nn.Module | ModelFolder, scratch: Path) -> dict[str, Any]:
    """Where ranks find a model, as plain values; one that is an object is saved to `scratch` first.

    Raises:
        ValueError: it is not a model of transformers, or has quantized weights.
    """
    if isinstance(model, ModelFolder):
        folder = str(model.folder.absolute())
        own: dict[str, Any] = {"class": None, "attention": None, "dtype": model.dtype, "frozen": []}
        return {"folder": folder, "name": folder, **own}
    transformers_model: Any = model
    if not hasattr(model, "save_pretrained") or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be split over several ranks, because only plain models of "
            f"transformers can; give one, or train with ranks = 1"
        )
    with no_progress_bars():
        transformers_model.save_pretrained(scratch)
    return {
        "folder": str(scratch),
        "name": transformers_model.name_or_path,
        "class": f"{type(model).__module__}:{type(model).__qualname__}",
        "attention": transformers_model.config._attn_implementation,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
    }
