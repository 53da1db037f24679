"""Trials of a model before it is trained: the kernel of attention and the layout that training will use.

::

    attention_choices --> kernel --use_attention--> three short sequences in the layout == each one alone?
                            ^-- no, and there is another: the next one               no: the layout is refused

Attention masks what lies beside a sequence. A layer that carries a state from token to token (linear
attention, state spaces, convolutions) takes it over from the sequence before, unless its code knows of
borders, and which models' code does changes from version to version. So it is asked of the model itself, on
its device and in its precision. A mask or a sliding window that a kernel leaves out shows against plain
attention (``eager``), sequence by sequence.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from forebay.models.attention import VARIABLE_LENGTH, attention_choices, attention_of, use_attention
from forebay.models.config import Attention, Precision
from forebay.models.images import Sight
from forebay.train.batch import Layout, TrainBatch
from forebay.train.collate import collate
from forebay.train.config import TrainConfig
from forebay.train.model.forward import response_logprobs
from forebay.train.model.lora import without_adapters
from forebay.train.packing import Packer
from forebay.train.parallel.context import Context
from forebay.train.parallel.sharding import is_sharded

logger = logging.getLogger(__name__)

NUM_TOKENS = 24
"""The length of a sequence: more than the convolutions of known models see, which is four."""
PROMPTS = (8, 6)
"""Tokens of the sequences' prompts: a shorter one is followed by pads, which a mask has to hide."""
WINDOW = 4
"""Tokens that a layer with a sliding window sees in a trial; its own is longer than the sequences."""
ROUNDING = 1e-3
"""Most that passes of other shapes differ in float32, in nats; they differ by about 1e-6."""
HALF_ROUNDING, HALF_SIZE = 0.2, 4.0
"""The same for 16-bit weights, on average; from that size of logits on in proportion: those of 30 lie 1/8 apart."""
STATES = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"}
"""Names in transformers of layers that carry a state. Ranks that share out a sequence lose it in its middle: in
16 bits that may be less, on average, than the rounding of large logits."""
ROUNDINGS = 5.0
"""Most that a kernel in bfloat16 is away from float32, in units of the distance of ``eager`` in bfloat16."""
EXPERTS_LEAK, HALF_EXPERTS_LEAK = 4e-6, 0.02
"""The same where experts see other tokens, in float32 and 16 bits; without, masked tokens count exactly nothing."""


def settle_attention(
    model: nn.Module, config: TrainConfig, device: torch.device, precision: Precision, context: Context | None = None
) -> Attention:
    """Have `model`, on `device`, compute with the kernel that `config` means, and try it; returns its name.

    Raises:
        ConfigError: the kernel is not installed, or does not suit device, precision or model.
        ValueError: the model gives others than its own log probabilities in the config's layout.
    """
    plain: Any = without_adapters(model)
    packed = config.layout == "packed"
    kernels = attention_choices(config.attention, plain.config, device=device, precision=precision, packed=packed)
    if context is not None:
        # The others need masks of their own.
        kernels = [kernel for kernel in kernels if kernel in (*VARIABLE_LENGTH, "sdpa")] or kernels[-1:]
    for kernel in kernels:
        try:
            use_attention(plain, kernel)
            if context is not None:
                over: Any = context.kernel_of(kernel, plain.config, config.parallel.num_tensor)
                use_attention(plain, over)
            check_layout(model, config.layout, device, context)
        except ValueError as error:
            if kernel == kernels[-1]:
                raise
            logger.warning("%s; attention %r is not used", error, kernel)
        else:
            break
    return attention_of(plain)


