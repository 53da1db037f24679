"""Whether a model can decode in a `DecodeBatch`; one that cannot is refused, never served wrongly.

::

    config --check_config--> plain attention?  --probe--> a few tokens, compared with a forward without cache

The config tells of what shows only in long contexts (sliding windows, context-dependent positions); the probe
finds everything else, whatever the architecture calls it.
"""

from typing import Any

import numpy as np
import torch

from forebay.engines.base import GenerateRequest
from forebay.engines.local.batch import DecodeBatch
from forebay.engines.local.rows import Ended, Row
from forebay.types import SampleParams

_PLAIN_LAYERS = {"full_attention"}
_WINDOW_LAYERS = {"sliding_attention", "chunked_attention"}
_MASKABLE_ATTENTION = {"sdpa", "eager"}

_FLOAT32_TOLERANCE = 1e-3
"""Of a log probability; rounding stays below 1e-4, a wrong mask or position is above 1e-2."""
_PROBED_LENGTHS = (1, 2, 5)
"""Without and with a prefill, and of different lengths, so that masks and positions of rows differ."""
_PROBED_TOKENS = 3

_HALF_TOLERANCE, _HALF_SIZE = 0.2, 4.0
"""The same for 16-bit weights, whose rounding alone reaches some 0.05, and from which size of a logit on in
proportion: those of 4 lie 1/32 apart, those of 30, which models of some billion weights have, 1/8."""


def check_config(model: Any, max_context_tokens: int | None) -> int:
    """Check that every layer attends to the whole context at positions of its own; return that context.

    Raises:
        ValueError: naming what does not fit, and the context in which it would.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    limit: int | None = getattr(config, "max_position_embeddings", None)
    max_context_tokens = limit if max_context_tokens is None else max_context_tokens
    if max_context_tokens is None:
        raise ValueError(f"{name} states no context length; give max_context_tokens")
    if max_context_tokens < 2 or (limit is not None and max_context_tokens > limit):
        raise ValueError(
            f"max_context_tokens is {max_context_tokens}; it must be at least 2 and at most the model's {limit}"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; the engine runs decoder-only models")
    attention = config._attn_implementation
    if attention not in _MASKABLE_ATTENTION:
        raise ValueError(f"{name} was loaded with attn_implementation={attention!r}; load it with 'sdpa' or 'eager'")
    layer_types = set(getattr(config, "layer_types", None) or [])
    if other := sorted(layer_types - _PLAIN_LAYERS - _WINDOW_LAYERS):
        raise ValueError(f"{name} has {', '.join(other)} layers; the engine runs plain attention only")
    # Where a config names no types, all layers may have the window.
    windowed = layer_types & _WINDOW_LAYERS or not layer_types
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if windowed and window is not None and window < max_context_tokens:
        raise ValueError(
            f"{name} attends to the last {window} tokens only, but the context is {max_context_tokens}; "
            f"set model.max_context (in code: max_context_tokens) to {window} or less"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind, trained = rope.get("rope_type"), rope.get("original_max_position_embeddings") or 0
    if kind in ("dynamic", "longrope") and max_context_tokens > trained:
        raise ValueError(
            f"{name} encodes positions by {kind!r} rope, which depends on the longest rollout of a batch; "
            f"set model.max_context (in code: max_context_tokens) to {trained or 'the trained context'} or "
            f"less"
        )
    return max_context_tokens


def probe(batch: DecodeBatch) -> None:
    """Decode two short prompts of different lengths and compare with plain forward passes.

    Raises:
        ValueError: a forward pass fails, or the log probabilities differ by more than rounding.
    """
    name = type(batch.model).__name__
    try:
        worst = _worst_difference(batch)
    # Models raise whatever their code runs into when masks or caches are not what it expects.
    except Exception as error:
        raise ValueError(f"{name} cannot decode in a batch with a cache: {type(error).__name__}: {error}") from error
    tolerance = _FLOAT32_TOLERANCE if batch.model.dtype == torch.float32 else _HALF_TOLERANCE
    # Weights that have diverged give NaN here, which passes: they are no fault of the architecture.
    if worst > tolerance:
        raise ValueError(
            f"{name} decodes differently in a batch than alone (log probabilities differ by {worst:.3g}); "
            f"its attention cache is not one that the engine can drive"
        )


@torch.inference_mode()
def _worst_difference(batch: DecodeBatch) -> float:
    """The largest difference between log probabilities of the batch and those of forwards without a cache.

    Of 16-bit weights the mean of the worst row, in proportion to large logits: single tokens may round far off.
    """
    is_exact = batch.model.dtype == torch.float32
    vocab_size = batch.model.config.get_text_config().vocab_size
    rows = [
        Row(
            GenerateRequest(
                request_id="probe",
                input_ids=np.arange(1, length + 1, dtype=np.int32) % vocab_size,
                # Greedy tokens report log probabilities at temperature 1, as the plain passes do.
                params=SampleParams(temperature=0.0, max_tokens=_PROBED_TOKENS),
                max_tokens=_PROBED_TOKENS,
                seed=0,
            )
        )
        for length in _PROBED_LENGTHS
        if length < batch.max_context_tokens
    ]
    batch.admit(rows)
    ended: list[Ended] = []
    while batch.size:
        ended += batch.step(0)
    differences: list[float] = []
    for row, completion in ended:
        if completion is None:
            raise torch.OutOfMemoryError("there is no memory for a few tokens")
        ids = completion.response_ids.astype(np.int64)
        tokens = torch.from_numpy(np.concatenate([row.request.input_ids, ids]))[None].to(batch.model.device)
        logits_TV = batch.model(input_ids=tokens, use_cache=False).logits[0].float()
        plain_TV = logits_TV[len(row.request.input_ids) - 1 : -1].cpu()
        chosen_T2 = torch.stack([plain_TV, torch.log_softmax(plain_TV, dim=-1)], dim=-1)[range(len(ids)), ids]
        logits_T, expected_T = chosen_T2.T.numpy()
        sizes_T = 1 if is_exact else (np.abs(logits_T) / _HALF_SIZE).clip(min=1)
        differences_T = np.abs(expected_T - completion.logprobs) / sizes_T
        differences.append(float(differences_T.max() if is_exact else differences_T.mean()))
    return max(differences)
