"""Weights split over ranks (FSDP2): splitting them, and seeing them whole again.

A model that no `shard` was called on passes through everything here unchanged, so that one code path serves
one process and many.

::

    model --shard--> every layer, and the rest, is a bucket; each rank holds a slice of each bucket's weights
    bucket --gathered--> its weights are whole while the block lasts      whole(tensor): a copy, whole
    whole tensor --slice_like--> the slice that belongs here              fill(slice, whole tensor)

`gathered`, `whole` and every forward or backward pass of a sharded model are collective: all ranks make the
same calls in the same order, or wait for each other until the time limit of the process group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the weights of `model` over the ranks of the one-dimensional `mesh`, in place.

    Gradients are summed over ranks, not averaged: token weights are already of the whole mini-batch. The root
    is freed after the forward pass like every layer is, because whole weights that stay behind a pass without
    gradient would be stale after the next optimizer step.
    """
    from torch.distributed.fsdp import fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*layers, model):
        sharded: Any = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        # With a factor alone torch asks for a premultiplied sum, which gloo lacks.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a slice of a larger one."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of `tensor`, which may be a slice."""
    if not is_sharded(tensor):
        return tensor
    sliced: Any = tensor
    full: torch.Tensor = sliced.full_tensor()
    return full


def slice_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The slice of `full` that belongs where the slice `like` is; `full` itself if `like` is whole."""
    if not is_sharded(like) or full.shape != like.shape:
        return full
    from torch.distributed.tensor import distribute_tensor

    target: Any = like
    # Every rank has all of it: nothing needs to be sent.
    return distribute_tensor(
        full.to(target.device, target.dtype), target.device_mesh, target.placements, src_data_rank=None
    )


def fill(target: torch.Tensor, full: torch.Tensor) -> None:
    """Overwrite `target`, a slice or whole, with (its part of) `full`."""
    with torch.no_grad():
        target.copy_(slice_like(full, target))


def buckets(model: nn.Module) -> list[nn.Module]:
    """The modules whose weights are gathered together; the model itself if it is not sharded."""
    return [module for module in model.modules() if hasattr(module, "unshard")] or [model]


@contextmanager
def gathered(bucket: nn.Module) -> Iterator[None]:
    """While open, the weights of `bucket`, without those of buckets inside it, are whole.

    They are shown in memory that is used again afterwards: copy what must outlast the block.
    """
    sharded: Any = bucket
    if not hasattr(bucket, "unshard"):
        yield
        return
    sharded.unshard()
    try:
        yield
    finally:
        sharded.reshard()


def plain_class(model: nn.Module) -> type[nn.Module]:
    """The class that `model` had before `shard`, which derives a class of its own from it."""
    return next(c for c in type(model).__mro__ if not hasattr(c, "unshard"))
