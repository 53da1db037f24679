"""A weight transfer engine for vLLM, whose processes load it as a plug-in: weights come in shared memory.

It has the names and the layout of vLLM's own engine for memory of a GPU that trainer and server share
(``ipc``), so servers take it by the same calls. Nothing of Forebay is imported: vLLM has an environment of
its own, and finds this folder by ``PYTHONPATH``, and this module by the entry point beside it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "forebay"


@dataclass
class Init(WeightTransferInitInfo):  # type: ignore[misc]
    """What the trainer says once."""

    packed: bool


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A bucket: tensors that lie one after another in the file at `path`."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    tensor_sizes: list[int]
    path: str


class SharedMemory(WeightTransferEngine):  # type: ignore[misc]
    """The side of a transfer where the server is, in each of its processes with a part of the model."""

    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info: Init) -> None:
        """Nothing: each bucket says where it is."""

    def start_weight_update(self) -> None:
        """Make ready for weights as checkpoints have them."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take over a bucket; without vLLM's own wait for an accelerator, which may not be there."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        """Copy it: the memory is used again, and vLLM keeps weights until a layer is whole."""
        sizes = update_info.tensor_sizes
        data = torch.from_file(update_info.path, shared=True, size=sum(sizes), dtype=torch.uint8)
        own = torch.split(data.to(self.device, copy=True), sizes)
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        columns = zip(update_info.names, own, dtypes, update_info.shapes, strict=True)
        self.model.load_weights(
            [(name, part.view(dtype).view(shape)) for name, part, dtype, shape in columns]
        )

    def finish_weight_update(self) -> None:
        """Bring the weights into the form in which they are used."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


def register() -> None:
    """Called by each process of vLLM, perhaps more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemory)
