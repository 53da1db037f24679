"""Importance weights against their definitions, one rollout at a time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.train.objective.corrections import (
    CORRECTIONS,
    DEFAULT_BANDS,
    MAX_LOG_WEIGHT,
    effective_share,
    log_weights,
)

WEIGHING = [name for name, function in CORRECTIONS.items() if function is not None]


def reference(name, rollouts, low, high):
    """The weights of every token of these rollouts (lists of log weights), by the book."""
    level, _, outside = name.partition("_")
    result = []
    for logs in rollouts:
        pooled = {
            "token": [math.exp(log) for log in logs],
            "sequence": [math.prod(math.exp(log) for log in logs)] * len(logs),
            "geometric": [math.prod(math.exp(log) for log in logs) ** (1 / max(1, len(logs)))] * len(logs),
        }[level]
        for weight in pooled:
            if low <= weight <= high:
                result.append(weight)
            else:
                result.append(min(max(weight, low), high) if outside == "tis" else 0.0)
    return result


# Eighths of a nat, so that no product lies so close to an end of the band that rounding decides.
rollouts_of_logs = st.lists(
    st.lists(st.integers(-16, 16).map(lambda number: number / 8 + 0.01), max_size=5), min_size=1, max_size=5
)


@given(rollouts_of_logs, st.sampled_from(WEIGHING), st.sampled_from([(0.0, 2.0), (0.5, 5.0), (0.0, 1e9)]))
def test_weights_are_those_of_the_definition(rollouts, name, band):
    logs = np.array([log for rollout in rollouts for log in rollout], np.float64)
    index = np.repeat(np.arange(len(rollouts)), [len(rollout) for rollout in rollouts])
    weights, limited = CORRECTIONS[name](logs, index, len(rollouts), band)
    assert weights.tolist() == pytest.approx(reference(name, rollouts, *band), rel=1e-9)
    unlimited, _ = CORRECTIONS[name](logs, index, len(rollouts), (0.0, 1e30))
    assert limited.tolist() == [not band[0] <= weight <= band[1] for weight in unlimited]
    assert (weights[~limited] == unlimited[~limited]).all()


@pytest.mark.parametrize("name", WEIGHING)
def test_on_policy_tokens_weigh_exactly_one(name):
    weights, limited = CORRECTIONS[name](np.zeros(4), np.array([0, 0, 1, 1]), 3, DEFAULT_BANDS[name])
    assert weights.tolist() == [1.0] * 4
    assert not limited.any()


@pytest.mark.parametrize("name", WEIGHING)
def test_absurd_differences_stay_finite(name):
    logs = np.array([500.0, 600.0, -700.0, 1e6])
    weights, _ = CORRECTIONS[name](logs, np.array([0, 0, 1, 2]), 3, (0.0, 1e30))
    assert np.isfinite(weights).all()
    assert weights.max() <= math.exp(MAX_LOG_WEIGHT) * 1.001


def test_unknown_behavior_logprobs_weigh_one():
    behavior = np.array([np.nan, -2.0, -np.inf], np.float32)
    assert log_weights(np.array([-1.0, -1.0, -1.0], np.float32), behavior).tolist() == [0.0, 1.0, 0.0]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(-300, 300))
def test_the_effective_share_is_kishs_and_knows_no_scale(logs, shift):
    weights = np.exp(logs)
    expected = weights.sum() ** 2 / (weights**2).sum() / len(weights)
    assert effective_share(np.array(logs) + shift) == pytest.approx(expected, rel=1e-6)
    assert 1 / len(logs) * (1 - 1e-9) <= effective_share(np.array(logs)) <= 1 + 1e-9


def test_the_effective_share_at_its_ends():
    assert effective_share(np.full(7, -3.0)) == 1.0
    assert effective_share(np.array([1000.0, 0.0, 0.0, 0.0])) == 0.25
    assert math.isnan(effective_share(np.array([])))


def test_sequence_weights_correct_the_mean_reward_of_rollouts():
    # Two tokens, each 0 or 1; reward: both equal. Behavior p(1) = 0.4, proximal p(1) = 0.7 after a 1.
    outcomes = [(a, b) for a in (0, 1) for b in (0, 1)]
    behavior = {1: 0.4, 0: 0.6}

    def proximal(first, second):
        return behavior[second] if first == 0 else {1: 0.7, 0: 0.3}[second]

    logs = [[0.0, math.log(proximal(a, b) / behavior[b])] for a, b in outcomes]
    weights, _ = CORRECTIONS["sequence_tis"](np.array(logs).ravel(), np.repeat(np.arange(4), 2), 4, (0.0, math.inf))
    by_rollout = weights[::2]
    expected = sum(behavior[a] * proximal(a, b) for a, b in outcomes if a == b)
    chances = [behavior[a] * behavior[b] for a, b in outcomes]
    estimate = sum(
        chance * weight for chance, weight, (a, b) in zip(chances, by_rollout, outcomes, strict=True) if a == b
    )
    assert estimate == pytest.approx(expected)
