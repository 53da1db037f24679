"""Rewards where they were earned: by turn and by token, discounted, with and without a critic; by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from forebay.config import ConfigError, parse_config
from forebay.train import TrainBatch, TrainConfig, TrainController
from forebay.train.objective.advantages import find_advantage
from forebay.train.objective.losses import steered
from forebay.types import RolloutState, SampleParams, Status


def rollout(mask, score, turn_rewards=None, **fields) -> RolloutState:
    reward = {"score": score} if turn_rewards is None else {"score": score, "turn_rewards": turn_rewards}
    given = {"prompt_ids": [1], "status": Status.COMPLETED, "group_id": 0, **fields}
    return RolloutState([], response_ids=np.arange(len(mask)), response_mask=mask, reward=reward, **given)


def advantages(batch: TrainBatch, **settings) -> list[list[float]]:
    config = TrainConfig(**settings)
    found = find_advantage(config.advantage)(batch, config)
    assert isinstance(found, tuple)
    return [part.round(6).tolist() for part in batch.by_sequence(found[0])]


# Two turns (tokens 0-1, and 4), with environment tokens between; the second attempt has one turn.
TWO_TURNS = [1, 1, 0, 0, 1]


def two_attempts() -> TrainBatch:
    """Rewards of turns 0.5 and 1.5 (score 2), and of the other attempt's only turn 1."""
    return TrainBatch.from_groups([[rollout(TWO_TURNS, 2.0, [[2, 0.5]]), rollout([1, 1], 1.0)]])


def test_rewards_lie_where_they_were_earned():
    assert two_attempts().token_rewards.tolist() == [0, 0.5, 0, 0, 1.5, 0, 1.0]
    # In place of a judge's: those of the environment.
    noted = rollout(TWO_TURNS, 2.0, extra_fields={"turn_rewards": [[2, 0.5]]})
    assert TrainBatch.from_groups([[noted]]).token_rewards.tolist() == [0, 0.5, 0, 0, 1.5]
    # Given after the environment's tokens: still the turn's before them. At the start: the first token's.
    batch = TrainBatch.from_groups([[rollout(TWO_TURNS, 2.0, [(4, 0.5), (0, 0.25), (5, 1.0)])]])
    assert batch.token_rewards.tolist() == [0.25, 0.5, 0, 0, 1.25]
    assert TrainBatch.from_groups([[rollout([], 1.0)]]).token_rewards.tolist() == []


def test_turns_are_compared_by_their_discounted_returns():
    # Returns with gamma 0.5: 0.5 + 0.5 * 1.5 = 1.25 and 1.5; 1.0. Their mean is 1.25.
    found = advantages(two_attempts(), advantage="dr_grpo", credit="turn", discount=(0.5, 1.0))
    assert found == [[0.0, 0.0, 0.0, 0.0, 0.25], [-0.25, -0.25]]
    # Not discounted: 2, 1.5, 1 with mean 1.5; the deviation of a sample is 0.5.
    found = advantages(two_attempts(), advantage="grpo", credit="turn")
    assert found == [[0.999998, 0.999998, 0.0, 0.0, 0.0], [-0.999998, -0.999998]]
    # Each against the mean of the others: 2 - 1.25, 1.5 - 1.5, 1 - 1.75.
    found = advantages(two_attempts(), advantage="rloo", credit="turn")
    assert found == [[0.75, 0.75, 0.0, 0.0, 0.0], [-0.75, -0.75]]


def test_tokens_are_compared_by_their_discounted_returns():
    # 0.875 (0.5 * 0.5 + 0.25 * 1.5 = 0.625), ...: from the end 1.5, 0.5 + 0.75 = 1.25, 0.625; 1.0, 0.5.
    found = advantages(two_attempts(), advantage="dr_grpo", credit="token", discount=(0.5, 1.0))
    mean = (0.625 + 1.25 + 1.5 + 0.5 + 1.0) / 5
    expected = [[0.625 - mean, 1.25 - mean, 0, 0, 1.5 - mean], [0.5 - mean, 1.0 - mean]]
    for got, wanted in zip(found, expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-6)


def test_reinforce_pp_standardizes_all_tokens_of_a_batch():
    found = np.concatenate(advantages(two_attempts(), advantage="reinforce_pp", credit="token"))
    returns = np.array([2.0, 2.0, 1.5, 1.0, 1.0])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    np.testing.assert_allclose(found[[0, 1, 4, 5, 6]], expected, atol=1e-5)
    assert found[[2, 3]].tolist() == [0, 0]


