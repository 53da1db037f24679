"""Slices of weights (DTensors) and their gradients, on a rank.

::

    whole(slice)      all of one tensor, for all ranks, which ask for the same in the same order
    own_block         of it, to a checkpoint          to_fill, put_back    from it
    sum_replicated    gradients of weights that every rank has whole      clip_gradients   of all kinds

A tensor that is not sharded passes through everything here unchanged: one code path serves one process
and many. `whole` and every pass of a sharded model are collective: all ranks make the same calls in the same
order, or wait for each other until the time limit of the process group.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

REPLICA, SHARD, TENSOR = "replica", "fsdp", "tensor"
"""The dimensions of a mesh. Ranks that differ in the last alone see the same sequences. peft knows the second
by its name: layers of weights that are split over it alone compute whole outputs."""
CONTEXT = "context"
"""A part of the second dimension."""


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a slice of a larger one."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of `tensor`, which may be a slice."""
    if not is_sharded(tensor):
        return tensor
    sliced: Any = tensor
    # One that is kept in the CPU's memory crosses to the others over the devices.
    full: torch.Tensor = sliced.to(sliced.device_mesh.device_type).full_tensor()
    return full


def to_fill(tensor: torch.Tensor) -> torch.Tensor:
    """The place for a rank's `own_block` of such a tensor: itself, or memory that has to be `put_back`.

    No rank waits for another here.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if (blocks := _blocks(tensor)) is None:
        return tensor
    sliced: Any = tensor
    shape, _ = compute_local_shape_and_global_offset(tensor.shape, sliced.device_mesh, blocks)
    local = torch.empty(shape, dtype=tensor.dtype, device=sliced.to_local().device)
    return DTensor.from_local(
        local, sliced.device_mesh, blocks, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _blocks(tensor: torch.Tensor) -> list[Any] | None:
    """How `tensor` lies on the ranks once each has one block of the whole; None: it does already.

    Where tensor parallelism and FSDP split the same dimension, FSDP's slice of a slice is one block. Of a fused weight
    a rank has a slice of each part: several blocks, which ``torch.distributed.checkpoint`` would take for one.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    sliced: Any = tensor
    placements = getattr(tensor, "placements", ())

    def block(number: int, placement: Any) -> Any:
        if not isinstance(placement, _StridedShard):
            return placement
        # The stride with which FSDP notes that later dimensions of the mesh have split before it.
        later = zip(placements[number + 1 :], sliced.device_mesh.shape[number + 1 :], strict=True)
        is_one = placement.split_factor == math.prod(size for p, size in later if p == Shard(placement.dim))
        return placement if is_one else Shard(placement.dim)

    blocks = [block(number, placement) for number, placement in enumerate(placements)]
    return None if blocks == list(placements) else blocks


def own_block(tensor: torch.Tensor) -> tuple[tuple[slice, ...], torch.Tensor]:
    """Where in the whole the block of `tensor` lies that this rank holds, and the block.

    Of several ranks with the same block the others have an empty one. Ranks make it together.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape: Sequence[int] = tensor.shape
    starts: Sequence[int] = [0] * tensor.ndim
    # A tensor that is no slice is whole on every rank; the first one's counts.
    is_copy = distributed.is_initialized() and distributed.get_rank() > 0
    if is_sharded(tensor):
        sliced: Any = tensor
        if (blocks := _blocks(tensor)) is not None:
            sliced = sliced.redistribute(placements=blocks)
        mesh, placements = sliced.device_mesh, sliced.placements
        shape, starts = compute_local_shape_and_global_offset(sliced.shape, mesh, placements)
        is_copy = any(p.is_replicate() and c for p, c in zip(placements, mesh.get_coordinate(), strict=True))
        tensor = sliced.to_local()
    if is_copy:
        # Not a view, with which all that it looks at would be sent.
        return (slice(0, 0),), tensor.reshape(-1, *shape[1:])[:0].clone()
    return tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True)), tensor


def put_back(target: torch.Tensor, block: torch.Tensor) -> None:
    """Overwrite `target` with what was read into `to_fill` of it."""
    sliced: Any = block
    with torch.no_grad():
        if block is not target:
            target.copy_(sliced.redistribute(placements=getattr(target, "placements", ())))


def sum_replicated(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Add up, over ranks that saw different sequences, the gradients of weights that every rank has whole."""
    plain = [p for p in parameters if not is_sharded(p)]
    if not plain:
        return
    # A rank without a gradient of some weight sends zeros: all must send as many numbers.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    for name in (REPLICA, SHARD):
        distributed.all_reduce(flat, group=mesh.get_group(name))
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for parameter, part in zip(plain, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> torch.Tensor:
    """Scale down gradients whose L2 norm together is over `limit`; the norm they had.

    torch's own takes slices of one mesh at a time.
    """
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    norms = [whole(nn.utils.get_total_norm(gradients)) for gradients in by_mesh.values()]
    device = norms[0].device if norms else "cpu"
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([part.to(device) for part in norms]))
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for gradients in by_mesh.values():
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing into the caller's terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
