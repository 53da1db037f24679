"""Loss and gradient of a step of the presets `dapo` and `gspo`: by the papers, in float64, and by TRL."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from forebay.train import TrainConfig, TrainController

ROOT = Path(__file__).parents[2]
# One optimizer step, whose gradient is to be seen as it is.
ONE_STEP = {"mini_batches": 1, "schedule": "constant", "max_grad_norm": 0.0, "token_budget": 40}


def formula(preset, model, groups, olds):
    """DAPO, equation 8, and GSPO, equations 5 to 7, of rollouts with these old log probabilities."""
    losses, olds = [], iter(olds)
    for group in groups:
        scores = np.array([state.reward["score"] for state in group])
        for state, score in zip(group, scores, strict=True):
            ids = torch.from_numpy(np.concatenate([state.prompt_ids, state.response_ids])).long()
            table = model(input_ids=ids[None]).logits[0, len(state.prompt_ids) - 1 : -1].log_softmax(-1)
            logprobs = table.gather(1, torch.from_numpy(state.response_ids).long()[:, None])[:, 0]
            log_ratio = logprobs - torch.from_numpy(next(olds)).double()
            advantage = (score - scores.mean()) / (scores.std(ddof=1) + 1e-6)
            if preset == "dapo":
                ratio, low, high = log_ratio.exp(), 0.2, 0.28
            else:
                ratio, low, high = log_ratio.mean().exp(), 3e-4, 4e-4
            clipped = ratio.clamp(1 - low, 1 + high)
            losses.append(-torch.minimum(ratio * advantage, clipped * advantage))
    return torch.cat(losses).mean() if preset == "dapo" else torch.stack(losses).mean()


@pytest.mark.parametrize(("preset", "noise"), [("dapo", 0.3), ("gspo", 1e-3)])
def test_the_first_step_is_the_formula_in_float64(preset, noise, make_model, make_groups):
    model = make_model()
    trainer = TrainController(model, TrainConfig(preset=preset, **ONE_STEP), pad_token_id=0)
    batch = trainer.compute_old_logprobs(trainer.compute_advantages(trainer.pack(make_groups())))
    shift = np.random.default_rng(1).normal(0, noise, batch.num_response_tokens)
    exact = trainer.compute_logprobs(batch) + shift
    batch.old_logprobs = exact.astype(np.float32)
    taken = []
    trainer.learner._optimizer.step = lambda step: taken.extend(p.grad.clone() for p in model.parameters()) or 0.0
    metrics = trainer.train(batch).metrics
    assert metrics["train/clip_share"] > 0.01

    exact_model = copy.deepcopy(make_model()).double()
    loss = formula(preset, exact_model, make_groups(), batch.by_sequence(batch.old_logprobs))
    loss.backward()
    assert metrics["train/policy_loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    for mine, other in zip(taken, exact_model.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), other.grad, rtol=0, atol=1e-5)


def test_the_first_step_is_that_of_trl():
    pytest.importorskip("trl")
    script = ROOT / "benchmarks/first_step_vs_trl.py"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, script], check=True, env=environment, timeout=500)
