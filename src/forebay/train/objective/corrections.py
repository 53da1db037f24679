"""Importance weights for tokens that another policy sampled; loads no torch.

Three policies meet in a train step::

    behavior   what the engine sampled with: older weights, or the same ones computed otherwise
        |           w = proximal / behavior      limited to a band: this module
    proximal    the trainer's weights at the start of the step
        |           r = current / proximal        clipped: `forebay.train.objective.losses`
    current     the weights that the optimizer is changing

    loss of a token = w x loss(r)

Decoupling the weight from the clipped ratio (Hilton, Cobbe and Schulman 2022, "Batch size-invariance for
policy optimization"; Fu et al. 2025, "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for
Language Reasoning") keeps the trust region around the newest weights, where clipping against old ones would
hold the policy back to where it was. The weight has no gradient.

How much of a rollout shares one weight:

* ``token``: each token its own, ``exp(d_t)`` with ``d_t = log proximal - log behavior``. Low variance; it
  ignores that earlier tokens led to states the proximal policy would visit more or less often.
* ``sequence``: the product ``exp(sum d_t)``, the exact weight of a whole rollout. Before it is limited it
  is unbiased for rewards of whole rollouts; its variance grows exponentially with the length.
* ``geometric``: the geometric mean ``exp(mean d_t)``. It does not grow with the length, and is no importance
  weight of anything: use it to find rollouts that are off as a whole.

Weights outside the band [low, high]:

* ``tis``: the weight becomes the nearer end. Truncated importance sampling: Ionides 2008, "Truncated
  Importance Sampling"; for engine against trainer, Yao et al. 2025, "Your Efficient RL Framework Secretly
  Brings You Off-Policy RL Training". A rare large weight is bounded and still counts.
* ``mask``: the weight becomes 0, and the token leaves the loss and its normalization. Ling Team 2025,
  "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model" (IcePop), by token;
  Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
  Mismatch", by sequence. Meant for weights so far out that they speak of an error and not of a policy.

Shapes: R response tokens of the batch, N generated tokens of whole sequences, S sequences.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.config import look_up
from forebay.train.batch import TrainBatch
from forebay.types import FloatArray


class Corrector:
    """Applies a correction that weighs tokens, by its name in a run file, to batches.

    Invariants: it changes no batch; a token whose engine logprob is unknown counts as weight 1.

    >>> batch = TrainBatch.from_examples([([1], [2, 3])])
    >>> batch.old_logprobs = np.array([-1.0, -1.0], np.float32)
    >>> Corrector("token_tis", (0.0, 2.0)).weights(batch).tolist()
    [1.0, 1.0]
    """

    def __init__(self, name: str, band: "Band") -> None:
        self._function: CorrectionFunction = look_up("correction", name, CORRECTIONS)
        self._band = band

    def weights(self, batch: TrainBatch) -> FloatArray | None:
        """Importance weights (R) from ``old_logprobs``; None without them."""
        if batch.old_logprobs is None:
            return None
        tokens = np.flatnonzero(batch.response_mask)
        weights_R = np.zeros(batch.num_response_tokens, np.float32)
        weights_R[tokens] = self.correct(batch, batch.old_logprobs[tokens], tokens).weights
        return weights_R

    def correct(self, batch: TrainBatch, proximal_N: FloatArray, tokens: "Ints") -> "Correction":
        """The correction of the response tokens with these numbers: all of a sequence's, or none."""
        behavior_N, index_N = batch.rollout_logprobs[tokens], batch.response_rows[tokens]
        return self.weigh(proximal_N, behavior_N, index_N, batch.num_sequences)

    def weigh(self, proximal_N: Any, behavior_N: Any, index_N: Any, num_sequences: int) -> "Correction":
        """The correction of whole sequences: of arrays, or of tensors where they are (`CORRECTIONS` only)."""
        return self._function(log_weights(proximal_N, behavior_N), index_N, num_sequences, self._band)


Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]
Band = tuple[float, float]

MAX_LOG_WEIGHT = 20.0
"""Log weights are held within this: e^20 is past any useful band, and infinity times 0 would be NaN."""


class Correction(NamedTuple):
    """The importance weight of each token, and where the band acted; both of shape N."""

    weights: Any
    """float64; a token with exactly 0 leaves the loss and its normalization."""
    limited: Any
    """bool: whether the weight was outside the band."""


