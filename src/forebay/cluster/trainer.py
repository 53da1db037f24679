"""The trainer in a process of its own.

::

    groups --TrainBatch.from_groups--> flat arrays --object store--> TrainController.fit --> metrics
    sync_weights: weights --> object store --> every engine        save, resume: folders that both can see

It is not started again by itself, because its state is in its last checkpoint: calls raise `PartLost`, and
the run goes back to that.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forebay.cluster.library import find_modules_in, import_ray, why
from forebay.cluster.weights import PlainWeight, Published, to_plain
from forebay.runs.config import RunConfig
from forebay.runs.placement import PartLost
from forebay.types import FloatArray, RolloutState

if TYPE_CHECKING:
    import torch

    from forebay.train.batch import TrainBatch


class TakesPublished(Protocol):
    """What `RayTrainer.sync_weights` gives weights to."""

    async def update_weights(self, weights: Any, model_step: int) -> None:
        """Have `weights`, which are `Published`, in use."""
        ...


class TrainerActor:
    """A `TrainController`; what runs in its process, one call at a time.

    >>> actor = ray.remote(TrainerActor).remote()
    >>> pid = ray.get(actor.start.remote(config, model_folder, (), "cpu"))
    """

    def __init__(self) -> None:
        self._trainer: Any = None

    def start(self, config: RunConfig, model_folder: Path, search_path: tuple[str, ...], device: str) -> int:
        """Build the trainer, with modules from `search_path`; the process id.

        Raises:
            ConfigError: the model or the training's settings do not fit.
        """
        import torch

        from forebay.models import load_tokenizer
        from forebay.runs.build import build_trainer

        find_modules_in(search_path)
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self._trainer = build_trainer(config, model_folder, load_tokenizer(model_folder), device=device)
        return os.getpid()

    def fit(self, batch: TrainBatch, stale_thresholds: int | Mapping[str, int] | None) -> dict[str, float]:
        """The metrics of one train step."""
        metrics: dict[str, float] = self._trainer.fit(batch, stale_thresholds=stale_thresholds).metrics
        return metrics

    def pack(self, batch: TrainBatch) -> TrainBatch:
        """See `TrainController.pack`."""
        packed: TrainBatch = self._trainer.pack(batch)
        return packed

    def compute_logprobs(self, batch: TrainBatch) -> FloatArray:
        """See `TrainController.compute_logprobs`."""
        logprobs: FloatArray = self._trainer.compute_logprobs(batch)
        return logprobs

    def weights(self) -> tuple[int, list[PlainWeight]]:
        """The step of the weights, and the weights: two results, of which the caller fetches the first."""
        receiver = _Receiver()
        asyncio.run(self._trainer.sync_weights(receiver))
        return receiver.model_step, receiver.weights

    def save(self, path: Path) -> None:
        """Write a checkpoint folder."""
        self._trainer.save(path)

    def resume(self, path: Path) -> int:
        """Go on from a checkpoint; its train step."""
        self._trainer.resume(path)
        step: int = self._trainer.model_step
        return step


class _Receiver:
    """Takes the trainer's weights without a copy."""

    model_step = 0
    weights: list[PlainWeight]

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None:
        self.model_step, self.weights = model_step, to_plain(weights)


class RayTrainer:
    """The verbs of a `TrainController`, done by a `TrainerActor`; all but `sync_weights` block.

    >>> trainer = RayTrainer(actor, pid)
    >>> metrics = trainer.fit(groups).metrics
    """

    def __init__(self, actor: Any, pid: int) -> None:
        self.pid = pid
        self._actor = actor
        self._model_step = 0

    @property
    def model_step(self) -> int:
        """Completed train steps."""
        return self._model_step

    def fit(
        self,
        groups: Iterable[Sequence[RolloutState]],
        *,
        stale_thresholds: int | Mapping[str, int] | None = None,
    ) -> TrainBatch:
        """One train step; the batch has its metrics.

        Raises:
            ValueError: the batch cannot be trained on.
            FloatingPointError: the training diverged.
            PartLost: the trainer's process has ended.
        """
        from forebay.train.batch import TrainBatch

        batch = TrainBatch.from_groups(groups)
        batch.metrics = self._call("fit", batch, stale_thresholds)
        self._model_step += 1
        return batch

    def pack(self, groups: Iterable[Sequence[RolloutState]]) -> TrainBatch:
        """See `TrainController.pack`.

        Raises:
            PartLost: the trainer's process has ended.
        """
        from forebay.train.batch import TrainBatch

        packed: TrainBatch = self._call("pack", TrainBatch.from_groups(groups))
        return packed

    def compute_logprobs(self, batch: TrainBatch) -> FloatArray:
        """See `TrainController.compute_logprobs`.

        Raises:
            PartLost: the trainer's process has ended.
        """
        logprobs: FloatArray = self._call("compute_logprobs", batch)
        return logprobs

    async def sync_weights(self, rollout_controller: TakesPublished) -> None:
        """Give the current weights to every engine.

        Raises:
            PartLost: the trainer's process has ended.
        """
        step_ref, weights_ref = self._actor.weights.options(num_returns=2).remote()
        try:
            # The weights themselves stay where they are.
            step = await step_ref
        except import_ray().exceptions.RayError as error:
            raise _lost(error) from error
        await rollout_controller.update_weights(Published(weights_ref, step), step)

    def save(self, path: Path | str) -> None:
        """Write a checkpoint folder.

        Raises:
            PartLost: the trainer's process has ended.
        """
        self._call("save", Path(path).resolve())

    def resume(self, path: Path | str) -> None:
        """Go on from what `save` wrote.

        Raises:
            ValueError: as `TrainController.resume`.
            PartLost: the trainer's process has ended.
        """
        self._model_step = self._call("resume", Path(path).resolve())

    def _call(self, method: str, *arguments: Any) -> Any:
        ray = import_ray()
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments))
        except ray.exceptions.RayTaskError as error:
            # Its own error, without the trace of the process that it comes from.
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise _lost(error) from error


def _lost(error: Exception) -> PartLost:
    return PartLost(f"the trainer is lost: {why(error)}")
