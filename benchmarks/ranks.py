"""What a trainer on several ranks costs on a CPU: weights to engines, a checkpoint beside steps, memory.

    python benchmarks/ranks.py weights [--ranks 2] [--engines 2] [--rounds 7]
    python benchmarks/ranks.py checkpoint [--ranks 2] [--tokens 6144] [--rounds 3]
    python benchmarks/ranks.py memory [--ranks 4] [--tokens 1024] [--offload]
    python benchmarks/ranks.py packs [--ranks 8] [--tokens 32768]

``weights``: 1 GB of float32 weights from the ranks into engine processes by `TrainController.sync_weights`,
until every engine has them in use, against one plain copy of as many bytes inside one thread.

``checkpoint``: train steps alone and train steps beside which 1 GB is written (weights, moments, model),
in turns; the CPU seconds are those of the ranks and of this process.

``memory``: the most anonymous memory of each rank over two train steps of a 0.3 B model, beyond what the
process had before there was a model, against ``(weights + gradients + moments) / ranks + activations``. The
activations are what autograd keeps of one micro-batch, counted on a model without content.

``packs``: micro-batches of 512 rollouts of log-normal lengths (median 3,000, sigma 1, to 32,000), at most
`tokens` cells each: the costs of the ranks, and the sum over rounds of the slowest rank's cost, as a share of
an even one. A count, with attention as in a model of 7 B; no time is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forebay.config import Component
from forebay.engines import RolloutController
from forebay.engines.process.engine import ProcessEngine
from forebay.engines.process.host import EngineRecipe
from forebay.engines.weights.between_processes import SharedMemoryHandOver
from forebay.models import ModelConfig, TinyConfig
from forebay.models.tiny import write_tiny
from forebay.train import LocalRanks, TrainConfig, TrainController
from forebay.train.batch import TrainBatch
from forebay.train.packing import Packer, num_cells
from forebay.train.parallel.learner import ModelFolder
from forebay.train.parallel.worker import EVEN_WIDTHS
from forebay.types import RolloutState, Status

PROMPT_TOKENS = 32


def write_model(folder: Path, hidden: int, layers: int) -> int:
    """A Llama decoder of this size; its parameters."""
    write_tiny(
        folder, TinyConfig(hidden_size=hidden, num_layers=layers, num_heads=hidden // 64), max_context=2048, seed=0
    )
    config = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        return sum(weight.numel() for weight in LlamaForCausalLM(config).parameters())


def groups(num_tokens: int, length: int, vocabulary: int) -> list[list[RolloutState]]:
    """About `num_tokens` tokens in groups of four rollouts of `length` tokens."""
    random = np.random.default_rng(0)
    made = []
    for number in range(max(1, num_tokens // length // 4)):
        prompt = random.integers(0, vocabulary, PROMPT_TOKENS)
        made.append(
            [
                RolloutState(
                    [],
                    rollout_id=f"{number}.{member}",
                    group_id=number,
                    task_name="task",
                    prompt_ids=prompt,
                    response_ids=random.integers(0, vocabulary, length - PROMPT_TOKENS),
                    logprobs=-random.random(length - PROMPT_TOKENS),
                    response_model_steps=np.zeros(length - PROMPT_TOKENS),
                    reward={"score": float(member % 2)},
                    status=Status.COMPLETED,
                )
                for member in range(4)
            ]
        )
    return made


def cpu_s(pids: Sequence[int | None]) -> float:
    """CPU seconds of these processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def timed(call: Callable[[], Any], pids: Sequence[int | None]) -> tuple[float, float]:
    """Seconds, and CPU seconds of these processes, of a call."""
    begun, used = time.perf_counter(), cpu_s(pids)
    call()
    return time.perf_counter() - begun, cpu_s(pids) - used


