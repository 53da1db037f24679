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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.models.images import Images, Sight
from forebay.models.routing import OWN_CHOICE
from forebay.train.batch import Pack, TrainBatch, passed
from forebay.train.parallel.context import Context, Share, even_columns

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedPrompts:
    """The first of the two passes of the shared-prompt layout."""

    input_ids: torch.Tensor
    """int64, Q x P, padded on the right."""
    positions: torch.Tensor
    """int64, N1: the cell of Q x P whose output predicts each trained first token of a response."""
    rows: torch.Tensor
    """int64, B: the prompt of each row of the second pass."""
    position_ids: torch.Tensor | None
    """int64, for the cells of Q x P: as in `MicroBatch`."""
    images: Mapping[str, torch.Tensor]
    """As of `MicroBatch`: those of the prompts."""
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
    """int64, B x L, 0 for a pad; None where every row counts 0, 1, 2, ...; 4 x B x L where images have
    positions of their own, in time, height and width (`forebay.models.images.Sight`), behind the count."""
    images: Mapping[str, torch.Tensor]
    """Arguments of the pass: the pixels of the images in its tokens, as the model's processor names them."""
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


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor with the content of `array`; a copy to a GPU does not wait for the work queued there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def collate(
    batch: TrainBatch,
    pack: Pack,
    *,
    pad_token_id: int,
    device: torch.device,
    with_borders: bool = False,
    context: Context | None = None,
    sight: Sight | None = None,
) -> MicroBatch:
    """The tensors of the sequences in `pack`, laid out as ``batch.layout`` says.

    An empty pack gives one pad token by pass and nothing to train: a rank that has no work left makes as many
    passes as the others. With a `context` it is this rank's share of them. Images need the model's `sight`.
    """

    def place(value: Any) -> Any:
        return to_device(value, device) if isinstance(value, np.ndarray) else value

    (tokens, rows, offsets), pack = _trained(batch, pack), passed(pack)
    numbers = _positions(batch, pack, sight if context is None else None)
    counts = numbers.ndim == 1
    starts, widths = batch.token_starts[pack], np.maximum(batch.lengths[pack] - 1, 0)
    prompts = share = attention_mask = None
    borders: dict[str, Any] = {}
    if batch.layout == "padded":
        tokens_BL = even_columns(_pad(starts, widths), -1, context)
        cells = rows * tokens_BL.shape[1] + offsets - 1
    elif batch.layout == "packed":
        firsts = np.cumsum(widths) - widths
        tokens_BL = even_columns(ranges(starts, widths)[None] if widths.any() else _PAD, -1, context)
        cells = firsts[rows] + offsets - 1
        # All columns are of some sequence: kernels for packed ones leave what is outside of them unwritten.
        widths = np.diff(firsts if len(firsts) else [0], append=tokens_BL.shape[1])
        if with_borders:
            borders = _borders(widths, widths)
    else:
        ends = batch.prompt_lengths[pack]
        # The prompts' pass predicts the first tokens of all responses, so these come before the others.
        is_first = offsets == ends[rows]
        order = np.argsort(~is_first, kind="stable")
        tokens, rows, offsets = tokens[order], rows[order], offsets[order]
        num_first = int(is_first.sum())
        tokens_QP, prompt_rows, members = _distinct_prompts(batch, pack)
        prompts = SharedPrompts(
            input_ids=place(_ids(batch, tokens_QP, pad_token_id)),
            positions=place((prompt_rows[rows] * tokens_QP.shape[1] + offsets - 1)[:num_first]),
            rows=place(prompt_rows),
            position_ids=None if counts else place(numbers[:, tokens_QP]),
            images=_pixels(sight, device, members, batch.images),
            routed_experts=place(_experts(batch, tokens_QP)),
        )
        tokens_BL, attention_mask = _responses(batch, pack, tokens_QP.shape[1])
        cells = (rows * tokens_BL.shape[1] + offsets - ends[rows] - 1)[num_first:]
        if with_borders and attention_mask is not None:
            borders = _borders(np.full_like(ends, tokens_BL.shape[1]), ends + tokens_BL.shape[1])
            borders["key_cells"] = np.flatnonzero(attention_mask)
    # Told nothing, a model counts from 0 in each row: right only where rows begin with a sequence.
    counts &= batch.layout == "padded" and context is None
    position_ids = None if counts else place(numbers[..., tokens_BL])
    if context is not None:
        columns, own, cells = context.split(tokens_BL.shape[1], cells)
        share, tokens_BL = Share(context, columns, place(own)), tokens_BL[:, columns]
    temperatures = batch.temperatures[pack]
    return MicroBatch(
        input_ids=place(_ids(batch, tokens_BL, pad_token_id)),
        position_ids=position_ids,
        images=_pixels(sight, device, pack, *([] if prompts else [batch.images]), batch.reply_images),
        positions=place(cells),
        prompts=prompts,
        share=share,
        attention_mask=place(attention_mask),
        borders={name: place(value) for name, value in borders.items()},
        routed_experts=place(_experts(batch, tokens_BL)),
        targets=place(batch.input_ids[starts[rows] + offsets].astype(np.int64)),
        inverse_temperature=None if np.all(temperatures == 1) else place(1 / temperatures[rows]),
        sequence_index=place(rows),
        num_sequences=len(pack),
        token_index=tokens,
    )


