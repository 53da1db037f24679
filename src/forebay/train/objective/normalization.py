"""How token losses become one number: a weight for every token, so that the loss is a plain weighted sum.

Weights are computed over a whole mini-batch (all micro-batches, all ranks). Adding up the weighted sums of
the micro-batches then gives the exact loss and gradient, however the mini-batch was cut:

    loss = sum over micro-batches of sum over tokens of weight x token loss

Shapes: S sequences of the mini-batch; R response tokens of the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay.train.batch import Pack, TrainBatch
from forebay.types import FloatArray


def token_weights(normalization: str | int, lengths_S: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weight of each token of each sequence (S), where `lengths_S` counts trained tokens.

    * ``token-mean``: 1 / all tokens. Every token counts the same (Yu et al. 2025, "DAPO").
    * ``sequence-mean``: 1 / (tokens of the sequence x sequences). Every sequence counts the same (Shao et al.
      2024, "DeepSeekMath"). Sequences without trained tokens are not counted.
    * a number c: 1 / (c x sequences). Neither depends on the length (Liu et al. 2025, "Understanding
      R1-Zero-Like Training", where c is the generation budget).

    >>> token_weights("sequence-mean", np.array([1, 4])).tolist()
    [0.5, 0.125]

    Raises:
        ValueError: the normalization is none of these.
    """
    if normalization == "token-mean":
        return np.full(len(lengths_S), 1 / max(1, lengths_S.sum()))
    if normalization == "sequence-mean":
        num_sequences = max(1, np.count_nonzero(lengths_S))
        return np.asarray(1 / (np.maximum(lengths_S, 1) * num_sequences))
    if isinstance(normalization, int):
        return np.full(len(lengths_S), 1 / (normalization * max(1, len(lengths_S))))
    raise ValueError(
        f"normalization must be 'token-mean', 'sequence-mean' or a number of tokens, got {normalization!r}"
    )


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
    return weights_R if batch.loss_weights is None else weights_R * batch.loss_weights
