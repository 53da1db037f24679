"""Where each parameter lies in one stretch of bytes, and how both ends of a hand-over agree on it.

::

    weights --layout_of--> WeightLayout --write--> bytes --(shared memory)--> bytes --views--> weights
                               |                                                            ^
                               +--- as plain data, beside them: to_message, from_message ---+

Every parameter starts at a multiple of 64 bytes, so that a view of it has the alignment of any dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""A cache line; any dtype's alignment divides it."""


@dataclass(frozen=True)
class WeightSpec:
    """One parameter."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Its first byte."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class WeightLayout:
    """All parameters, in order.

    >>> layout = layout_of([("bias", torch.zeros(3)), ("scale", torch.ones(2, 2))])
    >>> [(spec.name, spec.start) for spec in layout.specs], layout.num_bytes
    ([('bias', 0), ('scale', 64)], 128)
    """

    specs: tuple[WeightSpec, ...]
    num_bytes: int

    def view(self, data: torch.Tensor, spec: WeightSpec) -> torch.Tensor:
        """The parameter inside `data` (uint8, `num_bytes`), without a copy."""
        raw = data[spec.start : spec.start + spec.num_bytes]
        return raw.view(spec.dtype).view(spec.shape)

    def views(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters inside `data`, without a copy."""
        return ((spec.name, self.view(data, spec)) for spec in self.specs)

    def write(self, data: torch.Tensor, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy `weights`, from any device, to their places in `data`."""
        with torch.no_grad():
            for spec, (name, tensor) in zip(self.specs, weights, strict=True):
                assert spec.name == name, f"{name} comes where {spec.name} was laid out"
                self.view(data, spec).copy_(tensor)

    def to_message(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Plain data from which `from_message` makes the same layout."""
        return [(spec.name, str(spec.dtype).removeprefix("torch."), spec.shape) for spec in self.specs]


def layout_of(weights: Iterable[tuple[str, torch.Tensor]]) -> WeightLayout:
    """The layout of these parameters."""
    return _lay_out((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights)


def from_message(message: Iterable[tuple[str, str, Iterable[int]]]) -> WeightLayout:
    """The layout that `WeightLayout.to_message` described."""
    return _lay_out((name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in message)


def _lay_out(parameters: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> WeightLayout:
    specs, start = [], 0
    for name, dtype, shape in parameters:
        spec = WeightSpec(name, dtype, shape, start)
        specs.append(spec)
        start += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return WeightLayout(tuple(specs), start)