CorrectionFunction = Callable[[Floats, Ints, int, Band], Correction]
"""``(log_weights_N, sequence_index_N, num_sequences, band)``; unknown behavior has the log weight 0."""


def log_weights(proximal_N: Any, behavior_N: Any) -> Any:
    """``log proximal - log behavior`` by token; 0, so weight 1, where the behavior is unknown.
    Like the formulas below it takes arrays or tensors, and gives the same; float64 (Apple's GPU: float32).

    >>> log_weights(np.array([-1.0, -1.0]), np.array([-1.5, np.nan])).tolist()
    [0.5, 0.0]
    """
    xp = _functions(proximal_N)
    wide = xp.float32 if str(getattr(proximal_N, "device", "")).startswith("mps") else xp.float64
    return xp.where(xp.isfinite(behavior_N), xp.asarray(proximal_N, dtype=wide) - behavior_N, 0.0)


def correct(
    log_weights_N: Any, index_N: Any, num_sequences: int, band: Band, *, level: str, outside: str
) -> Correction:
    """The weights at `level` (token, sequence, geometric), with `outside` (tis, mask) done beyond `band`.

    >>> correct(np.log([0.5, 4.0]), np.array([0, 0]), 1, (0.0, 2.0), level="token", outside="tis").weights
    array([0.5, 2. ])
    """
    xp = _functions(log_weights_N)
    if level != "token":
        sums_S = sums_by(index_N, log_weights_N, num_sequences)
        if level == "geometric":
            sums_S = sums_S / sums_by(index_N, xp.ones_like(log_weights_N), num_sequences).clip(1)
        log_weights_N = sums_S[index_N]
    raw_N = xp.exp(log_weights_N.clip(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT))
    limited_N = (raw_N < band[0]) | (raw_N > band[1])
    inside_N = raw_N.clip(*band) if outside == "tis" else xp.where(limited_N, 0.0, raw_N)
    return Correction(inside_N, limited_N)


def sums_by(index_N: Any, values_N: Any, num_sequences: int) -> Any:
    """S: the sum of the values of each sequence."""
    if isinstance(values_N, np.ndarray):
        return np.bincount(index_N, values_N, minlength=num_sequences).astype(np.float64)
    # Not torch.bincount: it waits for a GPU, to see that no index is larger.
    return values_N.new_zeros(num_sequences).index_add(0, index_N, values_N)


def _functions(values: Any) -> Any:
    """The module with the functions for `values`: those that we use have the same names in both."""
    return np if isinstance(values, np.ndarray) else import_module("torch")


CORRECTIONS: Mapping[str, CorrectionFunction | None] = {
    # The first two give no weights.
    "none": None,
    "ratio": None,
    **{
        f"{level}_{outside}": partial(correct, level=level, outside=outside)
        for level in ("token", "sequence", "geometric")
        for outside in ("tis", "mask")
    },
}

DEFAULT_BANDS: Mapping[str, Band] = {
    # The cap of Yao et al. and of Liu, Li et al.; a small weight does no harm, so there is no lower end.
    **dict.fromkeys(("token_tis", "sequence_tis", "geometric_tis", "sequence_mask"), (0.0, 2.0)),
    # IcePop's.
    "token_mask": (0.5, 5.0),
    # 0.1 nats per token on average: one rollout's noise of a few hundred tokens is far inside.
    "geometric_mask": (0.9, 1.1),
}


def effective_share(log_weights_N: Floats) -> float:
    """The effective sample size of weighted samples as a share of their number, in (0, 1].

    ``(sum w)^2 / (n sum w^2)``: 1 if all weights are equal, 1/n if one has everything.

    Kish 1965, "Survey Sampling"; Kong 1992, "A Note on Importance Sampling using Standardized Weights".

    >>> effective_share(np.log([1.0, 1.0, 1.0])), round(effective_share(np.log([3.0, 1.0])), 3)
    (1.0, 0.8)
    """
    if len(log_weights_N) == 0:
        return math.nan
    # Relative to the largest, so that nothing overflows; the share does not depend on the scale.
    weights_N = np.exp(log_weights_N - log_weights_N.max())
    return float(weights_N.sum() ** 2 / (len(weights_N) * (weights_N**2).sum()))
