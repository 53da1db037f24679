"""`Learner`: the model of one rank, its critic, reference and optimizers, and the passes through them.

It knows batches as packs and token weights, and neither groups nor advantages nor metrics: what needs the
whole batch is worked out before (`TrainController`) and arrives as arrays by response token.

::

    token_values("old_logprobs" | "ref_logprobs" | "values", batch) --> array by response token
    update(batch, weights, importance) : epochs x mini-batches x micro-batches
                                         loss.backward() ... optimizer step --> Update(columns, norms)

On several ranks each has a Learner whose weights are slices (`forebay.train.parallel.sharding`) and whose
batch holds its own sequences; every rank makes the same passes and steps in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from forebay.config import look_up
from forebay.models.config import Precision
from forebay.models.starting_weights import BASE_FINGERPRINT, fingerprint
from forebay.train import checkpoint, weight_sync
from forebay.train.batch import Pack, TrainBatch
from forebay.train.collate import MicroBatch, collate, to_device
from forebay.train.config import TrainConfig
from forebay.train.measures import Columns, TokenRecords
from forebay.train.model import lora
from forebay.train.model.critic import Critic
from forebay.train.model.forward import checkpoint_activations, output_head, response_logprobs
from forebay.train.model.layout_check import check_layout
from forebay.train.objective.losses import (
    POLICY_LOSSES,
    PolicyInputs,
    PolicyLossFunction,
    kl_penalty,
    value_loss,
)
from forebay.train.objective.off_policy import Corrector
from forebay.train.optimization import Optimizer
from forebay.train.parallel.sharding import whole
from forebay.types import FloatArray


class Update(NamedTuple):
    """What one train step did."""

    columns: Columns
    """Arrays by trained token in the order of the passes, epoch by epoch; ``token_index`` says which."""
    norms: list[float]
    """The policy's gradient norm at each optimizer step taken, before clipping."""
    critic_norms: list[float]


