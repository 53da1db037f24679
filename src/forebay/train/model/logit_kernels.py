"""Log probability and entropy of each row of logits on a GPU, and the gradient of the former, in one read each.

torch's own operations read and write some 90 bytes for each logit of a train step, these four, and no float32
copy of the logits exists. Sums are float32.

Shapes: N tokens, V vocabulary.
"""

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
        logits_NV = logits_NV.contiguous()
        if not known:
            known += scale_N.new_empty(len(scale_N), 2), torch.empty_like(scale_N)
            _launch("statistics", (len(scale_N),), logits_NV, targets_N, scale_N, *known)
        results_N2: torch.Tensor = known[0]
        ctx.save_for_backward(logits_NV, targets_N, scale_N, known[1])
        return results_N2.clone()

    @staticmethod
    def backward(ctx: Any, grad_N2: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The gradient of the logits, in their dtype."""
        logits_NV, targets_N, scale_N, normalizer_N = ctx.saved_tensors
        factor_N, grad_NV = grad_N2[:, 0] * scale_N, torch.empty_like(logits_NV)
        blocks = len(logits_NV), -(-logits_NV.shape[1] // BLOCK)
        _launch("gradient", blocks, logits_NV, targets_N, scale_N, normalizer_N, factor_N, grad_NV)
        return grad_NV, None, None, None


def _launch(kernel: str, grid: tuple[int, ...], logits_NV: torch.Tensor, *others: torch.Tensor) -> None:
    from forebay.train.model import triton_kernels

    with torch.cuda.device(logits_NV.device):
        getattr(triton_kernels, kernel)[grid](logits_NV, *others, logits_NV.shape[1], BLOCK, num_warps=8)
