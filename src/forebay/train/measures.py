"""What a train step reports: per-token records of its forward passes, reduced once to a flat dict.

    each micro-batch --TokenRecords.add--> 1-D tensors (no transfer) --columns--> arrays (of all ranks)
                                                        --token_measures--> {"train/NAME": float}

Every name is ``train/NAME``; means are over trained tokens unless the name says otherwise.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.train.batch import TrainBatch
from forebay.train.packing import num_cells

Columns = dict[str, NDArray[Any]]
"""Arrays by trained token, of one length: float32, bool or int64."""


@contextmanager
def timed(batch: TrainBatch, phase: str) -> Iterator[None]:
    """Write the wall time of the block to ``batch.metrics`` as ``train/PHASE_s``."""
    started_s = time.perf_counter()
    yield
    batch.metrics[f"train/{phase}_s"] = time.perf_counter() - started_s


class TokenRecords:
    """Columns of numbers by trained token, gathered over the forward passes of one rank.

    >>> records = TokenRecords()
    >>> records.add(entropy=torch.tensor([1.0, 3.0]))
    >>> records.columns()["entropy"].mean()
    2.0
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[torch.Tensor]] = defaultdict(list)

    def add(self, **columns: torch.Tensor | None) -> None:
        """Add one forward pass; what is None is not recorded."""
        for name, values in columns.items():
            if values is not None:
                self._columns[name].append(values.detach())

    def columns(self) -> Columns:
        """All values of all columns."""
        return {name: torch.cat(values).cpu().numpy() for name, values in self._columns.items()}


def token_measures(columns: Columns, num_optimizer_steps: int) -> dict[str, float]:
    """The metrics of a train step; losses are means over its optimizer steps, others over kept tokens."""
    weights = columns["weight"].astype(np.float64)
    kept = weights != 0
    metrics: dict[str, float] = {
        name: float((columns[name] * weights).sum()) / max(1, num_optimizer_steps)
        for name in ("loss", "policy_loss", "value_loss")
        if name in columns
    }
    for name in ("kl", "entropy", "clip_low", "clip_high", "value_clip"):
        if name in columns:
            metrics[name] = _mean(columns[name][kept].astype(np.float64))
    metrics["clip_share"] = metrics["clip_low"] + metrics["clip_high"]
    log_ratio = columns["logprob"][kept].astype(np.float64) - columns["old_logprob"][kept]
    ratio = np.exp(log_ratio)
    metrics["ratio_mean"] = _mean(ratio)
    metrics["ratio_min"] = float(ratio.min(initial=1.0))
    metrics["ratio_max"] = float(ratio.max(initial=1.0))
    # KL(old || new), the k3 estimate: its tokens were sampled by the old policy.
    metrics["policy_kl"] = _mean(np.expm1(log_ratio) - log_ratio)
    return {f"train/{name}": value for name, value in metrics.items()}


def batch_measures(batch: TrainBatch) -> dict[str, float]:
    """Sizes, scores (by attempt) and advantages of a batch, and how much of its tensors is padding."""
    scores = batch.scores[batch.attempt_first == np.arange(batch.num_sequences)]
    metrics = {
        "tokens": float(batch.num_tokens),
        "sequences": float(batch.num_sequences),
        "trained_tokens": float(batch.in_loss.sum()),
        "score_mean": float(scores.mean()),
        "score_std": float(scores.std()),
        "equal_score_groups": _equal_score_share(batch),
        "padding": _padding_share(batch),
    }
    if batch.advantages is not None:
        trained = batch.advantages[batch.in_loss]
        metrics["advantage_mean"] = _mean(trained)
        metrics["advantage_abs_mean"] = _mean(np.abs(trained))
    if batch.values is not None and batch.returns is not None:
        metrics["explained_variance"] = explained_variance(
            batch.values[batch.response_mask], batch.returns[batch.response_mask]
        )
    return {f"train/{name}": value for name, value in metrics.items()}


def explained_variance(values: NDArray[np.float32], returns: NDArray[np.float32]) -> float:
    """The share of the returns' variance that the values foresee: 1 all, 0 none; NaN if there is none."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else float("nan")


def _equal_score_share(batch: TrainBatch) -> float:
    """The share of groups whose scores are all equal: they teach nothing."""
    firsts = np.flatnonzero(np.diff(batch.group_index, prepend=-1))
    spread = np.maximum.reduceat(batch.scores, firsts) - np.minimum.reduceat(batch.scores, firsts)
    return float((spread == 0).mean())


def _padding_share(batch: TrainBatch) -> float:
    """The share of tensor cells that hold no token; negative where shared prompts save more than it costs."""
    packs = [pack for ranks in batch.packs for micros in ranks for pack in micros]
    cells = sum(num_cells(batch, pack, batch.layout) for pack in packs)
    return 1 - batch.num_tokens / max(1, cells)


def _mean(values: NDArray[np.floating[Any]]) -> float:
    return float(values.mean()) if len(values) else 0.0
