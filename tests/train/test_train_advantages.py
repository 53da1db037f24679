"""Every estimator against its formula written out naively, and the corners that divide by zero."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.train.batch import TrainBatch
from forebay.train.config import ADVANTAGE_NAMES
from forebay.train.objective.advantages import (
    ADVANTAGES,
    Decisions,
    center,
    gae,
    grpo,
    opo,
    pass_at_k,
    reinforce_pp_baseline,
    rloo,
    spread,
    standardize,
)
from forebay.types import RolloutState, Status

scores_of_groups = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]), min_size=1, max_size=6), min_size=1, max_size=5
)


def flat(groups):
    scores = np.array([score for group in groups for score in group])
    return scores, np.repeat(np.arange(len(groups)), [len(group) for group in groups])


@given(scores_of_groups)
def test_grpo_divides_by_the_groups_deviation(groups):
    expected = []
    for group in groups:
        deviation = np.std(group, ddof=1) if len(group) > 1 else 0.0
        expected += [(score - np.mean(group)) / (deviation + 1e-6) for score in group]
    np.testing.assert_allclose(grpo(*flat(groups)), expected, atol=1e-9)


@given(scores_of_groups)
def test_dr_grpo_only_subtracts_the_mean(groups):
    expected = [score - np.mean(group) for group in groups for score in group]
    np.testing.assert_allclose(center(*flat(groups)), expected, atol=1e-12)


@given(scores_of_groups)
def test_rloo_subtracts_the_mean_of_the_others(groups):
    expected = [
        score - np.mean(group[:i] + group[i + 1 :]) if len(group) > 1 else 0.0
        for group in groups
        for i, score in enumerate(group)
    ]
    np.testing.assert_allclose(rloo(*flat(groups)), expected, atol=1e-12)


@given(scores_of_groups, st.randoms(use_true_random=False))
def test_opo_weights_the_baseline_by_length(groups, random):
    lengths = [[random.randint(1, 9) for _ in group] for group in groups]
    expected = [
        score - np.dot(group, lens) / np.sum(lens)
        for group, lens in zip(groups, lengths, strict=True)
        for score in group
    ]
    np.testing.assert_allclose(opo(*flat(groups), np.concatenate(lengths)), expected, atol=1e-12)


def test_opo_of_a_group_without_tokens_uses_the_plain_mean():
    scores, group_index = flat([[1.0, 0.0]])
    assert opo(scores, group_index, np.array([0, 0])).tolist() == [0.5, -0.5]


@given(scores_of_groups)
def test_reinforce_pp_baseline_normalizes_over_the_batch(groups):
    centered = np.array([score - np.mean(group) for group in groups for score in group])
    if len(centered) < 2:
        expected = np.zeros(len(centered))
    else:
        expected = (centered - centered.mean()) / (centered.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(reinforce_pp_baseline(*flat(groups)), expected, atol=1e-9)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(group, data):
    k = data.draw(st.integers(1, len(group)))
    subsets = list(combinations(range(len(group)), k))
    rewards = np.array([max(group[i] >= 1.0 for i in subset) for subset in subsets], float)
    scale = rewards.std()
    expected = [
        np.mean([
            (reward - rewards.mean()) / scale if scale > 0 else 0.0
            for subset, reward in zip(subsets, rewards, strict=True)
            if member in subset
        ])
        for member in range(len(group))
    ]  # fmt: skip
    np.testing.assert_allclose(pass_at_k(*flat([group]), k), expected, atol=1e-9)


def test_pass_at_k_by_hand():
    # n = 4, one solved, k = 2: m = 1 - C(3,2)/C(4,2) = 1/2, s = 1/2; unsolved: (1/2 - C(2,1)/C(3,1)) / s.
    assert pass_at_k(*flat([[1.0, 0.0, 0.0, 0.0]]), 2) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_pass_at_k_of_a_group_smaller_than_k_says_so():
    with pytest.raises(ValueError, match="pass_at_3 needs 3 rollouts, but a group has only 2"):
        pass_at_k(*flat([[1.0, 0.0, 1.0], [1.0, 0.0]]), 3)


@pytest.mark.parametrize("estimator", [grpo, center, rloo, reinforce_pp_baseline])
@pytest.mark.parametrize("score", [0.0, 0.1, 1 / 3])
def test_equal_scores_and_lone_rollouts_teach_exactly_nothing(estimator, score):
    assert estimator(*flat([[score] * 3, [score * 7], [score] * 5])).tolist() == [0.0] * 9


BY_ATTEMPT = {
    "grpo": grpo,
    "dr_grpo": center,
    "rloo": rloo,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "pass_at_2": lambda scores, group, first=None: pass_at_k(scores, group, 2, first),
}


def with_trajectories(groups, counts):
    """Every attempt's score `counts[i]` times, the groups, the firsts, and which attempt each is of."""
    scores, group_index = flat(groups)
    attempts = np.repeat(np.arange(len(scores)), counts)
    firsts = (np.cumsum(counts) - counts)[attempts]
    return scores[attempts], group_index[attempts], firsts, attempts


