"""Whether a model can decode in a `DecodeBatch`; one that cannot is refused, never served wrongly.

::

    config --check_config--> plain attention?  --probe--> a few tokens, compared with a forward without cache

The config tells of what shows only in long contexts (sliding windows, context-dependent positions); the probe
finds everything else, whatever the architecture calls it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from forebay.engines.base import GenerateRequest
from forebay.engines.batch import DecodeBatch, Row
from forebay.types import SampleParams

_PLAIN_LAYERS = {"full_attention"}
_WINDOW_LAYERS = {"sliding_attention", "chunked_attention"}
_MASKABLE_ATTENTION = {"sdpa", "eager"}

_FLOAT32_TOLERANCE = 1e-3
"""Of a log probability; rounding stays below 1e-4, a wrong mask or position is above 1e-2."""
_HALF_TOLERANCE = 0.2
"""The same for 16-bit weights, whose rounding alone reaches some 0.05."""


def check_config(model: Any, max_context_tokens: int) -> None:
    """Check that every layer attends to the whole context at positions of its own.

    Raises:
        ValueError: naming what does not fit, and the context in which it would.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; the engine runs decoder-only models")
    attention = config._attn_implementation
    if attention not in _MASKABLE_ATTENTION:
        raise ValueError(
            f"{name} was loaded with attn_implementation={attention!r}; load it with 'sdpa' or 'eager'"
        )
    layer_types = set(getattr(config, "layer_types", None) or [])
    if other := sorted(layer_types - _PLAIN_LAYERS - _WINDOW_LAYERS):
        raise ValueError(f"{name} has {', '.join(other)} layers; the engine runs plain attention only")
    windowed = layer_types & _WINDOW_LAYERS or not layer_types
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if windowed and window is not None and window < max_context_tokens:
        raise ValueError(
            f"{name} attends to the last {window} tokens only, but the context is {max_context_tokens}; "
            f"set the engine's max_context_tokens to {window} or less"
        )
    _check_rope(name, getattr(config, "rope_parameters", None) or {}, max_context_tokens)


def _check_rope(name: str, rope: dict[str, Any], max_context_tokens: int) -> None:
    kind = rope.get("rope_type")
    limit = rope.get("original_max_position_embeddings") or 0
    if kind in ("dynamic", "longrope") and max_context_tokens > limit:
        raise ValueError(
            f"{name} encodes positions by {kind!r} rope, which depends on the longest rollout of a batch; "
            f"set the engine's max_context_tokens to {limit or 'the trained context'} or less"
        )


@torch.inference_mode()
def probe(batch: DecodeBatch) -> None:
    """Decode two short prompts of different lengths and compare with plain forward passes.

    Raises:
        ValueError: the log probabilities differ by more than rounding.
    """
    model = batch.model
    vocab_size = model.config.get_text_config().vocab_size
    params = SampleParams(temperature=0.0, max_tokens=2)
    rows = [
        Row(
            GenerateRequest(
                request_id="probe",
                input_ids=np.arange(1, length + 1, dtype=np.int32) % vocab_size,
                params=params,
                max_tokens=2,
                seed=0,
            )
        )
        for length in (2, 5)
    ]
    batch.admit(rows)
    ended = []
    while batch.size:
        ended += batch.step(0)
    worst = max(
        _difference(model, row, completion.response_ids, completion.logprobs) for row, completion in ended
    )
    tolerance = _FLOAT32_TOLERANCE if model.dtype == torch.float32 else _HALF_TOLERANCE
    # Written so that NaN, which is what weights that have diverged give, passes: they are not the engine's.
    if worst > tolerance:
        raise ValueError(
            f"{type(model).__name__} decodes differently in a batch than alone (log probabilities differ by "
            f"{worst:.3g}); its attention cache is not one that the engine can drive"
        )


def _difference(model: Any, row: Row, ids: np.ndarray[Any, Any], logprobs: np.ndarray[Any, Any]) -> float:
    """The largest difference between `logprobs` and those of one forward pass without a cache."""
    tokens = torch.from_numpy(np.concatenate([row.request.input_ids, ids]).astype(np.int64))[None]
    logits_TV = model(input_ids=tokens.to(model.device), use_cache=False).logits[0].float()
    first = len(row.request.input_ids) - 1
    plain = torch.log_softmax(logits_TV[first:-1], dim=-1).cpu()
    expected = plain.gather(1, torch.from_numpy(ids.astype(np.int64))[:, None])[:, 0].numpy()
    return float(np.abs(expected - logprobs).max())
