"""Losses by token (policy gradient, divergence from a reference, value), and the weights that sum them up.

Each loss is a small function on tensors over the N trained tokens of a micro-batch (all tokens of a sequence
together); `POLICY_LOSSES` names them for run files. Weights (`token_weights`) are computed over a whole
mini-batch, all micro-batches and all ranks. Adding up the weighted sums of the micro-batches then gives the
exact loss and gradient, however the mini-batch was cut::

    loss = sum over micro-batches of sum over tokens of weight x token loss

Shapes: N trained tokens, S sequences of the mini-batch, R response tokens of the batch.
Notation: ratio ``r = exp(logprob - old logprob)``, advantage ``A``, clip range ``[1 - low, 1 + high]``.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.train.batch import Pack, TrainBatch
from forebay.train.objective.corrections import sums_by
from forebay.types import FloatArray

if TYPE_CHECKING:
    from forebay.train.config import TrainConfig

MAX_LOG_RATIO = 20.0
"""Log ratios are held within this: e^20 is past any clip range, and infinity times 0 would be NaN."""


class PolicyInputs(NamedTuple):
    """The inputs of a policy loss; all of shape N, and only tokens that the policy generated."""

    logprobs: torch.Tensor
    """float32, with gradient: log probabilities under the policy that is trained."""
    old_logprobs: torch.Tensor
    """float32: log probabilities under the policy that ratios are taken to."""
    advantages: torch.Tensor
    """float32: the advantage of each token."""
    sequence_index: torch.Tensor
    """int64: which sequence a token belongs to, 0 .. num_sequences - 1."""
    num_sequences: int


class PolicyLoss(NamedTuple):
    """A loss by token, and on which tokens the clipping acts; all of shape N."""

    loss: torch.Tensor
    """float32, with gradient: the loss of each token, before any weight."""
    clipped_low: torch.Tensor
    """bool: the ratio is under the range, and the clipped bound holds."""
    clipped_high: torch.Tensor
    """bool: the ratio is over the range (or the dual clip), and the clipped bound holds."""


def clipped_loss(inputs: PolicyInputs, config: "TrainConfig") -> PolicyLoss:
    """``-min(r A, clip(r) A)``; with a dual clip c, at most ``-c A`` where A < 0.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms". Separate bounds: Yu et al. 2025, "DAPO:
    An Open-Source LLM Reinforcement Learning System at Scale". Dual clip: Ye et al. 2020, "Mastering Complex
    Control in MOBA Games with Deep Reinforcement Learning".
    """
    return _clip(_log_ratio(inputs).exp(), inputs.advantages, config)


def gspo_loss(inputs: PolicyInputs, config: "TrainConfig") -> PolicyLoss:
    """The clipped loss with one ratio per sequence: the geometric mean of its tokens' ratios.

    Every token of a sequence carries the sequence's loss, so a mean over tokens and then over sequences
    (``sequence-mean``) is the paper's objective. Its clip ranges are a few 1e-4.

    Zheng et al. 2025, "Group Sequence Policy Optimization".
    """
    log_ratio_N = _log_ratio(inputs)
    index = inputs.sequence_index
    counts_S = sums_by(index, torch.ones_like(log_ratio_N), inputs.num_sequences).clamp(min=1)
    ratio_N = (sums_by(index, log_ratio_N, inputs.num_sequences) / counts_S).exp()[index]
    return _clip(ratio_N, inputs.advantages, config)


def cispo_loss(inputs: PolicyInputs, config: "TrainConfig") -> PolicyLoss:
    """``-stop_gradient(clip(r)) A logprob``: clipped tokens keep a gradient, with a bounded weight.

    Chen et al. 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention".
    """
    ratio_N = _log_ratio(inputs).exp().detach()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss_N = -ratio_N.clamp(low, high) * inputs.advantages * inputs.logprobs
    return PolicyLoss(loss_N, ratio_N < low, ratio_N > high)


def _log_ratio(inputs: PolicyInputs) -> torch.Tensor:
    return (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clip(ratio_N: torch.Tensor, advantages_N: torch.Tensor, config: "TrainConfig") -> PolicyLoss:
    low, high, dual_clip = 1 - config.clip_low, 1 + config.clip_high, config.dual_clip
    loss_N = torch.maximum(-ratio_N * advantages_N, -ratio_N.clamp(low, high) * advantages_N)
    clipped_low_N = (ratio_N < low) & (advantages_N < 0)
    clipped_high_N = (ratio_N > high) & (advantages_N > 0)
    if dual_clip is not None:
        negative_N = advantages_N < 0
        # The side that the clip leaves open: a large ratio where the advantage is negative.
        loss_N = torch.where(negative_N, torch.minimum(loss_N, -dual_clip * advantages_N), loss_N)
        clipped_high_N = clipped_high_N | (negative_N & (ratio_N > dual_clip))
    return PolicyLoss(loss_N, clipped_low_N, clipped_high_N)


PolicyLossFunction = Callable[[PolicyInputs, "TrainConfig"], PolicyLoss]
"""The form of a loss of one's own, too."""

POLICY_LOSSES: Mapping[str, PolicyLossFunction] = {"clipped": clipped_loss, "gspo": gspo_loss, "cispo": cispo_loss}


