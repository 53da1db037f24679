"""`Learner`: the model of one rank, its critic, reference and optimizers, and the passes through them.

It knows packs and token weights: `TrainController` works out what needs the whole batch, as arrays by token.

::

    token_values("old_logprobs" | "ref_logprobs" | "values", batch) --> array by response token
    update(batch): epochs x mini-batches x (micro-batches, optimizer step) --> Update(columns, norms)

On several ranks each has one with slices of weights; all get the whole batch and make equally many passes.
Shapes: R response tokens of the batch, N trained tokens of one micro-batch.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from forebay.config import look_up
from forebay.io.shared import Layout, views
from forebay.models import Precision, attention, empty_cache, forgo_cudnn, precision_on, routing
from forebay.models.images import Sight
from forebay.models.live_weights import cast
from forebay.models.starting_weights import BASE_FINGERPRINT, fingerprint
from forebay.train import checkpoint
from forebay.train.batch import Pack, TrainBatch
from forebay.train.collate import MicroBatch, collate
from forebay.train.config import TrainConfig
from forebay.train.measures import Columns, TokenRecords
from forebay.train.model import lora
from forebay.train.model.critic import Critic
from forebay.train.model.forward import Entropy, TokenOutputs, output_head, response_logprobs
from forebay.train.model.frozen import freeze
from forebay.train.model.layers import checkpoint_activations, compile_layers
from forebay.train.model.trial import check_layout, settle_attention
from forebay.train.objective import losses
from forebay.train.objective.corrections import Corrector
from forebay.train.offload import Offload, Place
from forebay.train.optimization import Optimizer
from forebay.train.parallel.context import Context
from forebay.train.parallel.sharding import is_sharded
from forebay.types import FloatArray


class Learner:
    """Runs and trains one model; see `TrainController` for what its arguments mean.

    Invariants: dropout is off; a pass without gradient changes nothing; `update` leaves no gradient behind.

    On several ranks all models are given, already split over `mesh` (`forebay.train.parallel.sharding`);
    `rank` is which of a batch's packs are this learner's, and `context` its share of their tokens.
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
        engine_dtype: Precision = "float32",
        yields_memory: bool = False,
        mesh: DeviceMesh | None = None,
        rank: int = 0,
        context: Context | None = None,
    ) -> None:
        output_head(model)
        forgo_cudnn()
        self.config = config
        self.device = torch.device(device) if device is not None else next(model.parameters()).device
        # Asked once: what a GPU computes in is a question to its driver, and passes are many.
        self._precision = precision_on(self.device, config.dtype)
        self._yields_memory = yields_memory and self.device.type == "cuda"
        self.adapter_config: dict[str, Any] | None = None
        """peft's config of the adapters as plain values, with what tells their starting weights from others;
        None without LoRA."""
        # A plan (`forebay.plan`) builds learners of tensors that have sizes and no content to read.
        has_content = not isinstance(next(model.parameters()), FakeTensor)
        self.critic = (value_model or Critic.from_policy(model)) if config.uses_critic else None
        # Steps of a small learning rate are lost in the rounding of anything shorter. Slices are so already.
        for part in (None if config.lora_rank else model, self.critic):
            if part is not None and mesh is None:
                part.float()
        frozen = freeze(model, config.frozen)
        if config.lora_rank > 0:
            # In the dtype of the engines, which compare it with the fingerprint of their own weights.
            base = fingerprint(cast(lora.model_weights(model), engine_dtype)) if has_content else ""
            alpha = config.lora_alpha or 2.0 * config.lora_rank
            targets = config.lora_targets
            model = lora.add_lora(model, rank=config.lora_rank, alpha=alpha, targets=targets, frozen=frozen)
            self.adapter_config = lora.adapter_config(model) | {BASE_FINGERPRINT: base}
        self.model, self.ref_model = model, ref_model
        if ref_model is None and config.uses_reference and not lora.is_lora(model):
            self.ref_model = routing.copied(model)
        if self.ref_model is not None:
            self.ref_model.requires_grad_(False).eval()
        below = model if lora.is_lora(model) else self.ref_model
        fixed = checkpoint.fingerprint(below) if below is not None and has_content else None
        self._mesh = mesh
        # FSDP casts what it gathers, so autocast has only what every rank has whole to cast.
        self._casts = self._precision != "float32" and (mesh is None or lora.is_lora(model))
        parts = [part for part in (lora.without_adapters(model), self.ref_model, self.critic) if part is not None]
        for part in parts:
            _place(part, self.device, mesh)
        model.eval()
        self._routing = routing.Routing(lora.without_adapters(model))
        kernel = self._settle_attention(lora.without_adapters(model), has_content, context)
        for part in parts if config.compile else ():
            compile_layers(part, self.device)
        self._rank = rank
        borders = kernel.startswith(attention.VARIABLE_LENGTH)
        tensors = partial(collate, pad_token_id=pad_token_id, device=self.device, context=context)
        self._collate = partial(tensors, with_borders=borders, sight=Sight(lora.without_adapters(model)))
        self._policy_loss: losses.PolicyLossFunction = look_up("loss", config.loss, losses.POLICY_LOSSES)
        self._corrector = Corrector(config.correction, config.band) if config.weighs_tokens else None
        make_optimizer = partial(Optimizer, total_steps=total_steps, mesh=mesh)
        self._optimizer = make_optimizer(model, config)
        self._optimizers = {"optimizer": self._optimizer}
        if self.critic is not None:
            own = config.model_copy(update={"lr": config.critic_lr})
            self._optimizers["critic_optimizer"] = make_optimizer(self.critic, own)
        self._parts = checkpoint.TrainerParts(
            model=model, critic=self.critic, optimizers=self._optimizers, starting_weights=fixed
        )
        self._writing: Callable[[], None] | None = None
        self._away = Offload()
        self._set_modes()
        if self._yields_memory:
            # The trial leaves the autocast copies of all matrices there, and the engine may start next.
            empty_cache()

    def _settle_attention(self, policy: Any, has_content: bool, context: Context | None) -> Any:
        """The kernel of attention with which all models compute from now on, tried if that can be."""
        # A plan has settled it.
        kernel: Any = self.config.attention
        # On several ranks passes are as exact as with it.
        with _autocast(self.device, self._precision):
            if has_content:
                kernel = settle_attention(self.model, self.config, self.device, self._precision, context)
            for part in (policy, self.ref_model, self.critic and self.critic.body):
                if part is not None:
                    attention.use_attention(part, kernel)
            # A teacher may be of another type than the policy.
            if has_content and self.ref_model is not None:
                check_layout(self.ref_model, self.config.layout, self.device, context)
        return kernel

    def _set_modes(self) -> None:
        """Dropout off; activation checkpointing on if configured. Others may have called ``train()``."""
        trained = [self.model] if self.critic is None else [self.model, self.critic.body]
        for module in trained:
            module.eval()
            if self.config.gradient_checkpointing:
                share = float(self.config.gradient_checkpointing)
                checkpoint_activations(module, share, offload=self.config.offload_activations)

    # Without gradient

    def token_values(self, name: str, batch: TrainBatch) -> FloatArray:
        """``old_logprobs``, ``ref_logprobs`` or ``values`` by response token (R).

        It is 0 where the mask is 0, and on the sequences of other ranks. A divergence over K tokens makes it
        R x (1 + 2 K): the token's own, then `TrainBatch.ref_top`.

        Raises:
            ValueError: there is no reference model, or no critic.
        """
        model = {"ref_logprobs": self.ref_model, "values": self.critic}.get(name, self.model)
        adapters: AbstractContextManager[None] = nullcontext()
        if model is None and name == "values":
            raise ValueError("there is no critic; set critic_lr (and advantage = 'gae')")
        if model is None:
            if not lora.is_lora(self.model):
                raise ValueError("there is no reference model: kl_coef is 0; set it, or give a ref_model")
            policy: Any = self.model
            # While that is open it computes what it did before it had adapters.
            model, adapters = policy, policy.disable_adapter()
        # The reference's own experts, also where it is the policy without its adapters.
        self._routing.replay(None)
        chosen = self._routing if name == "old_logprobs" else None
        top = None
        if name == "ref_logprobs" and self.config.kl_tokens:
            # A vocabulary may be filled up to a round number, another one for each size of a family.
            plain: list[Any] = [lora.without_adapters(self.model), lora.without_adapters(model)]
            known = min(int(each.config.get_text_config().vocab_size) for each in plain)
            top = min(self.config.kl_tokens, known), known
        tokens, parts = [], []
        with torch.no_grad(), self._autocast(), adapters:
            for pack in [pack for ranks in batch.packs for pack in ranks[self._rank]]:
                micro = self._collate(batch, pack)
                if name == "values":
                    values_N = model(micro)
                else:
                    output = response_logprobs(model, micro, routing=chosen, top=top)
                    values_N = output.logprobs
                    if output.others is not None:
                        values_N = torch.cat([values_N[:, None], output.others], dim=1)
                tokens.append(micro.token_index)
                parts.append(values_N)
        # Once, after the passes: a copy from a device waits for it.
        found_N = torch.cat(parts).cpu().numpy()
        results_R = np.zeros((batch.num_response_tokens, *found_N.shape[1:]), np.float32)
        results_R[np.concatenate(tokens)] = found_N
        return results_R

    def _autocast(self) -> AbstractContextManager[Any]:
        return _autocast(self.device, self._precision if self._casts else "float32")

    # With gradient

    def update(self, batch: TrainBatch, train_step: int) -> "Update":
        """One train step: an optimizer step for each mini-batch of each epoch.

        The batch has its ``token_weights``. `train_step` counts the completed steps. A mini-batch without any
        token in the loss takes no step.

        Raises:
            FloatingPointError: a gradient is not finite; earlier optimizer steps of this call stand.
        """
        assert batch.token_weights is not None
        self._set_modes()
        records, norms, critic_norms = TokenRecords(), [], []
        lr = self._optimizer.learning_rate(train_step)
        trained_S = np.zeros(batch.num_sequences, bool)
        trained_S[batch.response_rows[batch.token_weights != 0]] = True
        for _ in range(self.config.epochs):
            for sequences, ranks in zip(batch.mini_batches, batch.packs, strict=True):
                # An interrupted step, or one that was not taken, may have left gradients behind.
                for optimizer in self._optimizers.values():
                    optimizer.zero_grad()
                for pack in ranks[self._rank]:
                    self._backward(batch, pack, records)
                # Of all sequences, also those without a pass, or with one on another rank.
                if not trained_S[sequences].any():
                    continue
                norms.append(self._optimizer.step(train_step))
                if self.critic is not None:
                    critic_norms.append(self._optimizers["critic_optimizer"].step(train_step))
        columns = records.columns()
        columns["weight"] = batch.token_weights[columns["token_index"]]
        if self._yields_memory:
            empty_cache()
        return Update(columns, norms, critic_norms, lr)

    def rehearse(self, batch: TrainBatch, packs: Iterable[Pack], passed: Callable[[], None] = lambda: None) -> None:
        """The work of an optimizer step over these micro-batches, without reading any number.

        For plans (`forebay.plan`): gradients are clipped, the learning rate is 0. `passed` is called before that.
        """
        self._set_modes()
        for pack in packs:
            self._backward(batch, pack, TokenRecords())
        passed()
        for optimizer in self._optimizers.values():
            optimizer.clip()
            optimizer.apply(lr=0.0)

    def moments(self) -> Iterator[torch.Tensor]:
        """The state of the optimizers, as it lies in memory."""
        return (tensor for _, tensor, _ in self._places(weights=False))

    def offload(self, weights: bool) -> None:
        """Move the moments, and the models' weights if asked, to the host's memory, until `onload`."""
        self._away.offload(self._places(weights=weights))

    def onload(self) -> None:
        """Move back to the device what `offload` moved."""
        self._away.onload()

    def _places(self, *, weights: bool) -> Iterator[Place]:
        for kind, optimizer in self._optimizers.items():
            for name, tensor, put in optimizer.places():
                yield f"{kind}|{name}", tensor, put
        for kind, model in (("policy", self.model), ("critic", self.critic), ("reference", self.ref_model)):
            for name, weight in model.named_parameters() if weights and model is not None else ():
                yield f"{kind}|{name}", weight.data, partial(setattr, weight, "data")

    def _backward(self, batch: TrainBatch, pack: Pack, records: TokenRecords) -> None:
        """Add the gradients of one micro-batch."""
        assert batch.token_weights is not None
        micro = self._collate(batch, pack)
        weight_N = micro.gather(batch.token_weights)
        records.token_index.append(micro.token_index)
        # Weights of the whole mini-batch: the sums of its micro-batches, on all ranks, add up to its loss.
        loss = (weight_N * self._policy_losses(batch, micro, records)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.critic is not None:
            assert batch.values is not None
            assert batch.returns is not None
            with self._autocast():
                values_N = self.critic(micro)
            old_N, returns_N = micro.gather(batch.values), micro.gather(batch.returns)
            loss_N, clipped_N = losses.value_loss(values_N, old_N, returns_N, self.config.clip_high)
            records.add(value_loss=loss_N, value_clip=clipped_N)
            loss = (weight_N * loss_N).sum()
            loss.backward()  # type: ignore[no-untyped-call]

    def _policy_losses(self, batch: TrainBatch, micro: MicroBatch, records: TokenRecords) -> torch.Tensor:
        """N: each token's loss with its correction and penalties."""
        config = self.config
        with self._autocast():
            entropy: Entropy = "train" if config.uses_entropy else "measure"
            others_NK = None
            if batch.ref_top is not None:
                others_NK = micro.gather(batch.ref_top).chunk(2, dim=1)[1].long()
            output = response_logprobs(self.model, micro, entropy=entropy, routing=self._routing, others=others_NK)
        assert output.entropy is not None
        assert batch.advantages is not None
        # The ratio's denominator. Without old logprobs there is one optimizer step, taken by the old policy.
        old_N = output.logprobs.detach()
        if batch.old_logprobs is not None:
            old_N = micro.gather(batch.old_logprobs)
        advantages_N = micro.gather(batch.advantages)
        kl_coef, entropy_coef = batch.penalties or config.penalties
        kl_N = self._divergence(batch, micro, output, old_N)
        if kl_N is not None and config.kl_estimator == "advantage":
            # Of the tokens as they were sampled: weights, masks and clips of the policy's loss hold for it.
            advantages_N = advantages_N - kl_coef * kl_N
        policy = self._policy_loss(
            losses.PolicyInputs(output.logprobs, old_N, advantages_N, micro.sequence_index, micro.num_sequences),
            config,
        )
        # The correction weighs the policy's loss alone: the penalties are not of the engine's distribution.
        policy_N = policy.loss
        if batch.importance is not None:
            policy_N = policy_N * micro.gather(batch.importance)
        elif self._corrector is not None:
            # One optimizer step: these logprobs are the proximal ones, and no mask needs them any sooner.
            behavior_N = micro.gather(batch.rollout_logprobs)
            applied = self._corrector.weigh(old_N, behavior_N, micro.sequence_index, micro.num_sequences)
            policy_N = policy_N * applied.weights.to(old_N.dtype)
        loss_N = policy_N
        if kl_N is not None and config.kl_estimator != "advantage":
            loss_N = loss_N + kl_coef * kl_N
        if config.uses_entropy:
            loss_N = loss_N - entropy_coef * output.entropy
        records.add(
            loss=loss_N,
            policy_loss=policy_N,
            kl=kl_N,
            entropy=output.entropy,
            logprob=output.logprobs,
            old_logprob=old_N,
            clip_low=policy.clipped_low,
            clip_high=policy.clipped_high,
        )
        return loss_N

    def _divergence(
        self, batch: TrainBatch, micro: MicroBatch, output: TokenOutputs, old_N: torch.Tensor
    ) -> torch.Tensor | None:
        """N: from the reference, as the config estimates it; None where the loss reads none."""
        if batch.ref_logprobs is None or self.config.kl_in_reward:
            return None
        if output.others is not None:
            assert batch.ref_top is not None
            ref_NK = micro.gather(batch.ref_top)[:, : output.others.shape[1]]
            return losses.top_divergence(output.others, ref_NK)
        ref_N = micro.gather(batch.ref_logprobs)
        if self.config.kl_estimator == "advantage":
            return losses.kl_penalty(old_N, ref_N, "k1")
        return losses.kl_penalty(output.logprobs, ref_N, self.config.kl_estimator)

    # Weights and files

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights by the names that they have without adapters, one at a time.

        Adapters are `merged`, or left out: below them are the weights that training began with.
        """
        return lora.model_weights(self.model, merged=merged, parts=self._named_parts)

    def sizes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of the names, dtypes and shapes of `weights`, without content."""
        return ((name, parameter.detach().to("meta")) for name, parameter, _ in self._named_parts)

    @cached_property
    def _named_parts(self) -> list[lora.Part]:
        return list(lora.named_parts(self.model))

    def copy_weights(self, layout: Layout, memory: Any, *, merged: bool = True, are_whole: bool = False) -> None:
        """Put this rank's blocks of the weights that are laid out into `memory`, as `Source` has it.

        With `are_whole` all of each, which ranks gather together; memory of the meta device takes nothing.
        """
        places = dict(views(layout, memory.data))
        for name, place, block in lora.own_blocks(self._named_parts, merged=merged, only=places, are_whole=are_whole):
            places[name][place].copy_(block)

    def adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapters' weights, by their names in peft's files; none without LoRA."""
        return ((name, parameter.detach()) for name, parameter in lora.adapter_weights(self.model))

    def begin_save(self, folder: Path | str, train_step: int) -> None:
        """Copy the trainer's state, and write it into the empty `folder` beside whatever comes next."""
        self._writing = checkpoint.begin_save(Path(folder), self._parts, train_step=train_step, mesh=self._mesh)

    def finish_save(self) -> None:
        """Wait until what `begin_save` copied is written.

        Raises:
            OSError: the disk takes no more.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing()

    def resume(self, folder: Path) -> int:
        """Take over what `save` wrote; the number of completed train steps.

        Raises:
            ValueError: no checkpoint there, or one of another format, kind of training, or starting weights.
        """
        self.begin_resume(folder)
        return self.finish_resume()

    def begin_resume(self, folder: Path | str) -> None:
        """Read it; a rank waits for no other."""
        self._resuming = checkpoint.load_trainer(Path(folder), self._parts)

    def finish_resume(self) -> int:
        """Use what was read; ranks wait for each other."""
        use = vars(self).pop("_resuming")
        return int(use())


def _place(model: nn.Module, device: torch.device, mesh: DeviceMesh | None) -> None:
    """Move a model, in place; slices are where they belong, perhaps in the CPU's memory."""
    if mesh is None:
        model.to(device)
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_sharded(tensor):
            tensor.data = tensor.data.to(device)


def _autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    return nullcontext() if precision == "float32" else torch.autocast(device.type, torch.bfloat16)


class Update(NamedTuple):
    """The record of one train step."""

    columns: Columns
    """Arrays by trained token in the order of the passes, epoch by epoch; ``token_index`` says which."""
    norms: list[float]
    """The policy's gradient norm at each optimizer step taken, before clipping."""
    critic_norms: list[float]
    lr: float
    """The policy's learning rate in this step."""
