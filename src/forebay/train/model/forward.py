"""One forward pass: the log-probabilities that a model gives to the tokens of a micro-batch.

::

    MicroBatch --model--> hidden_BLH --keep N positions--> head --> logits --temperature--> logprobs_N
                 (shared prompts: first the prompts, whose keys and values the responses' pass continues)

The output head runs only on the positions that predict a trained token. They are selected by a hook in front
of the head, so whatever the architecture does to its logits afterwards (scaling, soft caps) and whatever
wraps the head (an adapter) stays in place. Where there are many, they go through the head by chunks
(`forebay.train.model.head`), and the N x V logits never exist. Logprobs are float32 and those of the sampled
distribution: the logits are divided by the sampling temperature. Top-p and top-k are not applied.

Whether a model computes a sequence in a layout as it does alone is asked of the model itself, at the start
(`check_layout`). Attention masks what lies beside a sequence. A layer that carries a state from token to
token (linear attention, state spaces, convolutions) takes it over from the sequence before, unless its code
knows of borders, and which models' code does changes from version to version.

Shapes: B rows, L columns, H hidden size, N trained tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from forebay.train.batch import Layout, TrainBatch
from forebay.train.collate import MicroBatch, collate
from forebay.train.model.borders import told_borders
from forebay.train.model.head import Tail, chunked_logits
from forebay.train.model.lora import without_adapters
from forebay.train.packing import Packer

CHUNK_ELEMENTS = 1 << 25
"""Logits that exist at once: 128 MiB of float32, and about five times as much in the backward pass. More are
computed by chunks, and once more in the backward pass, which is a third more work for the head."""

Entropy = Literal["none", "measure", "train"]


class TokenOutputs(NamedTuple):
    """The model's results for the N trained tokens."""

    logprobs: torch.Tensor
    """float32, N."""
    entropy: torch.Tensor | None
    """float32, N, of the whole distribution, in nats; without gradient unless asked for."""


