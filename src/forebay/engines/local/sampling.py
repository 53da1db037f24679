"""Drawing tokens: one uniform number per token, turned into a token by the inverse distribution function.

::

    logits_BV -> / temperature -> top-k -> top-p -> exp, cumulative sum -> first token whose sum exceeds u
    (seed, position) -> SplitMix64 -> u                                   its log probability

The number depends only on the rollout's seed and on how many tokens the rollout has made, never on the
batch, on other requests or on a generator's state. The log probability returned is that of the distribution
the token was drawn from. A greedy row (temperature 0) draws from no distribution; it reports log-softmax at
temperature 1, which is what a trainer compares with.

Shapes: B rows, V vocabulary, N blocks of it, W tokens of a block, R rows with top-k or top-p.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.types import FloatArray

# The constants of SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_UNIFORM_BITS = 48
"""Few enough that u times a float64 total is always below that total, so the draw always lands on a token."""

_WHOLE_SUM_TOKENS = 4096
"""Vocabularies up to this size are summed at once: that is as fast."""
_BLOCK_TOKENS = 512
"""Near the square root of a large vocabulary, where blocks and tokens of a block are equally many."""


class Sampling:
    """How each row of a batch draws; it lies on the device, and is made anew when rows join or leave.

    `temperature` (float32; 0 is greedy), `top_k` (int64; 0 is all tokens) and `top_p` (float32 in (0, 1]; 1
    is all tokens) have length B.
    """

    def __init__(
        self, temperature: FloatArray, top_k: NDArray[np.int64], top_p: FloatArray, device: Any = "cpu"
    ) -> None:
        def column(values: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values).to(device)[:, None]

        greedy = temperature == 0
        self.greedy_B1 = column(greedy) if greedy.any() else None
        divisor = np.where(greedy, np.float32(1), temperature)
        self.divisor_B1 = column(divisor) if (divisor != 1).any() else None
        limited = np.flatnonzero(~greedy & ((top_k > 0) | (top_p < 1)))
        self.limited_R = column(limited)[:, 0] if len(limited) else None
        self.top_k_R1, self.top_p_R1 = column(top_k[limited]), column(top_p[limited])


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


def draw(logits_BV: torch.Tensor, how: Sampling, uniform_B: torch.Tensor) -> torch.Tensor:
    """One token per row and its log probability: float64, [B, 2], on the device of the logits.

    Nothing is read back from the device, and of all matrices only one, float32, has the logits' size.
    `uniform_B` is float64. A row whose logits are not finite gets a log probability that is not finite.
    """
    largest_B1, best_B1 = logits_BV.max(dim=-1, keepdim=True)
    largest_B1 = largest_B1.float()
    weights_BV = logits_BV - largest_B1
    if how.divisor_B1 is not None:
        weights_BV.div_(how.divisor_B1)
    if how.limited_R is not None:
        weights_BV[how.limited_R] = _limit(weights_BV[how.limited_R], how)
    weights_BV.exp_()
    totals_B1, tokens_B1 = _pick(weights_BV, uniform_B[:, None])
    if how.greedy_B1 is not None:
        tokens_B1 = torch.where(how.greedy_B1, best_B1, tokens_B1)
    scaled_B1 = logits_BV.gather(1, tokens_B1) - largest_B1
    if how.divisor_B1 is not None:
        scaled_B1 = scaled_B1 / how.divisor_B1
    return torch.cat([tokens_B1.double(), scaled_B1 - totals_B1.log()], dim=1)


def _pick(weights_BV: torch.Tensor, uniform_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's sum of weights and the token in which u times that sum lies: [B, 1] each.

    A large vocabulary is summed by blocks first, and only the block with the token one by one. Sums of blocks
    are float32 and good to 1e-7; running sums in it would move the rare tokens' shares by some 1e-5.
    """
    vocabulary = weights_BV.shape[1]
    if vocabulary <= _WHOLE_SUM_TOKENS:
        sums_BV = weights_BV.cumsum(dim=-1, dtype=torch.float64)
        # `right`: the first sum above the wanted one, so that a token of weight 0 is never drawn.
        tokens_B1 = torch.searchsorted(sums_BV, uniform_B1 * sums_BV[:, -1:], right=True)
        # A row of NaN has no such token; its log probability says so.
        return sums_BV[:, -1:], tokens_B1.clamp_(max=vocabulary - 1)
    num_whole = vocabulary // _BLOCK_TOKENS
    whole_BNW = weights_BV[:, : num_whole * _BLOCK_TOKENS].view(-1, num_whole, _BLOCK_TOKENS)
    rest_BW = weights_BV[:, num_whole * _BLOCK_TOKENS :]
    blocks = [whole_BNW.sum(dim=-1).double(), rest_BW.sum(dim=-1, keepdim=True).double()]
    ends_BN = torch.cat(blocks, dim=1).cumsum(dim=-1)
    wanted_B1 = uniform_B1 * ends_BN[:, -1:]
    block_B1 = torch.searchsorted(ends_BN, wanted_B1, right=True).clamp_(max=num_whole)
    places_BW = block_B1 * _BLOCK_TOKENS + torch.arange(_BLOCK_TOKENS, device=weights_BV.device)
    block_BW = weights_BV.gather(1, places_BW.clamp(max=vocabulary - 1)) * (places_BW < vocabulary)
    sums_BW = block_BW.cumsum(dim=-1, dtype=torch.float64)
    before_B1 = torch.where(block_B1 > 0, ends_BN.gather(1, (block_B1 - 1).clamp_(min=0)), 0)
    # Added one by one the block may come out smaller than the share that is wanted of it.
    wanted_B1 = torch.minimum(wanted_B1 - before_B1, sums_BW[:, -1:] * (1 - 2.0**-_UNIFORM_BITS))
    tokens_B1 = block_B1 * _BLOCK_TOKENS + torch.searchsorted(sums_BW, wanted_B1, right=True)
    return ends_BN[:, -1:], tokens_B1.clamp_(max=vocabulary - 1)


def _limit(scaled_RV: torch.Tensor, how: Sampling) -> torch.Tensor:
    """The logits of the limited rows with everything outside top-k, then outside top-p, at minus infinity.

    Top-p keeps the fewest most likely tokens that together have at least that probability (Holtzman et al.,
    "The Curious Case of Neural Text Degeneration", 2020), of what top-k has left.
    """
    sorted_RV, order_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(scaled_RV.shape[1], device=scaled_RV.device)
    sorted_RV = sorted_RV.masked_fill((ranks_V >= how.top_k_R1) & (how.top_k_R1 > 0), -torch.inf)
    weights_RV = (sorted_RV - sorted_RV[:, :1]).exp_()
    before_RV = weights_RV.cumsum(dim=-1, dtype=torch.float64)
    wanted_R1 = how.top_p_R1 * before_RV[:, -1:]
    before_RV = before_RV - weights_RV
    # top_p = 1 keeps all: rounding must not cost the last token.
    outside_RV = (before_RV >= wanted_R1) & (how.top_p_R1 < 1)
    outside_RV[:, 0] = False
    sorted_RV = sorted_RV.masked_fill(outside_RV, -torch.inf)
    return torch.empty_like(scaled_RV).scatter_(1, order_RV, sorted_RV)
