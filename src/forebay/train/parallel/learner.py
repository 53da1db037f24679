"""`RankedLearner`: a `Learner` whose model is split over ranks, seen from the process of the trainer.

::

    batch --take_shard--> one per rank --Ranks.call--> RankWorker of each --> join_tokens / join_columns
                                                                          |
                       weights, bucket by bucket, whole  <-- rank 0 ------+

It has the methods of `Learner` that `TrainController` uses, and no model: that lives with the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forebay.models.config import Precision
from forebay.train.batch import TrainBatch
from forebay.train.config import TrainConfig
from forebay.train.learner import Update
from forebay.train.model.critic import Critic
from forebay.train.model.forward import output_head
from forebay.train.parallel.model_parts import to_parts
from forebay.train.parallel.ranks import Ranks
from forebay.train.parallel.shards import Shard, join_columns, join_tokens, take_shard, to_arrays
from forebay.types import FloatArray


class RankedLearner:
    """Trains one model on the ranks of `ranks`, which get it from this process and keep it.

    Invariants: results are in the order of the batch, whatever rank computed them; the gradient is that of
    one rank, up to rounding.

    >>> learner = RankedLearner(LocalRanks(2), model, TrainConfig(), pad_token_id=0)  # doctest: +SKIP
    >>> logprobs_R = learner.token_values("old_logprobs", batch)                      # doctest: +SKIP
    """

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        config: TrainConfig,
        *,
        pad_token_id: int,
        ref_model: nn.Module | None = None,
        value_model: Critic | None = None,
        total_steps: int | None = None,
        engine_dtype: Precision = "float32",
    ) -> None:
        output_head(model)
        self.config = config
        self.ranks = ranks
        given = {"model": model, "ref_model": ref_model, "value_model": value_model}
        models = {name: to_parts(module) for name, module in given.items() if module is not None}
        built = self._call(
            "build",
            models,
            config.model_dump(),
            pad_token_id,
            total_steps,
            torch.get_rng_state(),
            engine_dtype,
        )
        self.adapter_config: dict[str, Any] | None = built[0]
        """As `Learner.adapter_config`."""

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """The same arguments for every rank."""
        return self.ranks.call(method, [arguments] * self.ranks.num_ranks)

    def _shards(self, batch: TrainBatch) -> list[Shard]:
        return [take_shard(batch, rank) for rank in range(self.ranks.num_ranks)]

    def token_values(self, name: str, batch: TrainBatch) -> FloatArray:
        """As `Learner.token_values`."""
        shards = self._shards(batch)
        parts = self.ranks.call("token_values", [(name, to_arrays(shard.batch)) for shard in shards])
        return join_tokens(shards, parts, batch.num_response_tokens)

    def update(
        self,
        batch: TrainBatch,
        weights_R: FloatArray,
        importance_R: FloatArray | None,
        *,
        train_step: int,
        steps: Sequence[bool],
    ) -> Update:
        """As `Learner.update`."""
        shards = self._shards(batch)
        arguments = [
            (
                to_arrays(shard.batch),
                weights_R[shard.tokens],
                None if importance_R is None else importance_R[shard.tokens],
                train_step,
                list(steps),
            )
            for shard in shards
        ]
        parts = [Update(**part) for part in self.ranks.call("update", arguments)]
        columns = join_columns(shards, [part.columns for part in parts], self.config.epochs)
        # Norms are of the whole gradient, so every rank has the same.
        return Update(columns, parts[0].norms, parts[0].critic_norms)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Learner.weights`, but copies, on the CPU: one bucket at a time is gathered and sent."""
        return self._weights(merged=True)

    def base_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Learner.base_weights`, but copies, as `weights`."""
        return self._weights(merged=False)

    def _weights(self, *, merged: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in range(self._call("num_buckets")[0]):
            yield from self._call("weights", bucket, merged)[0].items()

    def adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Learner.adapters`, but copies, on the CPU."""
        return iter(self._call("adapters")[0].items())

    def save(self, folder: Path, train_step: int) -> None:
        """As `Learner.save`; written by rank 0, which must see the folder."""
        self._call("save", str(folder.absolute()), train_step)

    def resume(self, folder: Path) -> int:
        """As `Learner.resume`; read by every rank."""
        return int(self._call("resume", str(folder.absolute()))[0])
