"""The trainer in a process of its own.

::

    groups --TrainBatch.from_groups--> flat arrays --object store--> TrainController.fit --> metrics
    sync_weights: weights --> object store --> every engine        save, resume: folders that both can see
                  or an offer of them, where engines drive servers that take buckets: `forebay.cluster.feeding`

It is not started again by itself, because its state is in its last checkpoint: calls raise `PartLost`, and
the run goes back to that. While a call runs, however long, the process is asked for signs of life.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from forebay.cluster.calls import beside, result_of, signs_of_life
from forebay.cluster.feeding import EngineLink, Feeder
from forebay.cluster.library import PartSpec, Published, cause_of, find_modules_in, import_ray, why
from forebay.cluster.ranks import RayRanks, borrow_gpu
from forebay.cluster.supervisor import BEAT_EVERY_S, SILENCE_LIMIT_S
from forebay.engines.weights.between_processes import put
from forebay.io.shared import Layout, MemoryFile
from forebay.models import load_tokenizer
from forebay.models.starting_weights import AdaptersRefusedError
from forebay.runs.placement import PartLost
from forebay.train.batch import Groups, TrainBatch
from forebay.train.parallel.ranks import EXPECTED, RankError
from forebay.types import ByteArray, FloatArray
from forebay.watching.stalls import StallError

if TYPE_CHECKING:
    from forebay.cluster.workers import ClusterController

logger = logging.getLogger(__name__)


class RayTrainer:
    """The verbs of a `TrainController`, done by a `TrainerActor`; all but `sync_weights` block.

    ::

        trainer = RayTrainer(actor, ray.get(actor.start.remote(spec)))
        metrics = trainer.fit(groups).metrics
    """

    def __init__(self, actor: Any, pids: Sequence[int], overlong: str | float = "train") -> None:
        self.pids = {"trainer": pids[0], **{f"rank {rank}": pid for rank, pid in enumerate(pids[1:])}}
        """Process ids of "trainer", "rank 0" and so on."""
        self.lost_because = ""
        """Why its process ended, once a call has found that."""
        self.model_step = 0
        """Completed train steps."""
        self._actor = actor
        self._overlong = overlong

    def fit(self, groups: Groups, *, stale_thresholds: int | Mapping[str, int] | None = None) -> TrainBatch:
        """One train step; the batch has its metrics.

        Raises:
            ValueError: the batch cannot be trained on.
            FloatingPointError: the training diverged.
            PartLost: the trainer's process has ended, or hangs.
        """
        # Flat arrays travel as they lie; rollouts would be pickled one by one.
        batch = TrainBatch.from_groups(groups, overlong=self._overlong)
        batch.metrics = self._call("fit", batch, stale_thresholds)
        self.model_step += 1
        return batch

    def pack(self, groups: Groups) -> TrainBatch:
        """A packed batch, as of `TrainController.pack`; PartLost as of `fit`."""
        return cast("TrainBatch", self._call("call", "pack", TrainBatch.from_groups(groups, overlong=self._overlong)))

    def compute_logprobs(self, batch: TrainBatch) -> FloatArray:
        """The log probabilities of response tokens, by the current weights; PartLost as of `fit`."""
        return cast("FloatArray", self._call("call", "compute_logprobs", batch))

    async def sync_weights(self, rollout_controller: "ClusterController") -> int:
        """Give the current weights, or the adapters alone, to every engine; the bytes of one engine.

        Once an engine has refused adapters, all get merged weights. PartLost as of `fit`.
        """
        if all(getattr(engine, "takes_buckets", False) for engine in rollout_controller.engines):
            step, num_bytes = await self._result(self._actor.offer.remote(), "offer")
            # Engines wait for the trainer.
            await self._result(rollout_controller.update_weights(Published(self._actor, step), step), "feed")
            return int(num_bytes)
        step_ref, weights_ref = self._actor.weights.options(num_returns=2).remote(rollout_controller.takes_adapters)
        # The weights themselves stay where they are.
        step, num_bytes, adapters = await self._result(step_ref, "weights")
        try:
            await rollout_controller.update_weights(Published(weights_ref, step, adapters), step)
        except AdaptersRefusedError as refusal:
            logger.warning("adapters are merged from step %d on: %s", step, why(refusal))
            return await self.sync_weights(rollout_controller)
        return int(num_bytes)

    def begin_save(self, path: Path | str) -> None:
        """Begin a checkpoint folder, which is written beside `fit`; PartLost as of `fit`."""
        self._call("call", "begin_save", Path(path).resolve())

    def finish_save(self) -> None:
        """Wait until it is there; PartLost as of `fit`."""
        # Beside a train step, for which it would wait otherwise.
        asyncio.run(self._result(beside(self._actor.call).remote("finish_save"), "finish_save"))

    def resume(self, path: Path | str) -> int:
        """Go on from a folder of `save`; ValueError as of `TrainController.resume`, PartLost as of `fit`."""
        self.model_step = self._call("call", "resume", Path(path).resolve())
        return self.model_step

    def offload(self, *, weights: bool) -> None:
        """Move what is asked to the host's memory; PartLost as of `fit`."""
        self._call("call", "offload", weights)

    def onload(self) -> None:
        """Move it back; PartLost as of `fit`."""
        self._call("call", "onload")

    def close(self) -> None:
        """Nothing: the process outlives the run, and ends with its cluster."""

    def _call(self, method: str, *arguments: Any) -> Any:
        named = arguments[0] if method == "call" else method
        return asyncio.run(self._result(getattr(self._actor, method).remote(*arguments), named))

    async def _result(self, ref: Any, method: str) -> Any:
        what = f"the trainer, called to {method}, was asked for a sign of life"
        alive = signs_of_life(self._actor)
        try:
            return await result_of(ref, alive, what, every_s=BEAT_EVERY_S, limit_s=SILENCE_LIMIT_S)
        except (import_ray().exceptions.RayError, StallError) as error:
            raised = self._error(error)
            # An error about the batch or the settings needs no trace of the process that found it.
            raise raised from None if isinstance(raised, tuple(EXPECTED.values())) else error

    def _error(self, error: Exception) -> BaseException:
        """The error to raise: that of the process, or that it has ended."""
        cause = cause_of(error)
        if not isinstance(cause, RankError | StallError | import_ray().exceptions.RayError):
            return cause
        part = "a rank of the trainer" if isinstance(cause, RankError) else "the trainer"
        self.lost_because = str(cause) if isinstance(cause, RankError) else why(error)
        return PartLost(f"{part} is lost: {self.lost_because}")