def weights(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of hand-overs and of plain copies, in turns."""
    num_bytes = 4 * write_model(folder, 1024, arguments.layers or 19)
    model = ModelConfig(source=str(folder))
    recipe = EngineRecipe(model_folder=folder, model=model, engine=Component(name="transformers"))
    way = SharedMemoryHandOver()
    engines = [ProcessEngine(recipe, way, log=folder / f"engine_{n}.log") for n in range(arguments.engines)]
    for engine in engines:
        engine.wait_until_ready()
    ranks = LocalRanks(arguments.ranks, threads=1)
    trainer = TrainController(
        ModelFolder(folder=folder), TrainConfig(ranks=arguments.ranks, token_budget=64), pad_token_id=0, ranks=ranks
    )
    source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
    pids = [os.getpid(), *ranks.pids, *(engine.pid for engine in engines)]
    found: dict[str, list[tuple[float, float]]] = {"plain copy": [], "to the engines": [], "ranks' part": []}
    write = ranks.copy_weights

    def noted(*given: Any, **named: Any) -> None:
        found["ranks' part"].append(timed(lambda: write(*given, **named), pids))

    ranks.copy_weights = noted  # type: ignore[method-assign]

    async def measure() -> None:
        controller = RolloutController(engines)
        for number in range(arguments.rounds + 1):
            copied = timed(lambda: target.copy_(source), pids)
            begun, used = time.perf_counter(), cpu_s(pids)
            trainer.train_step = number + 1
            await trainer.sync_weights(controller)
            handed = time.perf_counter() - begun, cpu_s(pids) - used
            assert [engine.model_step for engine in engines] == [number + 1] * len(engines)
            # The first makes the memory.
            if number:
                found["plain copy"].append(copied)
                found["to the engines"].append(handed)
        await controller.close()

    asyncio.run(measure())
    ranks.close()
    found["ranks' part"] = found["ranks' part"][1:]
    plain = statistics.median(seconds for seconds, _ in found["plain copy"])
    handed = statistics.median(seconds for seconds, _ in found["to the engines"])
    return {
        "gigabytes": num_bytes / 1e9,
        "seconds": {name: [round(wall, 3) for wall, _ in values] for name, values in found.items()},
        "cpu_s": {name: [round(cpu, 3) for _, cpu in values] for name, values in found.items()},
        "share of a plain copy's bytes/s, median": plain / handed,
        "the same, of the fastest": min(found["plain copy"])[0] / min(found["to the engines"])[0],
        "bytes that arrive, over those that a plain copy moves": arguments.engines * plain / handed,
    }


def checkpoint(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of steps alone and beside a checkpoint, in turns."""
    num_parameters = write_model(folder, 640, arguments.layers or 12)
    ranks = LocalRanks(arguments.ranks, threads=1)
    config = TrainConfig(ranks=arguments.ranks, token_budget=2048)
    trainer = TrainController(ModelFolder(folder=folder), config, pad_token_id=0, ranks=ranks)
    batch = groups(arguments.tokens, 256, 30)
    pids, found = [os.getpid(), *ranks.pids], []
    trainer.fit(batch)
    with ThreadPoolExecutor(1) as beside:
        for number in range(arguments.rounds):
            alone = timed(lambda: trainer.fit(batch), pids)
            path = folder / f"checkpoint_{number}"
            copied = timed(lambda path=path: trainer.begin_save(path), pids)
            written = beside.submit(lambda: timed(trainer.finish_save, pids)[0])
            step = timed(lambda: trainer.fit(batch), pids)
            rest = timed(written.result, pids)
            written_s = written.result()
            found.append({
                "alone": alone, "copies": copied, "beside": step, "rest": rest, "written after s": written_s,
                "ratio": (copied[0] + step[0]) / alone[0],
                "cpu ratio": (copied[1] + step[1] + rest[1]) / alone[1],
            })  # fmt: skip
            print(json.dumps(found[-1]), flush=True)
    size = sum(path.stat().st_size for path in (folder / "checkpoint_0").rglob("*") if path.is_file())
    ranks.close()
    return {
        "parameters": num_parameters,
        "gigabytes on disk": size / 1e9,
        "step time beside / alone, median": statistics.median(entry["ratio"] for entry in found),
        "CPU beside / alone, median": statistics.median(entry["cpu ratio"] for entry in found),
    }


def anonymous(pid: int | None) -> int:
    """Bytes of a process that no file has."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return 0


@contextmanager
def peaks(pids: Sequence[int | None]) -> Iterator[list[int]]:
    """The most that each process had while open."""
    most, over = [anonymous(pid) for pid in pids], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            most[:] = [max(was, anonymous(pid)) for was, pid in zip(most, pids, strict=True)]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def kept_by_autograd(config: LlamaConfig, rows: int, columns: int) -> int:
    """Bytes that a forward pass keeps for the backward pass, weights not counted."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(rows, columns, dtype=torch.int64)
    own = {weight.untyped_storage()._cdata for weight in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _ = model(ids).logits.logsumexp(-1).sum()
    return sum(storage.nbytes() for storage in kept.values())


def memory(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Peak memory of each rank, and what the formula says."""
    num_parameters = write_model(folder, 1024, arguments.layers or 23)
    ranks = LocalRanks(arguments.ranks, threads=1)
    before = [anonymous(pid) for pid in ranks.pids]
    length = 256
    config = TrainConfig(ranks=arguments.ranks, token_budget=arguments.tokens, parallel={"offload": arguments.offload})
    with peaks(ranks.pids) as loading:
        trainer = TrainController(ModelFolder(folder=folder), config, pad_token_id=0, ranks=ranks)
    batch = groups(arguments.tokens * arguments.ranks, length, 30)
    with peaks(ranks.pids) as stepping:
        losses = [trainer.fit(batch).metrics["train/loss"] for _ in range(2)]
    ranks.close()
    kept = kept_by_autograd(LlamaConfig.from_pretrained(folder), arguments.tokens // length, length)
    formula = 16 * num_parameters / arguments.ranks + kept
    over = [most - had for most, had in zip(stepping, before, strict=True)]
    return {
        "parameters": num_parameters,
        "losses": losses,
        "activations, MB": kept / 1e6,
        "formula, MB": formula / 1e6,
        "peak of each rank while loading, MB": [(m - b) / 1e6 for m, b in zip(loading, before, strict=True)],
        "peak of each rank, MB": [most / 1e6 for most in over],
        "largest / formula": max(over) / formula,
    }


def packs(arguments: argparse.Namespace, _: Path) -> dict[str, Any]:
    """By layout, means of five batches: dearest over cheapest rank, and how long a step takes."""
    even_length, found = EVEN_WIDTHS * 3584, {}
    for layout in ("padded", "packed", "shared_prompt"):
        for name, counted in (("by tokens", math.inf), ("by cost", even_length)):
            rows = []
            for seed in range(5):
                random = np.random.default_rng(seed)
                prompts = [np.full(random.integers(100, 400), group) for group in range(64)]
                lengths = random.lognormal(np.log(3000), 1.0, (64, 8)).clip(16, 32000).astype(int)
                batch = TrainBatch.from_examples(
                    (prompt, np.zeros(length, int))
                    for prompt, row in zip(prompts, lengths, strict=True)
                    for length in row
                )
                packer = Packer(arguments.tokens, arguments.ranks, layout, even_length=counted)  # type: ignore[arg-type]
                dealt = packer.pack_pad_dispatch(batch).packs[0]
                costs = np.array([[num_cells(batch, p, layout, even_length) for p in rank] for rank in dealt])  # type: ignore[arg-type]
                totals = costs.sum(axis=1)
                rows.append((totals.max() / totals.min(), costs.max(axis=0).sum() / totals.mean(), len(costs[0])))
            dearest, step, number = np.mean(rows, axis=0).round(3).tolist()
            found[f"{layout}, {name}"] = {
                "dearest / cheapest rank": dearest, "step / even share": step, "micro-batches": number
            }  # fmt: skip
    return found


def main() -> None:
    """Measure one thing and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["weights", "checkpoint", "memory", "packs"])
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--layers", type=int, help="another size of model, for a trial")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--offload", action="store_true")
    arguments = parser.parse_args()
    usual: dict[str, tuple[int, int, int]] = {
        "weights": (2, 0, 7),
        "checkpoint": (2, 6144, 3),
        "memory": (4, 1024, 0),
        "packs": (8, 32768, 0),
    }
    for name, value in zip(("ranks", "tokens", "rounds"), usual[arguments.what], strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = globals()[arguments.what](arguments, Path(folder))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
