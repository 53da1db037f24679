"""Weights on their way through Ray's object store: the trainer's memory is copied into it once.

::

    parameters --to_plain--> [(name, dtype, shape, bytes)] --object store--> to_tensors: views of it
                             out of band: no pickle of the bytes            on one machine: no copy

The object is a result of a call that the run's own process made, and so is that process's: it stays when the
trainer ends, and an engine that starts again gets it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

PlainWeight = tuple[str, str, tuple[int, ...], NDArray[np.uint8]]
"""Name, torch's name of the dtype, shape, bytes."""


@dataclass(frozen=True, eq=False)
class Published:
    """Weights in the object store, after train step `model_step`."""

    ref: Any
    model_step: int


def to_plain(weights: Iterable[tuple[str, torch.Tensor]]) -> list[PlainWeight]:
    """The same as arrays over the same memory, as far as it is this machine's main memory."""
    import torch

    return [
        (
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(),
        )
        for name, tensor in weights
    ]


def to_tensors(weights: Iterable[PlainWeight]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, over the memory of the arrays: not to be written to."""
    import torch

    for name, dtype, shape, data in weights:
        with warnings.catch_warnings():
            # That it must not be written to is known, and whoever takes weights over copies them.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            tensor = torch.from_numpy(data)
        kind = getattr(torch, dtype)
        # Nothing cannot be seen as something of another size.
        yield name, tensor.view(kind).reshape(shape) if data.size else torch.empty(shape, dtype=kind)
