"""Whether a model computes a sequence in a layout as it does alone; asked of the model itself, at the start.

::

    second alone, padded  --+-- equal?   first + second in one pass --+-- equal?
    first + second        --+            other + second in one pass --+

Attention masks what lies beside a sequence. A layer that carries a state from token to token (linear
attention, state spaces, convolutions) takes it over from the sequence before, unless its code knows of
borders. Which models' code does changes from version to version, so it is tried, and not looked up in a list.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from forebay.train.batch import Layout, TrainBatch
from forebay.train.collate import collate
from forebay.train.model.forward import response_logprobs
from forebay.train.packing import Packer

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
