"""A trainer's tensors on their way to the host's memory and back, while an engine has the device.

::

    on the device --offload--> pinned memory of the host, the same at every turn --onload--> on the device

Tensors that were on the host before (moments that always are there) stay where they are.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from forebay.models import empty_cache

Place: TypeAlias = tuple[str, torch.Tensor, Callable[[torch.Tensor], None]]
"""A name that no other has, what is there, and the call that puts another tensor there."""


class Offload:
    """Moves tensors off their device and back to it.

    Invariants: values do not change; `onload` brings back all that `offload` moved, and nothing else.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> offload = Offload()
    >>> offload.offload([("weight", weight.data, lambda value: setattr(weight, "data", value))])
    >>> offload.onload()
    """

    def __init__(self, host: str = "cpu") -> None:
        self._host = torch.device(host)
        self._kept: dict[str, torch.Tensor] = {}
        """On the host, by name: pinning memory takes longer than a copy."""
        self._away: list[tuple[str, torch.device, Callable[[torch.Tensor], None]]] = []

    def offload(self, places: Iterable[Place]) -> None:
        """Move what is there to the host, and give the device's memory to other processes."""
        # Nothing here may hold a tensor that has left, or its memory would stay.
        devices = {self._move(*place) for place in places}
        for device in devices:
            if device.type == "cuda":
                # The copies may be under way still, and their sources are about to be given back.
                torch.cuda.current_stream(device).synchronize()
                empty_cache()

    def _move(self, name: str, tensor: torch.Tensor, put: Callable[[torch.Tensor], None]) -> torch.device:
        if tensor.device.type != self._host.type:
            kept = self._kept.get(name)
            # Moments are named by their place in the optimizer's state, where a resume may put another one.
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty_like(tensor, device=self._host, pin_memory=tensor.is_cuda)
                self._kept[name] = kept
            self._away.append((name, tensor.device, put))
            put(kept.copy_(tensor, non_blocking=True))
        return tensor.device

    def onload(self) -> None:
        """Move it all back."""
        for name, device, put in self._away:
            put(self._kept[name].to(device, non_blocking=True))
        self._away.clear()
