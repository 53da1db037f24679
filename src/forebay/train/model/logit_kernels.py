"""Log probability and entropy of each row of logits on a GPU, and the gradient of the former, in one read each.

torch's own operations read and write some 90 bytes for each logit of a train step, these four, and no float32
copy of the logits exists. Sums are float32.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

BLOCK = 4096
"""Logits that a program of the GPU looks at together."""


def has_kernels(logits: torch.Tensor) -> bool:
    """Whether there are kernels for these logits, or for others on their device."""
    is_plain = logits.dtype != torch.float64 and not isinstance(logits, DTensor)
    return logits.device.type == "cuda" and is_plain and _can_launch(logits.device)


@cache
def _can_launch(device: torch.device) -> bool:
    """Tried once: Triton may be missing, or what it builds with (a C compiler, Python's headers)."""
    try:
        few_NV = torch.zeros(1, 2, device=device)
        TargetLogprobs.apply(few_NV, few_NV.new_zeros(1, dtype=torch.int64), few_NV.new_ones(1), [])  # type: ignore[no-untyped-call]
    # Of what kind is up to Triton and the compiler.
    except Exception as error:
        logger.warning("the output head takes longer: its kernels cannot be built here: %s", error)
        return False
    return True


class TargetLogprobs(torch.autograd.Function):
    """float32, N x 2: log probability of the target, which has a gradient, and entropy, which has none."""

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: Any, scale_N: Any, known: list[Any]) -> torch.Tensor:
        """Of logits times `scale_N` (float32); `known` as of `forebay.train.model.forward`."""
        from forebay.train.model import triton_kernels

        logits_NV = logits_NV.contiguous()
        num_rows, num_words = logits_NV.shape
        if not known:
            known += scale_N.new_empty(num_rows, 2), torch.empty_like(scale_N)
            with torch.cuda.device(logits_NV.device):
                triton_kernels.statistics[(num_rows,)](
                    logits_NV, targets_N, scale_N, *known, num_words, BLOCK, num_warps=8
                )
        normalizer_N: torch.Tensor = known[1]
        results_N2: torch.Tensor = known[0]
        ctx.save_for_backward(logits_NV, targets_N, scale_N, normalizer_N)
        return results_N2.clone()

    @staticmethod
    def backward(ctx: Any, grad_N2: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The gradient of the logits, in their dtype."""
        from forebay.train.model import triton_kernels

        logits_NV, targets_N, scale_N, normalizer_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        num_rows, num_words = logits_NV.shape
        factor_N = grad_N2[:, 0] * scale_N
        with torch.cuda.device(logits_NV.device):
            triton_kernels.gradient[(num_rows, -(-num_words // BLOCK))](
                logits_NV, targets_N, scale_N, normalizer_N, factor_N, grad_NV, num_words, BLOCK, num_warps=8
            )
        return grad_NV, None, None, None