@pytest.mark.parametrize("name", BY_ATTEMPT)
@given(
    groups=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=5), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_trajectory_has_the_advantage_that_its_attempt_has_alone(name, groups, seed):
    estimator = BY_ATTEMPT[name]
    counts = np.random.default_rng(seed).integers(1, 4, sum(map(len, groups)))
    *arrays, attempts = with_trajectories(groups, counts)
    np.testing.assert_allclose(estimator(*arrays), estimator(*flat(groups))[attempts], atol=1e-12)


@given(scores_of_groups, st.integers(0, 2**32 - 1))
def test_opo_does_not_see_how_an_attempt_is_cut_into_trajectories(groups, seed):
    random = np.random.default_rng(seed)
    counts = random.integers(1, 4, sum(map(len, groups)))
    scores, group_index, _, attempts = with_trajectories(groups, counts)
    lengths = random.integers(1, 9, len(scores))
    whole = opo(*flat(groups), np.bincount(attempts, lengths))
    np.testing.assert_allclose(opo(scores, group_index, lengths), whole[attempts], atol=1e-12)


def test_pass_at_k_counts_attempts():
    # Scores 1 (three trajectories), 0 and 0: two of the three pairs of attempts are solved.
    arrays = with_trajectories([[1.0, 0.0, 0.0]], np.array([3, 1, 1]))[:3]
    solved, unsolved = pass_at_k(*flat([[1.0, 0.0, 0.0]]), 2)[:2]
    assert solved > 0 > unsolved
    assert pass_at_k(*arrays[:2], 2, arrays[2]).tolist() == [solved] * 3 + [unsolved] * 2
    # Of two attempts there is one pair: whatever its members did, it has no other to be better than.
    arrays = with_trajectories([[1.0, 0.0]], np.array([3, 1]))[:3]
    assert pass_at_k(*arrays[:2], 2, arrays[2]).tolist() == [0.0] * 4


def test_a_trajectory_with_a_reward_of_its_own_is_compared_with_the_attempts():
    scores, group, first = np.array([1.0, 0.5, 0.0, 0.5]), np.zeros(4, int), np.array([0, 0, 2, 3])
    assert center(scores, group, first).tolist() == [0.5, 0.0, -0.5, 0.0]
    assert rloo(scores, group, first).tolist() == [0.75, 0.25, -0.75, 0.0]


def gae_reference(score, values, gamma, lam):
    advantages, following, advantage = [], 0.0, 0.0
    for t in reversed(range(len(values))):
        reward = score if t == len(values) - 1 else 0.0
        advantage = reward + gamma * following - values[t] + gamma * lam * advantage
        following = values[t]
        advantages.insert(0, advantage)
    return advantages


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.7, 1.0]))
def test_gae_runs_backwards_over_generated_tokens(seed, gamma, lam):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 6, 4)
    total = lengths.sum()
    mask, values = random.integers(0, 2, total).astype(bool), random.normal(size=total)
    scores = random.normal(size=4)
    batch = TrainBatch.from_groups(
        [
            [
                RolloutState([], prompt_ids=[1], response_ids=part, response_mask=mask[part],
                             status=Status.COMPLETED, reward={"score": score})
            ]
            for score, part in zip(scores, np.split(np.arange(total), np.cumsum(lengths)[:-1]), strict=True)
        ]
    )  # fmt: skip
    batch.values = values
    decisions = Decisions(batch, "token")
    rewards = decisions.sums(batch.token_rewards)
    found = gae(rewards, batch.values[decisions.firsts_K], decisions.rows_K, gamma, lam)
    advantages, returns = (decisions.spread(part, batch) for part in found)
    for score, part in zip(batch.scores, batch.by_sequence(np.arange(total)), strict=True):
        generated = part[mask[part]]
        expected = gae_reference(score, batch.values[generated], gamma, lam)
        np.testing.assert_allclose(advantages[generated], expected, atol=1e-12)
        np.testing.assert_allclose(returns[generated], expected + batch.values[generated], atol=1e-12)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_gae_with_lambda_one_is_the_score_minus_the_value():
    advantages, returns = gae(np.array([0.0, 2.0]), np.array([0.5, 1.5]), np.array([0, 0]), 1.0, 1.0)
    assert advantages.tolist() == [1.5, 0.5]
    assert returns.tolist() == [2.0, 2.0]


def test_standardize_of_one_number_is_zero():
    assert standardize(np.array([3.0])).tolist() == [0.0]


def test_advantages_are_spread_over_tokens_and_must_be_one_per_sequence():
    batch = TrainBatch.from_examples([([1], [2, 3]), ([1], []), ([1], [4])])
    assert spread(np.array([1.0, 2.0, 3.0]), batch).tolist() == [1.0, 1.0, 3.0]
    with pytest.raises(ValueError, match="returned 2 numbers for 3 sequences"):
        spread(np.zeros(2), batch)


def test_the_config_knows_every_advantage():
    assert tuple(ADVANTAGES) == ADVANTAGE_NAMES