@dataclass(frozen=True, kw_only=True)
class TrainerSpec(PartSpec):
    """All that a trainer's process is told."""

    device: str
    """``cuda`` where the cluster gave it, or its ranks, one each."""
    ranks: tuple[Any, ...]
    """Ray's handles of new `RankActor`s; empty for a trainer on one rank."""


class TrainerActor:
    """A `TrainController`; what runs in its process, one call at a time.

    ::

        actor = blocking_actor(TrainerActor).remote()
        pids = ray.get(actor.start.remote(spec))
    """

    def __init__(self, lender: tuple[Any, int] | None = None) -> None:
        borrow_gpu(lender)
        self._trainer: Any = None
        self._memory: list[MemoryFile] = []
        """The memory with the weights that were handed over last; it is used again."""
        self._feeder: Feeder

    def start(self, spec: TrainerSpec) -> tuple[int, ...]:
        """Build the trainer; the ids of its process and of its ranks'.

        Raises:
            ConfigError: the model or the training's settings do not fit.
        """
        from forebay.runs.build import build_trainer

        config = spec.config
        find_modules_in(spec.search_path)
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        ranks = None
        if spec.ranks:
            ranks = RayRanks(spec.ranks, spec.device, threads=config.threads, search_path=spec.search_path)
        self._feeder = Feeder(spec.device)
        self._trainer = build_trainer(
            config,
            spec.model_folder,
            load_tokenizer(spec.model_folder),
            # With ranks the model is on their devices alone.
            device=None if spec.ranks else spec.device,
            ranks=ranks,
        )
        return os.getpid(), *(ranks.pids if ranks is not None else ())

    def fit(self, batch: TrainBatch, stale_thresholds: int | Mapping[str, int] | None) -> dict[str, float]:
        """The metrics of one train step."""
        return cast("dict[str, float]", self._trainer.fit(batch, stale_thresholds=stale_thresholds).metrics)

    def call(self, method: str, *arguments: Any) -> Any:
        """Any other method of the `TrainController`."""
        return getattr(self._trainer, method)(*arguments)

    def offer(self) -> tuple[int, int]:
        """Step and bytes of the weights that `feed` gives from now on."""
        return self._trainer.model_step, self._feeder.offer(self._trainer.live_weights())

    def feed(self, link: EngineLink, written_out: Mapping[str, str], hold: bool) -> int | None:
        """`Feeder.feed`, beside all other calls."""
        feeding = self._feeder.feed(link, written_out, hold)
        return asyncio.run_coroutine_threadsafe(feeding, self._feeder.loop).result()

    def weights(self, adapters: bool) -> tuple[tuple[int, int, Mapping[str, Any] | None], tuple[Layout, ByteArray]]:
        """Step and bytes of the weights, with `adapters` the config of these alone, if there are any; and the
        weights: two results, of which the caller fetches the first."""
        config, own = self._trainer.adapters() if adapters else (None, ())
        layout, memory = put(self._trainer.live_weights() if config is None else own, self._memory)
        self._memory = [memory]
        return (self._trainer.model_step, memory.num_bytes, config), (layout, memory.data.numpy())
