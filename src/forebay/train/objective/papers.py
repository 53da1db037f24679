"""What the papers behind names of losses and advantages set beside them; needs no torch.

::

    train = { loss = "gspo" } --fill_in--> clip, normalization of the paper, unless the run file sets them
    TrainConfig --differences--> one sentence for each setting that the paper has otherwise

Names that are not here leave everything to the run file, with the defaults of `TrainConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.train.config import TrainConfig

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
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


def fill_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """The table ``[train]`` with its names' defaults, where it does not say otherwise."""
    names = (str(given.get(key)) for key in ("advantage", "loss"))
    return {key: value for name in names for key, value in DEFAULTS.get(name, {}).items()} | dict(given)


def differences(config: TrainConfig) -> list[str]:
    """Sentences on settings that the papers of the chosen names have otherwise."""
    clip, norm, steps = config.clip, config.normalization, config.optimizer_steps
    is_gspo, advantage = config.loss == "gspo", config.advantage
    found = [
        (
            is_gspo and max(config.clip_low, config.clip_high) > WIDEST_SEQUENCE_CLIP,
            f"loss 'gspo' with clip = {clip}: its ratio is of a whole sequence and moves little; "
            f"the paper clips it at 3e-4 and 4e-4",
        ),
        (
            is_gspo and norm != "sequence-mean",
            f"loss 'gspo' with normalization = {norm!r}: the paper's is 'sequence-mean'",
        ),
        (
            is_gspo and config.uses_critic,
            f"loss 'gspo' with a critic: clip = {clip} is the range of the critic's values, too, "
            f"and the paper has no critic",
        ),
        (
            config.loss == "cispo" and config.clip_low < 1,
            f"loss 'cispo' with clip = {clip}: the paper has no lower bound, so clip = [1.0, HIGH]",
        ),
        (
            advantage == "dr_grpo" and not is_gspo and not isinstance(norm, int),
            f"advantage 'dr_grpo' with normalization = {norm!r}: the paper divides by a constant; set "
            f"normalization to the generation budget in tokens",
        ),
        (
            advantage in ("opo", "rloo") and steps > 1,
            f"advantage {advantage!r} with {steps} optimizer steps per batch: its paper is on-policy; set "
            f"mini_batches = 1 and epochs = 1",
        ),
        (
            advantage == "opo" and bool(config.kl_coef or config.entropy_coef),
            "advantage 'opo' with kl_coef or entropy_coef: the paper does without both",
        ),
        (
            advantage == "reinforce_pp_baseline" and config.kl_coef > 0 and config.kl_estimator != "k2",
            f"advantage {advantage!r} with kl_estimator = {config.kl_estimator!r}: the paper's is 'k2'",
        ),
    ]
    return [f"train: {message}" for is_different, message in found if is_different]
