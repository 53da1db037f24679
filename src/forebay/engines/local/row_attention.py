"""Attention of one new token per row, with the heads that share keys as the rows of one product.

A mask makes transformers' function copy keys and values once for each query head (up to 5.22), which reads
and writes the whole cache several times a token. Here the query is folded instead. Everything else, prompts
above all, goes to transformers' own function.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ROW_ATTENTION = "forebay_rows"
"""The name of `row_attention` in transformers' table."""


def row_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot product attention; the arguments are those of transformers' attention functions.

    `query` is [B, query heads, T, D], `key` and `value` [B, heads, C, D]; the result [B, T, query heads, D].
    """
    num_rows, num_heads, num_tokens, _ = query.shape
    plain = kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    if not plain or num_tokens > 1 or attention_mask is None or attention_mask.shape[1] > 1:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return output
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(num_rows, key.shape[1], -1, query.shape[-1]),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
    )
    return attended.reshape(num_rows, 1, num_heads, -1), None


def fold_shared_heads(model: Any) -> None:
    """Let `model` attend by `row_attention`, where it has shared heads and attends by ``sdpa``."""
    config = model.config.get_text_config()
    num_shared = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    plain = config._attn_implementation == "sdpa" and num_shared < config.num_attention_heads
    if plain and model._can_set_attn_implementation():
        model.set_attn_implementation(ROW_ATTENTION)


AttentionInterface.register(ROW_ATTENTION, row_attention)
AttentionMaskInterface.register(ROW_ATTENTION, sdpa_mask)
