"""Sequences over several ranks: each has a slice of their tokens, and all tokens for some heads of attention.

::

    row of L tokens --> rank i has tokens i L/c to (i + 1) L/c - 1, in every layer but attention
    attention       H heads, L/c tokens --all-to-all--> H/c heads, L tokens --kernel, all-to-all--> as before
    results         `Context.join`: the N trained tokens, for each rank of the group

The kernel is the one that one rank would use: it sees whole rows, with their masks or borders (Jacobs et al.
2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models"). Layers that carry a state from token to token do not learn of the slice
before; the trial at the start of training (`forebay.train.model.trial`) refuses such models.

Shapes: B rows, L columns, c ranks, H heads, D numbers of a head, N trained tokens, n on this rank.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.distributed._functional_collectives import all_to_all_single_autograd

from forebay.config import ConfigError
from forebay.models.attention import VARIABLE_LENGTH

Ints = NDArray[np.int64]


class Context:
    """This rank's place among the ranks of `group` that see the same sequences.

    A pass with it is made by all of them together, with the same micro-batch.
    """

    def __init__(self, group: distributed.ProcessGroup, size: int) -> None:
        self.group = group
        self.size = size
        self.index = distributed.get_rank(group)

    def kernel_of(self, kernel: str, model_config: Any, tensor: int) -> str:
        """The name of `kernel` over these ranks, made known to transformers.

        Raises:
            ConfigError: heads cannot be shared out, or transformers has no function for the kernel.
        """
        from transformers import AttentionInterface

        text = model_config.get_text_config()
        heads = text.num_attention_heads // tensor
        groups = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // tensor
        if heads % self.size or (groups % self.size and self.size % groups) or kernel == "eager":
            raise ConfigError(
                f"train.parallel.context = {self.size} does not go with {heads} heads, {groups} key/value "
                f"heads and attention {kernel!r}: every rank gets as many whole heads, and not by 'eager'"
            )
        name = f"{kernel}_over_ranks"
        inner = AttentionInterface()[kernel]

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
            """B x L/c x H x D, of states that are B x H x L/c x D."""
            # Where ranks are more than key/value heads, several of them get copies of one.
            if (repeats := self.size // key.shape[1]) > 1:
                key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            query, key, value = map(self._exchange, (query, key, value))
            # Kernels read this number from the module, which has that of the heads before the exchange.
            own = copy.copy(module)
            own.num_key_value_groups = query.shape[1] // key.shape[1]
            # They are of the slice; masks and borders are of whole rows.
            named.pop("position_ids", None)
            if kernel not in VARIABLE_LENGTH:
                mask = self._mask(query, named.get("sliding_window"))
            output, _ = inner(own, query, key, value, mask, **named)
            return self._exchange(output), None

        # Without an entry for its mask: transformers would make one of the slice.
        AttentionInterface.register(name, attend)
        return name

    def begin(self, position_ids_BL: torch.Tensor, *, packed: bool) -> None:
        """Before a pass: the positions in whole rows, which hold several sequences if they are `packed`.

        They stand until the next one, for layers that the backward pass computes once more.
        """
        self._masks: dict[int | None, torch.Tensor] = {}
        self._sequences_BL = None
        if packed:
            self._sequences_BL = (position_ids_BL.diff(prepend=position_ids_BL[:, :1] - 1) != 1).cumsum(-1)

    def _mask(self, query: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """B or 1 x 1 x L x L: what each token sees; None: all before it. All layers of a pass share it."""
        if self._sequences_BL is None and window is None:
            return None
        if window not in self._masks:
            here_L = torch.arange(query.shape[2], device=query.device)
            before_1LL = (here_L[:, None] - here_L)[None]
            seen_BLL = (before_1LL >= 0) & (before_1LL < (window or len(here_L)))
            if self._sequences_BL is not None:
                seen_BLL = seen_BLL & (self._sequences_BL[:, :, None] == self._sequences_BL[:, None])
            self._masks[window] = seen_BLL[:, None]
        return self._masks[window]

    def _exchange(self, states: Any) -> torch.Tensor:
        """B x H x L/c x D to B x H/c x L x D; or, with heads behind, B x L x H/c x D to B x L/c x H x D."""
        parts = states.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        # Part i goes to rank i; what comes from rank i is part i.
        parts = all_to_all_single_autograd(parts, None, None, self.group)
        return parts.movedim(0, 2).flatten(2, 3)

    def split(self, length: int, cells_N: Ints) -> tuple[slice, Ints, Ints]:
        """This rank's columns, which of `cells_N` (counted through B x L) are in them, and where there."""
        width = length // self.size
        own_n = np.flatnonzero(cells_N % length // width == self.index)
        columns = slice(self.index * width, (self.index + 1) * width)
        return columns, own_n, (cells_N // length * width + cells_N % width)[own_n]

    def join(self, results_nK: torch.Tensor, own_n: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """N x K: the results of all ranks, of which `own_n` are this one's and have its gradient.

        Every rank computes the same loss of them, so each rank's gradient counts once.
        """
        own_NK = results_nK.new_zeros(num_tokens, results_nK.shape[1]).index_copy(0, own_n, results_nK)
        all_NK = own_NK.detach().clone()
        distributed.all_reduce(all_NK, group=self.group)
        return own_NK + (all_NK - own_NK.detach())


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of the cells of a pass that a context group makes together."""

    context: Context
    columns: slice
    """This rank's part of the whole row's length, L."""
    own: torch.Tensor
    """int64: which of the N trained tokens they predict."""


def even_columns(cells_BL: Ints, filler: int, context: Context | None) -> Ints:
    """Equally many columns for every rank of the group, if there is one."""
    missing = -cells_BL.shape[1] % (1 if context is None else context.size)
    return np.pad(cells_BL, ((0, 0), (0, missing)), constant_values=filler)
