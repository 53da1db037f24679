"""How a model is trained, as the ``[train]`` and ``[warmup]`` tables of a run file; needs no torch.

Names that choose code (`advantage`, `loss`, `correction`) come from a literal table, or are
``package.module:function``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forebay.config import ConfigError, StrictModel, look_up
from forebay.models.config import AttentionKey, PrecisionKey
from forebay.train.batch import Layout
from forebay.train.objective.corrections import CORRECTIONS, DEFAULT_BANDS, Band
from forebay.train.objective.guard import DEFAULT_BANDS as GUARD_BANDS
from forebay.train.objective.guard import GuardAction, check_bands
from forebay.train.parallel.config import ParallelConfig

ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline", "gae")
LOSS_NAMES = ("clipped", "gspo", "cispo")
"""The keys of `ADVANTAGES` and `POLICY_LOSSES` (`forebay.train.objective`), so that run files are checked
without them: both modules read this one, and losses load torch."""

BETAS, EPSILON = (0.9, 0.999), 1e-8
"""AdamW's published defaults."""
Moments = Literal["float32", "cpu", "8bit"]

NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class WarmupConfig(StrictModel):
    """Supervised training before reinforcement learning, for a model that does not know the format yet.

    >>> WarmupConfig(steps=100).batch_size
    64
    """

    steps: int = Field(ge=1)
    """Optimizer steps."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate; it falls linearly to 0 over `steps`."""
    batch_size: int = Field(default=64, ge=1)
    """Examples per step."""