def kl_penalty(logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor, estimator: str) -> torch.Tensor:
    """An estimate by token of KL(policy || reference) from tokens that the policy sampled.

    With ``d = ref logprob - logprob``: k1 is ``-d`` (unbiased, noisy), k2 is ``d^2 / 2``, k3 is
    ``exp(d) - 1 - d`` (unbiased, never negative). As a loss, the gradient of k1 is 0 in expectation and that
    of k2 is the gradient of the divergence.

    Schulman 2020, "Approximating KL Divergence".
    """
    difference_N = (ref_logprobs_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -difference_N
    if estimator == "k2":
        return difference_N**2 / 2
    return torch.expm1(difference_N) - difference_N


def top_divergence(logprobs_NK: torch.Tensor, ref_logprobs_NK: torch.Tensor) -> torch.Tensor:
    """N: KL(policy || reference) over K tokens of the reference and over all others as one.

    Never negative, never more than the divergence over all tokens, and equal to it where K is all of them.
    The gradient is that of the distribution at the position, as of the student's own samples in Agarwal et
    al. 2024, "On-Policy Distillation of Language Models"; none goes through the choice of later tokens.
    """
    shares_NK = logprobs_NK.exp()
    listed_N = (shares_NK * (logprobs_NK - ref_logprobs_NK)).sum(1)
    others_N, ref_others_N = 1 - shares_NK.sum(1), 1 - ref_logprobs_NK.exp().sum(1)
    # Under 1e-6 there is only the rounding of float32.
    ratio_N = others_N.clamp(min=1e-6) / ref_others_N.clamp(min=1e-6)
    return listed_N + others_N.clamp(min=0) * ratio_N.log()


def steered(coefficient: float, measured: float | None, target: float | None, sign: int) -> float:
    """The weight of a penalty for the next step: up to 2% higher the more `measured` is over `target`.

    With the `sign` -1 higher where it is under it. None: nothing was measured, or there is no target.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2. The same for an
    entropy that is to stay at a target: compare He et al. 2025, "Skywork Open Reasoner 1".

    >>> steered(0.1, 0.03, 0.02, 1), steered(0.1, 0.019, 0.02, 1), steered(0.1, 0.5, None, 1)
    (0.10200000000000001, 0.0995, 0.1)
    """
    if measured is None or target is None:
        return coefficient
    return coefficient * (1 + STEERING * sign * min(max(measured / target - 1, -STEEPEST), STEEPEST))


STEERING, STEEPEST = 0.1, 0.2
"""The gain of `steered` and the largest error that it sees, as the paper has them."""


def value_loss(
    values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error, where a step of more than `clip` from the old value earns nothing.

    ``max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2``, and whether the clip acts, by token.

    The value clipping of the implementation of Schulman et al. 2017 in OpenAI Baselines (PPO2).
    """
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    plain_N, bounded_N = (values_N - returns_N) ** 2, (clipped_N - returns_N) ** 2
    return torch.maximum(plain_N, bounded_N) / 2, bounded_N > plain_N


def token_weights(normalization: str | int, lengths_S: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weight of each token of each sequence (S), where `lengths_S` counts trained tokens.

    * ``token-mean``: 1 / all tokens. Every token counts the same (Yu et al. 2025, "DAPO").
    * ``sequence-mean``: 1 / (tokens of the sequence x sequences). Every sequence counts the same (Shao et al.
      2024, "DeepSeekMath"). Sequences without trained tokens are not counted.
    * a number c: 1 / (c x sequences). Neither depends on the length (Liu et al. 2025, "Understanding
      R1-Zero-Like Training", where c is the generation budget).

    >>> token_weights("sequence-mean", np.array([1, 4])).tolist()
    [0.5, 0.125]
    """
    if normalization == "token-mean":
        # Masks may have left no token at all.
        return np.full(len(lengths_S), 1 / max(1, lengths_S.sum()))
    if normalization == "sequence-mean":
        return np.asarray(1 / (np.maximum(lengths_S, 1) * max(1, np.count_nonzero(lengths_S))))
    return np.full(len(lengths_S), 1 / (int(normalization) * max(1, len(lengths_S))))


def batch_token_weights(normalization: str | int, batch: TrainBatch, sequences: Pack) -> FloatArray:
    """The weight of each response token (float32, R) where `sequences` are one mini-batch of the batch.

    Tokens that a mask leaves out (loss weight 0, importance weight 0) have weight 0 and are not counted, and
    a sequence that lost all its tokens so is none: otherwise a mask would also shrink the step.
    """
    kept_R = batch.in_loss if batch.importance is None else batch.in_loss & (batch.importance != 0)
    rows_R = batch.response_rows
    lengths_S = np.bincount(rows_R[kept_R], minlength=batch.num_sequences)[sequences]
    # One that generated nothing counts as ever.
    counted_S = (lengths_S > 0) | (batch.generated_lengths[sequences] == 0)
    by_sequence = np.zeros(batch.num_sequences, np.float32)
    by_sequence[sequences[counted_S]] = token_weights(normalization, lengths_S[counted_S])
    weights_R = np.where(kept_R, by_sequence[rows_R], np.float32(0))
    # After the tokens are counted: a factor of 0.5 halves its token's loss, and raises no other's.
    return weights_R if batch.loss_weights is None else weights_R * batch.loss_weights
