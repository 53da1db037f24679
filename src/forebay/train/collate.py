"""From sequence numbers to the tensors of one forward pass.

::

    TrainBatch, pack --collate--> MicroBatch(input_ids, positions, targets, ...) --forward--> logprobs_N

The last token of a sequence predicts nothing and is left out of the input. Three layouts, one result:

* ``padded``: a row per sequence, padded on the right. Causal attention needs no mask for that: no real token
  ever looks at a pad.
* ``packed``: one row; ``position_ids`` restart at each sequence, from which transformers builds the
  block-diagonal mask (or flash attention its sequence boundaries).
* ``shared_prompt``: the distinct prompts once, then a row per response that attends to the keys and values
  of its prompt. Exact, gradients included, and the k sequences of a group pay for their prompt once.
  (Compare Liu et al. 2025, "Prefix Grouper: Efficient GRPO Training through Shared-Prefix Forward".)

Shapes: B rows, L columns, Q distinct prompts, P longest prompt, N trained tokens (mask True), R response
tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.models.routing import OWN_CHOICE
from forebay.train.batch import Pack, TrainBatch
from forebay.train.parallel.context import Context, Share, even_columns

Ints = NDArray[np.int64]


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor with the content of `array`; a copy to a GPU does not wait for the work queued there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedPrompts:
    """The first of the two passes of the shared-prompt layout."""

    input_ids: torch.Tensor
    """int64, Q x P, padded on the right."""
    positions: torch.Tensor
    """int64, N1: the cell of Q x P whose output predicts each trained first token of a response."""
    rows: torch.Tensor
    """int64, B: the prompt of each row of the second pass."""
    routed_experts: torch.Tensor | None
    """int8 or int16, Q P x layers x k, as of `MicroBatch`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MicroBatch:
    """The input of one forward pass and where its answers belong.

    With `prompts`, the first N1 of the N trained tokens are predicted by the prompts' pass and the others by
    the rows'; without, all are predicted by the rows.
    """

    input_ids: torch.Tensor
    """int64, B x L: whole sequences, or the responses if there are `prompts`."""
    position_ids: torch.Tensor | None
    """int64, B x L; None where every row counts 0, 1, 2, ..."""
    positions: torch.Tensor
    """int64, N (or N - N1): the cell, counted through B x L, whose output predicts each trained token."""
    prompts: SharedPrompts | None
    share: Share | None
    """The rank's part of the columns: `input_ids`, `positions` and `routed_experts` are of these alone; None:
    it has all of them."""
    attention_mask: torch.Tensor | None
    """int64, B x (P + L): 0 on the pads between a prompt and its response; None if there are none."""
    borders: Mapping[str, Any]
    """The same as that mask, or as the restarts of `position_ids`, for kernels without a mask: the arguments
    of `forebay.models.varlen.varlen_attention`, by the names that transformers has for them. Empty where rows
    are sequences, and where they were not asked for."""
    routed_experts: torch.Tensor | None
    """int8 or int16, B L x layers x k: the experts that the engine chose for each cell's token; -1 where that
    is unknown. None: it is for all of the batch."""
    targets: torch.Tensor
    """int64, N: the trained tokens."""
    inverse_temperature: torch.Tensor | None
    """float32, N: factor of the logits; None if all are 1."""
    sequence_index: torch.Tensor
    """int64, N: the number of each token's sequence within the micro-batch."""
    num_sequences: int
    token_index: Ints
    """N: the place of each trained token in the batch's arrays by response token."""

    def gather(self, values_R: NDArray[np.float32]) -> torch.Tensor:
        """The entries of an array by response token that belong to the N trained tokens."""
        return to_device(values_R[self.token_index], self.targets.device)


