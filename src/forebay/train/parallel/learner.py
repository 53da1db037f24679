"""`RankedLearner`: a `Learner` whose model is split over ranks, seen from the process of the trainer.

::

    batch --Ranks.call--> RankWorker of each rank: the passes of its own packs --> joined by response token
                                                                          |
                       weights, bucket by bucket, whole  <-- rank 0 ------+

It has the methods of `Learner` that `TrainController` uses, and no model: that lives with the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from forebay.train.batch import TrainBatch
from forebay.train.config import TrainConfig
from forebay.train.learner import Update
from forebay.train.parallel.frames import to_parts
from forebay.train.parallel.ranks import Ranks
from forebay.types import FloatArray


class RankedLearner:
    """Trains one model on the ranks of `ranks`, which get it from this process and keep it.

    `models` and `settings` are the other arguments of `Learner`, by name.

    Invariants: results are in the order of the batch, whatever rank computed them; the gradient is that of
    one rank, up to rounding.
    """

    def __init__(
        self,
        ranks: Ranks,
        models: Mapping[str, nn.Module | None],
        config: TrainConfig,
        settings: Mapping[str, Any],
    ) -> None:
        self._ranks, self._epochs = ranks, config.epochs
        parts = {name: to_parts(model) for name, model in models.items() if model is not None}
        built = self._call("build", parts, config.model_dump(), dict(settings), torch.get_rng_state())
        self.adapter_config: dict[str, Any] | None = built[0]
        """As `Learner.adapter_config`."""

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """The same arguments for every rank."""
        return self._ranks.call(method, [arguments] * self._ranks.num_ranks)

    def token_values(self, name: str, batch: TrainBatch) -> FloatArray:
        """As `Learner.token_values`."""
        # Each rank gives 0 for the sequences of the others.
        parts: list[FloatArray] = self._call("token_values", name, batch.to_plain())
        return reduce(np.add, parts)

    def update(self, batch: TrainBatch, train_step: int) -> Update:
        """As `Learner.update`."""
        parts = [Update(**part) for part in self._call("update", batch.to_plain(), train_step)]
        columns = {
            # Epoch by epoch, as of one rank: every epoch goes through the same tokens.
            name: np.concatenate([part.columns[name].reshape(self._epochs, -1) for part in parts], axis=1)
            for name in parts[0].columns
        }
        # Norms are of the whole gradient, so every rank has the same.
        return parts[0]._replace(columns={name: values.ravel() for name, values in columns.items()})

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Learner.weights`, but copies, on the CPU: one bucket at a time is gathered and sent."""
        for bucket in range(self._call("num_buckets")[0]):
            yield from self._call("weights", bucket, merged)[0].items()

    def base_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Learner.base_weights`, but copies, as `weights`."""
        return self.weights(merged=False)

    def adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Learner.adapters`, but copies, on the CPU."""
        return iter(self._call("adapters")[0].items())

    def save(self, folder: Path, train_step: int) -> None:
        """As `Learner.save`; written by rank 0, which must see the folder."""
        self._call("save", str(folder.absolute()), train_step)

    def resume(self, folder: Path) -> int:
        """As `Learner.resume`; read by every rank."""
        return int(self._call("resume", str(folder.absolute()))[0])
