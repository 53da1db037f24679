"""One process of a scripted vLLM server: Forebay's plug-in, on a stand-in for the engine of vLLM that it changes.

Lines in: a method of the plug-in and its argument; lines out: an error, or none. With a signal and a number as
arguments it sends itself that signal before it takes so many slices.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed as dist

received: dict[str, torch.Tensor] = {}


class Model:
    @staticmethod
    def load_weights(weights: list[tuple[str, torch.Tensor]]) -> None:
        received.update(weights)


class IPCWeightTransferEngine:
    device = torch.device("cpu")
    model = Model()


def stand_in(name: str, **content: Any) -> None:
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(content)


def dump(path: str) -> None:
    save_file(received, path)


def main(plugin: str, fatal: int = 0, num_slices: int = 0) -> None:
    sys.path.insert(0, plugin)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        stand_in(name)
    stand_in("vllm.distributed.weight_transfer.factory", WeightTransferEngineFactory=None)
    stand_in("vllm.distributed.weight_transfer.ipc_engine", IPCWeightTransferEngine=IPCWeightTransferEngine)
    for name in ("vllm.model_executor", "vllm.model_executor.model_loader"):
        stand_in(name)
    stand_in("vllm.model_executor.model_loader.mtp_validation", disable_mtp_completeness_check=nullcontext)
    from forebay_transfer import ForebayTransfer

    engine, options = ForebayTransfer(), dist.BroadcastOptions

    def counted() -> Any:
        """The options of one broadcast, of which the first is the byte with which a group begins."""
        nonlocal num_slices
        if fatal and num_slices == -1:
            os.kill(os.getpid(), fatal)
        num_slices -= 1
        return options()

    dist.BroadcastOptions = counted
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        method, argument = json.loads(line)
        answer = {}
        try:
            if method == "init":
                engine.init_transfer_engine(engine.parse_init_info(argument))
            elif method == "update":
                engine.update_weights(argument)
            else:
                dump(argument)
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