def collate(
    batch: TrainBatch,
    pack: Pack,
    *,
    pad_token_id: int,
    device: torch.device,
    with_borders: bool = False,
    context: Context | None = None,
) -> MicroBatch:
    """The tensors of the sequences in `pack`, laid out as ``batch.layout`` says.

    An empty pack gives one pad token by pass and nothing to train: a rank that has no work left makes as many
    passes as the others. With a `context` it is this rank's share of them.
    """

    def place(array: NDArray[Any] | None) -> Any:
        return None if array is None else to_device(array, device)

    def ids_at(tokens_BL: Ints) -> Any:
        return place(np.where(tokens_BL < 0, pad_token_id, batch.input_ids[tokens_BL]).astype(np.int64))

    tokens, rows, offsets = _trained(batch, pack)
    prompts = share = attention_mask = position_ids = None
    borders: dict[str, Any] = {}
    if batch.layout == "padded":
        tokens_BL = even_columns(_pad(batch.token_starts[pack], _input_widths(batch, pack)), -1, context)
        cells = rows * tokens_BL.shape[1] + offsets - 1
    elif batch.layout == "packed":
        tokens_BL, position_ids, firsts = _concatenate(batch, pack)
        tokens_BL = even_columns(tokens_BL, -1, context)
        position_ids = even_columns(position_ids, 0, context)
        cells = firsts[rows] + offsets - 1
        widths = np.diff(firsts, append=tokens_BL.shape[1])
        if with_borders:
            borders = _borders(widths, widths)
    else:
        ends = batch.prompt_lengths[pack]
        # The prompts' pass predicts the first tokens of all responses, so these come before the others.
        is_first = offsets == ends[rows]
        order = np.argsort(~is_first, kind="stable")
        tokens, rows, offsets = tokens[order], rows[order], offsets[order]
        num_first = int(is_first.sum())
        tokens_QP, prompt_rows = _distinct_prompts(batch, pack)
        prompt_cells = prompt_rows[rows] * tokens_QP.shape[1] + offsets - 1
        prompts = SharedPrompts(
            input_ids=ids_at(tokens_QP),
            positions=place(prompt_cells[:num_first]),
            rows=place(prompt_rows),
            routed_experts=place(_experts(batch, tokens_QP)),
        )
        tokens_BL, position_ids, attention_mask = _responses(batch, pack, tokens_QP.shape[1])
        cells = (rows * tokens_BL.shape[1] + offsets - ends[rows] - 1)[num_first:]
        if with_borders and attention_mask is not None:
            borders = _borders(np.full_like(ends, tokens_BL.shape[1]), ends + tokens_BL.shape[1])
            borders["key_cells"] = np.flatnonzero(attention_mask)
    if context is not None:
        position_ids = np.arange(tokens_BL.shape[1])[None] if position_ids is None else position_ids
        columns, own, cells = context.split(tokens_BL.shape[1], cells)
        share, tokens_BL = Share(context, columns, place(own)), tokens_BL[:, columns]
    temperatures = batch.temperatures[pack]
    targets = batch.input_ids[batch.token_starts[pack][rows] + offsets]
    return MicroBatch(
        input_ids=ids_at(tokens_BL),
        position_ids=place(position_ids),
        positions=place(cells),
        prompts=prompts,
        share=share,
        attention_mask=place(attention_mask),
        borders={
            name: place(value) if isinstance(value, np.ndarray) else value for name, value in borders.items()
        },
        routed_experts=place(_experts(batch, tokens_BL)),
        targets=place(targets.astype(np.int64)),
        inverse_temperature=None if np.all(temperatures == 1) else place(1 / temperatures[rows]),
        sequence_index=place(rows),
        num_sequences=len(pack),
        token_index=tokens,
    )


def _trained(batch: TrainBatch, pack: Pack) -> tuple[Ints, Ints, Ints]:
    """Of each trained token: its place in the batch, its row in the pack, and its distance from the first
    token of its sequence, which is at least 1."""
    lengths = batch.response_lengths[pack]
    tokens = ranges(batch.response_starts[pack], lengths)
    rows = np.repeat(np.arange(len(pack)), lengths)
    offsets = ranges(batch.prompt_lengths[pack], lengths)
    kept = np.flatnonzero(batch.response_mask[tokens])
    return tokens[kept], rows[kept], offsets[kept]