def _pixels(sight: Sight | None, device: torch.device, pack: Pack, *kinds: list[Images]) -> dict[str, Any]:
    """The arguments of a pass for these kinds of images of each sequence, in the order of their tokens."""
    shown = [images[row] for row in pack for images in kinds if images]
    return {} if sight is None else sight.inputs(shown, device)


def _trained(batch: TrainBatch, pack: Pack) -> tuple[Ints, Ints, Ints]:
    """Of each trained token: its place in the batch, its row in the pack, and its distance from the first
    token of its sequence, which is at least 1."""
    is_trained, pack = pack >= 0, passed(pack)
    lengths = batch.response_lengths[pack]
    tokens = ranges(batch.response_starts[pack], lengths)
    rows = np.repeat(np.arange(len(pack)), lengths)
    offsets = ranges(batch.prompt_lengths[pack], lengths)
    kept = np.flatnonzero(batch.response_mask[tokens] & is_trained[rows])
    return tokens[kept], rows[kept], offsets[kept]


def _ids(batch: TrainBatch, tokens_BL: Ints, pad_token_id: int) -> Ints:
    # A cell of a pad is -1, and what is read there, the last token of all, is not taken.
    return np.where(tokens_BL < 0, pad_token_id, batch.input_ids[tokens_BL]).astype(np.int64)


def _experts(batch: TrainBatch, tokens_BL: Ints) -> NDArray[Any] | None:
    """B L x layers x k: the engine's choice for these tokens."""
    if batch.routed_experts is None:
        return None
    cells = tokens_BL.reshape(-1)
    experts = batch.routed_experts[cells]
    experts[cells < 0] = OWN_CHOICE
    return experts


def _positions(batch: TrainBatch, pack: Pack, sight: Sight | None) -> Ints:
    """T + 1: the number of each token of these sequences, then a pad's, which is 0.

    Or 4 x T + 1: behind it time, height and width. Of text alone too, where the model takes these: some know
    where a packed row restarts by all four only.
    """
    lengths = batch.lengths[pack]
    numbers_4T = np.zeros((4, batch.num_tokens + 1), np.int64)
    numbers_4T[:, ranges(batch.token_starts[pack], lengths)] = ranges(np.zeros_like(lengths), lengths)
    if sight is None or not sight.has_axes:
        return np.asarray(numbers_4T[0])
    for row in pack if batch.images else ():
        # Without the last token, which no pass reads: it may be a placeholder that the model wrote.
        start, end = batch.token_starts[row] + [0, batch.lengths[row] - 1]
        images = batch.images[row] + batch.reply_images[row]
        numbers_4T[1:, start:end], _ = sight.positions(batch.input_ids[start:end], images)
    return numbers_4T


def _borders(queries: Ints, keys: Ints) -> dict[str, Any]:
    """The borders of sequences with so many queries and keys, in this order; those without any have none."""
    given = {"q": queries[queries > 0], "k": keys[queries > 0]}
    # An empty pack has one pad for a sequence.
    given = {name: widths if len(widths) else np.ones(1, np.int64) for name, widths in given.items()}
    return {
        **{f"cu_seq_lens_{name}": np.cumsum([0, *widths], dtype=np.int32) for name, widths in given.items()},
        **{f"max_length_{name}": int(widths.max()) for name, widths in given.items()},
    }


_PAD = np.full((1, 1), -1, np.int64)
"""The cells of a pass without tokens."""


def _pad(starts: Ints, widths: Ints) -> Ints:
    """Rows of `widths` tokens from `starts`, padded with -1 to the longest; at least one cell."""
    if len(starts) == 0:
        return _PAD
    columns = np.arange(max(1, widths.max()))
    return np.where(columns < widths[:, None], starts[:, None] + columns, -1)


def _distinct_prompts(batch: TrainBatch, pack: Pack) -> tuple[Ints, Ints, Pack]:
    """The tokens of the distinct prompts of a pack (Q x P), which of them each sequence has (B), and a
    sequence that has each (Q)."""
    _, members, rows = np.unique(batch.prompt_index[pack], return_index=True, return_inverse=True)
    chosen = pack[members]
    # An empty pack has one row, a pad.
    rows = rows if len(pack) else np.zeros(1, np.int64)
    return _pad(batch.token_starts[chosen], batch.prompt_lengths[chosen]), rows, chosen


def _responses(batch: TrainBatch, pack: Pack, longest_prompt: int) -> tuple[Ints, Ints | None]:
    """The tokens of responses in rows, and the mask of prompt pads if there are any."""
    ends = batch.prompt_lengths[pack]
    # All but the last token, which predicts nothing; the prompt's last one predicts the first.
    widths = np.maximum(batch.response_lengths[pack] - 1, 0)
    tokens_BL = _pad(batch.token_starts[pack] + ends, widths)
    if (ends == longest_prompt).all():
        return tokens_BL, None
    # Pads behind a response need no mask: no token of it looks so far ahead.
    mask_BP = (np.arange(longest_prompt) < ends[:, None]).astype(np.int64)
    return tokens_BL, np.concatenate([mask_BP, np.ones_like(tokens_BL)], axis=1)


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """``starts[0], starts[0] + 1, ...`` for `lengths[0]` numbers, then the same from ``starts[1]``, ..."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) + np.repeat(starts - (ends - lengths), lengths))
