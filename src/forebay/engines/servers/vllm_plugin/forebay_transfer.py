"""A weight transfer engine for vLLM, whose processes load it as a plug-in: weights come in shared memory.

It is vLLM's own engine for memory of a GPU that trainer and server share (``ipc``), but for where a bucket
is. Nothing of Forebay is imported: vLLM has an environment of its own, and finds this folder by
``PYTHONPATH``, and `register` by the entry point beside it.
"""

from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine


class SharedMemory(IPCWeightTransferEngine):  # type: ignore[misc]
    """The server's side of a transfer, in each of its processes that has a part of the model."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Copy one bucket: its memory is used again, and vLLM keeps weights until a layer is whole."""
        sizes = update_info["tensor_sizes"]
        data = torch.from_file(update_info["path"], shared=True, size=sum(sizes), dtype=torch.uint8)
        parts = data.to(self.device, copy=True).split(sizes)  # type: ignore[no-untyped-call]
        columns = zip(parts, update_info["dtype_names"], update_info["shapes"], strict=True)
        tensors = [part.view(getattr(torch, kind)).view(shape) for part, kind, shape in columns]
        self.model.load_weights(list(zip(update_info["names"], tensors, strict=True)))


def register() -> None:
    """Called by each process of vLLM, perhaps more than once."""
    if "forebay" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("forebay", SharedMemory)
