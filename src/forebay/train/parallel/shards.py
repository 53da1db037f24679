"""The part of a batch that one rank works on, and its results put back where they belong.

::

    TrainBatch --take_shard(rank)--> Shard(batch of the rank's sequences, tokens) --to_arrays--> rank
    results by response token of each shard --join_tokens--> array by response token of the whole batch
    columns by trained token of each shard  --join_columns--> columns of the whole batch

A shard is itself a `TrainBatch`, of one rank, whose sequences are numbered anew. It has what the passes of a
model need; names, scores and groups stay behind.

Shapes: R response tokens of the whole batch, r of a shard, N trained tokens of a shard over all epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.train.batch import TrainBatch
from forebay.train.collate import ranges
from forebay.train.measures import Columns
from forebay.types import FloatArray

BY_SEQUENCE = ("prompt_lengths", "response_lengths", "temperatures")
BY_RESPONSE_TOKEN = ("response_mask", "rollout_logprobs")
COMPUTED = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns")
"""By response token, and None until a step has filled them."""


class Shard(NamedTuple):
    """One rank's sequences of a batch."""

    batch: TrainBatch
    tokens: NDArray[np.int64]
    """r: the place of each of its response tokens in the whole batch."""


def take_shard(batch: TrainBatch, rank: int) -> Shard:
    """The sequences of `rank`, all mini-batches together."""
    packs = [pack for ranks in batch.packs for pack in ranks[rank]]
    sequences = np.sort(np.concatenate([np.empty(0, np.int64), *packs]))
    tokens = ranges(batch.response_starts[sequences], batch.response_lengths[sequences])
    computed = {name: values[tokens] for name in COMPUTED if (values := getattr(batch, name)) is not None}
    shard = TrainBatch(
        **{name: getattr(batch, name)[sequences] for name in BY_SEQUENCE},
        **{name: getattr(batch, name)[tokens] for name in BY_RESPONSE_TOKEN},
        **computed,
        **_left_behind(len(sequences), len(tokens)),
        input_ids=batch.input_ids[ranges(batch.token_starts[sequences], batch.lengths[sequences])],
        packs=[[[np.searchsorted(sequences, pack) for pack in ranks[rank]]] for ranks in batch.packs],
        layout=batch.layout,
    )
    return Shard(shard, tokens)


def _left_behind(num_sequences: int, num_tokens: int) -> dict[str, Any]:
    return {
        "rollout_ids": [None] * num_sequences,
        "task_names": [None] * num_sequences,
        "model_steps": np.zeros(num_tokens, np.int32),
        "scores": np.zeros(num_sequences),
        "group_index": np.zeros(num_sequences, np.int64),
        "attempt_first": np.arange(num_sequences),
    }


def to_arrays(shard: TrainBatch) -> dict[str, Any]:
    """A shard as a dict of arrays, for a process or a machine that is somewhere else."""
    names = ("input_ids", *BY_SEQUENCE, *BY_RESPONSE_TOKEN, *COMPUTED)
    arrays = {name: values for name in names if (values := getattr(shard, name)) is not None}
    return {"arrays": arrays, "packs": [ranks[0] for ranks in shard.packs], "layout": shard.layout}


def from_arrays(values: Mapping[str, Any]) -> TrainBatch:
    """What `to_arrays` was given."""
    arrays = values["arrays"]
    return TrainBatch(
        **arrays,
        **_left_behind(len(arrays["prompt_lengths"]), len(arrays["response_mask"])),
        packs=[[packs] for packs in values["packs"]],
        layout=values["layout"],
    )


def join_tokens(shards: Sequence[Shard], parts: Sequence[FloatArray], num_response_tokens: int) -> FloatArray:
    """One array by response token (R) of those of the shards (r)."""
    joined_R = np.zeros(num_response_tokens, np.float32)
    for shard, part in zip(shards, parts, strict=True):
        joined_R[shard.tokens] = part
    return joined_R


def join_columns(shards: Sequence[Shard], parts: Sequence[Columns], num_epochs: int) -> Columns:
    """The columns of all shards, epoch by epoch, with ``token_index`` of the whole batch."""
    numbered = [
        part | {"token_index": shard.tokens[part["token_index"]]}
        for shard, part in zip(shards, parts, strict=True)
    ]
    return {
        # Every epoch goes through the same tokens.
        name: np.concatenate([part[name].reshape(num_epochs, -1) for part in numbered], axis=1).ravel()
        for name in numbered[0]
    }
