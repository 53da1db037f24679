"""`TrainController`: one model, its optimiser, and the steps that a train step is made of.

It knows rollouts only as a `TrainBatch` and engines only as something that takes weights. All steps but
`sync_weights` are plain blocking code: a caller with an event loop runs them in a thread.

::

    groups -> pack -> mask_stale
                -> compute_old_logprobs -> compute_ref_logprobs -> compute_values -> compute_advantages
                                                                                               |
              sync_weights(rollout_controller) <- train: mini-batches x epochs optimiser steps <-+

Every step takes the batch and returns it. `fit` is their composition, without those the config does not need.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forebay.config import look_up
from forebay.train import checkpoint, lora, weight_sync
from forebay.train.advantages import AdvantageFunction, find_advantage, spread
from forebay.train.batch import Pack, TrainBatch
from forebay.train.collate import MicroBatch, collate
from forebay.train.config import TrainConfig
from forebay.train.critic import Critic
from forebay.train.forward import checkpoint_activations, output_head, response_logprobs
from forebay.train.losses import POLICY_LOSSES, PolicyInputs, PolicyLossFunction, kl_penalty, value_loss
from forebay.train.measures import TokenRecords, batch_measures, timed
from forebay.train.normalisation import batch_token_weights
from forebay.train.off_policy import Corrector, staleness_measures
from forebay.train.optimisation import Optimiser
from forebay.train.packing import Packer
from forebay.types import FloatArray, RolloutState

logger = logging.getLogger(__name__)

Groups = Iterable[Sequence[RolloutState]]


class TrainController:
    """Trains a causal language model on groups of rollouts.

    Invariants: the loss of a batch depends neither on the order of its groups nor on how it is packed, up to
    rounding; the same batches and seed give bit-equal weights on one CPU thread; dropout is off, so that the
    trained policy is the one that sampled; after train step m the weights are those of model step m.

    With ``lora_rank`` the given model gets adapters in place. With ``kl_coef`` and neither LoRA nor a
    `ref_model`, the reference is a frozen copy of the model as given. With ``critic_lr`` and no
    `value_model`, the critic starts as a copy of the model's body.

    >>> trainer = TrainController(model, TrainConfig(lr=1e-4), pad_token_id=0)  # doctest: +SKIP
    >>> batch = trainer.fit(groups)                                             # doctest: +SKIP
    >>> batch.metrics["train/loss"], trainer.train_step                         # doctest: +SKIP
    (-0.0123, 1)

    The same, step by step (here with what an on-policy GRPO run needs)::

        batch = trainer.pack(groups)
        batch = trainer.compute_advantages(batch)
        batch = trainer.train(batch)
        await trainer.sync_weights(rollout_controller)

    Raises:
        ValueError: the model is no causal language model, or a falling schedule has no `total_steps`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        pad_token_id: int,
        ref_model: nn.Module | None = None,
        value_model: Critic | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        total_steps: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        output_head(model)
        self.config = config
        self.train_step = 0
        """Completed train steps."""
        self.critic = (value_model or Critic.from_policy(model)) if config.uses_critic else None
        if config.lora_rank > 0:
            alpha = config.lora_alpha or 2.0 * config.lora_rank
            model = lora.add_lora(model, rank=config.lora_rank, alpha=alpha, targets=config.lora_targets)
        self.model = model
        self.ref_model = ref_model
        if ref_model is None and config.kl_coef > 0 and not lora.is_lora(model):
            self.ref_model = copy.deepcopy(model)
        if self.ref_model is not None:
            self.ref_model.requires_grad_(False).eval()
        self._pad_token_id = pad_token_id
        self._temperature = temperature
        self._seed = seed
        self._tokenizer = tokenizer
        self._advantages: AdvantageFunction = find_advantage(config.advantage)
        self._policy_loss: PolicyLossFunction = look_up("loss", config.loss, POLICY_LOSSES)
        self._corrector = Corrector(config)
        self._packer = Packer(config.token_budget, layout=config.layout, mini_batches=config.mini_batches)
        self._optimiser = self._build_optimiser(model, config.lr, total_steps)
        self._critic_optimiser = (
            self._build_optimiser(self.critic, config.critic_lr, total_steps)
            if self.critic is not None and config.critic_lr is not None
            else None
        )
        self._set_modes()

    def _build_optimiser(self, model: nn.Module, lr: float, total_steps: int | None) -> Optimiser:
        return Optimiser(
            model,
            lr=lr,
            schedule=self.config.schedule,
            warmup_steps=self.config.schedule_warmup_steps,
            total_steps=total_steps,
            weight_decay=self.config.weight_decay,
            max_grad_norm=self.config.max_grad_norm,
        )

    def _set_modes(self) -> None:
        """Dropout off; activation checkpointing on if configured. Others may have called ``train()``."""
        trained = [self.model] if self.critic is None else [self.model, self.critic.body]
        for module in trained:
            module.eval()
            if self.config.gradient_checkpointing:
                checkpoint_activations(module)

    @property
    def model_step(self) -> int:
        """The step of the weights: after train step m they are those of model step m."""
        return self.train_step

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    # The steps

    def pack(self, groups: Groups | TrainBatch) -> TrainBatch:
        """A batch of these groups, cut into mini-batches and micro-batches.

        Raises:
            ValueError: as `TrainBatch.from_groups` and `Packer.pack_pad_dispatch`.
        """
        batch = groups if isinstance(groups, TrainBatch) else self._batch(groups)
        return self._packer.pack_pad_dispatch(batch, seed=(self._seed, self.train_step))

    def _batch(self, groups: Groups) -> TrainBatch:
        return TrainBatch.from_groups(groups, temperature=self._temperature)

    def mask_stale(self, batch: TrainBatch, thresholds: int | Mapping[str, int]) -> TrainBatch:
        """Leave out of the loss the tokens at or over their task's stale threshold in the next train step.

        Raises:
            ValueError: as `TrainBatch.mask_stale`.
        """
        batch.mask_stale(self.train_step + 1, thresholds)
        return batch

    def compute_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``old_logprobs``: by the current weights, or the engine's if ``correction = "ratio"``.

        Raises:
            ValueError: the engine's are asked for and some are unknown.
        """
        with timed(batch, "old_logprobs"):
            if self.config.correction == "ratio":
                batch.old_logprobs = _known_rollout_logprobs(batch)
            else:
                batch.old_logprobs = self._map_tokens(batch, self._logprobs_of(self.model))
        return batch

    def compute_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``ref_logprobs``: by the reference model, or by the model without its adapters.

        Raises:
            ValueError: there is no reference, because ``kl_coef`` is 0 and no model was given.
        """
        with timed(batch, "ref_logprobs"):
            if self.ref_model is not None:
                batch.ref_logprobs = self._map_tokens(batch, self._logprobs_of(self.ref_model))
            elif lora.is_lora(self.model):
                with lora.adapters_off(self.model):
                    batch.ref_logprobs = self._map_tokens(batch, self._logprobs_of(self.model))
            else:
                raise ValueError("there is no reference model: kl_coef is 0; set it, or give a ref_model")
        return batch

    def compute_values(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``values`` by the critic.

        Raises:
            ValueError: there is no critic.
        """
        critic = self.critic
        if critic is None:
            raise ValueError("there is no critic; set critic_lr (and advantage = 'gae')")
        with timed(batch, "values"):
            batch.values = self._map_tokens(batch, lambda micro: critic(micro))
        return batch

    def compute_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``advantages``, and ``returns`` where the estimator gives them.

        Raises:
            ValueError: as the estimator; values are missing, for example.
        """
        with timed(batch, "advantages"):
            result = self._advantages(batch, self.config)
            if isinstance(result, tuple):
                advantages_R, returns_R = result
                batch.returns = returns_R.astype(np.float32)
            else:
                advantages_R = spread(result, batch)
            batch.advantages = np.where(batch.response_mask, advantages_R, 0).astype(np.float32)
        return batch

    def train(self, batch: TrainBatch) -> TrainBatch:
        """One train step: every mini-batch of every epoch is one optimiser step. Metrics go to the batch.

        Without ``old_logprobs`` the old policy is the trained one, which is only so if the config has a
        single optimiser step per batch.

        Raises:
            ValueError: the batch is not packed, or a result that the config needs is missing.
            FloatingPointError: a gradient is not finite; earlier optimiser steps of this call stand.
        """
        self._check_ready(batch)
        self._set_modes()
        records, norms, critic_norms = TokenRecords(), [], []
        importance_R = self._corrector.weights(batch)
        with timed(batch, "update"):
            for _ in range(self.config.epochs):
                for ranks in batch.packs:
                    self._zero_grad()
                    if not self._accumulate(batch, ranks[0], importance_R, records):
                        continue
                    norms.append(self._optimiser.step(self.train_step))
                    if self._critic_optimiser is not None:
                        critic_norms.append(self._critic_optimiser.step(self.train_step))
        batch.metrics |= records.reduce(len(norms)) | batch_measures(batch) | self._off_policy(batch, records)
        batch.metrics["train/grad_norm"] = float(np.mean(norms)) if norms else 0.0
        batch.metrics["train/lr"] = self._optimiser.learning_rate(self.train_step)
        batch.metrics["train/skipped_updates"] = float(self.config.optimiser_steps - len(norms))
        if critic_norms:
            batch.metrics["train/critic_grad_norm"] = float(np.mean(critic_norms))
        self.train_step += 1
        if not norms:
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
        if self.config.needs_old_logprobs:
            batch = self.compute_old_logprobs(batch)
        if self.config.kl_coef > 0:
            batch = self.compute_ref_logprobs(batch)
        if self.config.uses_critic:
            batch = self.compute_values(batch)
        return self.train(self.compute_advantages(batch))

    async def sync_weights(self, rollout_controller: weight_sync.WeightReceiver) -> None:
        """Give the current weights, adapters merged, to what generates rollouts. Not during `train`."""
        await weight_sync.sync_weights(self.model, rollout_controller, self.model_step)

    def save(self, path: Path | str) -> None:
        """Write everything that continuing needs into the folder `path`, whole or not at all.

        ``model/`` is a complete Hugging Face model, adapters merged; see docs/training.md for the rest.
        """
        parts = self._parts()
        with checkpoint.replace_folder(Path(path)) as folder:
            checkpoint.save_trainer(folder, parts, train_step=self.train_step, tokenizer=self._tokenizer)

    def resume(self, path: Path | str) -> None:
        """Continue from what `save` wrote, in a controller built as the saved one was.

        Raises:
            ValueError: no checkpoint there, or one of another format, kind of training, or starting weights.
        """
        self.train_step = checkpoint.load_trainer(Path(path), self._parts())

    def _parts(self) -> checkpoint.TrainerParts:
        return checkpoint.TrainerParts(
            model=self.model,
            optimiser=self._optimiser,
            critic=self.critic,
            critic_optimiser=self._critic_optimiser,
            ref_model=self.ref_model,
        )

    # Forward and backward passes

    def _zero_grad(self) -> None:
        """An interrupted step may have left gradients behind."""
        self._optimiser.zero_grad()
        if self._critic_optimiser is not None:
            self._critic_optimiser.zero_grad()

    def _accumulate(
        self,
        batch: TrainBatch,
        packs: Sequence[Pack],
        importance_R: FloatArray | None,
        records: TokenRecords,
    ) -> bool:
        """Add the gradients of one mini-batch, micro-batch by micro-batch; whether any token has a weight."""
        sequences = np.concatenate(packs)
        weights_R = batch_token_weights(self.config.normalisation, batch, sequences, importance_R)
        for pack in packs:
            micro = self._collate(batch, pack)
            weight_N = micro.gather(weights_R)
            records.add(weight=weight_N, token_index=torch.from_numpy(micro.token_index))
            self._policy_backward(batch, micro, weight_N, importance_R, records)
            if self.critic is not None:
                self._value_backward(self.critic, batch, micro, weight_N, records)
        return bool(weights_R.any())

    def _policy_backward(
        self,
        batch: TrainBatch,
        micro: MicroBatch,
        weight_N: torch.Tensor,
        importance_R: FloatArray | None,
        records: TokenRecords,
    ) -> None:
        config = self.config
        with self._autocast():
            output = response_logprobs(
                self.model, micro, entropy="train" if config.entropy_coef else "measure"
            )
        assert output.entropy is not None
        old_N = output.logprobs.detach()
        if batch.old_logprobs is not None:
            old_N = micro.gather(batch.old_logprobs)
        assert batch.advantages is not None
        policy = self._policy_loss(
            PolicyInputs(
                output.logprobs,
                old_N,
                micro.gather(batch.advantages),
                micro.sequence_index,
                micro.num_sequences,
            ),
            config,
        )
        if importance_R is not None:
            policy = policy._replace(loss=policy.loss * micro.gather(importance_R))
        elif self._corrector.weighs_tokens:
            # One optimiser step: these logprobs are the proximal ones, and no mask needs them any sooner.
            weights_N = self._corrector.correct(batch, old_N.cpu().numpy(), micro.token_index).weights
            policy = policy._replace(loss=policy.loss * torch.from_numpy(weights_N).to(old_N))
        loss_N, kl_N = policy.loss, None
        if batch.ref_logprobs is not None:
            kl_N = kl_penalty(output.logprobs, micro.gather(batch.ref_logprobs), config.kl_estimator)
            loss_N = loss_N + config.kl_coef * kl_N
        if config.entropy_coef:
            loss_N = loss_N - config.entropy_coef * output.entropy
        (weight_N * loss_N).sum().backward()  # type: ignore[no-untyped-call]
        records.add(
            loss=loss_N,
            policy_loss=policy.loss,
            kl=kl_N,
            entropy=output.entropy,
            logprob=output.logprobs,
            old_logprob=old_N,
            clip_low=policy.clipped_low,
            clip_high=policy.clipped_high,
        )

    def _value_backward(
        self,
        critic: Critic,
        batch: TrainBatch,
        micro: MicroBatch,
        weight_N: torch.Tensor,
        records: TokenRecords,
    ) -> None:
        assert batch.values is not None
        assert batch.returns is not None
        with self._autocast():
            values_N = critic(micro)
        loss_N, clipped_N = value_loss(
            values_N, micro.gather(batch.values), micro.gather(batch.returns), self.config.clip_high
        )
        (weight_N * loss_N).sum().backward()  # type: ignore[no-untyped-call]
        records.add(value_loss=loss_N, value_clip=clipped_N)

    def _map_tokens(self, batch: TrainBatch, compute: Callable[[MicroBatch], torch.Tensor]) -> FloatArray:
        """The results of `compute` without gradient, by response token (R); 0 where the mask is 0."""
        results_R = np.zeros(batch.num_response_tokens, np.float32)
        with torch.no_grad(), self._autocast():
            for micro in self._micro_batches(batch):
                results_R[micro.token_index] = compute(micro).cpu().numpy()
        return results_R

    def _micro_batches(self, batch: TrainBatch) -> Iterator[MicroBatch]:
        if not batch.packs:
            raise ValueError("the batch is not packed; use TrainController.pack before the compute steps")
        for ranks in batch.packs:
            for pack in ranks[0]:
                yield self._collate(batch, pack)

    def _logprobs_of(self, model: nn.Module) -> Callable[[MicroBatch], torch.Tensor]:
        return lambda micro: response_logprobs(model, micro).logprobs

    def _collate(self, batch: TrainBatch, pack: Pack) -> MicroBatch:
        return collate(batch, pack, pad_token_id=self._pad_token_id, device=self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    # Checks and measures

    def _check_ready(self, batch: TrainBatch) -> None:
        needed: dict[str, tuple[bool, Any]] = {
            "pack": (True, batch.packs or None),
            "compute_old_logprobs": (self.config.needs_old_logprobs, batch.old_logprobs),
            "compute_ref_logprobs": (self.config.kl_coef > 0, batch.ref_logprobs),
            "compute_values": (self.config.uses_critic, batch.values),
            "compute_advantages": (True, batch.advantages),
            "an advantage function that gives returns": (self.config.uses_critic, batch.returns),
        }
        missing = [step for step, (wanted, result) in needed.items() if wanted and result is None]
        if missing:
            raise ValueError(f"before train, the batch needs {', '.join(missing)}; or call fit")

    def _off_policy(self, batch: TrainBatch, records: TokenRecords) -> dict[str, float]:
        """Engine against trainer at the start of the step (correction ratio: over the first epoch)."""
        column = "logprob" if self.config.correction == "ratio" else "old_logprob"
        tokens = records.column("token_index").astype(np.int64)
        first_epoch = slice(len(tokens) // self.config.epochs)
        proximal_N = records.column(column)[first_epoch].astype(np.float32)
        measures = self._corrector.measures(batch, proximal_N, tokens[first_epoch])
        return measures | staleness_measures(batch, self.train_step + 1)


def _known_rollout_logprobs(batch: TrainBatch) -> FloatArray:
    unknown_R: NDArray[np.bool_] = np.isnan(batch.rollout_logprobs) & batch.response_mask
    if unknown_R.any():
        rollout_id = batch.rollout_ids[int(batch.response_rows[np.argmax(unknown_R)])]
        raise ValueError(
            f"correction = 'ratio' needs the engine's logprobs, but {int(unknown_R.sum())} generated tokens "
            f"have none, the first in rollout {rollout_id!r}; use an engine that returns them, or 'token_tis'"
        )
    return np.where(batch.response_mask, batch.rollout_logprobs, 0).astype(np.float32)
