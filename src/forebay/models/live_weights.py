"""A trainer's weights that are read when they are needed, not copied before.

::

    trainer: train step, moves between device and CPU  --+-- one turn at a time
    reader:  with live.reading() as step: next(weights) -+

Trainers and engines do not know each other, so what both must agree on is here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forebay.models.config import Precision
from forebay.models.starting_weights import Weights

if TYPE_CHECKING:
    import torch


class LiveWeights:
    """All weights of a model that is being trained, as they are at the moment of reading.

    Invariants: while a block of `reading` is open, no train step changes them; every `read` begins anew, and
    so does every loop over this object, which gives them in `dtype`.

    >>> weights = LiveWeights(model.named_parameters, "bfloat16", threading.Lock(), int)      # doctest: +SKIP
    >>> with weights.reading() as step:                                             # doctest: +SKIP
    ...     step, next(iter(weights.read()))[0]
    (0, 'model.embed_tokens.weight')
    """

    def __init__(
        self, read: Callable[[], Weights], dtype: Precision, turn: threading.Lock, step: Callable[[], int]
    ) -> None:
        """`turn` is held by whoever changes or moves the weights; `step` is theirs now."""
        self.read = read
        self.dtype = dtype
        """In which engines hold those of floating point; `read` gives them as the trainer has them."""
        self._turn, self._step = turn, step

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        kind = getattr(torch, self.dtype)
        for name, tensor in self.read():
            yield name, tensor.detach().to(kind) if tensor.is_floating_point() else tensor.detach()

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Wait for a train step that is under way, and keep off the next; the step of the weights."""
        with self._turn:
            yield self._step()
