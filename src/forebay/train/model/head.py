"""Through a model's output head a chunk of tokens at a time: the N x V logits never exist.

::

    hidden_NH --chunk--> head --> raw_nV --scale or soft cap of the model--> logits_nV --tail--> results_nK
    backward: each chunk once more, its gradients added to those of the chunks before

Made for what keeps few numbers of each token's logits (log probabilities, entropies). Slicing logits that
exist would not do: the gradient of a slice is as large as all of them, so the backward pass grows with N^2.

Shapes: N tokens, n of a chunk, m of several, H hidden size, V vocabulary, K results by token.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Tail = Callable[[torch.Tensor, slice], torch.Tensor]
"""``(logits_nV, which of the N tokens)`` to results (n x K)."""


@contextmanager
def chunked_logits(
    model: nn.Module, head: nn.Module, positions_N: torch.Tensor, tail: Tail, rows: int
) -> Iterator[None]:
    """While open, a forward pass of `model` gives `tail`'s results (N x K) as its ``logits``.

    `positions_N` are the cells of B x L that `head` is applied to, `rows` of them at a time. All is done
    inside the model's own forward pass, where the weights of a sharded model are whole.

    Raises:
        ValueError: (in the pass) the model does not call its head.
    """
    original: Any = model.forward
    body: Any = model.base_model

    def forward(*arguments: Any, **keywords: Any) -> Any:
        hidden: list[torch.Tensor] = []
        seen: list[Any] = []

        def keep(hidden_BLH: torch.Tensor) -> torch.Tensor:
            hidden.append(hidden_BLH.flatten(0, 1).index_select(0, positions_N))
            # Logits of no token: `finish` makes the real ones.
            return hidden_BLH.new_empty(1, 0, 1)

        watching = body.register_forward_hook(lambda module, inputs, output: seen.append(output))
        with watching, patch.object(head, "forward", keep):
            output = original(*arguments, **keywords)
        if not hidden or not seen:
            raise ValueError(f"{type(model).__name__} computes its logits without its output embeddings")

        # The head that reads these is replaced below, so no gradient goes through them.
        states = copy.copy(seen[0])
        states.last_hidden_state = states.last_hidden_state.detach()

        def finish(raw_nV: torch.Tensor, part: slice) -> torch.Tensor:
            # Scales and soft caps are the model's own: its forward pass again, without body and head.
            with (
                patch.object(body, "forward", lambda *_, **__: states),
                patch.object(head, "forward", lambda _: raw_nV[None]),
            ):
                return tail(original(*arguments, **keywords).logits.squeeze(0), part)

        output.logits = _apply(head, hidden[0], finish, rows)
        return output

    with patch.object(model, "forward", forward):
        yield


def _apply(head: nn.Module, hidden_NH: torch.Tensor, finish: Tail, rows: int) -> torch.Tensor:
    parts = [slice(start, start + rows) for start in range(0, len(hidden_NH), rows)]
    if type(head) is nn.Linear:
        results: torch.Tensor = _ChunkedLinear.apply(hidden_NH, head.weight, head.bias, finish, parts)  # type: ignore[no-untyped-call]
        return results
    # Others, such as a head with adapters, by autograd, which makes a gradient of the weights for each chunk.
    chunks = [
        checkpoint(lambda chunk, part: finish(head(chunk), part), chunk, part, use_reentrant=False)
        for chunk, part in zip(torch.split(hidden_NH, rows), parts, strict=True)
    ]
    return torch.cat(chunks)


class _ChunkedLinear(torch.autograd.Function):
    """``finish(hidden @ weight.T + bias)`` by chunks; the gradient of the weight is added up in one place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        finish: Tail,
        parts: list[slice],
    ) -> torch.Tensor:
        """N x K: the results that `finish` makes of each part's logits."""
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        ctx.finish, ctx.parts, device = finish, parts, hidden_NH.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NH.dtype
        with torch.autocast(device, enabled=False):
            hidden_NH, weight_VH, bias_V = _cast(ctx.dtype, hidden_NH, weight_VH, bias_V)
            # No name for a chunk's logits: they are freed before the next ones are made.
            return torch.cat([finish(functional.linear(hidden_NH[part], weight_VH, bias_V), part) for part in parts])

    @staticmethod
    def backward(ctx: Any, grad_NK: torch.Tensor) -> Any:
        """The gradients of hidden states, weight and bias."""
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors
        grad_NH = torch.empty_like(hidden_NH)
        grad_VH = None
        is_added = ctx.needs_input_grad[1] and _adds_in_place(weight_VH)
        if ctx.needs_input_grad[1]:
            # Into the gradient that is there: another of this size would be the largest tensor of the pass.
            grad_VH = weight_VH.grad if is_added else torch.zeros_like(weight_VH)
        grad_V = torch.zeros_like(bias_V) if ctx.needs_input_grad[2] else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            hidden_NH, weight_VH, bias_V = _cast(ctx.dtype, hidden_NH, weight_VH, bias_V)
            chunk = ctx.parts[0].stop * len(weight_VH)
            at_once = max(1, JOINED_ELEMENTS // chunk) if ctx.dtype.itemsize == 2 else 1
            for first in range(0, len(ctx.parts), at_once):
                parts = ctx.parts[first : first + at_once]
                rows = slice(parts[0].start, parts[-1].stop)
                joined_mV = hidden_NH.new_empty(len(hidden_NH[rows]) if len(parts) > 1 else 0, len(weight_VH))
                for part in parts:
                    raw_nV = functional.linear(hidden_NH[part], weight_VH, bias_V).requires_grad_()
                    with torch.enable_grad():
                        results_nK = ctx.finish(raw_nV, part)
                    (grad_mV,) = torch.autograd.grad(results_nK, raw_nV, grad_NK[part])
                    del raw_nV, results_nK
                    if len(parts) > 1:
                        joined_mV[part.start - rows.start : part.stop - rows.start] = grad_mV
                        grad_mV = joined_mV
                grad_NH[rows] = grad_mV @ weight_VH
                if grad_VH is not None:
                    if grad_VH.dtype == grad_mV.dtype:
                        grad_VH.addmm_(grad_mV.T, hidden_NH[rows])
                    else:
                        # By slices: the whole product in 16 bits would be half as large as the gradient.
                        for start in range(0, len(grad_VH), WEIGHT_ROWS):
                            some = slice(start, start + WEIGHT_ROWS)
                            # `+=` would copy the slice onto itself.
                            grad_VH[some].add_(grad_mV[:, some].T @ hidden_NH[rows])
                if grad_V is not None:
                    grad_V += grad_mV.sum(0)
                del grad_mV, joined_mV
        return grad_NH, None if is_added else grad_VH, grad_V, None, None


def _adds_in_place(weight_VH: torch.Tensor) -> bool:
    """Whether autograd would only add to the gradient of the weight: then this may be done here.

    Only for ``backward()``: `torch.autograd.grad` would find the head's part in ``weight.grad``. Hooks that
    autograd calls after it has added are not called for that part then.
    """
    is_plain = weight_VH.is_leaf and not isinstance(weight_VH, DTensor)
    return is_plain and weight_VH.grad is not None and not weight_VH._backward_hooks


JOINED_ELEMENTS = 1 << 28
"""Gradients of logits, in 16 bits, that chunks leave for one product: each product reads and writes the gradient
of the weight, at 1.5 B parameters 2.8 GB, and a small chunk has only 220 rows to do so for."""


WEIGHT_ROWS = 1 << 15
"""Rows of the weight's gradient that are added at once: enough to keep a GPU busy, 100 MB at a hidden size of
1,536."""


def _cast(dtype: torch.dtype, *operands: Any) -> list[Any]:
    """The operands in the dtype of the product, cast once.

    Autocast would do so too, but it would keep the copy for the next call, and this one has no graph.
    """
    return [None if operand is None else operand.to(dtype) for operand in operands]
