"""Tells transformers whether a row is packed, so that it need not ask the device.

transformers finds the borders of packed sequences in the position ids of every pass, and asks the device
whether there are any. A process that queues work for a GPU then waits at each pass until the GPU has done all
of it. The answer is known here, from the layout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch


@contextmanager
def told_borders(packed: bool) -> Iterator[None]:
    """While open, rows of this thread's passes are taken for several sequences (`packed`), or for one."""
    _teach()
    before = _packed.set(packed)
    try:
        yield
    finally:
        _packed.reset(before)


_packed = ContextVar[bool | None]("packed", default=None)
"""None, as in every new thread: nothing is known, and transformers looks."""


@cache
def _teach() -> None:
    """Put a function that knows in the place of the one that looks; other threads keep the latter."""
    from transformers import masking_utils

    look = masking_utils.find_packed_sequence_indices

    def find(position_ids_BL: torch.Tensor) -> torch.Tensor | None:
        """B x L: the number of each token's sequence in its row; None where every row is one."""
        if (packed := _packed.get()) is None:
            return look(position_ids_BL)  # type: ignore[no-any-return]
        if not packed:
            return None
        # As if one token came before, so that a row's first sequence has the number 0.
        steps_BL = torch.diff(position_ids_BL, prepend=position_ids_BL[:, :1] - 1, dim=-1)
        return (steps_BL != 1).cumsum(-1)

    masking_utils.find_packed_sequence_indices = find
