"""How fast new weights reach engines in other processes, against copying them once inside this process.

    python benchmarks/weight_handover.py [--parameters-m 100] [--engines 2] [--rounds 5]

Each round: the plain copy of all parameters into other tensors (what an engine in this process costs),
then a hand-over to `engines` processes by shared memory.
A hand-over ends when every engine generates with the new weights, so it includes the engines' own copy.

Then a trainer with LoRA on every linear layer synchronizes as many engines, by adapters alone and by merged
weights: into processes by shared memory, and into engines in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from forebay.config import Component
from forebay.engines import RolloutController, TransformersEngine
from forebay.engines.process.engine import ProcessEngine
from forebay.engines.process.host import EngineRecipe
from forebay.engines.weights.between_processes import SharedMemoryHandOver
from forebay.models import ModelConfig, TinyConfig, load_model
from forebay.models.tiny import write_tiny
from forebay.train import TrainConfig, TrainController

HIDDEN, PARAMETERS_PER_LAYER = 768, 6_500_000
LORA_RANK = 16
"""Usual for reinforcement learning; the bytes of adapters are proportional to it."""


def make_model(folder: Path, parameters_m: int) -> ModelConfig:
    """A Llama decoder of about so many million parameters."""
    layers = max(1, round(parameters_m * 1e6 / PARAMETERS_PER_LAYER))
    tiny = TinyConfig(hidden_size=HIDDEN, num_layers=layers, num_heads=12)
    write_tiny(folder, tiny, max_context=256, seed=0)
    return ModelConfig(source="tiny", tiny=tiny)


async def measure(folder: Path, model: ModelConfig, engines: int, rounds: int) -> dict[str, Any]:
    """Seconds of each way, by round."""
    weights = [(name, value.detach().clone()) for name, value in load_model(folder).named_parameters()]
    target = [torch.empty_like(value) for _, value in weights]
    recipe = EngineRecipe(model_folder=folder, model=model, engine=Component(name="transformers"))
    seconds: dict[str, list[float]] = {"copy in process": [], "shared memory": []}
    way = SharedMemoryHandOver()
    members = [ProcessEngine(recipe, way, log=folder / f"engine_{n}.log") for n in range(engines)]
    for member in members:
        member.wait_until_ready()
    # The first hand-over makes the memory.
    for number in range(rounds + 1):
        begun = time.perf_counter()
        for (_, value), copy in zip(weights, target, strict=True):
            copy.copy_(value)
        copied = time.perf_counter()
        given = list(weights)
        await asyncio.gather(*(member.load_weights(given, number) for member in members))
        if number:
            seconds["copy in process"].append(copied - begun)
            seconds["shared memory"].append(time.perf_counter() - copied)
    for member in members:
        await member.close()
    num_bytes = sum(value.nbytes for _, value in weights)
    plain = statistics.median(seconds["copy in process"])
    return {
        "gigabytes": num_bytes / 1e9,
        "engines": engines,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "median_s": {name: statistics.median(values) for name, values in seconds.items()},
        "gb_per_s": {name: num_bytes / 1e9 / statistics.median(values) for name, values in seconds.items()},
        "times_a_copy": {name: statistics.median(values) / plain for name, values in seconds.items()},
    }


class Merged:
    """A controller that takes no adapters."""

    def __init__(self, controller: RolloutController) -> None:
        self.update_weights = controller.update_weights


async def measure_lora(folder: Path, model: ModelConfig, engines: int, rounds: int) -> dict[str, Any]:
    """Bytes and seconds of `TrainController.sync_weights`, from the trainer's weights to the engines' use."""
    trainer = TrainController(load_model(folder), TrainConfig(lora_rank=LORA_RANK), pad_token_id=0, seed=0)
    result: dict[str, Any] = {"rank": LORA_RANK}
    hand_over = SharedMemoryHandOver()
    recipe = EngineRecipe(model_folder=folder, model=model, engine=Component(name="transformers"))
    for place in ("processes", "in process"):
        members: list[Any] = []
        for number in range(engines):
            if place == "processes":
                members.append(ProcessEngine(recipe, hand_over, log=folder / f"lora_{number}.log"))
            else:
                members.append(TransformersEngine(load_model(folder)))
        if place == "processes":
            for member in members:
                member.wait_until_ready()
        controller = RolloutController(members)
        for way, receiver in (("adapters", controller), ("merged", Merged(controller))):
            seconds = []
            for _ in range(rounds + 1):
                begun = time.perf_counter()
                await trainer.sync_weights(receiver)
                seconds.append(time.perf_counter() - begun)
            result[f"{way}, {place}"] = {"first_s": seconds[0], "median_s": statistics.median(seconds[1:])}
        await controller.close()
    adapters = [weight for name, weight in trainer.model.named_parameters() if ".lora_" in name]
    result["megabytes"] = {
        "adapters": sum(weight.nbytes for weight in adapters) / 1e6,
        "merged": sum(weight.nbytes for weight in load_model(folder).parameters()) / 1e6,
    }
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters-m", type=int, default=100)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), arguments.parameters_m)
        sizes = Path(folder), model, arguments.engines, arguments.rounds
        found = asyncio.run(measure(*sizes))
        found["lora"] = asyncio.run(measure_lora(*sizes))
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
