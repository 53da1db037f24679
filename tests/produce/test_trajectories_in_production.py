"""Attempts with several trajectories, from the manager through pauses and the buffer to the trainer."""

from __future__ import annotations

import numpy as np
import pytest
from production_world import PromptLoop, World, train

from forebay.aio.virtual_time import run
from forebay.produce import AsyncProduceStrategyConfig
from forebay.produce.strategies.rules import check_form
from forebay.types import TRAJECTORY_OF_KEY, RolloutState, Status


class Branching(PromptLoop):
    """The answer, and beside it a summary with a prompt of its own where the answer is long."""

    async def controller_call(self, state):
        await super().controller_call(state)
        if state.status is not Status.COMPLETED or len(state.response_ids) < 4:
            return state
        note = RolloutState([], prompt_ids=[3, *state.prompt_ids], rollout_id=f"{state.rollout_id}/note")
        await super().controller_call(note)
        return [state, note]


def build(monkeypatch, **options) -> World:
    monkeypatch.setattr("production_world.PromptLoop", Branching)
    return World(**options).build()


@pytest.mark.parametrize("partial", [False, True])
def test_no_attempt_is_lost_or_doubled_by_pauses(monkeypatch, partial) -> None:
    async def main():
        strategy = AsyncProduceStrategyConfig(
            over_sample_threshold=2.0, enable_partial_rollout=partial, max_staleness=1, tail_batch_trigger_size=2
        )
        world = build(monkeypatch, strategy=strategy, num_prompts=40, k=3)
        batches = await train(world, 4, 6, train_s=0.2)
        await world.check_balance()
        return batches

    groups = [group for batch in run(main()).values() for group in batch]
    assert len({group[0].group_id for group in groups}) == len(groups) == 24
    num_further = 0
    for group in groups:
        firsts = [state for state in group if TRAJECTORY_OF_KEY not in state.extra_fields]
        assert [state.rollout_id for state in firsts] == [f"{group[0].group_id}/{i}" for i in range(3)]
        long = [state.rollout_id for state in firsts if len(state.response_ids) >= 4]
        further = [state for state in group if TRAJECTORY_OF_KEY in state.extra_fields]
        num_further += len(further)
        assert [state.extra_fields[TRAJECTORY_OF_KEY] for state in further] == long
        assert [state.rollout_id for state in further] == [f"{name}/1" for name in long]
        assert all(state.status is Status.COMPLETED and state.reward for state in group)
        assert len({state.rollout_id for state in group}) == len(group)
    assert num_further > 10


def test_the_trainer_takes_every_trajectory_and_compares_attempts(monkeypatch) -> None:
    pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    from forebay.train import TrainBatch, TrainConfig, TrainController

    async def main():
        world = build(monkeypatch, num_prompts=6, k=3)
        return (await train(world, 3, 1))[1]

    groups = run(main())
    batch = TrainBatch.from_groups(groups)
    assert batch.num_sequences == sum(map(len, groups)) > 9
    assert np.bincount(batch.group_index).tolist() == [len(group) for group in sorted(groups, key=group_name)]
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
    )
    trainer = TrainController(LlamaForCausalLM(config).eval(), TrainConfig(lr=1e-3, token_budget=64), pad_token_id=0)
    trained = trainer.fit(batch)
    by_sequence = trained.by_sequence(trained.advantages)
    for number in range(len(groups)):
        members = np.flatnonzero(batch.group_index == number)
        # Attempts are compared; a further trajectory has its attempt's advantage.
        firsts = [i for i in members if batch.attempt_first[i] == i]
        assert len(firsts) == 3
        assert sum(by_sequence[i][0] for i in firsts) == pytest.approx(0, abs=1e-5)
        assert all(by_sequence[i][0] == by_sequence[batch.attempt_first[i]][0] for i in members)


def group_name(group) -> str:
    return str(group[0].group_id)


def test_attempts_must_still_be_the_given_ones() -> None:
    fields = {"group_id": "g", "status": Status.COMPLETED}
    given = [RolloutState([], rollout_id=i, **fields) for i in range(2)]
    extra = RolloutState([], rollout_id="0/1", extra_fields={TRAJECTORY_OF_KEY: 0}, **fields)
    assert check_form([given[0], extra, given[1]], given, [0, 0])
    # Those of an earlier try are gone, and new ones are there.
    assert check_form([*given, extra], [given[0], extra, given[1]], [0, 0, 0])
    with pytest.raises(ValueError, match="returned 1 rollouts for a group of 2"):
        check_form([given[0], extra], given, [0, 0])
