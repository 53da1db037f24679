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
(`forebay.train.model.trial`).

Shapes: B rows, L columns, H hidden size, N trained tokens, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from forebay.models.routing import Routing
from forebay.train.collate import MicroBatch, SharedPrompts
from forebay.train.model.borders import told_borders
from forebay.train.model.head import Tail, chunked_logits
from forebay.train.model.logit_kernels import TargetLogprobs, has_kernels
from forebay.train.model.lora import without_adapters

CHUNK_ELEMENTS = 1 << 25
"""Logits that exist at once: 128 MiB of float32, and about twice as much in the backward pass. More are
computed by chunks, and once more in the backward pass, which is a third more work for the head."""
KERNEL_ELEMENTS = 1 << 26
"""The same where no float32 copy of them is made: 128 MiB of bfloat16, and as much for their gradient."""

Entropy = Literal["none", "measure", "train"]
Cells = MicroBatch | SharedPrompts
"""The tokens of one pass."""


class TokenOutputs(NamedTuple):
    """The model's results for the N trained tokens."""

    logprobs: torch.Tensor
    """float32, N: log probability of each trained token."""
    entropy: torch.Tensor | None
    """float32, N, of the whole distribution, in nats; without gradient unless asked for."""
    others: torch.Tensor | None = None
    """float32, N x K: the log probabilities of the tokens `others`; or, of the likeliest `top`, N x 2 K:
    their log probabilities from the largest on, then their ids, which are exact below 2^24."""