def test_gae_across_turns_by_hand():
    """Turn values 0.2 and 1.0, gamma 0.9, lambda 0.5; the values inside of turns are not read."""
    batch = TrainBatch.from_groups([[rollout(TWO_TURNS, 2.0, [[2, 0.5]])]])
    batch.values = np.array([0.2, 9.0, 0.0, 0.0, 1.0], np.float32)
    config = TrainConfig(advantage="gae", critic_lr=1e-3, credit="turn", discount=(0.9, 0.5))
    standardized, returns = find_advantage("gae")(batch, config)
    last = 1.5 - 1.0
    first = 0.5 + 0.9 * 1.0 - 0.2 + 0.9 * 0.5 * last
    np.testing.assert_allclose(returns, [first + 0.2, first + 0.2, 0, 0, last + 1.0], atol=1e-6)
    raw = np.array([first, first, last])
    expected = (raw - raw.mean()) / (raw.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(standardized[[0, 1, 4]], expected, atol=1e-6)
    # By token the value inside counts, and a turn ends nothing.
    _, by_token = find_advantage("gae")(batch, config.model_copy(update={"credit": "rollout"}))
    inner = 0.5 + 0.9 * 1.0 - 9.0 + 0.45 * last
    outer = 0.9 * 9.0 - 0.2 + 0.45 * inner
    np.testing.assert_allclose(by_token[[0, 1, 4]], [outer + 0.2, inner + 9.0, 1.5], atol=1e-6)


def test_without_turn_rewards_and_discount_the_first_turn_has_the_score():
    batch = TrainBatch.from_groups([[rollout(TWO_TURNS, 1.0), rollout(TWO_TURNS, 0.0)]])
    by_turn = advantages(batch, advantage="dr_grpo", credit="turn")
    assert by_turn == [[0.5, 0.5, 0, 0, 0.5], [-0.5, -0.5, 0, 0, -0.5]]


def test_further_trajectories_of_an_attempt_do_not_count_in_the_mean():
    first = [rollout([1], 1.0, rollout_id="a"), rollout([1], 0.0, rollout_id="b")]
    further = rollout([1, 1], 1.0, rollout_id="c", extra_fields={"trajectory_of": "a"})
    batch = TrainBatch.from_groups([[*first, further]])
    assert advantages(batch, advantage="dr_grpo", credit="turn") == [[0.5], [-0.5], [0.5, 0.5]]


def test_credit_is_refused_where_it_is_not_read():
    with pytest.raises(ConfigError, match="credit = 'turn' is not read by advantage 'opo'"):
        parse_config(TrainConfig, {"advantage": "opo", "credit": "turn"})


# Overlong rollouts


def of_length(length: int, finish: str = "stop") -> RolloutState:
    return rollout([1] * length, 1.0, sample_params=SampleParams(max_tokens=10), finish_reason=finish)


def test_the_soft_penalty_is_that_of_the_paper():
    """Budget 10, share 0.4: nothing up to 6 tokens, then linear to -1 at 10 (DAPO, equation 13)."""
    batch = TrainBatch.from_groups([[of_length(n) for n in (5, 6, 7, 9, 10)]], overlong=0.4)
    np.testing.assert_allclose(batch.scores, [1.0, 1.0, 0.75, 0.25, 0.0], atol=1e-9)
    ends = np.cumsum(batch.response_lengths) - 1
    np.testing.assert_allclose(batch.token_rewards[ends], batch.scores)
    assert batch.metrics["train/overlong_penalty"] == pytest.approx(2.0 / 5)
    unknown = TrainBatch.from_groups([[rollout([1] * 300, 1.0)]], overlong=0.4)
    assert unknown.scores.tolist() == [1.0]


def test_a_filtered_rollout_gives_no_gradient_and_counts_in_no_mean(model, make_model):
    def groups():
        # The first used up its turns, and not its tokens.
        of_turns = of_length(3, "length")
        of_turns.extra_fields["episode"] = {"ended_by": "max_turns"}
        return [[of_turns, of_length(4), of_length(10, "length")]]

    batch = TrainBatch.from_groups(groups(), overlong="filter")
    assert batch.in_loss.tolist() == [True] * 7 + [False] * 10
    results = {}
    for overlong in ("filter", "train"):
        trained = make_model()
        for state in (given := groups())[0]:
            state.reward = {"score": float(len(state.response_ids))}
        trainer = TrainController(trained, TrainConfig(lr=1e-3, overlong=overlong), pad_token_id=0)
        results[overlong] = trainer.fit(given).metrics
    assert results["filter"]["train/trained_tokens"] == 7
    assert results["train"]["train/trained_tokens"] == 17
    assert results["filter"]["train/score_mean"] == results["train"]["train/score_mean"]


# Penalties


def test_a_divergence_in_the_reward_is_the_score_less_its_sum(make_model, make_groups):
    settings = {"advantage": "rloo", "kl_coef": 0.5, "kl_estimator": "reward", "lr": 1e-3}
    trainer = TrainController(make_model(), TrainConfig(**settings), pad_token_id=0, ref_model=make_model(seed=1))
    batch = trainer.fit(make_groups(masked=True))
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    gaps = np.where(batch.response_mask, batch.old_logprobs - batch.ref_logprobs, 0)
    sums = [part.sum() for part in batch.by_sequence(gaps)]
    plain = make_groups(masked=True)
    for state, score, gap in zip([s for group in plain for s in group], batch.scores, sums, strict=True):
        state.reward = {"score": score - 0.5 * gap}
    other = TrainController(make_model(), TrainConfig(advantage="rloo", lr=1e-3), pad_token_id=0)
    expected = other.fit(plain)
    np.testing.assert_allclose(batch.advantages, expected.advantages, atol=1e-5)
    np.testing.assert_allclose(batch.metrics["train/loss"], expected.metrics["train/loss"], atol=1e-6)
    assert batch.metrics["train/kl"] == pytest.approx(gaps[batch.response_mask].mean())


def test_the_reward_of_a_divergence_needs_the_passes_first(make_model, make_groups):
    config = TrainConfig(advantage="rloo", kl_coef=0.5, kl_estimator="reward")
    trainer = TrainController(make_model(), config, pad_token_id=0)
    with pytest.raises(ValueError, match="before compute_advantages; or call fit"):
        trainer.compute_advantages(trainer.pack(make_groups()))


def test_a_penalty_is_steered_towards_its_target_and_survives_a_checkpoint(make_model, make_groups, tmp_path):
    config = TrainConfig(lr=1e-2, kl_coef=(0.1, 1e-9), entropy_coef=(0.01, 1e-9))

    def trainer_of(model):
        return TrainController(model, config, pad_token_id=0)

    trainer = trainer_of(make_model())
    trainer.fit(make_groups())
    assert trainer.fit(make_groups(seed=1)).metrics["train/kl"] > 2e-9
    # The first step is at the reference: its divergence is 0, as far under the target as counts.
    assert trainer.penalties[0] == pytest.approx(0.1 * 0.98 * 1.02, rel=1e-6)
    # The entropy is far over its target both times.
    assert trainer.penalties[1] == pytest.approx(0.01 * 0.98**2, rel=1e-6)
    trainer.save(tmp_path / "checkpoint")
    saved = json.loads((tmp_path / "checkpoint/penalties.json").read_text())
    assert saved["penalties"] == list(trainer.penalties)
    # One that is not steered is the config's; so is one that begins to be, since 0 could not be steered.
    for kl_coef, kept in ((0.07, 0.07), (0.0, 0.1)):
        other = TrainController(make_model(), TrainConfig(kl_coef=(0.1, 0.02), entropy_coef=0.001), pad_token_id=0)
        other.penalties = kl_coef, 0.01
        other.save(tmp_path / f"saved at {kl_coef}")
        other.resume(tmp_path / f"saved at {kl_coef}")
        assert other.penalties == (kept, 0.001)
    resumed = trainer_of(make_model())
    resumed.resume(tmp_path / "checkpoint")
    losses = [each.fit(make_groups(seed=2)).metrics["train/loss"] for each in (trainer, resumed)]
    assert losses[0] == losses[1]


def test_steering_moves_by_two_percent_at_the_most():
    coefficient = 0.1
    for _ in range(200):
        coefficient = steered(coefficient, 0.5, 0.1, 1)
    assert coefficient == pytest.approx(0.1 * 1.02**200)
    assert steered(0.1, 0.0, 0.1, -1) == pytest.approx(0.102)
    assert steered(0.1, None, 0.1, 1) == steered(0.1, 0.3, None, 1) == 0.1
