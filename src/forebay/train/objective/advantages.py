"""Advantages: from the scores of a batch's rollouts to one number per response token.

Each estimator is a small function on arrays; `ADVANTAGES` is the table that names them and feeds them from a
`TrainBatch`. Nothing here touches a model or needs torch.

::

    scores_S, group_S [, lengths_S] --estimator--> advantages_S --spread--> advantages_R (0 where mask is 0)
    rewards_R --sums--> rewards_K --gae, or discounted sums and an estimator--> advantages_K --> advantages_R

Shapes: S sequences, R response tokens of all sequences one after the other, K decisions (turns or tokens),
G groups. `group_S` numbers the group of each sequence from 0. A group of one has no baseline but itself: its
advantage is 0. So is that of a group whose scores are all equal, exactly.

Attempts. A group compares attempts, and an attempt may have made several sequences (trajectories). `first_S`
is the number of the first sequence of each one's attempt; only the first ones count in means, deviations and
numbers, and every sequence is then compared with these by its own score. None: each is an attempt of its own.
"""

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
    return np.ones(len(group_S), bool) if first_S is None else first_S == np.arange(len(group_S))


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


def rloo(scores_S: Floats, group_S: Ints, first_S: Ints | None = None) -> Floats:
    """Score minus the mean of the *other* attempts, which is n / (n - 1) times the centered score.

    Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human
    Feedback in LLMs".
    """
    num_others_S = np.bincount(group_S, _is_counted(group_S, first_S))[group_S] - 1
    centered_S = center(scores_S, group_S, first_S)
    # A further sequence leaves out its own attempt as well, by the score of its first one.
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


def reinforce_pp(scores_S: Floats, group_S: Ints, first_S: Ints | None = None) -> Floats:
    """Scores normalized over the whole batch; groups make no difference.

    Hu et al. 2025, "REINFORCE++", as the paper has it with ``credit = "token"``.
    """
    return standardize(scores_S, _is_counted(group_S, first_S))


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
    # Every subset is solved, or none is.
    if deviation == 0:
        return 0.0, 0.0
    rest_unsolved = math.comb(unsolved - 1, k - 1) / math.comb(n - 1, k - 1)
    return (all_unsolved - rest_unsolved) / deviation, all_unsolved / deviation