def response_logprobs(
    model: nn.Module,
    micro: MicroBatch,
    *,
    entropy: Entropy = "none",
    routing: Routing | None = None,
    others: torch.Tensor | None = None,
    top: tuple[int, int] | None = None,
) -> TokenOutputs:
    """Log-probabilities of the trained tokens and, if asked for, the entropy at their positions.

    With `routing`, which is the model's, tokens go to the experts that they went to in the engine. At each
    position also those of `others` (int64, N x K), or with `top` = (K, V) of the K likeliest of the first V.

    Raises:
        ValueError: the model has no output head that its forward pass calls.
    """
    head = output_head(model)
    plain: Any = without_adapters(model)
    is_plain = entropy != "train" and others is None and top is None

    def tail_at(place: slice | torch.Tensor) -> Tail:
        targets_NT = micro.targets[place, None]
        if others is not None:
            targets_NT = torch.cat([targets_NT, others[place]], dim=1)
        scale_N = None if micro.inverse_temperature is None else micro.inverse_temperature[place]
        known = defaultdict[Any, list[torch.Tensor]](list)
        return lambda logits_nV, part: _token_outputs(
            logits_nV, targets_NT[part], None if scale_N is None else scale_N[part], entropy, top, known[part.start]
        )

    def outputs_at(place: slice | torch.Tensor, cells: Cells, **inputs: Any) -> tuple[torch.Tensor, Any]:
        if routing is not None:
            routing.replay(cells.routed_experts)
        positions_N = cells.positions
        tail, num_tokens = tail_at(place), len(positions_N)
        # A model without a body of its own cannot be asked for its logits chunk by chunk.
        rows = num_tokens
        if plain.base_model is not plain:
            elements = KERNEL_ELEMENTS if is_plain and has_kernels(cells.input_ids) else CHUNK_ELEMENTS
            rows = max(1, elements // int(plain.config.get_text_config().vocab_size))
        if num_tokens > rows:
            with chunked_logits(plain, head, positions_N, tail, rows):
                output = model(cells.input_ids, **inputs)
            return output.logits, output.get("past_key_values")

        def select(module: nn.Module, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden_BLH, *others = states
            return (hidden_BLH.flatten(0, 1).index_select(0, positions_N)[None], *others)

        with head.register_forward_pre_hook(select):
            output = model(cells.input_ids, **inputs)
        # Then the hook was not called, and these are the logits of all cells.
        if output.logits.shape[1] != num_tokens:
            raise ValueError(f"{type(plain).__name__} computes its logits without its output embeddings")
        return tail(output.logits.squeeze(0), slice(None)), output.get("past_key_values")

    results_NK = run_passes(outputs_at, micro)
    logprobs_N, others_NK, entropy_N = results_NK[:, 0], results_NK[:, 1:], None
    if entropy != "none":
        others_NK, entropy_N = results_NK[:, 1:-1], results_NK[:, -1]
        entropy_N = entropy_N if entropy == "train" else entropy_N.detach()
    has_others = top is not None or others is not None
    return TokenOutputs(logprobs_N, entropy_N, others_NK if has_others else None)


def _token_outputs(
    logits_NV: torch.Tensor,
    targets_NT: torch.Tensor,
    scale_N: torch.Tensor | None,
    entropy: Entropy,
    top: tuple[int, int] | None,
    known: list[torch.Tensor],
) -> torch.Tensor:
    """N x T: log probabilities; with `top` 2 K columns more, and one with the entropies."""
    if entropy != "train" and top is None and targets_NT.shape[1] == 1 and has_kernels(logits_NV):
        ones_N = logits_NV.new_ones(len(logits_NV), dtype=torch.float32) if scale_N is None else scale_N.float()
        results_N2: torch.Tensor = TargetLogprobs.apply(logits_NV, targets_NT[:, 0], ones_N, known)  # type: ignore[no-untyped-call]
        return results_N2 if entropy == "measure" else results_N2[:, :1]
    if scale_N is not None:
        logits_NV = logits_NV * scale_N[:, None]
    if top is not None:
        ids_NK = logits_NV[:, : top[1]].topk(top[0]).indices
        targets_NT = torch.cat([targets_NT, ids_NK], dim=1)
    results: torch.Tensor = _LogProbabilities.apply(logits_NV, targets_NT, entropy, known)  # type: ignore[no-untyped-call]
    return results if top is None else torch.cat([results, ids_NK], dim=1)


class _LogProbabilities(torch.autograd.Function):
    """Of the T targets of each token and, if asked for, in a last column the entropy, ``softmax(logits)``'s.

    ``d logprob[t] / d logits = onehot(t) - p``; ``d entropy / d logits[i] = -p[i] (log p[i] + entropy)``.
    By torch's own operations five float32 copies of the logits are alive in the backward pass; here there is one.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Any, targets_NT: Any, entropy: Entropy, known: list[torch.Tensor]) -> Any:
        """float32, N x T or N x (T + 1).

        What is put into `known` at the first call is taken from it where the logits are made once more for the
        backward pass: on a GPU each look at all of them costs as much as a product that makes them.
        """
        if not known:
            largest_N = logits_NV.amax(-1).to(torch.promote_types(logits_NV.dtype, torch.float32))
            shares_NV = torch.sub(logits_NV, largest_N[:, None]).exp_()
            total_N = shares_NV.sum(-1)
            normalizer_N = total_N.log() + largest_N
            results = logits_NV.gather(1, targets_NT) - normalizer_N[:, None]
            if entropy != "none":
                entropy_N = normalizer_N - shares_NV.mul_(logits_NV).sum(-1) / total_N
                results = torch.cat([results, entropy_N[:, None]], dim=1)
            known += normalizer_N, results
        normalizer_N, results = known
        ctx.save_for_backward(logits_NV, targets_NT, normalizer_N, results)
        ctx.trains_entropy = entropy == "train"
        return results.clone()

    @staticmethod
    def backward(ctx: Any, grad_NK: torch.Tensor) -> Any:
        """The gradient of the logits."""
        logits_NV, targets_NT, normalizer_N, results_NK = ctx.saved_tensors
        grad_NT = grad_NK[:, : targets_NT.shape[1]]
        grad_N = grad_NT.sum(1)
        # p, then p times what multiplies it.
        grad_NV = torch.sub(logits_NV, normalizer_N[:, None]).exp_()
        if ctx.trains_entropy:
            entropy_grad_N = grad_NK[:, -1]
            shift_N = grad_N + entropy_grad_N * (results_NK[:, -1] - normalizer_N)
            grad_NV.mul_(torch.mul(logits_NV, entropy_grad_N[:, None]).add_(shift_N[:, None])).neg_()
        else:
            grad_NV.mul_(-grad_N[:, None])
        grad_NV.scatter_add_(1, targets_NT, grad_NT)
        return grad_NV.to(logits_NV.dtype), None, None, None


def run_passes(call: Callable[..., tuple[torch.Tensor, Any]], micro: MicroBatch) -> torch.Tensor:
    """The results (N x anything) for the trained tokens of a micro-batch, in one pass or in two.

    ``call(place, cells, **inputs)`` runs a model over the tokens of `cells` and returns the results at its
    positions, which are those of the trained tokens at `place`, and the model's cache. Where ranks share the
    cells out, each has the results of all.

    Raises:
        ValueError: the layout is ``shared_prompt`` and the model's cache is not plain keys and values.
    """
    if micro.prompts is None:
        position_ids, share = micro.position_ids, micro.share
        # Fewer rows than sequences: one packed row that holds several.
        packed = position_ids is not None and len(micro.input_ids) < micro.num_sequences
        if share is not None and position_ids is not None:
            # Masks are of whole rows: their positions are kept before this rank's columns are cut out.
            share.context.begin(position_ids, packed=packed)
            position_ids = position_ids[:, share.columns]
        with told_borders(packed):
            results, _ = call(
                slice(None) if share is None else share.own,
                micro,
                position_ids=position_ids,
                use_cache=False,
                **micro.borders,
                **micro.images,
            )
        return results if share is None else share.context.join(results, share.own, len(micro.targets))
    num_first = len(micro.prompts.positions)
    seen = {"position_ids": micro.prompts.position_ids, **micro.prompts.images}
    first, cache = call(slice(num_first), micro.prompts, use_cache=True, **seen)
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    # No subclass either: a layer with a sliding window, for one, drops keys of long prompts.
    if not isinstance(cache, DynamicCache) or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise ValueError(
            f"layout 'shared_prompt' needs full attention with plain keys and values in every layer, but "
            f"this model keeps {type(cache).__name__}; use layout 'padded'"
        )
    # A copy for each response, through which its gradient reaches the prompt.
    cache.batch_select_indices(micro.prompts.rows)
    rest, _ = call(
        slice(num_first, None),
        micro,
        position_ids=micro.position_ids,
        attention_mask=micro.attention_mask,
        past_key_values=cache,
        use_cache=True,
        **micro.borders,
        **micro.images,
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
