"""Parameters as bytes: how both ends of a hand-over agree on what lies where.

::

    lay_out(weights) --> layout, plain data --write--> one stretch of bytes (shared memory) --views--> weights
    to_plain(weights) --> arrays over the same memory, with name, dtype and shape --to_tensors--> weights

Every parameter of a layout starts at a multiple of 64 bytes, so that a view of it has the alignment of any
dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from forebay.models.starting_weights import Weights

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""A cache line; any dtype's alignment divides it."""

Layout = Sequence[tuple[str, str, Sequence[int], int, int]]
"""Of each parameter: name, torch's name of the dtype, shape, first byte, byte after the last."""

PlainWeight = tuple[str, str, tuple[int, ...], NDArray[np.uint8]]
"""Name, torch's name of the dtype, shape, bytes."""


def lay_out(weights: Weights) -> tuple[Layout, int]:
    """Where each of these parameters is to lie, and how many bytes they take in all.

    >>> lay_out([("bias", torch.zeros(3)), ("scale", torch.ones(2, 2))])
    ([('bias', 'float32', (3,), 0, 12), ('scale', 'float32', (2, 2), 64, 80)], 128)
    """
    layout, start = [], 0
    for name, tensor in weights:
        layout.append((name, _name_of(tensor), tuple(tensor.shape), start, start + tensor.nbytes))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return layout, start


def views(layout: Layout, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters inside `data` (uint8), without a copy."""
    import torch

    for name, dtype, shape, start, stop in layout:
        yield name, data[start:stop].view(getattr(torch, dtype)).view(tuple(shape))


def write(layout: Layout, data: torch.Tensor, weights: Weights) -> None:
    """Copy `weights`, from any device, to their places in `data`."""
    for (name, place), (own_name, tensor) in zip(views(layout, data), weights, strict=True):
        assert name == own_name, f"{own_name} comes where {name} was laid out"
        place.copy_(tensor.detach())


def to_plain(weights: Weights) -> list[PlainWeight]:
    """The same as arrays over the same memory, as far as it is this machine's main memory."""
    import torch

    return [
        (
            name,
            _name_of(tensor),
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
            # That it must not be written to is known: an engine that takes weights over copies them.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            tensor = torch.from_numpy(data)
        kind = getattr(torch, dtype)
        # An empty array has no stride that another dtype could be seen with.
        yield name, tensor.view(kind).reshape(shape) if data.size else torch.empty(shape, dtype=kind)


def _name_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