def _experts(batch: TrainBatch, tokens_BL: Ints) -> NDArray[Any] | None:
    """B L x layers x k: the engine's choice for these tokens."""
    if batch.routed_experts is None:
        return None
    cells = tokens_BL.reshape(-1)
    experts = batch.routed_experts[cells]
    experts[cells < 0] = OWN_CHOICE
    return experts


def _borders(queries: Ints, keys: Ints) -> dict[str, Any]:
    """The borders of sequences with so many queries and keys, in this order; those without any have none."""
    given = {"q": queries[queries > 0], "k": keys[queries > 0]}
    # An empty pack has one pad for a sequence.
    given = {name: widths if len(widths) else np.ones(1, np.int64) for name, widths in given.items()}
    return {
        **{f"cu_seq_lens_{name}": np.cumsum([0, *widths], dtype=np.int32) for name, widths in given.items()},
        **{f"max_length_{name}": int(widths.max()) for name, widths in given.items()},
    }


def _input_widths(batch: TrainBatch, pack: Pack) -> Ints:
    """Tokens of each sequence that predict another one."""
    return np.maximum(batch.lengths[pack] - 1, 0)


_PAD = np.full((1, 1), -1, np.int64)
"""The cells of a pass without tokens."""


def _pad(starts: Ints, widths: Ints) -> Ints:
    """Rows of `widths` tokens from `starts`, padded with -1 to the longest; at least one cell."""
    if len(starts) == 0:
        return _PAD
    columns = np.arange(max(1, widths.max()))
    return np.where(columns < widths[:, None], starts[:, None] + columns, -1)


def _concatenate(batch: TrainBatch, pack: Pack) -> tuple[Ints, Ints, Ints]:
    """One row with all sequences' tokens, its position ids, and the cell at which each sequence begins."""
    widths = _input_widths(batch, pack)
    firsts = np.cumsum(widths) - widths
    if not widths.any():
        return _PAD, np.zeros((1, 1), np.int64), firsts
    return ranges(batch.token_starts[pack], widths)[None], ranges(np.zeros_like(widths), widths)[None], firsts


def _distinct_prompts(batch: TrainBatch, pack: Pack) -> tuple[Ints, Ints]:
    """The tokens of the distinct prompts of a pack (Q x P), and which of them each sequence has (B)."""
    if len(pack) == 0:
        return _PAD, np.zeros(1, np.int64)
    _, members, rows = np.unique(batch.prompt_index[pack], return_index=True, return_inverse=True)
    chosen = pack[members]
    return _pad(batch.token_starts[chosen], batch.prompt_lengths[chosen]), rows


def _responses(batch: TrainBatch, pack: Pack, longest_prompt: int) -> tuple[Ints, Ints, Ints | None]:
    """The tokens of responses in rows, their position ids, and the mask of prompt pads if there are any."""
    if len(pack) == 0:
        return _PAD, np.ones((1, 1), np.int64), None
    ends = batch.prompt_lengths[pack]
    widths = np.maximum(batch.response_lengths[pack] - 1, 0)
    tokens_BL = _pad(batch.token_starts[pack] + ends, widths)
    columns = np.arange(tokens_BL.shape[1])
    if (ends == longest_prompt).all():
        return tokens_BL, ends[:, None] + columns, None
    mask_BP = (np.arange(longest_prompt) < ends[:, None]).astype(np.int64)
    return tokens_BL, ends[:, None] + columns, np.concatenate([mask_BP, np.ones_like(tokens_BL)], axis=1)


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """``starts[0], starts[0] + 1, ...`` for `lengths[0]` numbers, then the same from ``starts[1]``, ..."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) + np.repeat(starts - (ends - lengths), lengths))
