"""A trainer's weights that are read when they are needed, not copied before.

::

    trainer: train step, moves between device and CPU --+-- one turn at a time
    reader:  live.copy_to(layout, memory) --------------'   all or some of them, from several ranks at once

Trainers and engines do not know each other, so what both must agree on is here.
"""

import contextlib
from collections.abc import Callable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from forebay.io.shared import Layout
from forebay.models.config import Precision
from forebay.models.starting_weights import Weights

if TYPE_CHECKING:
    import torch


def cast(weights: Weights, dtype: Precision | None) -> "Iterator[tuple[str, torch.Tensor]]":
    """`weights` as engines hold them: floating point in `dtype`, copied only where it is in another.

    None: as they are.
    """
    import torch

    for name, tensor in weights:
        yield name, tensor.detach().to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor


class Source(Protocol):
    """The model that is trained, on one rank or several."""

    def sizes(self) -> Weights:
        """Tensors of the weights' names, dtypes and shapes, without content."""

    def copy_weights(self, layout: Layout, memory: Any) -> None:
        """Put the weights that are laid out, cast as they are there, into the bytes of ``memory.data``.

        Ranks take a `MemoryFile` (`forebay.io.shared`), which they map.
        """


class LiveWeights:
    """All weights of a model that is being trained, as they are at the moment of reading.

    Invariant: while some are copied, no train step changes them.

    ::

        weights = LiveWeights(learner, "bfloat16", Lock(), int)
        layout, num_bytes = lay_out(weights.sizes())
        weights.copy_to(layout, MemoryFile(num_bytes))  # 0
    """

    def __init__(self, source: Source, dtype: Precision | None, turn: Lock, step: Callable[[], int]) -> None:
        """Engines hold those of floating point in `dtype`; None: as the source has them.

        Code that changes or moves the weights holds `turn`; `step()` is their current model step.
        """
        self._source, self._dtype, self._turn = source, dtype, turn
        self.step = step
        """Their model step, until the next train step changes them."""
        self._counting, self._num_readers = Lock(), 0

    def sizes(self) -> Weights:
        """Tensors of the names, dtypes and shapes that engines have, without content."""
        return cast(self._source.sizes(), self._dtype)

    def copy_to(self, layout: Layout, memory: Any) -> int:
        """Put the weights that are laid out into `memory`, as of `Source`; the step that they are of.

        Waits for a train step that is under way.
        """
        with self.held():
            self._source.copy_weights(layout, memory)
            return self.step()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While open, in whatever thread, the next train step waits; several may hold them at once."""
        with self._counting:
            if not self._num_readers:
                self._turn.acquire()
            self._num_readers += 1
        try:
            yield
        finally:
            with self._counting:
                self._num_readers -= 1
                if not self._num_readers:
                    self._turn.release()