@torch.no_grad()
def check_layout(model: nn.Module, layout: Layout, device: torch.device, context: Context | None = None) -> None:
    """Try three short sequences of random tokens, also as the ranks of `context` share them out.

    Raises:
        ValueError: the model gives others than its own log probabilities in `layout`.
    """
    plain: Any = without_adapters(model)
    kernel = attention_of(plain)
    if layout == "padded" and kernel in ("sdpa", "eager") and context is None:
        return
    vocabulary = plain.config.get_text_config().vocab_size
    first, other, second = np.random.default_rng(0).integers(0, vocabulary, (3, NUM_TOKENS))

    def logprobs(layout: Layout, *sequences: Any, context: Context | None = None) -> torch.Tensor:
        """The log probabilities of the trained tokens of the last sequence."""
        prompts = PROMPTS[-len(sequences) :]
        batch = TrainBatch.from_examples([(ids[:cut], ids[cut:]) for ids, cut in zip(sequences, prompts, strict=True)])
        pack = Packer(10 * NUM_TOKENS, layout=layout).pack_pad_dispatch(batch).packs[0][0][0]
        # In the order given: what comes before is what may leak.
        tensors = partial(collate, batch, np.sort(pack), pad_token_id=0, device=device, context=context)
        micro = tensors(with_borders=kernel.startswith(VARIABLE_LENGTH), sight=Sight(plain))
        order = torch.from_numpy(np.argsort(micro.token_index)).to(device)
        return response_logprobs(model, micro).logprobs[order][prompts[-1] - NUM_TOKENS :]

    kind = plain.config.model_type
    way = f"layout {layout!r} with attention {kernel!r}"
    beside_it, fix = "its neighbors", "layout 'padded'"
    if context is not None:
        beside_it, fix = "the ranks that share it out", "parallel.context = 1"
        if carried := STATES.intersection(getattr(plain.config.get_text_config(), "layer_types", None) or ()):
            raise ValueError(
                f"parallel.context is wrong for models of type {kind!r}: layers of type {min(carried)!r} carry a "
                f"state from token to token, which ranks do not hand on; use {fix}"
            )
    is_half = torch.is_autocast_enabled(device.type)
    sharded = any(is_sharded(weight) for weight in model.parameters())
    try:
        with _short_windows(plain):
            tried = partial(logprobs, layout, context=context)
            beside, again, moved = (tried(one, second) for one in (first, first, other))
            with torch.enable_grad():
                _try_gradient(model, lambda: tried(first, second).sum(), sharded)
            with _plain_attention(plain):
                rounded = logprobs("padded", second)
                with torch.autocast(device.type, enabled=False):
                    alone = logprobs("padded", second)
                    # States that leak are seen best in the weights' own precision.
                    leak = _distance(logprobs(layout, first, second), logprobs(layout, other, second))
    # A RuntimeError too, but one that says nothing about the model.
    except torch.OutOfMemoryError:
        raise
    # Kernels refuse sizes in ways of their own.
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{way} does not go with models of type {kind!r}: {error}") from error
    # Weights of several ranks are cast as they are gathered, with autocast or without.
    has_half_weights = next(model.parameters()).dtype != torch.float32 or (sharded and is_half)
    has_experts = any("expert" in name for name, _ in model.named_parameters())
    noise = _distance(beside, again)
    leaks, half_leaks = (EXPERTS_LEAK, HALF_EXPERTS_LEAK) if has_experts else (noise, noise)
    rounding = HALF_ROUNDING if has_half_weights else ROUNDING + ROUNDINGS * _distance(rounded, alone)
    apart = _distance(beside, alone)
    if has_half_weights:
        apart = float(((beside - alone).abs() / (alone.abs() / HALF_SIZE).clamp(min=1)).mean())
    for difference, limit in (
        (leak, half_leaks if has_half_weights else leaks),
        (_distance(beside, moved), half_leaks if is_half or has_half_weights else leaks),
        (apart, rounding),
    ):
        # So that NaN is refused too.
        if not difference <= limit:
            raise ValueError(
                f"{way} is wrong for models of type {kind!r}: a sequence's log probabilities change with "
                f"{beside_it} (by {difference:.2g}), as where layers carry a state from token to token; "
                f"use {fix}"
            )


def _try_gradient(model: nn.Module, total: Callable[[], Any], sharded: bool) -> None:
    """Of one small weight below the attention of all layers, which need no gradient themselves."""
    # Not of a tower for images: there are none.
    plain: Any = without_adapters(model)
    trained = [weight for weight in plain.get_decoder().parameters() if weight.requires_grad]
    # A reference has none.
    if not trained:
        return
    if sharded:
        # Between passes a rank holds slices only, so the gradient of one weight alone cannot be asked for.
        total().backward()
        model.zero_grad()
    else:
        small = next((weight for weight in trained if weight.ndim == 1), trained[0])
        torch.autograd.grad(total(), small)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """`model` computes with ``eager``, if it can be switched."""
    kernel = attention_of(model)
    try:
        with suppress(ValueError):
            use_attention(model, "eager")
        yield
    finally:
        use_attention(model, kernel)


@contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Layers with a sliding window see `WINDOW` tokens, so that short sequences show if a kernel has it."""
    holders: Sequence[Any] = (model.config.get_text_config(), *model.modules())
    with ExitStack() as stack:
        for holder in holders:
            if type(vars(holder).get("sliding_window")) is int:
                stack.enter_context(patch.object(holder, "sliding_window", WINDOW))
        yield
