"""A trainer's weights that are read when they are needed, not copied before.

::

    trainer: train step, moves between device and CPU  --+-- one turn at a time
    reader:  with live.reading() as step: next(weights) -+
             live.copy_to(layout, memory) ---------------'   also from several ranks at once

Trainers and engines do not know each other, so what both must agree on is here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forebay.io.shared import Layout, Memory, write
from forebay.models.config import Precision
from forebay.models.starting_weights import Weights

if TYPE_CHECKING:
    import torch


def cast(weights: Weights, dtype: Precision) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` as engines hold them: floating point in `dtype`, copied only where it is in another."""
    import torch

    for name, tensor in weights:
        yield name, tensor.detach().to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


class LiveWeights:
    """All weights of a model that is being trained, as they are at the moment of reading.

    Invariants: while a block of `reading` is open, no train step changes them; every `read` begins anew, and
    so does every loop over this object, which gives them in `dtype`.

    ::

        weights = LiveWeights(model.named_parameters, "bfloat16", threading.Lock(), int)
        with weights.reading() as step:
            step, next(iter(weights.read()))[0]  # (0, 'model.embed_tokens.weight')
    """

    def __init__(
        self,
        read: Callable[[], Weights],
        dtype: Precision,
        turn: threading.Lock,
        step: Callable[[], int],
        *,
        sizes: Callable[[], Weights] | None = None,
        copy: Callable[[Layout, Any], None] | None = None,
    ) -> None:
        """Code that changes or moves the weights holds `turn`; `step()` is their current model step.

        `sizes` gives tensors without content, of the weights' names, dtypes and shapes, and `copy` puts some
        of the weights into memory; left out, both is done by reading.
        """
        self.read = read
        self.dtype = dtype
        """In which engines hold those of floating point; `read` gives them as the trainer has them."""
        self.step = step
        """Their model step, until the next train step changes them."""
        self._turn, self._sizes, self._copy = turn, sizes or read, copy or self._copy_by_reading

    def sizes(self) -> Weights:
        """Tensors of the names, dtypes and shapes that a loop over this object has, without content."""
        return cast(((name, tensor.to("meta")) for name, tensor in self._sizes()), self.dtype)

    def copy_to(self, layout: Layout, memory: Memory) -> int:
        """Put those that are laid out, in the order of `sizes`, into `memory`; the step that they are of."""
        with self.reading() as step:
            # Ranks write their own blocks there; reading would first collect all weights elsewhere.
            self._copy(layout, memory)
        return step

    def _copy_by_reading(self, layout: Layout, memory: Memory) -> None:
        names = {name for name, *_ in layout}
        # Not cast before: writing casts, to the dtypes that were laid out.
        write(layout, memory.data, ((name, tensor) for name, tensor in self.read() if name in names))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return cast(self.read(), self.dtype)

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Wait for a train step that is under way, and keep off the next; the step of the weights."""
        with self._turn:
            yield self.step()
