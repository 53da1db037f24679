"""Groups whose trajectories have prompts of their own: through a buffer, and in every layout the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forebay.replay import FIFOReplayPolicy, NaiveStorage, ReplayBuffer, SQLStorage
from forebay.train import TrainConfig, TrainController
from forebay.types import TRAJECTORY_OF_KEY, RolloutState, Status


def with_further_trajectories(groups: list[list[RolloutState]]) -> list[list[RolloutState]]:
    """Each attempt's trajectory, then 0 to 2 further ones with longer, shorter and shared prompts."""
    random = np.random.default_rng(5)
    grown = []
    for group in groups:
        attempts: list[RolloutState] = []
        for number, state in enumerate(group):
            attempts.append(state)
            for further in range(number % 3):
                length = int(random.integers(1, 6))
                attempts.append(
                    RolloutState(
                        [{"role": "user", "content": "sub"}],
                        rollout_id=f"{state.rollout_id}/{further}",
                        group_id=state.group_id,
                        task_name=state.task_name,
                        prompt_ids=[9, 8, 7] if further else random.integers(3, 23, 8),
                        response_ids=random.integers(3, 23, length),
                        response_mask=[*[1] * (length - 1), 1] if further else [1, *[0] * (length - 1)],
                        logprobs=-random.random(length),
                        response_model_steps=np.zeros(length),
                        reward=dict(state.reward or {}),
                        status=Status.COMPLETED,
                        extra_fields={
                            TRAJECTORY_OF_KEY: state.rollout_id,
                            "chat_record": {"tools": None, "messages": [{"role": "user"}], "turn_starts": [0]},
                        },
                    )
                )
        grown.append(attempts)
    return grown


def trained(model, groups, layout: str) -> tuple[np.ndarray, dict[str, float], list[torch.Tensor]]:
    trainer = TrainController(
        model,
        TrainConfig(lr=1e-2, token_budget=60, layout=layout, mini_batches=2, kl_coef=0.1),
        pad_token_id=0,
        seed=3,
    )
    batch = trainer.pack(groups)
    logprobs = trainer.compute_logprobs(batch)
    batch = trainer.fit(groups)
    return logprobs, batch.metrics, [parameter.detach().clone() for parameter in model.parameters()]


def test_every_layout_trains_the_same(make_model, make_groups) -> None:
    groups = with_further_trajectories(make_groups(num_groups=3, size=4))
    results = [trained(make_model(), groups, layout) for layout in ("padded", "packed", "shared_prompt")]
    for logprobs, metrics, parameters in results[1:]:
        np.testing.assert_allclose(logprobs, results[0][0], atol=1e-5)
        assert metrics["train/loss"] == pytest.approx(results[0][1]["train/loss"], abs=1e-5)
        for one, other in zip(parameters, results[0][2], strict=True):
            # Adam's first steps have the size of the learning rate whatever the gradient's: rounding shows.
            torch.testing.assert_close(one, other, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("advantage", "won"), [("grpo", 0.7071), ("dr_grpo", 0.5), ("rloo", 1.0), ("pass_at_2", 0.0)])
def test_an_attempt_counts_once_however_many_trajectories_it_has(model, make_groups, advantage, won) -> None:
    [[winner, loser]] = make_groups(num_groups=1, size=2)
    winner.reward, loser.reward = {"score": 1.0}, {"score": 0.0}
    further = [
        replace(winner, rollout_id=f"{winner.rollout_id}/{i}", extra_fields={TRAJECTORY_OF_KEY: winner.rollout_id})
        for i in (1, 2)
    ]
    trainer = TrainController(model, TrainConfig(advantage=advantage), pad_token_id=0)
    # Neighbors or not, and whoever comes first.
    for group in ([winner, *further, loser], [further[0], loser, winner, further[1]]):
        batch = trainer.compute_advantages(trainer.pack([group]))
        assert batch.advantages is not None
        for state, advantages in zip(group, batch.by_sequence(batch.advantages), strict=True):
            expected = -won if state is loser else won
            np.testing.assert_allclose(advantages, expected, atol=1e-4)


@pytest.mark.parametrize("store", ["naive", "sql"])
async def test_a_buffer_gives_them_back_whole(make_groups, tmp_path: Path, store: str) -> None:
    groups = with_further_trajectories(make_groups(num_groups=3, size=4))
    expected = [
        [(s.rollout_id, s.prompt_ids.tolist(), s.response_ids.tolist(), s.extra_fields) for s in group]
        for group in groups
    ]
    storage = NaiveStorage() if store == "naive" else SQLStorage(f"sqlite:///{tmp_path / 'store.db'}")
    buffer = ReplayBuffer(FIFOReplayPolicy(), storage)
    for group in groups:
        await buffer.put(group, "task", model_step=0, current_train_step=1, stale_threshold=2)
    taken, consumed = await buffer.take_batch({"task": 3}, train_step=1)
    close = getattr(storage, "close", None)
    if close is not None and asyncio.iscoroutine(closing := close()):
        await closing
    assert consumed == {"task": 3}
    assert [
        [(s.rollout_id, s.prompt_ids.tolist(), s.response_ids.tolist(), s.extra_fields) for s in group]
        for group in taken["task"]
    ] == expected
