"""Programs of the GPU for `forebay.train.model.logit_kernels`; importing this needs Triton.

Tensors are contiguous: logits N x V, results N x 2, all others N.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def statistics(logits, targets, scales, results, normalizers, num_words: tl.constexpr, BLOCK: tl.constexpr):
    """One row: sums over ``exp(x - largest so far)``, lane by lane, as Milakov & Gimelshein 2018 add them up."""
    row = tl.program_id(0).to(tl.int64)
    start, scale = logits + row * num_words, tl.load(scales + row)
    # Not -inf, from which -inf cannot be subtracted.
    highest = tl.full((BLOCK,), -1e30, tl.float32)
    total, weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_words, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(start + columns, mask=columns < num_words, other=float("-inf")).to(tl.float32) * scale
        above = tl.maximum(highest, x)
        shrink, e = tl.exp(highest - above), tl.exp(x - above)
        total = total * shrink + e
        weighted = weighted * shrink + tl.where(e > 0, e * x, 0.0)
        highest = above
    top = tl.max(highest, 0)
    shrink = tl.exp(highest - top)
    whole = tl.sum(total * shrink, 0)
    normalizer = top + tl.log(whole)
    target = tl.load(start + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(results + 2 * row, target - normalizer)
    tl.store(results + 2 * row + 1, normalizer - tl.sum(weighted * shrink, 0) / whole)
    tl.store(normalizers + row, normalizer)


@triton.jit
def gradient(logits, targets, scales, normalizers, factors, gradients, num_words: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a row: ``d logprob[target] / d logits = onehot(target) - p``, times its factor."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, places = columns < num_words, row * num_words + columns
    x = tl.load(logits + places, mask=inside, other=0.0).to(tl.float32) * tl.load(scales + row)
    onehot = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    share = onehot - tl.exp(x - tl.load(normalizers + row))
    tl.store(gradients + places, share * tl.load(factors + row), mask=inside)
