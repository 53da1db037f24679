"""Drawing tokens: one uniform number per token, turned into a token by the inverse distribution function.

::

    logits_BV -> / temperature -> top-k -> top-p -> exp, cumulative sum -> first token whose sum exceeds u
    (seed, position) -> SplitMix64 -> u                                   its log probability

The number depends only on the rollout's seed and on how many tokens the rollout has made, never on the
batch, on other requests or on a generator's state. The log probability returned is that of the distribution
the token was drawn from. A greedy row (temperature 0) draws from no distribution; it reports log-softmax at
temperature 1, which is what a trainer compares with.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.types import FloatArray, IntArray

# The constants of SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_UNIFORM_BITS = 48
"""Few enough that u times a float64 total is always below that total, so the draw always lands on a token."""


@dataclass(frozen=True, eq=False)
class Sampling:
    """How each row of a batch draws; all arrays have length B."""

    temperature: FloatArray
    """float32; 0 is greedy."""
    top_k: NDArray[np.int64]
    """int64; 0 is all tokens."""
    top_p: FloatArray
    """float32 in (0, 1]; 1 is all tokens."""


def seed_state(seed: int) -> int:
    """The random stream's start for a request's seed (any Python int), as an unsigned 64-bit number."""
    return int(_mix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64))[0])


def uniforms(states: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row: number `positions` of the streams that start at `states`."""
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    bits = _mix(states + counters) >> np.uint64(64 - _UNIFORM_BITS)
    return bits.astype(np.float64) * 2.0**-_UNIFORM_BITS


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def draw(logits_BV: torch.Tensor, how: Sampling, uniform: NDArray[np.float64]) -> tuple[IntArray, FloatArray]:
    """One token per row and its log probability: int32 and float32, length B.

    A row whose logits are not finite gets a log probability that is not finite.
    """
    device = logits_BV.device
    greedy = how.temperature == 0
    scaled_BV = logits_BV.float()
    if (how.temperature != 1).any():
        temperature = np.where(greedy, np.float32(1), how.temperature)
        scaled_BV = scaled_BV / torch.from_numpy(temperature).to(device)[:, None]
    limited = np.flatnonzero(~greedy & ((how.top_k > 0) | (how.top_p < 1)))
    if len(limited):
        rows = torch.from_numpy(limited).to(device)
        scaled_BV = scaled_BV.index_copy(0, rows, _limit(scaled_BV[rows], how, limited))
    largest_B1, best_B1 = scaled_BV.max(dim=-1, keepdim=True)
    weights_BV = (scaled_BV - largest_B1).exp_()
    if greedy.all():
        totals_B1 = weights_BV.sum(dim=-1, keepdim=True, dtype=torch.float64)
        tokens_B1 = best_B1
    else:
        # In float32 the sums over a large vocabulary would move the rare tokens' shares by some 1e-5.
        sums_BV = weights_BV.cumsum(dim=-1, dtype=torch.float64)
        totals_B1 = sums_BV[:, -1:]
        targets_B1 = torch.from_numpy(uniform).to(device)[:, None] * totals_B1
        tokens_B1 = torch.searchsorted(sums_BV, targets_B1, right=True)
        # A row of NaN has no such token; its log probability below says so.
        tokens_B1 = tokens_B1.clamp_(max=sums_BV.shape[1] - 1)
        if greedy.any():
            tokens_B1 = torch.where(torch.from_numpy(greedy).to(device)[:, None], best_B1, tokens_B1)
    logprobs_B1 = scaled_BV.gather(1, tokens_B1) - largest_B1 - totals_B1.log()
    drawn_B2 = torch.cat([tokens_B1.double(), logprobs_B1.double()], dim=1).cpu().numpy()
    return drawn_B2[:, 0].astype(np.int32), drawn_B2[:, 1].astype(np.float32)


def _limit(scaled_RV: torch.Tensor, how: Sampling, rows: NDArray[np.int64]) -> torch.Tensor:
    """The logits of these rows with everything outside top-k, then outside top-p, at minus infinity.

    Top-p keeps the fewest most likely tokens that together have at least that probability (Holtzman et al.,
    "The Curious Case of Neural Text Degeneration", 2020), of what top-k has left.
    """
    device, vocabulary = scaled_RV.device, scaled_RV.shape[1]
    sorted_RV, order_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    top_k = np.where(how.top_k[rows] > 0, how.top_k[rows], vocabulary)
    ranks_V = torch.arange(vocabulary, device=device)
    sorted_RV = sorted_RV.masked_fill(ranks_V >= torch.from_numpy(top_k).to(device)[:, None], -torch.inf)
    weights_RV = (sorted_RV - sorted_RV[:, :1]).exp_()
    before_RV = weights_RV.cumsum(dim=-1, dtype=torch.float64)
    wanted_R1 = torch.from_numpy(how.top_p[rows]).to(device)[:, None] * before_RV[:, -1:]
    before_RV = before_RV - weights_RV
    # top_p = 1 keeps all: rounding must not cost the last token.
    outside_RV = (before_RV >= wanted_R1) & (torch.from_numpy(how.top_p[rows]).to(device)[:, None] < 1)
    outside_RV[:, 0] = False
    sorted_RV = sorted_RV.masked_fill(outside_RV, -torch.inf)
    return torch.empty_like(scaled_RV).scatter_(1, order_RV, sorted_RV)
