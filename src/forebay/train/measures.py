"""Measures of a train step: per-token records of its forward passes, reduced once to a flat dict.

    each micro-batch --TokenRecords.add--> 1-D tensors (no transfer) --columns, once--> arrays (of all ranks)
                                                        --token_measures--> {"train/NAME": float}

Every name is ``train/NAME``; means are over trained tokens unless the name says otherwise.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.metrics import nearest_rank
from forebay.train.batch import TrainBatch
from forebay.train.objective.corrections import MAX_LOG_WEIGHT, Corrector, effective_share, log_weights
from forebay.train.packing import num_cells
from forebay.types import FloatArray

Columns = dict[str, NDArray[Any]]
"""Arrays by trained token, of one length: float32, but for ``token_index`` (int64)."""


@contextmanager
def timed(batch: TrainBatch, phase: str) -> Iterator[None]:
    """Write the wall time of the block to ``batch.metrics`` as ``train/PHASE_s``."""
    started_s = time.perf_counter()
    yield
    batch.metrics[f"train/{phase}_s"] = time.perf_counter() - started_s


class TokenRecords:
    """Columns of numbers by trained token, gathered over the forward passes of one rank.

    >>> records = TokenRecords()
    >>> records.token_index.append(np.array([0, 1]))
    >>> records.add(entropy=torch.tensor([1.0, 3.0]))
    >>> float(records.columns()["entropy"].mean())
    2.0
    """

    def __init__(self) -> None:
        self.token_index: list[NDArray[np.int64]] = []
        """Which tokens: of each forward pass their places among the response tokens of the batch."""
        self._columns: dict[str, list[torch.Tensor]] = defaultdict(list)

    def add(self, **columns: torch.Tensor | None) -> None:
        """Add one forward pass; what is None is not recorded."""
        for name, values in columns.items():
            if values is not None:
                self._columns[name].append(values.detach())

    def columns(self) -> Columns:
        """All values of all columns, and ``token_index``, in one copy from the device."""
        rows = torch.stack([torch.cat(values).float() for values in self._columns.values()]).cpu().numpy()
        by_name: Columns = dict(zip(self._columns, rows, strict=True))
        return {"token_index": np.concatenate(self.token_index), **by_name}


def token_measures(columns: Columns, num_optimizer_steps: int) -> dict[str, float]:
    """The metrics of the passes: losses are means over optimizer steps, others over tokens in the loss.

    Without any such token there are losses only.
    """
    weights = columns["weight"].astype(np.float64)
    kept = weights != 0
    metrics: dict[str, float] = {
        # Weights are made within each mini-batch, so this sum has one loss for every optimizer step.
        name: float((columns[name] * weights).sum()) / max(1, num_optimizer_steps)
        for name in ("loss", "policy_loss", "value_loss")
        if name in columns
    }
    if kept.any():
        names = [name for name in ("kl", "entropy", "clip_low", "clip_high", "value_clip") if name in columns]
        metrics |= {name: _mean(columns[name][kept].astype(np.float64)) for name in names}
        metrics["clip_share"] = metrics["clip_low"] + metrics["clip_high"]
        log_ratio = columns["logprob"][kept].astype(np.float64) - columns["old_logprob"][kept]
        ratio = np.exp(log_ratio)
        metrics["ratio_mean"] = _mean(ratio)
        metrics["ratio_min"] = float(ratio.min())
        metrics["ratio_max"] = float(ratio.max())
        # KL(old || new), the k3 estimate: its tokens were sampled by the old policy.
        metrics["policy_kl"] = _mean(np.expm1(log_ratio) - log_ratio)
    return {f"train/{name}": value for name, value in metrics.items()}


def batch_measures(batch: TrainBatch) -> dict[str, float]:
    """Sizes, scores (by attempt) and advantages of a batch, and how much of its tensors is padding."""
    is_first = batch.attempt_first == np.arange(batch.num_sequences)
    scores, groups = batch.scores[is_first], batch.group_index[is_first]
    firsts = np.flatnonzero(np.diff(batch.group_index, prepend=-1))
    spread = np.maximum.reduceat(batch.scores, firsts) - np.minimum.reduceat(batch.scores, firsts)
    packs = [pack for ranks in batch.packs for micros in ranks for pack in micros]
    cells = sum(num_cells(batch, pack, batch.layout) for pack in packs)
    passed = sum(int(batch.lengths[pack[pack >= 0]].sum()) for pack in packs)
    metrics = {
        "tokens": float(batch.num_tokens),
        "sequences": float(batch.num_sequences),
        "trained_tokens": float(batch.in_loss.sum()),
        "score_mean": float(scores.mean()),
        "score_std": float(scores.std()),
        # Of the groups' means: how differently hard the prompts are.
        "group_score_std": float((np.bincount(groups, scores) / np.bincount(groups)).std()),
        # Groups whose scores are all equal teach nothing.
        "equal_score_groups": float((spread == 0).mean()),
        # Cells that hold no token; negative where shared prompts save more than it costs.
        "padding": (cells - passed) / max(1, cells),
        "skipped_share": 1 - passed / batch.num_tokens,
    }
    if batch.advantages is not None:
        trained = batch.advantages[batch.in_loss]
        metrics["advantage_mean"] = _mean(trained)
        metrics["advantage_abs_mean"] = _mean(np.abs(trained))
    if batch.values is not None and batch.returns is not None:
        returns = batch.returns[batch.response_mask]
        variance, errors = returns.var(), returns - batch.values[batch.response_mask]
        # The share of the returns' variance that the values foresee: 1 all, 0 none.
        metrics["explained_variance"] = float(1 - errors.var() / variance) if variance > 0 else math.nan
    return {f"train/{name}": value for name, value in metrics.items()}


def correction_measures(
    corrector: Corrector | None, batch: TrainBatch, proximal_N: FloatArray, tokens: NDArray[np.int64]
) -> dict[str, float]:
    """The engine's policy against the trainer's at the start of the step, over those of `tokens` in the loss.

    With ``w = trainer / engine`` by token, and by sequence the product of its tokens' w, without any band:

    * ``importance_mean`` and ``importance_max`` of w by token;
    * ``ess_token`` and ``ess_sequence``: effective sample sizes as shares (`effective_share`);
    * ``mismatch_k1`` (signed) and ``mismatch_kl`` (k3, never negative): two estimates of KL(engine ||
      trainer) in nats per token (Schulman 2020, "Approximating KL Divergence");
    * ``mismatch_max``: the largest absolute difference of a logprob;
    * ``unknown_logprobs``: the share of all tokens in the loss without an engine logprob; the others leave
      these out.

    If both compute the same policy, weights and sizes are 1 and the others 0. Without any known logprob only
    ``unknown_logprobs`` is given. A correction adds what it did: ``correction_limited``, the share of tokens
    outside the band, and ``correction_weight``, the mean weight.
    """
    in_loss_N = batch.in_loss[tokens]
    known_N = in_loss_N & np.isfinite(batch.rollout_logprobs[tokens])
    metrics = {"unknown_logprobs": _mean(~np.isfinite(batch.rollout_logprobs[batch.in_loss]))}
    if known_N.any():
        logs_K = log_weights(proximal_N[known_N], batch.rollout_logprobs[tokens[known_N]])
        rows_K = batch.response_rows[tokens[known_N]]
        # Only sequences of which something is known: any other would count with weight 1.
        logs_S = np.bincount(rows_K, logs_K, minlength=batch.num_sequences)[np.unique(rows_K)]
        bounded_K = np.clip(logs_K, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
        metrics |= {
            "ess_token": effective_share(logs_K),
            "ess_sequence": effective_share(logs_S.astype(np.float64)),
            "importance_mean": _mean(np.exp(bounded_K)),
            "importance_max": float(np.exp(bounded_K).max()),
            "mismatch_k1": _mean(-logs_K),
            "mismatch_kl": _mean(np.expm1(bounded_K) - bounded_K),
            "mismatch_max": float(np.abs(logs_K).max()),
        }
    if corrector is not None and in_loss_N.any():
        applied = corrector.correct(batch, proximal_N, tokens)
        metrics["correction_limited"] = _mean(applied.limited[in_loss_N])
        metrics["correction_weight"] = _mean(applied.weights[in_loss_N])
    return {f"train/{name}": value for name, value in metrics.items()}


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