class TrainConfig(StrictModel):
    """Everything about the loss, the optimizer and the precision.

    Invariants: every combination that validates can be trained; a field that its companions would ignore is
    an error.

    >>> TrainConfig(lr=1e-4, loss="gspo", clip=(3e-4, 4e-4)).clip_high
    0.0004
    """

    # Optimizer
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up; ``linear`` and ``cosine`` reach 0 after the last train step."""
    schedule_warmup_steps: int = Field(default=0, ge=0)
    """Train steps over which the rate rises linearly."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of matrices; norms and biases never decay."""
    betas: tuple[Share, Share] = BETAS
    """How much AdamW keeps of its two moments, the mean gradient and the mean square, at each step."""
    epsilon: float = Field(default=EPSILON, gt=0)
    """AdamW divides by the root of the second moment and this."""
    moments: Moments = "float32"
    """``cpu``: in the host's memory, on the device for their step only; the same numbers, slower. ``8bit``: a
    quarter of the bytes, on one rank, by bitsandbytes. A resumed run may change between the other two."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients with a larger L2 norm are scaled down to it; 0: never."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps that one pass over a batch is split into."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    # Memory and speed
    token_budget: int = Field(default=16384, ge=1)
    """Most tokens, padding included, of one micro-batch; 1024-2048 suits a tiny model on a CPU's caches."""
    layout: Layout = "padded"
    """``padded``: rows of like length. ``packed``: one long row, for a GPU, whose kernels need no mask.
    ``shared_prompt``: a prompt's keys and values are computed once for all its responses; needs full
    attention in every layer."""
    dtype: PrecisionKey = "auto"
    """Of the forward passes (autocast): ``float32``, ``bfloat16``, or ``auto``, which is bfloat16 on a CUDA
    device. The trained weights and their moments are float32 always, or steps of
    a small learning rate would be lost in rounding."""
    attention: AttentionKey = "auto"
    """The kernel of attention, in transformers' names or ``varlen``, which is torch's own for packed rows.
    ``auto``: for packed rows on a CUDA device the first of flash_attention_3, flash_attention_2, varlen and
    flex_attention that is installed and right for the model; else ``sdpa``."""
    ranks: int = Field(default=1, ge=1)
    """Processes that hold a slice of the weights each and share out the micro-batches."""
    parallel: ParallelConfig = ParallelConfig()
    gradient_checkpointing: bool | Annotated[float, Field(ge=0, le=1)] = False
    """Recompute activations in the backward pass: less memory, about a third more time. A number, 0.5 for
    example: for this share of the layers."""
    offload_activations: bool = False
    """What layers with gradient_checkpointing keep waits in the host's memory."""
    compile: bool = False
    """The layers become one program by torch.compile: faster steps after some minutes of compiling."""
    # Advantage and loss
    advantage: str = "grpo"
    """``grpo``, ``dr_grpo``, ``rloo``, ``opo``, ``reinforce_pp_baseline``, ``gae``, ``pass_at_8`` (or any
    other number), or ``package.module:function``."""
    loss: str = "clipped"
    """``clipped``, ``gspo``, ``cispo``, or ``package.module:function``."""
    clip: NonNegative | tuple[NonNegative, NonNegative] = 0.2
    """The probability ratio counts from ``1 - clip`` to ``1 + clip``; a pair is (low, high). The high one is
    also the critic's clip range. With loss ``gspo`` [3e-4, 4e-4], with ``cispo`` [1.0, 4.0]."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the ratio of tokens with a negative advantage (``clipped`` only); None: no bound."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the reference model; 0 needs no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How samples estimate the divergence (Schulman, 2020); ``k3`` is unbiased and never negative."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    normalization: Literal["token-mean", "sequence-mean"] | Annotated[int, Field(ge=1)] = "token-mean"
    """A number is the fixed-length normalization: each sequence's token losses are summed and divided by it.
    With loss ``gspo`` ``sequence-mean``, with advantage ``dr_grpo`` the tasks' largest ``max_tokens``."""
    # Off-policy data (forebay.train.objective.corrections, forebay.train.objective.guard)
    correction: str = "none"
    """How the loss accounts for tokens that other weights, or an engine that computes otherwise, sampled:
    ``none``; ``ratio`` takes the clipped ratio against the engine's logprobs; ``token_tis``,
    ``sequence_tis``, ``geometric_tis``, ``token_mask``, ``sequence_mask``, ``geometric_mask`` or
    ``package.module:function`` weigh the loss by trainer over engine (decoupled PPO)."""
    correction_band: Band | None = None
    """(low, high): importance weights outside are truncated to it, or masked; None: the correction's own."""
    guard: GuardAction = "warn"
    """The reaction when the measures leave `guard_bands`: ``off``, ``warn``, ``lower_lag`` or ``stop``."""
    guard_bands: dict[str, float] = GUARD_BANDS
    """The least ``ess_token`` and ``ess_sequence`` and the most ``mismatch_kl`` and ``clip_share`` allowed;
    what is left out is not watched."""
    # Critic (for advantage "gae")
    critic_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the critic, which exists if this is given."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """The lambda of generalized advantage estimation; rewards are not discounted."""
    # LoRA
    lora_rank: int = Field(default=0, ge=0)
    """0 trains all weights."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """The adapter's output is scaled by ``lora_alpha / lora_rank``; None: twice the rank."""
    lora_targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers to adapt, ``all-linear`` for all but the output head."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per train step."""
        return self.mini_batches * self.epochs

    @property
    def uses_critic(self) -> bool:
        """Whether values are computed and a critic is trained."""
        return self.critic_lr is not None

    @property
    def pass_k(self) -> int | None:
        """The k of advantage ``pass_at_K``."""
        return pass_at(self.advantage)

    @property
    def clip_low(self) -> float:
        """The ratio counts down to ``1 - clip_low``."""
        return self.clip[0] if isinstance(self.clip, tuple) else self.clip

    @property
    def clip_high(self) -> float:
        """The ratio counts up to ``1 + clip_high``."""
        return self.clip[1] if isinstance(self.clip, tuple) else self.clip

    @property
    def weighs_tokens(self) -> bool:
        """Whether the correction is an importance weight."""
        return self.correction not in ("none", "ratio")

    @property
    def band(self) -> Band:
        """The band of the importance weights; a function of the user's gets everything if none is set."""
        return self.correction_band or DEFAULT_BANDS.get(self.correction, (0.0, math.inf))

    @property
    def may_mask(self) -> bool:
        """Whether the correction may take tokens out of the loss, by the old logprobs of all of them."""
        return self.weighs_tokens and (":" in self.correction or self.correction.endswith("_mask"))

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the old logprobs must be computed before `train`.

        With a single optimizer step per batch the old policy is the trained one: the ratio is exactly 1, and
        the logprobs of the training forward pass, without gradient, are the old ones. Truncated weights can
        be taken from that pass too; masks cannot, because how many tokens are left sets the normalization.
        """
        return self.may_mask or self.correction == "ratio" or self.optimizer_steps > 1

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """The papers' settings for the names in the table, where it does not say otherwise."""
        if not isinstance(given, Mapping):
            return given
        names = (str(given.get(key)) for key in ("advantage", "loss"))
        return {key: value for name in names for key, value in PAPERS.get(name, {}).items()} | dict(given)

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.pass_k is None:
            look_up("advantage", self.advantage, dict.fromkeys((*ADVANTAGE_NAMES, "pass_at_8")))
        look_up("loss", self.loss, dict.fromkeys(LOSS_NAMES))
        look_up("correction", self.correction, CORRECTIONS)
        check_bands(self.guard_bands)
        for problem in self._problems():
            raise ConfigError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        gae = self.advantage == "gae"
        if gae and not self.uses_critic:
            yield "advantage 'gae' needs a critic: set critic_lr"
        if self.uses_critic and not gae and ":" not in self.advantage:
            yield (
                f"critic_lr = {self.critic_lr} trains a critic that advantage {self.advantage!r} ignores; "
                f"use advantage 'gae' or leave critic_lr out"
            )
        if self.clip_low > 1:
            yield f"clip = {self.clip} lets the ratio fall under 0; the low clip is at most 1"
        if self.dual_clip is not None and self.loss != "clipped":
            yield f"dual_clip = {self.dual_clip} is only read by loss 'clipped', not by {self.loss!r}"
        if self.correction_band is not None and not self.weighs_tokens:
            yield (
                f"correction_band = {self.correction_band} is not read by correction {self.correction!r}, "
                f"which has no importance weights; use 'token_tis', for example, or leave the band out"
            )
        if not self.band[0] <= 1 <= self.band[1] or self.band[0] < 0:
            yield (
                f"correction_band = {self.correction_band} must be (low, high) with 0 <= low <= 1 <= high, "
                f"because an on-policy token has weight 1 and must keep it"
            )
        if self.moments != "float32" and self.ranks > 1:
            yield f"moments = {self.moments!r} goes with one rank, and ranks = {self.ranks} share moments out"
        if self.offload_activations and not self.gradient_checkpointing:
            yield "offload_activations moves what gradient_checkpointing keeps; set that too"
        if self.compile and (self.layout == "shared_prompt" or self.offload_activations or self.ranks > 1):
            yield "compile goes with neither layout 'shared_prompt' nor offload_activations nor several ranks"
        if self.layout == "shared_prompt" and self.gradient_checkpointing:
            yield "layout 'shared_prompt' keeps keys and values that gradient_checkpointing drops; choose one"
        if self.ranks == 1 and self.parallel != ParallelConfig():
            yield f"parallel = {self.parallel.model_dump()} has no effect on one rank; set ranks"
        if self.ranks > 1:
            self.parallel.check(self.ranks)
        if self.lora_rank and max(self.parallel.tensor, self.parallel.replicas) > 1:
            yield (
                f"parallel = {self.parallel.model_dump()} does not go with lora_rank: adapters are made for "
                f"weights that are split in one way; set tensor = 1 and replicas = 1"
            )
        if self.lora_alpha is not None and self.lora_rank == 0:
            yield f"lora_alpha = {self.lora_alpha} has no effect without lora_rank"

    def differences_from_papers(self) -> Iterator[str]:
        """Sentences on settings that the papers of the chosen names have otherwise."""
        clip, norm, steps = f"clip = {self.clip}", self.normalization, self.optimizer_steps
        advantage, chosen = self.advantage, f"train: advantage {self.advantage!r} with"
        if self.loss == "gspo":
            if max(self.clip_low, self.clip_high) > WIDEST_SEQUENCE_CLIP:
                yield (
                    f"train: loss 'gspo' with {clip}: its ratio is of a whole sequence and moves little; the "
                    f"paper clips it at 3e-4 and 4e-4"
                )
            if norm != "sequence-mean":
                yield f"train: loss 'gspo' with normalization = {norm!r}: the paper's is 'sequence-mean'"
            if self.uses_critic:
                yield (
                    f"train: loss 'gspo' with a critic: {clip} is the range of the critic's values, too, and "
                    f"the paper has no critic"
                )
        if self.loss == "cispo" and self.clip_low < 1:
            yield f"train: loss 'cispo' with {clip}: the paper has no lower bound, so clip = [1.0, HIGH]"
        if advantage == "dr_grpo" and self.loss != "gspo" and not isinstance(norm, int):
            yield (
                f"{chosen} normalization = {norm!r}: the paper divides by a constant; set "
                f"normalization to the generation budget in tokens"
            )
        if advantage in ("opo", "rloo") and steps > 1:
            yield (
                f"{chosen} {steps} optimizer steps per batch: its paper is on-policy; set "
                f"mini_batches = 1 and epochs = 1"
            )
        if advantage == "opo" and (self.kl_coef or self.entropy_coef):
            yield f"{chosen} kl_coef or entropy_coef: the paper does without both"
        if advantage == "reinforce_pp_baseline" and self.kl_coef > 0 and self.kl_estimator != "k2":
            yield f"{chosen} kl_estimator = {self.kl_estimator!r}: the paper's is 'k2'"


