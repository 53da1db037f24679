"""The weight hand-over from trainer to engine against the speed at which the device copies memory.

Usage: python benchmarks/gpu/handover.py [--size 0.5b|1.5b] [--repeats 3] [--tiny --device cpu]

`TrainController.sync_weights` to a `RolloutController` with one engine on the same device, whose weights may
be of another dtype. The copy it is measured against moves as many bytes, from one tensor to another, with
the same cast. Share: the copy's seconds over the hand-over's; 0.8 or more is the aim on a GPU. A tiny model's
hand-over is all overhead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from accelerator import Bench, arguments

from forebay.engines import RolloutController, TransformersEngine
from forebay.train import TrainConfig, TrainController

ADAPTERS = "LoRA adapters alone, bfloat16"
"""The engine merges them; the copy they are measured against is still that of all weights."""
CASES: dict[str, tuple[torch.dtype, torch.dtype, dict[str, Any]]] = {
    "float32 to float32": (torch.float32, torch.float32, {}),
    "float32 to bfloat16": (torch.float32, torch.bfloat16, {}),
    "bfloat16 to bfloat16": (torch.bfloat16, torch.bfloat16, {}),
    "LoRA merged, bfloat16": (torch.bfloat16, torch.bfloat16, {"lora_rank": 16}),
    ADAPTERS: (torch.bfloat16, torch.bfloat16, {"lora_rank": 16}),
}


def measure(bench: Bench, case: str) -> dict[str, Any]:
    trained, held, settings = CASES[case]
    model = bench.model(trained)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    trainer = TrainController(model, TrainConfig(**settings), pad_token_id=0, device=bench.device)
    engine = TransformersEngine(bench.model(held), device=str(bench.device), takes_adapters=case == ADAPTERS)
    controller = RolloutController(engine)
    source = torch.ones(num_weights, dtype=trained, device=bench.device)
    target = torch.empty(num_weights, dtype=held, device=bench.device)
    copy_s = bench.seconds(lambda: target.copy_(source))
    with asyncio.Runner() as runner:
        handover_s = bench.seconds(lambda: runner.run(trainer.sync_weights(controller)))
        runner.run(controller.close())
    moved = num_weights * (source.element_size() + target.element_size())
    return {
        "case": case,
        "weights (M)": num_weights / 1e6,
        "copy ms": copy_s * 1e3,
        "copy GB/s": moved / copy_s / 1e9,
        "hand-over ms": handover_s * 1e3,
        "hand-over GB/s": moved / handover_s / 1e9,
        "share": copy_s / handover_s,
    }


def main(given: Sequence[str] | None = None) -> None:
    bench = arguments(__doc__ or "", given)
    bench.report("Weight hand-over", [measure(bench, case) for case in CASES])


if __name__ == "__main__":
    main()
