"""Taking over a trainer's parameters by name, all or nothing.

::

    (name, tensor), ... --check names and shapes--> copy into the model's own parameters
                              | anything wrong: ValueError, nothing copied
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_NAMED_IN_ERRORS = 3
"""Enough to see a pattern (a prefix, another model), few enough to read."""


def copy_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy `weights` into the parameters and persistent buffers of `model` that have these names.

    Every parameter must be given, a tied one under any of its names; buffers may be left out. Tensors may be
    on another device and of another dtype.

    Raises:
        ValueError: names are missing or unknown, or a shape differs; then nothing has been copied.
    """
    own: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    given = dict(weights)
    if unknown := [name for name in given if name not in own]:
        raise ValueError(f"the model has no {_some(unknown)}; its names look like {_some(list(own))}")
    covered = {id(own[name]) for name in given}
    if missing := [name for name, _ in model.named_parameters() if id(own[name]) not in covered]:
        raise ValueError(f"no weights were given for {_some(missing)}")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but the model's is {tuple(own[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED_IN_ERRORS])
    return f"{shown} and {len(names) - _NAMED_IN_ERRORS} more" if len(names) > _NAMED_IN_ERRORS else shown
