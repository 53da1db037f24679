"""How far the tokens of a batch are from the policy trained on them: their weights, and the measures.

::

    batch, proximal logprobs --Corrector--> importance weights by token --> the loss
                             --Corrector.measures--> {"train/ess_token": ..., "train/mismatch_kl": ..., ...}

The formulas of the weights are in `forebay.train.objective.corrections`. Shapes: R response tokens of the
batch, N of them, S sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.config import look_up
from forebay.metrics import nearest_rank
from forebay.train.batch import TrainBatch
from forebay.train.config import TrainConfig
from forebay.train.objective.corrections import (
    CORRECTIONS,
    MAX_LOG_WEIGHT,
    Correction,
    CorrectionFunction,
    effective_share,
    log_weights,
)
from forebay.types import FloatArray


class Corrector:
    """Applies the configured correction to batches.

    Invariants: it changes no batch; a token whose engine logprob is unknown counts as weight 1.

    >>> batch = TrainBatch.from_examples([([1], [2, 3])])
    >>> batch.old_logprobs = np.array([-1.0, -1.0], np.float32)
    >>> Corrector(TrainConfig(correction="token_tis")).weights(batch).tolist()
    [1.0, 1.0]
    """

    def __init__(self, config: TrainConfig) -> None:
        self._function: CorrectionFunction | None = look_up("correction", config.correction, CORRECTIONS)
        self._band = config.band

    @property
    def weighs_tokens(self) -> bool:
        """Whether there are importance weights at all."""
        return self._function is not None

    def weights(self, batch: TrainBatch) -> FloatArray | None:
        """Importance weights (R) from ``old_logprobs``; None without them, or if nothing is weighed."""
        if self._function is None or batch.old_logprobs is None:
            return None
        tokens = np.flatnonzero(batch.response_mask)
        weights_R = np.zeros(batch.num_response_tokens, np.float32)
        weights_R[tokens] = self.correct(batch, batch.old_logprobs[tokens], tokens).weights
        return weights_R

    def correct(self, batch: TrainBatch, proximal_N: FloatArray, tokens: NDArray[np.int64]) -> Correction:
        """The correction of the response tokens with these numbers: all of a sequence's, or none."""
        assert self._function is not None
        differences_N = log_weights(proximal_N, batch.rollout_logprobs[tokens])
        return self._function(differences_N, batch.response_rows[tokens], batch.num_sequences, self._band)

    def measures(
        self, batch: TrainBatch, proximal_N: FloatArray, tokens: NDArray[np.int64]
    ) -> dict[str, float]:
        """Every measure of a train step that speaks of engine against trainer, over the tokens in the loss.

        ``correction_limited`` is the share of tokens outside the band, ``correction_weight`` the mean weight.
        """
        metrics = mismatch_measures(batch, proximal_N, tokens)
        if self._function is not None:
            applied, in_loss_N = self.correct(batch, proximal_N, tokens), batch.in_loss[tokens]
            metrics["train/correction_limited"] = _mean(applied.limited[in_loss_N])
            metrics["train/correction_weight"] = _mean(applied.weights[in_loss_N])
        return metrics


def mismatch_measures(
    batch: TrainBatch, proximal_N: FloatArray, tokens: NDArray[np.int64]
) -> dict[str, float]:
    """The engine's policy against the trainer's at the start of the step, over the tokens in the loss.

    With ``w = trainer / engine`` by token, and by sequence the product of its tokens' w, without any band:

    * ``importance_mean`` and ``importance_max`` of w by token;
    * ``ess_token`` and ``ess_sequence``: effective sample sizes as shares (`corrections.effective_share`);
    * ``mismatch_k1`` (signed) and ``mismatch_kl`` (k3, never negative): two estimates of KL(engine ||
      trainer) in nats per token (Schulman 2020, "Approximating KL Divergence");
    * ``mismatch_max``: the largest absolute difference of a logprob;
    * ``unknown_logprobs``: the share of tokens without an engine logprob, which the others leave out.

    If both compute the same policy, weights and sizes are 1 and the others 0. Without any known logprob only
    ``unknown_logprobs`` is given.
    """
    used = tokens[batch.in_loss[tokens]]
    known_N = batch.in_loss[tokens] & np.isfinite(batch.rollout_logprobs[tokens])
    num_known = int(known_N.sum())
    metrics = {"train/unknown_logprobs": 1 - num_known / len(used) if len(used) else 0.0}
    if num_known == 0:
        return metrics
    logs_K = log_weights(proximal_N[known_N], batch.rollout_logprobs[tokens[known_N]])
    rows_K = batch.response_rows[tokens[known_N]]
    logs_S = np.bincount(rows_K, logs_K, minlength=batch.num_sequences)[np.unique(rows_K)]
    bounded_K = np.clip(logs_K, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    return metrics | {
        "train/ess_token": effective_share(logs_K),
        "train/ess_sequence": effective_share(logs_S.astype(np.float64)),
        "train/importance_mean": _mean(np.exp(bounded_K)),
        "train/importance_max": float(np.exp(bounded_K).max()),
        "train/mismatch_k1": _mean(-logs_K),
        "train/mismatch_kl": _mean(np.expm1(bounded_K) - bounded_K),
        "train/mismatch_max": float(np.abs(logs_K).max()),
    }


def staleness_measures(batch: TrainBatch, train_step: int) -> dict[str, float]:
    """The staleness at `train_step` of the tokens in the loss, and ``stale_masked``, the share left out."""
    staleness_N = batch.token_staleness(train_step)[batch.in_loss]
    return {
        "train/staleness_mean": _mean(staleness_N),
        "train/staleness_p95": nearest_rank(staleness_N, 95),
        "train/staleness_max": float(staleness_N.max()) if len(staleness_N) else 0.0,
        "train/stale_masked": _mean(~batch.in_loss[batch.response_mask]),
    }


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else 0.0
