"""How a model is trained, as the ``[train]`` and ``[warmup]`` tables of a run file; needs no torch.

Names that choose code (`advantage`, `loss`, `correction`) come from a literal table, or are
``package.module:function``.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, FiniteFloat, model_validator

from forebay.config import ConfigError, Located, StrictModel, look_up
from forebay.models.config import AttentionKey, PrecisionKey
from forebay.train.batch import Layout
from forebay.train.objective.corrections import CORRECTIONS, DEFAULT_BANDS, Band
from forebay.train.objective.guard import DEFAULT_BANDS as GUARD_BANDS
from forebay.train.objective.guard import Bands, GuardAction
from forebay.train.parallel.config import ParallelConfig
from forebay.train.presets import with_papers

ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_pp", "reinforce_pp_baseline", "gae", "none")
LOSS_NAMES = ("clipped", "gspo", "cispo")
"""The keys of `ADVANTAGES` and `POLICY_LOSSES` (`forebay.train.objective`), so that run files are checked
without them: both modules read this one, and losses load torch."""

Moments = Literal["float32", "cpu", "8bit"]

NonNegative = Annotated[float, Field(ge=0)]
DualClip = Annotated[float, Field(gt=1)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0, le=1)]
Schedule = Literal["constant", "linear", "cosine"]


class TrainConfig(StrictModel):
    """Everything about the loss, the optimizer and the precision.

    Invariants: every combination that validates can be trained; a field that its companions would ignore is
    an error.

    >>> TrainConfig(lr=1e-4, loss="gspo", clip=(3e-4, 4e-4)).clip_high
    0.0004
    """

    # Optimizer
    lr: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Peak learning rate of AdamW."""
    schedule: Schedule | tuple[Schedule, Annotated[int, Field(ge=0)]] = "constant"
    """How the rate falls: ``constant``, or ``linear`` or ``cosine`` to 0 after the last train step; a pair
    such as ["cosine", 20] has the number of train steps over which it rises before."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Of matrices; norms and biases never decay."""
    # The published ones.
    adam: tuple[Share, Share, Positive] = (0.9, 0.999, 1e-8)
    """AdamW's betas, how much it keeps of the mean gradient and of the mean square, and its epsilon."""
    moments: Moments = "float32"
    """``cpu``: in the host's memory, on the device for their step only; the same numbers, slower. ``8bit``: a
    quarter of the bytes, on one rank, by bitsandbytes. A resumed run may change between the other two."""
    frozen: tuple[str, ...] = ()
    """Names of weights, or of modules with all their weights, that stay as they are (``model.vision_tower``,
    ``*.layers.[0-7].*``): no gradient, no moments, no adapters. Not of the critic, which trains all."""
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
    """Layers with gradient_checkpointing keep their inputs in the host's memory."""
    compile: bool = False
    """The layers become one program by torch.compile: faster steps; the first compiles for some ten seconds."""
    # Advantage and loss
    preset: Literal["dapo", "dr_grpo", "gspo", "cispo", "reinforce_pp", "rloo", "ppo"] | None = None
    """A method with all settings of its paper; keys that are given win over it."""
    advantage: str = "grpo"
    """``grpo``, ``dr_grpo``, ``rloo``, ``opo``, ``reinforce_pp``, ``reinforce_pp_baseline``, ``gae``,
    ``pass_at_8`` (or any other number), ``package.module:function``; ``none``: scores are only measured, and
    the divergence from a `teacher` is all that is trained on."""
    credit: Literal["rollout", "turn", "token"] = "rollout"
    """A score counts for all tokens of its ``rollout``; or rewards are summed, discounted, from the end to
    each ``turn`` or ``token``, and these are compared. ``gae`` goes by token, or by ``turn``."""
    discount: tuple[Weight, Weight] = (1.0, 0.95)
    """Gamma, of a reward one turn or token later, and the lambda of generalized advantage estimation."""
    overlong: Literal["train", "filter"] | Share = "train"
    """For rollouts cut at ``max_tokens``: ``train`` them, ``filter`` them out of the loss; or a share of
    ``max_tokens``, over the last of which the score falls by up to 1."""
    loss: str = "clipped"
    """``clipped``, ``gspo``, ``cispo``, or ``package.module:function``."""
    clip: NonNegative | tuple[NonNegative, NonNegative] | tuple[NonNegative, NonNegative, DualClip] = 0.2
    """The probability ratio counts from ``1 - clip`` to ``1 + clip``; a pair is (low, high), and a third
    number bounds the ratio where the advantage is negative (``clipped`` only). The high one is also the
    critic's clip range. With loss ``gspo`` [3e-4, 4e-4], with ``cispo`` [1.0, 4.0]."""
    kl_coef: NonNegative | tuple[Positive, Positive] = 0.0
    """Weight of the divergence from the reference model; 0 needs no reference model. A pair is the first
    weight, and the divergence in nats per token that it is then steered to. With a `teacher`: 1."""
    kl_estimator: str = Field(default="k3", pattern=r"^(k[123]|reward|advantage|top_[1-9]\d*)$")
    """How samples estimate the divergence in the loss (Schulman, 2020): ``k1``, ``k2``, or ``k3``, which is
    unbiased and never negative. ``reward``: k1 is taken from the rewards instead, token by token;
    ``advantage``: from each token's own advantage (with a `teacher`, where nothing is said). ``top_64``: the
    divergence itself over the reference's 64 likeliest tokens, and over all others as one."""
    teacher: Annotated[str, Located] | None = None
    """A model with the same tokenizer, named as ``model.source`` is: the reference in place of the model
    before training, so that the trained one is distilled from it on its own rollouts."""
    entropy_coef: FiniteFloat | tuple[Positive, Positive] = 0.0
    """Weight of the entropy bonus; a pair is the first weight, and the entropy in nats it is steered to."""
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
    guard_bands: Bands = GUARD_BANDS
    """The least ``ess_token`` and ``ess_sequence`` and the most ``mismatch_kl`` and ``clip_share`` allowed;
    what is left out is not watched."""
    # Critic (for advantage "gae")
    critic_lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Peak learning rate of the critic, which exists if this is given."""
    # LoRA
    lora_rank: int = Field(default=0, ge=0)
    """0 trains all weights."""
    lora_alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
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
    def compares(self) -> bool:
        """Whether the advantage compares the rollouts of a group, as far as its name says."""
        return self.advantage not in ("gae", "reinforce_pp", "none") and ":" not in self.advantage

    @property
    def pass_k(self) -> int | None:
        """The k of advantage ``pass_at_K``."""
        return pass_at(self.advantage)

    @property
    def fall_and_rise(self) -> tuple[str, int]:
        """How the rate falls, and the train steps over which it rises linearly before."""
        return (self.schedule, 0) if isinstance(self.schedule, str) else self.schedule

    @property
    def dual_clip(self) -> float | None:
        """Bound on the ratio of tokens with a negative advantage; None: no bound."""
        return self.clip[2] if isinstance(self.clip, tuple) and len(self.clip) == 3 else None

    @property
    def penalties(self) -> tuple[float, float]:
        """The first weights of divergence and entropy."""
        return _pair(self.kl_coef)[0], _pair(self.entropy_coef)[0]

    @property
    def penalty_targets(self) -> tuple[float | None, float | None]:
        """The targets that these are steered to; None: they stay."""
        return _pair(self.kl_coef)[1], _pair(self.entropy_coef)[1]

    @property
    def uses_reference(self) -> bool:
        """Whether the divergence from a reference model counts."""
        return self.penalties[0] > 0

    @property
    def uses_entropy(self) -> bool:
        """Whether there is an entropy bonus."""
        return self.penalties[1] != 0

    @property
    def kl_in_reward(self) -> bool:
        """Whether the divergence is taken from the rewards, and not into the loss."""
        return self.uses_reference and self.kl_estimator == "reward"

    @property
    def kl_tokens(self) -> int:
        """How many of the reference's likeliest tokens the divergence is summed over; 0: it is estimated."""
        return int(self.kl_estimator.removeprefix("top_")) if self.kl_estimator.startswith("top_") else 0

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
        several = self.optimizer_steps > 1
        return self.may_mask or self.correction == "ratio" or several or self.kl_in_reward

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """The papers' settings for the names in the table, where it does not say otherwise."""
        if not isinstance(given, Mapping):
            return given
        # The run file's own keys win over those that go with a teacher, and these over a paper's.
        return with_papers(given) | (DISTILLING if given.get("teacher") else {}) | dict(given)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pass_k is None:
            # The last name is for the message: it stands for every `pass_at_K`.
            look_up("advantage", self.advantage, dict.fromkeys((*ADVANTAGE_NAMES, "pass_at_8")))
        look_up("loss", self.loss, dict.fromkeys(LOSS_NAMES))
        look_up("correction", self.correction, CORRECTIONS)
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
        if self.credit != "rollout" and self.advantage not in BY_PARTS and ":" not in self.advantage:
            yield (
                f"credit = {self.credit!r} is not read by advantage {self.advantage!r}, which is of whole "
                f"rollouts; use one of {', '.join(BY_PARTS)}, or leave credit out"
            )
        if self.kl_in_reward and (self.advantage in ("opo", "none") or self.pass_k is not None):
            yield f"kl_estimator = 'reward' is not read by advantage {self.advantage!r}; leave one out"
        if not self.uses_reference and (self.teacher is not None or self.advantage == "none"):
            yield (
                f"advantage = {self.advantage!r} and teacher = {self.teacher!r} go with a divergence from a "
                f"teacher, and kl_coef is 0: set teacher, and kl_coef over 0 or not at all"
            )
        if self.clip_low > 1:
            yield f"clip = {self.clip} lets the ratio fall under 0; the low clip is at most 1"
        if self.dual_clip is not None and self.loss != "clipped":
            yield f"clip = {self.clip}: the third is only read by loss 'clipped', not by {self.loss!r}"
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
        if self.parallel.context > 1 and self.layout == "shared_prompt":
            yield "parallel.context splits whole rows, which layout 'shared_prompt' has not; choose another"
        if self.lora_rank and (self.parallel.tensor != 1 or self.parallel.replicas > 1):
            yield (
                f"parallel = {self.parallel.model_dump()} does not go with lora_rank: adapters are made for "
                f"weights that are split in one way; set tensor = 1 and replicas = 1"
            )
        if self.lora_alpha is not None and self.lora_rank == 0:
            yield f"lora_alpha = {self.lora_alpha} has no effect without lora_rank"


