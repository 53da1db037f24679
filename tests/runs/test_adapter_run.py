"""A run with LoRA hands over adapters alone, also when resumed, and its engines hold the trainer's model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_colocated_run import config

from forebay.engines import TransformersEngine
from forebay.metrics import read_jsonl
from forebay.models import load_model
from forebay.models.starting_weights import BaseDiffersError
from forebay.runs.folder import saved_config
from forebay.runs.launch import launch
from forebay.runs.verify import LEAST_LIMIT
from forebay.train.weight_sync import sync_weights

GIVEN: list[tuple[str, int, int]] = []
"""What the run's engine was given: what, of which step, how many bytes."""


class Counting(TransformersEngine):
    """Notes what it is given."""

    async def load_weights(self, weights: Any, model_step: int) -> None:
        given = list(weights)
        GIVEN.append(("weights", model_step, size(given)))
        await super().load_weights(given, model_step)

    async def load_adapters(self, adapters: Any, model_step: int, *, config: Any) -> None:
        given = list(adapters)
        GIVEN.append(("adapters", model_step, size(given)))
        await super().load_adapters(given, model_step, config=config)


def size(tensors: list[tuple[str, torch.Tensor]]) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)


def build(surroundings: Any) -> list[Any]:
    model = load_model(surroundings.model_folder)
    return [Counting(model, surroundings.tokenizer, max_context_tokens=surroundings.model.max_context)]


def lora_run(output: Path, **changes: Any) -> Any:
    table = {
        "verify_weights": True,
        "train": {"lr": 1e-2, "token_budget": 512, "lora_rank": 1},
        "produce": {"mode": "separate", "enable_partial_rollout": True},
        "engine": "test_adapter_run:build",
    }
    return config(output, **{**table, **changes})


def differences(run: Any) -> list[float]:
    rows = read_jsonl(run.folder / "metrics.jsonl")
    return [row["sync/logprob_difference"] for row in rows if "sync/logprob_difference" in row]


def test_only_adapters_travel_also_in_a_run_that_goes_on(tmp_path: Path) -> None:
    GIVEN.clear()
    # The starting weights are those after the warm-up, for the trainer as for the engine.
    run = lora_run(tmp_path)
    asyncio.run(launch(run))
    steps = [step for _, step, _ in GIVEN]
    assert steps == sorted(steps)
    assert set(steps) == set(range(run.steps + 1))
    asyncio.run(launch(saved_config(run.folder, ["steps=6"]), resume=run.folder))
    assert {step for _, step, _ in GIVEN} == set(range(7))
    assert {what for what, _, _ in GIVEN} == {"adapters"}
    whole = size(list(load_model(run.folder / "warmup").named_parameters()))
    assert max(num_bytes for _, _, num_bytes in GIVEN) < whole / 8
    assert len(differences(run)) == 7
    assert max(differences(run)) < LEAST_LIMIT


def test_without_them_the_same_run_draws_the_same(tmp_path: Path) -> None:
    rows = []
    for name, takes in (("adapters", True), ("merged", False)):
        run = lora_run(
            tmp_path / name, produce={}, engine={"name": "transformers", "arguments": {"takes_adapters": takes}}
        )
        asyncio.run(launch(run))
        rows.append([row["train/loss"] for row in read_jsonl(run.folder / "metrics.jsonl") if "train/loss" in row])
    assert len(rows[0]) == 4
    assert rows[0] == rows[1]


@pytest.mark.usefixtures("warm")
def test_engines_in_processes_are_given_adapters_too(tmp_path: Path) -> None:
    run = lora_run(tmp_path, engine={"name": "process"})
    asyncio.run(launch(run))
    assert max(differences(run)) < LEAST_LIMIT


class Holding:
    """Takes adapters, but holds other weights than those below them; `model_step` says whose it uses."""

    takes_adapters = True

    def __init__(self, model_step: int) -> None:
        self.model_step = model_step
        self.given: list[tuple[str, int]] = []

    async def update_weights(self, weights: Any, model_step: int) -> None:
        self.given.append((weights[0][0], model_step))

    async def update_adapters(self, adapters: Any, model_step: int, *, config: Any) -> None:
        if "base" not in dict(self.given):
            raise BaseDiffersError("others")
        self.given.append((adapters[0][0], model_step))


async def test_engines_with_trained_weights_do_not_fall_back_to_those_of_the_beginning() -> None:
    def named(name: str) -> Any:
        return lambda: iter([(name, torch.zeros(1))])

    def weights(*, merged: bool = True) -> Any:
        return named("merged" if merged else "base")()

    source: Any = SimpleNamespace(adapter_config={}, weights=weights, adapters=named("adapters"))
    begun, trained = Holding(0), Holding(3)
    for receiver in (begun, trained):
        await sync_weights(source, receiver, 4)
    assert begun.given == [("base", 0), ("adapters", 4)]
    assert trained.given == [("merged", 4)]
