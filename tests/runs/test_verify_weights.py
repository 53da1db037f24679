"""The check that engines hold the trainer's weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from test_colocated_run import config

from forebay.engines import TransformersEngine
from forebay.metrics import read_jsonl
from forebay.models import load_model
from forebay.runs.launch import launch
from forebay.runs.verify import LEAST_LIMIT, WeightsDifferError


class Deaf(TransformersEngine):
    """Says that it took new weights, from the third hand-over on without doing so."""

    num_updates = 0

    async def load_weights(self, weights: Any, model_step: int) -> None:
        self.num_updates += 1
        if self.num_updates < 3:
            await super().load_weights(weights, model_step)
        self._model_step = model_step


def build(surroundings: Any) -> list[Any]:
    model = load_model(surroundings.model_folder, surroundings.model)
    return [Deaf(model, surroundings.tokenizer, max_context_tokens=surroundings.model.max_context)]


@pytest.mark.parametrize("engine", ["transformers", "process"])
def test_a_sound_run_passes_after_every_hand_over(tmp_path: Path, engine: str) -> None:
    run = config(tmp_path, engine=engine, verify_weights=True, train={"lr": 1e-2, "token_budget": 512})
    asyncio.run(launch(run))
    rows = read_jsonl(run.folder / "metrics.jsonl")
    found = [row["sync/logprob_difference"] for row in rows if "sync/logprob_difference" in row]
    assert len(found) >= 4
    assert max(found) < LEAST_LIMIT


def test_an_engine_that_keeps_old_weights_ends_the_run(tmp_path: Path) -> None:
    run = config(
        tmp_path,
        engine="test_verify_weights:build",
        verify_weights=True,
        train={"lr": 1e-2, "token_budget": 512},
    )
    with pytest.raises(
        WeightsDifferError, match=r"engine 0 does not hold the trainer's weights of step [23]"
    ):
        asyncio.run(launch(run))