def pass_at(name: str) -> int | None:
    """The k of the advantage ``pass_at_K`` (``pass_at_8``: 8); None for other names.

    >>> pass_at("pass_at_8"), pass_at("grpo")
    (8, None)
    """
    match = re.fullmatch(r"pass_at_([1-9][0-9]*)", name)
    return int(match[1]) if match else None


PAPERS: Mapping[str, Mapping[str, Any]] = {
    # Zheng et al. 2025, "Group Sequence Policy Optimization", section 5.1 and equation 5.
    "gspo": {"clip": (3e-4, 4e-4), "normalization": "sequence-mean"},
    # Chen et al. 2025, "MiniMax-M1", bounds the weight from above only and does not say where. A weight of at
    # most 5 is among those that Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute for
    # LLMs", found to make little difference.
    "cispo": {"clip": (1.0, 4.0)},
    # Hu et al. 2025, "REINFORCE++", takes the divergence into the loss as k2.
    "reinforce_pp_baseline": {"kl_estimator": "k2"},
}
"""By loss or advantage. Dr. GRPO's constant is the generation budget, which only a whole run file knows."""

WIDEST_SEQUENCE_CLIP = 0.01
"""Beyond it a clip range is meant for ratios of tokens: means over a sequence move a hundred times less."""


def check_staleness_rule(rule: str, config: TrainConfig) -> None:
    """Check that the trainer does its part of a staleness rule.

    Only ``correct`` asks something of the config: stale tokens stay in the batch, so the loss has to account
    for them. For ``mask``, give the thresholds to `TrainController.fit`.

    Raises:
        ConfigError: `rule` is ``correct`` and the loss has no correction.
    """
    if rule == "correct" and config.correction == "none":
        raise ConfigError(
            "the staleness rule 'correct' keeps stale tokens, but train.correction = 'none' trains them as "
            "if they were fresh; set train.correction to 'token_tis', for example, or choose another rule"
        )