class Learner:
    """Runs and trains one model; see `TrainController` for what its arguments mean.

    Invariants: dropout is off; a pass without gradient changes nothing; `update` leaves no gradient behind.

    `shard` is called on each model before its optimizer is made, and may split its weights over ranks.

    >>> learner = Learner(model, TrainConfig(), pad_token_id=0)   # doctest: +SKIP
    >>> logprobs_R = learner.token_values("old_logprobs", batch)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        pad_token_id: int,
        ref_model: nn.Module | None = None,
        value_model: Critic | None = None,
        total_steps: int | None = None,
        device: torch.device | str | None = None,
        shard: Callable[[nn.Module], None] = lambda model: None,
        engine_dtype: Precision = "float32",
    ) -> None:
        output_head(model)
        self.config = config
        self.device = torch.device(device) if device is not None else next(model.parameters()).device
        if config.lora_rank == 0:
            # Steps of a small learning rate are lost in the rounding of anything shorter.
            model.float()
        self.critic = (value_model or Critic.from_policy(model)).float() if config.uses_critic else None
        base_fingerprint = None
        if config.lora_rank > 0:
            # As engines hold them, which compare.
            base_fingerprint = fingerprint(weight_sync.cast(model.named_parameters(), engine_dtype))
            alpha = config.lora_alpha or 2.0 * config.lora_rank
            model = lora.add_lora(model, rank=config.lora_rank, alpha=alpha, targets=config.lora_targets)
        self.model = model
        self.ref_model = ref_model
        if ref_model is None and config.kl_coef > 0 and not lora.is_lora(model):
            self.ref_model = copy.deepcopy(model)
        if self.ref_model is not None:
            self.ref_model.requires_grad_(False).eval()
        frozen = model if lora.is_lora(model) else self.ref_model
        self._starting_weights = checkpoint.fingerprint(frozen) if frozen is not None else None
        policy = lora.without_adapters(model).to(self.device)
        check_layout(model.eval(), config.layout, self.device)
        shard(policy)
        # One after the other: a rank's device never holds more than one of them whole.
        for part in (self.ref_model, self.critic):
            if part is not None:
                shard(part.to(self.device))
        self._pad_token_id = pad_token_id
        self._policy_loss: PolicyLossFunction = look_up("loss", config.loss, POLICY_LOSSES)
        self._corrector = Corrector(config)
        self._optimizer = self._build_optimizer(model, config.lr, total_steps)
        self._critic_optimizer = (
            self._build_optimizer(self.critic, config.critic_lr, total_steps)
            if self.critic is not None and config.critic_lr is not None
            else None
        )
        self.adapter_config = (
            lora.adapter_config(model) | {BASE_FINGERPRINT: base_fingerprint} if base_fingerprint else None
        )
        """peft's config of the adapters as plain values, with what tells their starting weights from others;
        None without LoRA."""
        self._set_modes()

    def _build_optimizer(self, model: nn.Module, lr: float, total_steps: int | None) -> Optimizer:
        return Optimizer(
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
    def parts(self) -> checkpoint.TrainerParts:
        """What a checkpoint holds."""
        return checkpoint.TrainerParts(
            model=self.model,
            optimizer=self._optimizer,
            critic=self.critic,
            critic_optimizer=self._critic_optimizer,
            starting_weights=self._starting_weights,
        )

    # Without gradient

    def token_values(self, name: str, batch: TrainBatch) -> FloatArray:
        """``old_logprobs``, ``ref_logprobs`` or ``values`` by response token (R); 0 where the mask is 0.

        Raises:
            ValueError: there is no reference model, or no critic.
        """
        if name == "values":
            if self.critic is None:
                raise ValueError("there is no critic; set critic_lr (and advantage = 'gae')")
            return self._map_tokens(batch, self.critic)
        if name == "old_logprobs":
            return self._map_tokens(batch, self._logprobs_of(self.model))
        if self.ref_model is not None:
            return self._map_tokens(batch, self._logprobs_of(self.ref_model))
        if not lora.is_lora(self.model):
            raise ValueError("there is no reference model: kl_coef is 0; set it, or give a ref_model")
        with lora.adapters_off(self.model):
            return self._map_tokens(batch, self._logprobs_of(self.model))

    def _map_tokens(self, batch: TrainBatch, compute: Callable[[MicroBatch], torch.Tensor]) -> FloatArray:
        parts = []
        with torch.no_grad(), self._autocast():
            for pack in _own_packs(batch):
                micro = self._collate(batch, pack)
                parts.append((micro.token_index, compute(micro)))
        results_R = np.zeros(batch.num_response_tokens, np.float32)
        for tokens, values in parts:
            results_R[tokens] = values.cpu().numpy()
        return results_R

    def _logprobs_of(self, model: nn.Module) -> Callable[[MicroBatch], torch.Tensor]:
        return lambda micro: response_logprobs(model, micro).logprobs

    def _collate(self, batch: TrainBatch, pack: Pack) -> MicroBatch:
        return collate(batch, pack, pad_token_id=self._pad_token_id, device=self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    # With gradient

    def update(
        self,
        batch: TrainBatch,
        weights_R: FloatArray,
        importance_R: FloatArray | None,
        *,
        train_step: int,
        steps: Sequence[bool],
    ) -> Update:
        """One train step: an optimizer step for each mini-batch of each epoch.

        `weights_R` are the weights of the token losses, each of its whole mini-batch on all ranks; `steps`
        says of each mini-batch whether any of them is not 0. `train_step` counts the completed ones.

        Raises:
            FloatingPointError: a gradient is not finite; earlier optimizer steps of this call stand.
        """
        self._set_modes()
        records, norms, critic_norms = TokenRecords(), [], []
        for _ in range(self.config.epochs):
            for ranks, takes_step in zip(batch.packs, steps, strict=True):
                self._zero_grad()
                for pack in ranks[0]:
                    self._backward(batch, pack, weights_R, importance_R, records)
                if not takes_step:
                    continue
                norms.append(self._optimizer.step(train_step))
                if self._critic_optimizer is not None:
                    critic_norms.append(self._critic_optimizer.step(train_step))
        return Update(records.columns(), norms, critic_norms)

    def _zero_grad(self) -> None:
        """An interrupted step, or one that was not taken, may have left gradients behind."""
        self._optimizer.zero_grad()
        if self._critic_optimizer is not None:
            self._critic_optimizer.zero_grad()

    def _backward(
        self,
        batch: TrainBatch,
        pack: Pack,
        weights_R: FloatArray,
        importance_R: FloatArray | None,
        records: TokenRecords,
    ) -> None:
        """Add the gradients of one micro-batch."""
        micro = self._collate(batch, pack)
        weight_N = micro.gather(weights_R)
        records.add(weight=weight_N, token_index=torch.from_numpy(micro.token_index))
        self._policy_backward(batch, micro, weight_N, importance_R, records)
        if self.critic is not None:
            self._value_backward(self.critic, batch, micro, weight_N, records)

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
        assert batch.advantages is not None
        old_N = output.logprobs.detach()
        if batch.old_logprobs is not None:
            old_N = micro.gather(batch.old_logprobs)
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
        importance_N = self._importance(batch, micro, old_N, importance_R)
        if importance_N is not None:
            policy = policy._replace(loss=policy.loss * importance_N)
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

    def _importance(
        self, batch: TrainBatch, micro: MicroBatch, old_N: torch.Tensor, importance_R: FloatArray | None
    ) -> torch.Tensor | None:
        if importance_R is not None:
            return micro.gather(importance_R)
        if not self._corrector.weighs_tokens:
            return None
        # One optimizer step: these logprobs are the proximal ones, and no mask needs them any sooner.
        weights_N = self._corrector.correct(batch, old_N.cpu().numpy(), micro.token_index).weights
        return to_device(weights_N, old_N.device).to(old_N.dtype)

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

    # Weights and files

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, adapters merged, by the names that they have without adapters."""
        return lora.model_weights(self.model)

    def base_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights below the adapters, by the same names: those that training began with."""
        return lora.model_weights(self.model, merged=False)

    def adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapters' weights, by their names in peft's files; none without LoRA."""
        return ((name, whole(parameter.detach())) for name, parameter in lora.adapter_weights(self.model))

    def save(self, folder: Path, train_step: int) -> None:
        """Write the trainer's files into the empty `folder`."""
        checkpoint.save_trainer(folder, self.parts, train_step=train_step)

    def resume(self, folder: Path) -> int:
        """Take over what `save` wrote; the number of completed train steps.

        Raises:
            ValueError: no checkpoint there, or one of another format, kind of training, or starting weights.
        """
        return checkpoint.load_trainer(folder, self.parts)


def _own_packs(batch: TrainBatch) -> Iterator[Pack]:
    for ranks in batch.packs:
        yield from ranks[0]
