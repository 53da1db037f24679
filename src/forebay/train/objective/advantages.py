"""Advantages: from the scores of a batch's rollouts to one number per response token.

Each estimator is a small function on arrays; `ADVANTAGES` is the table that names them and feeds them from a
`TrainBatch`. Nothing here touches a model or needs torch.

::

    scores_S, group_S [, lengths_S] --estimator--> advantages_S --spread--> advantages_R (0 where mask is 0)
    scores_S, values_R              --gae--------> advantages_R, returns_R

Shapes: S sequences, R response tokens of all sequences one after the other, G groups. `group_S` numbers the
group of each sequence from 0. A group of one has no baseline but itself: its advantage is 0. So is that of a
group whose scores are all equal, exactly.

Attempts. A group compares attempts, and an attempt may have made several sequences (trajectories). `first_S`
is the number of the first sequence of each one's attempt; only the first ones count in means, deviations and
numbers, and every sequence is then compared with these by its own score. None: each is an attempt of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.config import look_up
from forebay.train.batch import TrainBatch
from forebay.train.config import TrainConfig, pass_at

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]

EPSILON = 1e-6
"""Keeps a division by a tiny standard deviation finite; far below the spread of any two distinct scores."""

SOLVED_SCORE = 1.0
"""A rollout at or over this score counts as solved; the evaluation's accuracy and pass@k use the same."""


def _is_counted(group_S: Ints, first_S: Ints | None) -> NDArray[np.bool_]:
    """Which sequences stand for their attempt."""
    numbers_S = np.arange(len(group_S))
    return np.ones(len(group_S), bool) if first_S is None else first_S == numbers_S


def center(scores_S: Floats, group_S: Ints, first_S: Ints | None = None) -> Floats:
    """Scores minus the mean of their group."""
    counted_S = _is_counted(group_S, first_S)
    counts_G = np.bincount(group_S, counted_S)
    # Relative to the group's lowest score, so that equal scores give exactly 0 and not a rounding error.
    lowest_G = np.full(len(counts_G), np.inf)
    np.minimum.at(lowest_G, group_S, scores_S)
    above_S = scores_S - lowest_G[group_S]
    means_G = np.bincount(group_S, above_S * counted_S) / np.maximum(counts_G, 1)
    return np.asarray(above_S - means_G[group_S])


def grpo(scores_S: Floats, group_S: Ints, first_S: Ints | None = None) -> Floats:
    """Centered scores over the group's standard deviation (of a sample: n - 1).

    Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models".

    >>> grpo(np.array([1.0, 0.0, 0.0, 1.0]), np.array([0, 0, 0, 0])).round(3).tolist()
    [0.866, -0.866, -0.866, 0.866]

    Two attempts, the first with three sequences:

    >>> scores, group, first = np.array([1.0, 1.0, 1.0, 0.0]), np.zeros(4, int), np.array([0, 0, 0, 3])
    >>> grpo(scores, group, first).round(2).tolist()
    [0.71, 0.71, 0.71, -0.71]
    """
    counted_S = _is_counted(group_S, first_S)
    centered_S = center(scores_S, group_S, first_S)
    degrees_G = np.maximum(np.bincount(group_S, counted_S) - 1, 1)
    std_G = np.sqrt(np.bincount(group_S, centered_S**2 * counted_S) / degrees_G)
    return np.asarray(centered_S / (std_G[group_S] + EPSILON))


def dr_grpo(scores_S: Floats, group_S: Ints, first_S: Ints | None = None) -> Floats:
    """Centered scores, not divided: hard and easy prompts keep their weight.

    Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective".
    """
    return center(scores_S, group_S, first_S)


def rloo(scores_S: Floats, group_S: Ints, first_S: Ints | None = None) -> Floats:
    """Score minus the mean of the *other* attempts, which is n / (n - 1) times the centered score.

    Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human
    Feedback in LLMs".
    """
    num_others_S = np.bincount(group_S, _is_counted(group_S, first_S))[group_S] - 1
    centered_S = center(scores_S, group_S, first_S)
    own_S = centered_S if first_S is None else centered_S[first_S]
    return np.asarray(centered_S + own_S / np.maximum(num_others_S, 1))


