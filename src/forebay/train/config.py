"""How a model is trained, as the ``[train]`` and ``[warmup]`` tables of a run file; needs no torch.

Names that choose code (`advantage`, `loss`) come from a literal table, or are ``package.module:function``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from forebay.config import ConfigError, StrictModel, look_up
from forebay.train.advantages import ADVANTAGES
from forebay.train.batch import Layout

LOSS_NAMES = ("clipped", "gspo", "cispo")
"""The keys of `forebay.train.losses.POLICY_LOSSES`, here so that a run file is checked without torch."""


class WarmupConfig(StrictModel):
    """Supervised training before reinforcement learning, for a model that does not know the format yet.

    >>> WarmupConfig(steps=100).batch_size
    64
    """

    steps: int = Field(ge=1)
    """Optimiser steps."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate; it falls linearly to 0 over `steps`."""
    batch_size: int = Field(default=64, ge=1)
    """Examples per step."""


class TrainConfig(StrictModel):
    """Everything about the loss, the optimiser and the precision.

    Invariants: every combination that validates can be trained; a field that its companions would ignore is
    an error.

    >>> TrainConfig(lr=1e-4, loss="gspo", clip_low=3e-4, clip_high=4e-4).normalisation
    'token-mean'
    """

    # Optimiser
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up; ``linear`` and ``cosine`` reach 0 after the last train step."""
    schedule_warmup_steps: int = Field(default=0, ge=0)
    """Train steps over which the rate rises linearly."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of matrices; norms and biases never decay."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients with a larger L2 norm are scaled down to it; 0: never."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimiser steps that one pass over a batch is split into."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    # Memory and speed
    token_budget: int = Field(default=16384, ge=1)
    """Most tokens, padding included, of one micro-batch; 1024-2048 suits a tiny model on a CPU's caches."""
    layout: Layout = "padded"
    """``padded``: rows of like length. ``packed``: one long row, for flash attention on a GPU.
    ``shared_prompt``: a prompt's keys and values are computed once for all its responses; needs full
    attention in every layer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward pass (autocast); the weights keep their own."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    # Advantage and loss
    advantage: str = "grpo"
    """``grpo``, ``dr_grpo``, ``rloo``, ``opo``, ``reinforce_pp_baseline``, ``pass_at_k``, ``gae``, or
    ``package.module:function``."""
    pass_k: int | None = Field(default=None, ge=1)
    """The k of ``pass_at_k``."""
    loss: str = "clipped"
    """``clipped``, ``gspo``, ``cispo``, or ``package.module:function``."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The probability ratio counts down to ``1 - clip_low``."""
    clip_high: float = Field(default=0.2, ge=0)
    """The probability ratio counts up to ``1 + clip_high``; also the critic's clip range."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the ratio of tokens with a negative advantage (``clipped`` only); None: no bound."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the reference model; 0 needs no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    normalisation: Literal["token-mean", "sequence-mean"] | Annotated[int, Field(ge=1)] = "token-mean"
    """A number is the fixed-length normalisation: each sequence's token losses are summed and divided by it
    (Dr. GRPO: the generation budget in tokens)."""
    old_policy: Literal["trainer", "rollout"] = "trainer"
    """What the ratio is taken against: the trainer's weights at the start of the step, or the logprobs that
    the engine sampled with (needed for a real off-policy correction of stale rollouts)."""
    # Critic (for advantage "gae")
    critic_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the critic, which exists if this is given."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """The lambda of generalised advantage estimation; rewards are not discounted."""
    # LoRA
    lora_rank: int = Field(default=0, ge=0)
    """0 trains all weights."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """The adapter's output is scaled by ``lora_alpha / lora_rank``; None: twice the rank."""
    lora_targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers to adapt, ``all-linear`` for all but the output head."""

    @property
    def optimiser_steps(self) -> int:
        """Optimiser steps per train step."""
        return self.mini_batches * self.epochs

    @property
    def uses_critic(self) -> bool:
        """Whether values are computed and a critic is trained."""
        return self.critic_lr is not None

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the old logprobs must be computed before `train`.

        With a single optimiser step per batch the old policy is the trained one: the ratio is exactly 1, and
        the logprobs of the training forward pass, without gradient, are the old ones.
        """
        return self.old_policy == "rollout" or self.optimiser_steps > 1

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        look_up("advantage", self.advantage, ADVANTAGES)
        look_up("loss", self.loss, dict.fromkeys(LOSS_NAMES))
        for wrong, message in self._rules():
            if wrong:
                raise ConfigError(message)
        return self

    def _rules(self) -> list[tuple[bool, str]]:
        gae, pass_at_k = self.advantage == "gae", self.advantage == "pass_at_k"
        return [
            (gae and not self.uses_critic, "advantage 'gae' needs a critic: set critic_lr"),
            (
                self.uses_critic and not gae and ":" not in self.advantage,
                f"critic_lr = {self.critic_lr} trains a critic that advantage {self.advantage!r} ignores; "
                f"use advantage 'gae' or leave critic_lr out",
            ),
            (pass_at_k and self.pass_k is None, "advantage 'pass_at_k' needs pass_k, the k to optimise"),
            (
                self.pass_k is not None and not pass_at_k,
                f"pass_k = {self.pass_k} is only read by advantage 'pass_at_k', not by {self.advantage!r}",
            ),
            (
                self.dual_clip is not None and self.loss != "clipped",
                f"dual_clip = {self.dual_clip} is only read by loss 'clipped', not by {self.loss!r}",
            ),
            (
                self.layout == "shared_prompt" and self.gradient_checkpointing,
                "layout 'shared_prompt' keeps keys and values, gradient_checkpointing drops them; choose one",
            ),
            (
                self.lora_alpha is not None and self.lora_rank == 0,
                f"lora_alpha = {self.lora_alpha} has no effect without lora_rank",
            ),
        ]