def gae(rewards_K: Floats, values_K: Floats, rows_K: Ints, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Advantages and returns (``A + V``) of decisions in order; `rows_K` is the sequence of each.

    ``delta_k = r_k + gamma V_{k+1} - V_k`` and ``A_k = delta_k + gamma lam A_{k+1}`` within a sequence. With
    values of 0 and a lambda of 1 the advantages are the discounted sums of the rewards to come.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation".
    """
    counts_S = np.bincount(rows_K)
    columns_K = np.arange(len(rows_K)) - (np.cumsum(counts_S) - counts_S)[rows_K]
    width = int(counts_S.max(initial=0))
    # One extra column: the value and the advantage after the last decision are 0.
    values_SL, rewards_SL, advantages_SL = (np.zeros((len(counts_S), width + 1)) for _ in range(3))
    values_SL[rows_K, columns_K], rewards_SL[rows_K, columns_K] = values_K, rewards_K
    deltas_SL = rewards_SL[:, :-1] + gamma * values_SL[:, 1:] - values_SL[:, :-1]
    for column in range(width - 1, -1, -1):
        advantages_SL[:, column] = deltas_SL[:, column] + gamma * lam * advantages_SL[:, column + 1]
    advantages_K = advantages_SL[rows_K, columns_K]
    return advantages_K, advantages_K + values_K


class Decisions:
    """The parts of a batch's responses that are judged as one: tokens, or turns, which are runs of them."""

    def __init__(self, batch: TrainBatch, credit: str) -> None:
        self.tokens_N = np.flatnonzero(batch.response_mask)
        """N: the generated tokens."""
        rows_N = batch.response_rows[self.tokens_N]
        # A turn begins behind a gap, where the environment spoke, and with each sequence.
        begins_N = (np.diff(self.tokens_N, prepend=-2) > 1) | (np.diff(rows_N, prepend=-1) > 0)
        self.part_N = np.cumsum(begins_N | (credit == "token")) - 1
        """N: the decision of each token."""
        self.firsts_K = self.tokens_N[np.unique(self.part_N, return_index=True)[1]]
        """K: the first token of each decision."""
        self.rows_K = batch.response_rows[self.firsts_K]
        """K: the sequence of each first token."""

    def sums(self, values_R: Floats) -> Floats:
        """K: the sums of an array by response token."""
        return np.asarray(np.bincount(self.part_N, values_R[self.tokens_N], len(self.rows_K)), np.float64)

    def spread(self, values_K: Floats, batch: TrainBatch) -> Floats:
        """R: each decision's value on all its tokens, 0 elsewhere."""
        values_R = np.zeros(batch.num_response_tokens)
        values_R[self.tokens_N] = values_K[self.part_N]
        return values_R


def rewards_by_token(batch: TrainBatch, config: TrainConfig) -> Floats:
    """R: the batch's rewards, less the weighted divergence from the reference if it counts as a reward.

    By token k1, ``log old - log reference``: Ouyang et al. 2022, "Training language models to follow
    instructions with human feedback", equation 2.

    Raises:
        ValueError: the two log probabilities are not known yet.
    """
    if not config.kl_in_reward:
        return batch.token_rewards
    if batch.old_logprobs is None or batch.ref_logprobs is None:
        raise ValueError(
            "kl_estimator = 'reward' needs compute_old_logprobs and compute_ref_logprobs before "
            "compute_advantages; or call fit"
        )
    kl_R = np.where(batch.response_mask, batch.old_logprobs - batch.ref_logprobs, 0.0)
    # Steering reads it, and the passes of the loss do not measure it then.
    batch.metrics["train/kl"] = float(kl_R[batch.response_mask].mean())
    return np.asarray(batch.token_rewards - (batch.penalties or config.penalties)[0] * kl_R)


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
    decisions = Decisions(batch, "turn" if config.credit == "turn" else "token")
    rewards_K = decisions.sums(rewards_by_token(batch, config))
    found = gae(rewards_K, batch.values[decisions.firsts_K], decisions.rows_K, *config.discount)
    advantages_R, returns_R = (decisions.spread(values_K, batch) for values_K in found)
    # As in all common implementations of PPO: the step size must not depend on the scale of the rewards.
    mask_R = batch.response_mask
    advantages_R[mask_R] = standardize(advantages_R[mask_R])
    return advantages_R, returns_R


def _by_attempt(estimator: Callable[..., Floats]) -> AdvantageFunction:
    """Compares rollouts by their scores, or turns or tokens by their discounted returns."""

    def compare(batch: TrainBatch, config: TrainConfig) -> Floats | tuple[Floats, Floats]:
        rewards_R = rewards_by_token(batch, config)
        if config.credit == "rollout":
            # A score is of no token in particular, so it loses the divergence of all of them.
            penalties_R = rewards_R - batch.token_rewards
            scores_S = batch.scores + np.bincount(batch.response_rows, penalties_R, batch.num_sequences)
            return estimator(scores_S, batch.group_index, batch.attempt_first)
        decisions = Decisions(batch, config.credit)
        rows_K, gamma = decisions.rows_K, config.discount[0]
        returns_K, _ = gae(decisions.sums(rewards_R), np.zeros(len(rows_K)), rows_K, gamma, 1.0)
        firsts_K = batch.attempt_first[rows_K]
        # Only the decisions of the first sequence of an attempt count.
        firsts_K = np.where(firsts_K == rows_K, np.arange(len(rows_K)), np.searchsorted(rows_K, firsts_K))
        advantages_K = estimator(returns_K, batch.group_index[rows_K], firsts_K)
        return decisions.spread(advantages_K, batch), decisions.spread(returns_K, batch)

    return compare


ADVANTAGES: Mapping[str, AdvantageFunction] = {
    "grpo": _by_attempt(grpo),
    # Not divided: hard and easy prompts keep their weight (Liu et al. 2025, "Understanding R1-Zero-Like
    # Training: A Critical Perspective").
    "dr_grpo": _by_attempt(center),
    "rloo": _by_attempt(rloo),
    "opo": lambda batch, config: opo(batch.scores, batch.group_index, batch.generated_lengths),
    "reinforce_pp": _by_attempt(reinforce_pp),
    "reinforce_pp_baseline": _by_attempt(reinforce_pp_baseline),
    "gae": _gae_of_batch,
    "none": lambda batch, config: np.zeros(batch.num_sequences),
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