def opo(scores_S: Floats, group_S: Ints, lengths_S: Ints) -> Floats:
    """Score minus the length-weighted mean of the group, the baseline of least gradient variance.

    Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline". Lengths in generated tokens; a group that
    generated nothing uses the plain mean. An attempt's length is that of its sequences together, so it makes
    no difference how many they are.
    """
    centered_S = center(scores_S, group_S)
    tokens_G = np.bincount(group_S, lengths_S)
    weighted_G = np.bincount(group_S, centered_S * lengths_S) / np.maximum(tokens_G, 1)
    return np.asarray(centered_S - weighted_G[group_S])


def reinforce_pp_baseline(scores_S: Floats, group_S: Ints, first_S: Ints | None = None) -> Floats:
    """Centered scores, then normalized over the whole batch.

    Hu et al. 2025, "REINFORCE++: An Efficient RLHF Algorithm with Robustness to Both Prompt and Reward
    Models", the variant with a group baseline.
    """
    centered_S = center(scores_S, group_S, first_S)
    scaled_S = standardize(centered_S, _is_counted(group_S, first_S))
    # The batch's mean is 0 but for rounding, which must not make a signal of a group without one.
    return np.where(np.isclose(centered_S, 0, atol=1e-12), 0.0, scaled_S)


def pass_at_k(scores_S: Floats, group_S: Ints, k: int, first_S: Ints | None = None) -> Floats:
    """The advantage that raises the chance that at least one of k attempts solves the prompt.

    Closed form over all k-subsets of a group of n with n- unsolved rollouts: the subset's reward is 1 if any
    member solved it, mean ``m = 1 - C(n-, k) / C(n, k)``, deviation ``s = sqrt(m (1 - m))``. A solved
    rollout gets ``(1 - m) / s``, an unsolved one ``(1 - m - C(n- - 1, k - 1) / C(n - 1, k - 1)) / s``.

    Chen et al. 2025, "Pass@k Training for Adaptively Balancing Exploration and Exploitation of Large
    Reasoning Models". Solved: a score of at least `SOLVED_SCORE`.

    Raises:
        ValueError: a group has fewer than k attempts.
    """
    counted_S = _is_counted(group_S, first_S)
    sizes_G = np.bincount(group_S, counted_S).astype(int)
    if len(sizes_G) and sizes_G.min() < k:
        raise ValueError(f"pass_at_{k} needs {k} rollouts, but a group has only {sizes_G.min()}; lower k")
    solved_S = scores_S >= SOLVED_SCORE
    unsolved_G = np.bincount(group_S, ~solved_S & counted_S).astype(int)
    pairs = [_pass_at_k_pair(int(n), int(bad), k) for n, bad in zip(sizes_G, unsolved_G, strict=True)]
    table_G2 = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return np.asarray(table_G2[group_S, solved_S.astype(int)])


def _pass_at_k_pair(n: int, unsolved: int, k: int) -> tuple[float, float]:
    """The advantages of an unsolved and of a solved rollout."""
    all_unsolved = math.comb(unsolved, k) / math.comb(n, k)
    deviation = math.sqrt(all_unsolved * (1 - all_unsolved))
    if deviation == 0:
        return 0.0, 0.0
    rest_unsolved = math.comb(unsolved - 1, k - 1) / math.comb(n - 1, k - 1)
    return (all_unsolved - rest_unsolved) / deviation, all_unsolved / deviation