def response_logprobs(model: nn.Module, micro: MicroBatch, *, entropy: Entropy = "none") -> TokenOutputs:
    """Log-probabilities of the trained tokens and, if asked for, the entropy at their positions.

    Raises:
        ValueError: the model has no output head that its forward pass calls.
    """
    head = output_head(model)
    plain: Any = without_adapters(model)

    def tail_at(place: slice) -> Tail:
        targets_N = micro.targets[place]
        scale_N = None if micro.inverse_temperature is None else micro.inverse_temperature[place]
        return lambda logits_nV, part: _token_outputs(
            logits_nV, targets_N[part], None if scale_N is None else scale_N[part], entropy
        )

    def outputs_at(place: slice, positions_N: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, Any]:
        tail, num_tokens = tail_at(place), len(positions_N)
        # A model without a body of its own cannot be asked for its logits chunk by chunk.
        rows = num_tokens
        if plain.base_model is not plain:
            rows = max(1, CHUNK_ELEMENTS // int(plain.config.get_text_config().vocab_size))
        if num_tokens > rows:
            with chunked_logits(plain, head, positions_N, tail, rows):
                output = model(**inputs)
            return output.logits, output.get("past_key_values")

        def select(module: nn.Module, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden_BLH, *others = states
            return (hidden_BLH.flatten(0, 1).index_select(0, positions_N)[None], *others)

        with head.register_forward_pre_hook(select):
            output = model(**inputs)
        if output.logits.shape[1] != num_tokens:
            raise ValueError(f"{type(plain).__name__} computes its logits without its output embeddings")
        return tail(output.logits.squeeze(0), slice(None)), output.get("past_key_values")

    logprobs_N, *entropies = run_passes(outputs_at, micro).unbind(1)
    if not entropies:
        return TokenOutputs(logprobs_N, None)
    return TokenOutputs(logprobs_N, entropies[0] if entropy == "train" else entropies[0].detach())


def _token_outputs(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, scale_N: torch.Tensor | None, entropy: Entropy
) -> torch.Tensor:
    """N x 1: log probabilities; N x 2 with entropies."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if scale_N is not None:
        logits_NV = logits_NV * scale_N[:, None]
    logprobs_NV = functional.log_softmax(logits_NV, dim=-1)
    logprobs_N = logprobs_NV.gather(1, targets_N[:, None]).squeeze(1)
    if entropy == "none":
        return logprobs_N[:, None]
    with torch.set_grad_enabled(entropy == "train" and torch.is_grad_enabled()):
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return torch.stack([logprobs_N, entropy_N], dim=1)


def run_passes(call: Callable[..., tuple[torch.Tensor, Any]], micro: MicroBatch) -> torch.Tensor:
    """The results (N x anything) for the trained tokens of a micro-batch, in one pass or in two.

    ``call(place, positions, **inputs)`` runs a model and returns the results at `positions`, which are those
    of the trained tokens at `place`, and the model's cache.

    Raises:
        ValueError: the layout is ``shared_prompt`` and the model's cache is not plain keys and values.
    """
    if micro.prompts is None:
        with told_borders(packed=micro.position_ids is not None and micro.num_sequences > 1):
            results, _ = call(
                slice(None),
                micro.positions,
                input_ids=micro.input_ids,
                position_ids=micro.position_ids,
                use_cache=False,
            )
        return results
    num_first = len(micro.prompts.positions)
    first, cache = call(
        slice(num_first), micro.prompts.positions, input_ids=micro.prompts.input_ids, use_cache=True
    )
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if not isinstance(cache, DynamicCache) or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise ValueError(
            f"layout 'shared_prompt' needs full attention with plain keys and values in every layer, but "
            f"this model keeps {type(cache).__name__}; use layout 'padded'"
        )
    cache.batch_select_indices(micro.prompts.rows)
    rest, _ = call(
        slice(num_first, None),
        micro.positions,
        input_ids=micro.input_ids,
        position_ids=micro.position_ids,
        attention_mask=micro.attention_mask,
        past_key_values=cache,
        use_cache=True,
    )
    return torch.cat([first, rest])


def output_head(model: nn.Module) -> nn.Module:
    """The layer that makes logits of hidden states.

    Raises:
        ValueError: the model is not a causal language model of transformers.
    """
    get: Any = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if not isinstance(head, nn.Module):
        raise ValueError(f"{type(model).__name__} has no output embeddings; give a causal language model")
    return head


NUM_TOKENS = 12
"""Of a sequence: longer than the convolutions of known models, which see four."""
ROUNDING = 1e-3
"""Most that passes of other shapes differ in float32, in nats; they differ by about 1e-6."""
LEAK = 4e-6
"""Most that passes of one shape differ: masked tokens count exactly nothing, so only experts, which see other
tokens beside these, round otherwise. Fresh models with states leak 1.5e-5 (Falcon-H1) to 0.1 (Mamba 2)."""
HALF_ROUNDING, HALF_LEAK = 0.2, 0.02
"""The same for 16-bit weights."""


@torch.no_grad()
def check_layout(model: nn.Module, layout: Layout, device: torch.device) -> None:
    """Try three short sequences of random tokens.

    Raises:
        ValueError: the model gives others than its own log probabilities in `layout`.
    """
    if layout == "padded":
        return
    plain: Any = model
    vocabulary = plain.config.get_text_config().vocab_size
    first, other, second = np.random.default_rng(0).integers(0, vocabulary, (3, NUM_TOKENS))

    def logprobs(layout: Layout, *sequences: Any) -> torch.Tensor:
        """Those of the last of the sequences."""
        cut = NUM_TOKENS // 2
        batch = TrainBatch.from_examples([(ids[:cut], ids[cut:]) for ids in sequences])
        pack = Packer(10 * NUM_TOKENS, layout=layout).pack_pad_dispatch(batch).packs[0][0][0]
        # In the order given: what comes before is what may leak.
        micro = collate(batch, np.sort(pack), pad_token_id=0, device=device)
        order = torch.from_numpy(np.argsort(micro.token_index)).to(device)
        return response_logprobs(model, micro).logprobs[order][-(NUM_TOKENS - cut) :]

    is_half = next(model.parameters()).dtype != torch.float32
    kind = plain.config.model_type
    try:
        beside, moved = logprobs(layout, first, second), logprobs(layout, other, second)
    except ValueError as error:
        raise ValueError(f"layout {layout!r} does not go with models of type {kind!r}: {error}") from error
    for expected, limit in (
        (logprobs("padded", second), HALF_ROUNDING if is_half else ROUNDING),
        (moved, HALF_LEAK if is_half else LEAK),
    ):
        difference = float((beside - expected).abs().max())
        # So that NaN is refused too.
        if not difference <= limit:
            raise ValueError(
                f"layout {layout!r} is wrong for models of type {kind!r}: a sequence's log probabilities "
                f"change with its neighbors (by {difference:.2g}), as where layers carry a state from token "
                f"to token; use layout 'padded'"
            )