BY_PARTS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae")
"""Advantages that compare turns or tokens, too."""


def _pair(value: float | tuple[float, float]) -> tuple[float, float | None]:
    return value if isinstance(value, tuple) else (value, None)


DISTILLING = {"kl_coef": 1.0, "kl_estimator": "advantage"}
"""With a teacher, where the run file says nothing: each token earns ``log teacher - log student``, without a
discount (Lu et al. 2025, "On-Policy Distillation", Thinking Machines Lab)."""


def pass_at(name: str) -> int | None:
    """The k of the advantage ``pass_at_K`` (``pass_at_8``: 8); None for other names.

    >>> pass_at("pass_at_8"), pass_at("grpo")
    (8, None)
    """
    match = re.fullmatch(r"pass_at_([1-9][0-9]*)", name)
    return int(match[1]) if match else None


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


class WarmupConfig(BaseModel):
    """Supervised training before reinforcement learning, for a model that does not know the format yet.

    >>> WarmupConfig(steps="3 epochs").num_steps(100)
    6
    """

    model_config = StrictModel.model_config

    steps: Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^[1-9]\d* epochs?$")]
    """Optimizer steps, or passes over all examples as ``3 epochs``, each in an order of its own."""
    lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Peak learning rate; it falls linearly to 0."""
    batch_size: int = Field(default=64, ge=1)
    """Conversations per step; a task's prompt and answer are one, too."""

    def num_steps(self, num_examples: int) -> int:
        """Optimizer steps with so many examples."""
        if isinstance(self.steps, int):
            return self.steps
        return int(self.steps.split()[0]) * math.ceil(max(1, num_examples) / self.batch_size)

    def trained_as(self, run: TrainConfig) -> TrainConfig:
        """The `run`'s memory, precision and frozen weights, with cross-entropy and no adapters."""
        # Conversations begin alike only by chance.
        kept: dict[str, Any] = {"layout": "packed" if run.layout == "packed" else "padded"}
        kept |= {name: getattr(run, name) for name in _OF_THE_RUN}
        loss = "forebay.train.supervised:cross_entropy"
        return TrainConfig(**kept, lr=self.lr, schedule="linear", loss=loss)


_MEMORY = ("token_budget", "gradient_checkpointing", "offload_activations", "moments")
_OF_THE_RUN = (*_MEMORY, "dtype", "attention", "frozen")
"""Keys of ``[train]`` that a warm-up takes over, besides a packed layout."""
