"""`TrainController`: the steps that a train step is made of, for a model in this process or on several ranks.

It knows rollouts only as a `TrainBatch`, engines only as something that takes weights, and the model only
through a learner: a `Learner` here, or a `RankedLearner` whose ranks hold a slice each. All steps but
`sync_weights` block: a caller with an event loop runs them in a thread.

::

    groups -> pack -> mask_stale
                -> compute_values -> compute_advantages -> compute_old_logprobs -> compute_ref_logprobs
                                                                                               |
              sync_weights(rollout_controller) <- train: mini-batches x epochs optimizer steps <-+

Every step takes and returns the batch; `fit` composes those needed. No pass reads what the loss does not.
"""

import json
import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forebay.io.safe_files import publish, unfinished
from forebay.models import load_model, precision_on, save_tokenizer
from forebay.models.config import Precision
from forebay.models.live_weights import LiveWeights
from forebay.train import checkpoint, measures, presets, weight_sync
from forebay.train.batch import Groups, TrainBatch
from forebay.train.config import TrainConfig
from forebay.train.learner import Learner
from forebay.train.objective.advantages import AdvantageFunction, find_advantage, spread
from forebay.train.objective.corrections import Corrector
from forebay.train.objective.losses import batch_token_weights, steered
from forebay.train.packing import Packer
from forebay.train.parallel.learner import ModelFolder, RankedLearner
from forebay.train.parallel.ranks import LocalRanks, Ranks
from forebay.types import FloatArray

logger = logging.getLogger(__name__)


