"""Torch's own flash attention for sequences that lie one after the other, as a kernel of transformers.

::

    borders of sequences (keyword arguments of the model's forward) --> every layer --> varlen_attn

No mask is built: the borders say which tokens see each other. So they have to reach the layers, and what a
model would say in a mask beyond its causal order and its sliding window is not computed; whether a model is
one of those is tried before it is trained (`forebay.train.model.trial`).

Shapes: B rows, L columns of queries, K of keys, H heads, D numbers of a head, S sequences.
"""

import inspect
from typing import Any

import torch
from torch.nn.attention import varlen

_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
"""Its first versions do not group heads."""
_NOT_COMPUTED = ("softcap", "s_aux", "position_bias")


def register_varlen() -> None:
    """Make the kernel known to transformers as ``varlen``."""
    from transformers import AttentionInterface

    # Without an entry for its mask: transformers then makes none, and does not wait for the device to find
    # out whether it needs one.
    AttentionInterface.register("varlen", varlen_attention)


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    key_cells: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention, B x L x H x D, of `query` (B x H x L x D) to `key` and `value` (B x H' x K x D).

    `cu_seq_lens_q` and `cu_seq_lens_k` (int32, S + 1) are borders of sequences in the B x L queries and in
    the keys; `max_length_q` and `max_length_k` are their longest. Without them every row is a sequence, its
    queries the last of its keys. `key_cells` (int64) are the keys that are no padding, counted through B x K.

    Raises:
        ValueError: it is asked for what the kernel does not compute.
    """
    asked = [name for name in _NOT_COMPUTED if others.get(name) is not None]
    if asked or attention_mask is not None:
        raise ValueError(f"attention 'varlen' does not compute {', '.join(asked or ['attention_mask'])}")
    num_rows, num_heads, length, head_dim = query.shape
    # Norms and rotations of float32 weights give float32 also under autocast, which does not know the kernel.
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    queries, keys, values = (states.transpose(1, 2).flatten(0, 1).to(dtype) for states in (query, key, value))
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        cu_seq_lens_q, cu_seq_lens_k = (
            torch.arange(0, num_rows * width + 1, width, dtype=torch.int32, device=query.device)
            for width in (length, key.shape[2])
        )
        max_length_q, max_length_k = length, key.shape[2]
    if key_cells is not None:
        keys, values = keys.index_select(0, key_cells), values.index_select(0, key_cells)
    grouped: dict[str, Any] = {}
    if (repeats := num_heads // key.shape[1]) > 1 and _GROUPS_HEADS:
        grouped = {"enable_gqa": True}
    elif repeats > 1:
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    output: Any = varlen.varlen_attn(
        queries,
        keys,
        values,
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        scale=scaling,
        # To the left without the token itself, to the right none; (-1, 0) is causal without a window.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **grouped,
    )
    return output.view(num_rows, length, num_heads, head_dim), None
