"""The check that engines hold the trainer's weights."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_colocated_run import config

from forebay.engines import Completion, EngineLost, TransformersEngine
from forebay.metrics import read_jsonl
from forebay.models import load_model
from forebay.runs import evaluation
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
    model = load_model(surroundings.model_folder)
    return [Deaf(model, surroundings.tokenizer, max_context_tokens=surroundings.model.max_context)]


class Away(TransformersEngine):
    """Comes up for the first weights and is gone from then on."""

    is_there = True

    async def bring_up(self) -> None:
        if not self.is_there:
            raise EngineLost("it does not come back")

    async def generate(self, request: Any) -> Completion:
        self.is_there = False
        return Completion(finish_reason="error", error_msg="the server is gone", lost=True)


def build_two(surroundings: Any) -> list[Any]:
    return [
        kind(
            load_model(surroundings.model_folder),
            surroundings.tokenizer,
            max_context_tokens=surroundings.model.max_context,
        )
        for kind in (TransformersEngine, Away)
    ]


def test_an_engine_that_is_lost_is_not_checked_and_ends_nothing(tmp_path: Path) -> None:
    run = config(tmp_path, engine="test_verify_weights:build_two", verify_weights=True)
    asyncio.run(launch(run))
    rows = [row for row in read_jsonl(run.folder / "metrics.jsonl") if "sync/engines_unchecked" in row]
    assert len(rows) >= 4
    assert all(row["sync/engines_unchecked"] == 1 for row in rows)
    assert all(row["sync/logprob_difference"] < LEAST_LIMIT for row in rows)


@pytest.mark.usefixtures("warm")
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
        tmp_path, engine="test_verify_weights:build", verify_weights=True, train={"lr": 1e-2, "token_budget": 512}
    )
    with pytest.raises(WeightsDifferError, match=r"engine 0 does not hold the trainer's weights of step [23]"):
        asyncio.run(launch(run))


async def test_an_engine_that_leaves_over_its_probe_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "phase", lambda *_: contextlib.nullcontext())
    up, logged = {0: "stays", 1: "leaves"}, []

    async def probe(engine: str, number: int) -> None:
        up.pop(1, None)
        raise WeightsDifferError(f"engine {number} generated nothing")

    async def nothing(*_: Any) -> int:
        return 0

    class Controller:
        engines_up = property(lambda self: dict(up))
        engines = ("stays",)

    run: Any = SimpleNamespace(
        turns=None,
        trainer=SimpleNamespace(sync_weights=nothing),
        controller=Controller(),
        weight_check=SimpleNamespace(probe=probe),
        metrics=SimpleNamespace(log=lambda step, metrics: logged.append(metrics)),
        train_step=1,
        synced_bytes=0,
    )
    with pytest.raises(WeightsDifferError, match="engine 0"):
        await evaluation.sync_weights(run)
    del up[0]
    up[1] = "leaves"
    await evaluation.sync_weights(run)
    assert logged == [{"sync/engines_unchecked": 1.0}]
