"""A weight transfer engine for vLLM, whose processes load it as a plug-in: weights come in shared memory, or from a
sender on any machine (`forebay_group`).

It is vLLM's own engine for memory of a GPU that trainer and server share (``ipc``), but for where a bucket
is. Nothing of Forebay is imported: vLLM has an environment of its own, and finds this folder by
``PYTHONPATH``, and `register` by the entry point beside it.
"""

from contextlib import nullcontext
from typing import Any

import torch
from forebay_group import Group
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine


class ForebayTransfer(IPCWeightTransferEngine):  # type: ignore[misc]
    """The server's side of a transfer, in each of its processes that has a part of the model."""

    _place: dict[str, Any] | None = None
    _group: Group | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """As it came."""
        return init_dict

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the group of the sender that is named, if that is a new one."""
        if init_info == self._place:
            return
        self._place, self._group, settings = None, None, nullcontext()
        if (backend := init_info.get("backend")) == "nccl":
            from vllm.utils.nccl import unpinned_nccl_env

            # Without those that vLLM has for itself, which the sender lacks.
            settings = unpinned_nccl_env()
        with settings:
            self._group = Group.join(init_info, self.device) if backend else None
        self._place = init_info

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Copy one bucket: its memory is used again, and vLLM keeps weights until a layer is whole."""
        sizes = update_info["tensor_sizes"]
        if self._group is not None:
            data = self._group.receive(sum(sizes)).to(self.device)
        else:
            data = torch.from_file(update_info["path"], shared=True, size=sum(sizes), dtype=torch.uint8)
            data = data.to(self.device, copy=True)
        parts = data.split(sizes)  # type: ignore[no-untyped-call]
        columns = zip(parts, update_info["dtype_names"], update_info["shapes"], strict=True)
        tensors = [part.view(getattr(torch, kind)).view(shape) for part, kind, shape in columns]
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        # A bucket has not all weights of a layer, as vLLM's own engines have it.
        with disable_mtp_completeness_check():
            self.model.load_weights(list(zip(update_info["names"], tensors, strict=True)))


def register() -> None:
    """Called by each process of vLLM, perhaps more than once."""
    if "forebay" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("forebay", ForebayTransfer)