def gae(
    scores_S: Floats, values_R: Floats, mask_R: NDArray[np.bool_], lengths_S: Ints, gamma: float, lam: float
) -> tuple[Floats, Floats]:
    """Advantages and returns by token; the score is earned at a sequence's last generated token.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}`` over the *generated*
    tokens of a sequence: environment tokens between them are no decisions and take no part. Returns are
    ``A_t + V_t``; both are 0 where the mask is 0. `lengths_S` are response lengths, environment included.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation".
    """
    rows_R = np.repeat(np.arange(len(scores_S)), lengths_S)[mask_R]
    counts_S = np.bincount(rows_R, minlength=len(scores_S))
    starts_S = np.cumsum(counts_S) - counts_S
    columns_R = np.arange(len(rows_R)) - starts_S[rows_R]
    width = int(counts_S.max(initial=0))
    # One extra column: the value and the advantage after the last token are 0.
    values_SL = np.zeros((len(scores_S), width + 1))
    values_SL[rows_R, columns_R] = values_R[mask_R]
    rewards_SL = np.zeros((len(scores_S), width))
    generated_S = np.flatnonzero(counts_S)
    rewards_SL[generated_S, counts_S[generated_S] - 1] = scores_S[generated_S]
    deltas_SL = rewards_SL + gamma * values_SL[:, 1:] - values_SL[:, :-1]
    advantages_SL = np.zeros((len(scores_S), width + 1))
    for column in range(width - 1, -1, -1):
        advantages_SL[:, column] = deltas_SL[:, column] + gamma * lam * advantages_SL[:, column + 1]
    advantages_R, returns_R = np.zeros(len(mask_R)), np.zeros(len(mask_R))
    advantages_R[mask_R] = advantages_SL[rows_R, columns_R]
    returns_R[mask_R] = advantages_R[mask_R] + values_R[mask_R]
    return advantages_R, returns_R


def standardize(values_N: Floats, counted_N: NDArray[np.bool_] | None = None) -> Floats:
    """Values scaled so that those counted have mean 0 and standard deviation 1 (of a sample: n - 1).

    All are counted if `counted_N` does not say otherwise; 0 if only one is.
    """
    known_N = values_N if counted_N is None else values_N[counted_N]
    if len(known_N) < 2:
        return np.zeros_like(values_N)
    return np.asarray((values_N - known_N.mean()) / (known_N.std(ddof=1) + EPSILON))


AdvantageFunction = Callable[[TrainBatch, TrainConfig], Floats | tuple[Floats, Floats]]
"""Gives advantages by sequence (S), or both advantages and returns by response token (R)."""


def _gae_of_batch(batch: TrainBatch, config: TrainConfig) -> tuple[Floats, Floats]:
    if batch.values is None:
        raise ValueError("advantage 'gae' needs values; call compute_values before compute_advantages")
    mask_R = batch.response_mask
    advantages_R, returns_R = gae(
        batch.scores, batch.values, mask_R, batch.response_lengths, gamma=1.0, lam=config.lam
    )
    # As in all common implementations of PPO: the step size must not depend on the scale of the rewards.
    advantages_R[mask_R] = standardize(advantages_R[mask_R])
    return advantages_R, returns_R


def _by_attempt(estimator: Callable[..., Floats]) -> AdvantageFunction:
    return lambda batch, config: estimator(batch.scores, batch.group_index, batch.attempt_first)


ADVANTAGES: Mapping[str, AdvantageFunction] = {
    "grpo": _by_attempt(grpo),
    "dr_grpo": _by_attempt(dr_grpo),
    "rloo": _by_attempt(rloo),
    "opo": lambda batch, config: opo(batch.scores, batch.group_index, batch.generated_lengths),
    "reinforce_pp_baseline": _by_attempt(reinforce_pp_baseline),
    "gae": _gae_of_batch,
}


def find_advantage(name: str) -> AdvantageFunction:
    """The estimator of a run file: a key of `ADVANTAGES`, ``pass_at_K``, or ``package.module:function``.

    Raises:
        ConfigError: it is none of these.
    """
    k = pass_at(name)
    if k is not None:
        return lambda batch, config: pass_at_k(batch.scores, batch.group_index, k, batch.attempt_first)
    # That entry is for the messages only: `pass_at` has read the name itself.
    function: AdvantageFunction = look_up("advantage", name, {**ADVANTAGES, "pass_at_8": None})
    return function


def spread(advantages_S: Floats, batch: TrainBatch) -> Floats:
    """Each sequence's advantage on all its response tokens (R).

    Raises:
        ValueError: there is not one advantage per sequence.
    """
    if len(advantages_S) != batch.num_sequences:
        raise ValueError(
            f"an advantage function returned {len(advantages_S)} numbers for {batch.num_sequences} "
            f"sequences; give one per sequence, or a pair (advantages, returns) by response token"
        )
    return np.asarray(advantages_S[batch.response_rows])