class TrainController:
    """Trains a causal language model on groups of rollouts.

    Invariants: the loss of a batch depends neither on the order of its groups nor on how it is packed, up to
    rounding; the same batches and seed give bit-equal weights on one CPU thread; dropout is off, so that the
    trained policy is the one that sampled; after train step m the weights are those of model step m.

    With ``lora_rank`` the given model gets adapters in place. With ``kl_coef`` and neither LoRA nor a
    `ref_model`, the reference is a frozen copy of the model as given; a `ref_model` with the same tokenizer
    is a teacher (``config.teacher`` is read by the run, not here). With ``critic_lr`` a critic
    starts as a copy of the model's body.

    Trained weights and their moments are float32: a model given in another dtype is cast, in place (with
    `lora_rank` the adapters are float32, and what lies below them stays). Engines get `engine_dtype`. With
    `yields_memory` the memory that torch caches on a GPU is given back once the trainer is made and after each
    train step, for an engine in another process; torch then takes it anew at every step.

    The models go to `device`; left out, they stay where they are. With ``config.ranks`` over 1 they are split
    over as many processes of this machine, which `close` ends, and this process keeps none; `ranks` are other
    ranks to use, which stay the caller's. Results are those of one rank, up to rounding. A model given as a
    `ModelFolder` is never whole anywhere then: each rank reads its own slices. With `apart` one rank has a
    process of its own, too, whose passes this one's Python does not hold up; results are equal to the bit.

    The same, step by step (here with what an on-policy GRPO run needs)::

        batch = trainer.pack(groups)
        batch = trainer.compute_advantages(batch)
        batch = trainer.train(batch)
        await trainer.sync_weights(rollout_controller)

    Raises:
        ValueError: the model is no causal language model, or cannot be trained in the config's layout, or a
            falling schedule has no `total_steps`, or `ranks` are not as many as the config says.
        RankError: a rank could not be started; so from every step if a rank fails or dies.
    """

    def __init__(
        self,
        model: nn.Module | ModelFolder,
        config: TrainConfig,
        *,
        pad_token_id: int,
        ref_model: nn.Module | ModelFolder | None = None,
        seed: int = 0,
        total_steps: int | None = None,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        ranks: Ranks | None = None,
        apart: bool = False,
        engine_dtype: Precision = "float32",
        yields_memory: bool = False,
    ) -> None:
        if ranks is not None and config.ranks not in (1, ranks.num_ranks):
            raise ValueError(
                f"config.ranks is {config.ranks}, but {ranks.num_ranks} ranks were given; give as many, or none"
            )
        for difference in presets.differences(config):
            logger.warning("%s", difference)
        self.config = config
        self.train_step = 0
        """Completed train steps."""
        self._turn = threading.Lock()
        """Held while weights change or move: an engine that comes back may read them at any time."""
        self._seed = seed
        self._engine_dtype: Precision = engine_dtype
        self._tokenizer = tokenizer
        self._advantages: AdvantageFunction = find_advantage(config.advantage)
        self._corrector = Corrector(config.correction, config.band) if config.weighs_tokens else None
        self.penalties = config.penalties
        """Weights of divergence and entropy, as they are steered."""
        self._saving: tuple[Path, Path, ExitStack] | None = None
        self._own_ranks: LocalRanks | None = None
        if ranks is None and (apart or config.ranks > 1):
            # A folder says no device.
            at = torch.device(device or ("cpu" if isinstance(model, ModelFolder) else next(model.parameters()).device))
            ranks = self._own_ranks = LocalRanks(config.ranks, device=str(at), imports_main=config.ranks > 1)
        models: dict[str, Any] = {"model": model, "ref_model": ref_model}
        settings: dict[str, Any] = {
            "pad_token_id": pad_token_id,
            "total_steps": total_steps,
            "engine_dtype": engine_dtype,
            "yields_memory": yields_memory,
        }
        self._learner: Learner | RankedLearner
        even_length = np.inf
        if ranks is None:
            for name, given in models.items():
                if isinstance(given, ModelFolder):
                    held = given.dtype or precision_on(torch.device(device or "cpu"), config.dtype)
                    models[name] = load_model(given.folder, dtype=held)
            self._learner = Learner(**models, config=config, **settings, device=device)
        else:
            try:
                self._learner = ranked = RankedLearner(ranks, models, config, settings)
            # The caller gets no object by which it could end the processes.
            except BaseException:
                self.close()
                raise
            # One rank packs as one of this process does.
            even_length = ranked.even_length if ranks.num_ranks > 1 else even_length
        self._packer = Packer(
            config.token_budget,
            num_ranks=1 if ranks is None else ranks.num_ranks // config.parallel.same_sequences,
            layout=config.layout,
            mini_batches=config.mini_batches,
            even_length=even_length,
        )

    def close(self) -> None:
        """End the rank processes that the controller started; on one rank there is nothing to end."""
        if self._own_ranks is not None:
            self._own_ranks.close()

    @property
    def model_step(self) -> int:
        """The step of the weights: after train step m they are those of model step m."""
        return self.train_step

    @property
    def learner(self) -> Learner:
        """The models of this process (`critic`, `ref_model`), and their `device`.

        Raises:
            RuntimeError: they are in other processes; so for `model`.
        """
        if not isinstance(self._learner, Learner):
            raise RuntimeError("the models are in the ranks' processes; use sync_weights or save to see them")
        return self._learner

    @property
    def model(self) -> nn.Module:
        """The trained model, if it is in this process."""
        return self.learner.model

    # The steps

    def pack(self, groups: Groups | TrainBatch) -> TrainBatch:
        """A batch of these groups, cut into mini-batches and micro-batches.

        Raises:
            ValueError: as `TrainBatch.from_groups` and `Packer.pack_pad_dispatch`.
        """
        if not isinstance(groups, TrainBatch):
            groups = TrainBatch.from_groups(groups, overlong=self.config.overlong)
        # In the batch, because a learner, on whatever rank, knows no controller.
        groups.penalties = self.penalties
        return self._packer.pack_pad_dispatch(groups, seed=(self._seed, self.train_step))

    def mask_stale(self, batch: TrainBatch, thresholds: int | Mapping[str, int]) -> TrainBatch:
        """Leave out of the loss the tokens at or over their task's stale threshold in the next train step.

        Raises:
            ValueError: as `TrainBatch.mask_stale`.
        """
        batch.mask_stale(self.train_step + 1, thresholds)
        return batch

    def compute_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``old_logprobs``: by the current weights, or the engine's if ``correction = "ratio"``.

        After `compute_advantages` they are NaN on sequences that the loss does not read, for which no pass is
        made; so are those of the reference.

        Raises:
            ValueError: the engine's are asked for and some are unknown.
        """
        if self.config.correction != "ratio":
            return self._fill("old_logprobs", batch)
        with measures.timed(batch, "old_logprobs"):
            unknown_R: NDArray[np.bool_] = np.isnan(batch.rollout_logprobs) & batch.response_mask
            if unknown_R.any():
                rollout_id = batch.rollout_ids[int(batch.response_rows[np.argmax(unknown_R)])]
                raise ValueError(
                    f"correction = 'ratio' needs the engine's logprobs, but {int(unknown_R.sum())} generated "
                    f"tokens have none, the first in rollout {rollout_id!r}; use an engine that returns "
                    f"them, or 'token_tis'"
                )
            known_R = np.where(batch.response_mask, batch.rollout_logprobs, 0)
            batch.old_logprobs = known_R.astype(np.float32)
        return batch

    def compute_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``ref_logprobs``: by the reference model, or by the model without its adapters.

        Raises:
            ValueError: there is no reference, because ``kl_coef`` is 0 and no model was given.
        """
        return self._fill("ref_logprobs", batch)

    def compute_values(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``values`` by the critic.

        Raises:
            ValueError: there is no critic.
        """
        return self._fill("values", batch)

    def _fill(self, name: str, batch: TrainBatch) -> TrainBatch:
        read_S = np.ones(batch.num_sequences, bool)
        # A mask by the old logprobs is of all tokens, and counts those that it leaves.
        masks = name == "old_logprobs" and self.config.may_mask
        if batch.advantages is not None and name != "values" and not masks:
            read_S = self._read_by_loss(batch, batch.in_loss)
        with measures.timed(batch, name):
            values_R = self._token_values(name, self._only(batch, read_S))
        # Not 0, so that `_check_ready` finds out if the loss reads them after all.
        values_R[batch.response_mask & ~read_S[batch.response_rows]] = np.nan
        if values_R.ndim > 1:
            values_R, batch.ref_top = values_R[:, 0], values_R[:, 1:]
        setattr(batch, name, values_R)
        return batch

    def _read_by_loss(self, batch: TrainBatch, in_loss_R: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """S: whether a term of the loss reads anything of a sequence, where the tokens in the loss are these.

        The policy's term and its gradient are 0 where the advantage is 0, for the losses of the table; then
        only penalties and a critic read a token.
        """
        config = self.config
        if ":" in config.loss:
            return np.ones(batch.num_sequences, bool)
        kl_in_loss = config.uses_reference and not config.kl_in_reward
        if batch.advantages is not None and not (kl_in_loss or config.uses_entropy or config.uses_critic):
            in_loss_R = in_loss_R & (batch.advantages != 0)
        read_S = np.zeros(batch.num_sequences, bool)
        read_S[batch.response_rows[in_loss_R]] = True
        return read_S

    def _only(self, batch: TrainBatch, kept_S: NDArray[np.bool_]) -> TrainBatch:
        """The batch with packs of the kept sequences alone."""
        return batch if kept_S.all() else replace(batch, packs=self._packer.cut(batch, kept_S))

    def compute_logprobs(self, batch: TrainBatch) -> FloatArray:
        """float32, R: log probabilities of the response tokens by the current weights."""
        return self._token_values("old_logprobs", batch)

    def _token_values(self, name: str, batch: TrainBatch) -> FloatArray:
        if not batch.packs:
            raise ValueError("the batch is not packed; use TrainController.pack before the compute steps")
        return self._learner.token_values(name, batch)

    def compute_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``advantages``, and ``returns`` where the estimator gives them.

        Raises:
            ValueError: as the estimator; values are missing, for example.
        """
        with measures.timed(batch, "advantages"):
            result = self._advantages(batch, self.config)
            if isinstance(result, tuple):
                advantages_R, returns_R = result
                batch.returns = returns_R.astype(np.float32)
            else:
                advantages_R = spread(result, batch)
            batch.advantages = np.where(batch.response_mask, advantages_R, 0).astype(np.float32)
        return batch

    def train(self, batch: TrainBatch) -> TrainBatch:
        """One train step: every mini-batch of every epoch is one optimizer step. Metrics go to the batch.

        Without ``old_logprobs`` the old policy is the trained one, which is only so if the config has a
        single optimizer step per batch.

        Raises:
            ValueError: the batch is not packed, or a result that the config needs is missing or NaN.
            FloatingPointError: a gradient is not finite; earlier optimizer steps of this call stand.
        """
        with self._turn:
            return self._train(batch)

    def _train(self, batch: TrainBatch) -> TrainBatch:
        self._check_ready(batch)
        batch.importance = None if self._corrector is None else self._corrector.weights(batch)
        with measures.timed(batch, "update"):
            batch.token_weights = np.zeros(batch.num_response_tokens, np.float32)
            for sequences in batch.mini_batches:
                batch.token_weights += batch_token_weights(self.config.normalization, batch, sequences)
            passed = self._only(batch, self._read_by_loss(batch, batch.token_weights != 0))
            done = self._learner.update(passed, self.train_step)
        num_steps = len(done.norms)
        # Engine against trainer at the start of the step; with correction "ratio", over the first epoch.
        column = "logprob" if self.config.correction == "ratio" else "old_logprob"
        tokens = done.columns["token_index"]
        first_epoch = slice(len(tokens) // self.config.epochs)
        tokens, proximal_N = tokens[first_epoch], done.columns[column][first_epoch]
        if self.config.may_mask:
            assert batch.old_logprobs is not None
            # A mask was worked out on all tokens, so also on those that the update made no pass over.
            tokens = np.flatnonzero(batch.response_mask)
            proximal_N = batch.old_logprobs[tokens]
        batch.trainer_logprobs = np.full(batch.num_response_tokens, np.nan, np.float32)
        batch.trainer_logprobs[tokens] = proximal_N
        metrics = measures.token_measures(done.columns, num_steps) | measures.batch_measures(passed)
        metrics |= measures.correction_measures(self._corrector, batch, proximal_N, tokens)
        metrics |= measures.staleness_measures(batch, self.train_step + 1)
        metrics["train/grad_norm"] = float(np.mean(done.norms)) if done.norms else 0.0
        metrics["train/lr"] = done.lr
        metrics["train/skipped_updates"] = float(self.config.optimizer_steps - num_steps)
        if done.critic_norms:
            metrics["train/critic_grad_norm"] = float(np.mean(done.critic_norms))
        batch.metrics |= metrics
        measured = [batch.metrics.get(f"train/{name}") for name in ("kl", "entropy")]
        kl, entropy = map(steered, self.penalties, measured, self.config.penalty_targets, (1, -1))
        self.penalties = kl, entropy
        self.train_step += 1
        if not done.norms:
            logger.warning(
                "train step %d changed no weight: all of its tokens are masked (%s)",
                self.train_step,
                "stale" if not batch.in_loss.any() else f"by correction {self.config.correction!r}",
            )
        return batch

    def fit(
        self, groups: Groups | TrainBatch, *, stale_thresholds: int | Mapping[str, int] | None = None
    ) -> TrainBatch:
        """One whole train step on these groups; the steps above in order, without those not needed.

        With `stale_thresholds`, by task name or one for all, stale tokens are masked.
        """
        batch = self.pack(groups)
        if stale_thresholds is not None:
            batch = self.mask_stale(batch, stale_thresholds)
        if self.config.uses_critic:
            batch = self.compute_values(batch)
        # One of the user's own may read what the passes find; a divergence in the rewards does.
        comes_last = ":" in self.config.advantage or self.config.kl_in_reward
        if not comes_last:
            batch = self.compute_advantages(batch)
        if self.config.needs_old_logprobs:
            batch = self.compute_old_logprobs(batch)
        if self.config.uses_reference:
            batch = self.compute_ref_logprobs(batch)
        return self.train(self.compute_advantages(batch) if comes_last else batch)

    async def sync_weights(self, rollout_controller: weight_sync.WeightReceiver) -> int:
        """Give the current weights, adapters merged, to what generates, not during `train`; an engine's bytes."""
        step, dtype, live = self.model_step, self._engine_dtype, self.live_weights()
        return await weight_sync.sync_weights(self._learner, rollout_controller, step, dtype=dtype, live=live)

    def live_weights(self) -> LiveWeights:
        """The current weights, adapters merged, in the precision of the engines."""
        return LiveWeights(self._learner, self._engine_dtype, self._turn, lambda: self.train_step)

    def adapters(self) -> tuple[dict[str, Any] | None, list[tuple[str, torch.Tensor]]]:
        """The config of the adapters, and these; None, and none, without LoRA."""
        config = self._learner.adapter_config
        return config, [] if config is None else list(self._learner.adapters())

    def offload(self, weights: bool) -> None:
        """Move the moments, and on one rank the models if asked, to the host's memory."""
        with self._turn:
            self._learner.offload(weights)

    def onload(self) -> None:
        """Move back to the device what `offload` moved."""
        with self._turn:
            self._learner.onload()

    def save(self, path: Path | str) -> None:
        """Write everything that continuing needs into the folder `path`, whole or not at all.

        ``model/`` is a complete Hugging Face model, adapters merged; see docs/training.md for the rest.
        """
        self.begin_save(path)
        self.finish_save()

    def begin_save(self, path: Path | str) -> None:
        """Copy all that `save` writes, and write it in threads, while training may go on.

        The folder `path` is there after `finish_save`, which also comes before the next save. One that was
        begun before is finished first.
        """
        self.finish_save()
        with ExitStack() as stack:
            folder = stack.enter_context(unfinished(Path(path)))
            checkpoint.save_random(folder)
            checkpoint.save_json({"penalties": self.penalties}, folder / checkpoint.PENALTIES_FILE)
            self._learner.begin_save(folder, self.train_step)
            # An error up to here deletes the folder; from now on `finish_save` publishes or deletes it.
            self._saving = folder, Path(path), stack.pop_all()

    def finish_save(self) -> None:
        """Wait for what `begin_save` began, if anything, and make it the folder that it is to be.

        Raises:
            OSError: the disk takes no more; what was at that place before is still there.
        """
        if self._saving is None:
            return
        (folder, final, stack), self._saving = self._saving, None
        with stack:
            self._learner.finish_save()
            checkpoint.join_model(folder / "model")
            if self._tokenizer is not None:
                save_tokenizer(self._tokenizer, folder / "model")
            publish(folder, final)

    def resume(self, path: Path | str) -> int:
        """Continue from what `save` wrote, in a controller built as the saved one was; its train step.

        The number of ranks may differ.

        Raises:
            ValueError: no checkpoint there, a damaged one, or one of another format, kind of training, or
                starting weights.
        """
        checkpoint.check_folder(Path(path))
        with self._turn:
            self.train_step = self._learner.resume(Path(path))
        checkpoint.load_random(Path(path))
        saved = Path(path) / checkpoint.PENALTIES_FILE
        found = json.loads(saved.read_text(encoding="utf-8"))["penalties"]
        # One that is not steered is the config's, which may have changed. So is one that was 0: steering
        # multiplies.
        targets, own = self.config.penalty_targets, self.config.penalties
        kl, entropy = (s if t and s else o for s, t, o in zip(found, targets, own, strict=True))
        self.penalties = kl, entropy
        return self.train_step

    def _check_ready(self, batch: TrainBatch) -> None:
        needed: dict[str, tuple[bool, Any]] = {
            "pack": (True, batch.packs or None),
            "compute_old_logprobs": (self.config.needs_old_logprobs, batch.old_logprobs),
            "compute_ref_logprobs": (self.config.uses_reference, batch.ref_logprobs),
            "compute_values": (self.config.uses_critic, batch.values),
            "compute_advantages": (True, batch.advantages),
            "an advantage function that gives returns": (self.config.uses_critic, batch.returns),
        }
        missing = [step for step, (wanted, result) in needed.items() if wanted and result is None]
        if missing:
            raise ValueError(f"before train, the batch needs {', '.join(missing)}; or call fit")
        read_R = batch.in_loss & self._read_by_loss(batch, batch.in_loss)[batch.response_rows]
        for name in ("old_logprobs", "ref_logprobs"):
            values_R = getattr(batch, name)
            if values_R is not None and np.isnan(values_R[read_R]).any():
                raise ValueError(
                    f"{name} are NaN on tokens that the loss reads: the model gives NaN, or advantages or "
                    f"loss weights were changed after compute_{name}; then call it again"
                )
