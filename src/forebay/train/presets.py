"""The settings of papers: whole methods (``train.preset``), and what a loss or an advantage brings by itself.

::

    the run file's own keys  >  PRESETS[preset]  >  PAPERS[loss], PAPERS[advantage]  >  the defaults

Learning rates and sizes of batches are not here: they go with a model, not with a method. Nor are numbers of
rollouts and of tokens, which are keys of other tables.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def with_papers(given: Mapping[str, Any]) -> dict[str, Any]:
    """``[train]`` with what preset, loss and advantage bring, where it does not say otherwise."""
    chosen = {**PRESETS.get(str(given.get("preset")), {}), **given}
    names = (str(chosen.get(key)) for key in ("advantage", "loss"))
    return {key: value for name in names for key, value in PAPERS.get(name, {}).items()} | chosen


def origins(config: Any) -> Iterator[str]:
    """Each key of the preset with its value in a `TrainConfig`, and whether the preset set it."""
    for key, value in PRESETS.get(str(config.preset), {}).items():
        found = getattr(config, key)
        origin = f"preset {config.preset!r}"
        yield f"train.{key} = {found!r}: " + (origin if found == value else f"not {value!r} of {origin}")


def differences(config: Any) -> Iterator[str]:
    """Sentences on settings of a `TrainConfig` that the papers of its loss and advantage have otherwise."""
    for kind in ("loss", "advantage"):
        name = getattr(config, kind)
        for key, paper in PAPERS.get(name, {}).items():
            if (value := getattr(config, key)) != paper:
                yield f"train: {kind} {name!r} with {key} = {value!r}: after its paper it is {paper!r}"
    if config.advantage == "dr_grpo" and config.loss != "gspo" and not isinstance(config.normalization, int):
        yield (
            f"train: advantage 'dr_grpo' with normalization = {config.normalization!r}: the paper divides by "
            f"a constant; set normalization to the generation budget in tokens"
        )


ON_POLICY = {"mini_batches": 1, "epochs": 1}

PAPERS: Mapping[str, Mapping[str, Any]] = {
    # Zheng et al. 2025, "Group Sequence Policy Optimization", section 5.1 and equation 5. With a critic the
    # narrow clip would be the range of its values, too.
    "gspo": {"clip": (3e-4, 4e-4), "normalization": "sequence-mean", "critic_lr": None},
    # Chen et al. 2025, "MiniMax-M1", bounds the weight from above only and does not say where. A weight of at
    # most 5 is among those that Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute for
    # LLMs", found to make little difference.
    "cispo": {"clip": (1.0, 4.0)},
    # Hu et al. 2025, "REINFORCE++", takes the divergence into the loss as k2.
    "reinforce_pp_baseline": {"kl_estimator": "k2"},
    # Ahmadian et al. 2024, and Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline".
    "rloo": ON_POLICY,
    "opo": {**ON_POLICY, "kl_coef": 0.0, "entropy_coef": 0.0},
}
"""By loss or advantage. Dr. GRPO's constant is the generation budget, which only a whole run file knows."""

METHOD: Mapping[str, Any] = {
    "advantage": "grpo",
    "credit": "rollout",
    "loss": "clipped",
    "clip": 0.2,
    "normalization": "token-mean",
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "overlong": "train",
    "mini_batches": 1,
    "epochs": 1,
}
"""Every preset says all of these; below is what it has otherwise, or beyond them."""
LIKE_DAPO = {"overlong": 0.2, "mini_batches": 16}
"""A soft penalty over the last fifth of the tokens, and 16 optimizer steps a batch."""
DYNAMIC_SAMPLING = ("dapo", "cispo")
"""Presets with which groups without variance are replaced by others, by a key of another table."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale". Equations 8-12: group
    # advantages, token-level loss, no divergence, no group without variance. Section 4.1: clip 0.2 and 0.28,
    # 16 optimizer steps a batch, a soft penalty over the last 4,096 of 20,480 tokens (equation 13), and a
    # rate that rises for 20 steps and then stays.
    "dapo": {**METHOD, "clip": (0.2, 0.28), "schedule": ("constant", 20), **LIKE_DAPO},
    # Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", section 3.2: neither the
    # deviation of the group nor the length of a response divides; the constant is the generation budget, set
    # by the run from its tasks.
    "dr_grpo": {key: METHOD[key] for key in METHOD if key != "normalization"} | {"advantage": "dr_grpo"},
    # Zheng et al. 2025, "Group Sequence Policy Optimization", equations 5-7, and section 5.1: clip 3e-4 and
    # 4e-4, four optimizer steps a batch.
    "gspo": {**METHOD, "loss": "gspo", **PAPERS["gspo"], "mini_batches": 4},
    # Chen et al. 2025, "MiniMax-M1", section 3.1: group advantages, a mean over all tokens of a group, no
    # divergence, dynamic sampling and the penalty of the length as in DAPO, 16 optimizer steps a batch.
    "cispo": {**METHOD, "loss": "cispo", **PAPERS["cispo"], **LIKE_DAPO},
    # Hu et al. 2025, "REINFORCE++", the method without groups: the divergence is taken from the reward token
    # by token as k1, returns are summed to each token, and all tokens of a batch are standardized together.
    # The coefficient is the default of the authors' code, OpenRLHF.
    "reinforce_pp": {
        **METHOD,
        **{"advantage": "reinforce_pp", "credit": "token", "discount": (1.0, 1.0)},
        **{"kl_coef": 0.01, "kl_estimator": "reward"},
    },
    # Ahmadian et al. 2024, "Back to Basics", section 3: REINFORCE of whole responses with the mean of the
    # others as baseline, so log probabilities are summed and not averaged, and one step a batch leaves no
    # ratio to clip. The divergence is taken from the reward, with 0.03 for TL;DR (appendix on training).
    "rloo": {**METHOD, "advantage": "rloo", "normalization": 1, "kl_coef": 0.03, "kl_estimator": "reward"},
    # Ouyang et al. 2022, "Training language models to follow instructions with human feedback", appendix C.4:
    # PPO (Schulman et al. 2017) of language models. Clip 0.2, 8 optimizer steps of one epoch, a rate that
    # rises for 10 batches, no discount, 0.02 for the divergence in the reward, 9e-6 for the critic. Lambda is
    # that of PPO's table 3.
    "ppo": {
        **METHOD,
        **{"advantage": "gae", "critic_lr": 9e-6, "discount": (1.0, 0.95)},
        **{"kl_coef": 0.02, "kl_estimator": "reward", "mini_batches": 8, "schedule": ("constant", 10)},
    },
}
