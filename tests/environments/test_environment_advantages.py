"""Advantages and value targets against their definitions."""

import numpy as np
import pytest
from environment_factory import random_stream
from hypothesis import given
from hypothesis import strategies as st

from forebay.environments.ppo import vtrace

seeds = st.integers(0, 2**32 - 1)


def reference(stream, ratio, gamma, lam, column):
    """V-trace of one stream, by the sums of the paper: target_s = value_s + sum of discounted deltas."""
    s = {name: array[..., column] for name, array in stream.items()}
    values, steps = np.append(s["value_SB"], s["next_value_B"]), len(s["reward_SB"])
    cut = np.minimum(1.0, ratio[:, column])
    delta = s["reward_SB"] + gamma * values[1:] * ~s["terminated_SB"] - values[:-1]
    targets = values[:-1].copy()
    for start in range(steps):
        weight = 1.0
        for t in range(start, steps if s["live_SB"][start] else start):
            targets[start] += weight * cut[t] * delta[t]
            weight *= gamma * lam * cut[t]
            if s["done_SB"][t]:
                break
    return targets


@given(seeds, st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_value_targets_are_those_of_the_paper(seed, gamma, lam):
    rng = np.random.default_rng(seed)
    stream = random_stream(rng, 12, 2)
    ratio = rng.lognormal(size=(12, 2))
    targets = vtrace(**stream, gamma=gamma, lam=lam, ratio_SB=ratio)
    for column in range(2):
        expected = reference(stream, ratio, gamma, lam, column)
        np.testing.assert_allclose(targets.values_SB[:, column], expected, atol=1e-9)


@given(seeds, st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_without_lag_advantages_are_those_of_gae(seed, gamma, lam):
    stream = random_stream(np.random.default_rng(seed), 12, 2)
    targets = vtrace(**stream, gamma=gamma, lam=lam, ratio_SB=np.ones((12, 2)))
    for column in range(2):
        expected = reference(stream, np.ones((12, 2)), gamma, lam, column)
        advantages = expected - stream["value_SB"][:, column]
        np.testing.assert_allclose(targets.advantages_SB[:, column], advantages, atol=1e-9)


@given(seeds, st.integers(1, 11))
def test_a_stream_may_be_cut_anywhere_when_the_bootstrap_is_exact(seed, cut):
    rng = np.random.default_rng(seed)
    stream = random_stream(rng, 12, 3)
    ratio = rng.lognormal(size=(12, 3))
    whole = vtrace(**stream, gamma=0.9, lam=1.0, ratio_SB=ratio)
    # What follows the cut is worth its target, unless nothing follows: then it is worth its value.
    exact_B = np.where(stream["live_SB"][cut], whole.values_SB[cut], stream["value_SB"][cut])
    front = {name: array[:cut] for name, array in stream.items()} | {"next_value_B": exact_B}
    back = {name: array[cut:] for name, array in stream.items()} | {"next_value_B": stream["next_value_B"]}
    for part, at in ((front, slice(0, cut)), (back, slice(cut, 12))):
        targets = vtrace(**part, gamma=0.9, lam=1.0, ratio_SB=ratio[at])
        np.testing.assert_allclose(targets.values_SB, whole.values_SB[at], atol=1e-9)
        np.testing.assert_allclose(targets.advantages_SB, whole.advantages_SB[at], atol=1e-9)


@pytest.mark.parametrize(("terminated", "expected"), [(True, 1.0 - 5.0), (False, 1.0 + 0.5 * 8.0 - 5.0)])
def test_only_a_truncated_episode_has_a_future(terminated, expected):
    targets = vtrace(
        np.array([[1.0], [0.0], [7.0]]),
        np.array([[5.0], [8.0], [3.0]]),
        np.array([100.0]),
        np.array([[terminated], [False], [False]]),
        np.array([[True], [False], [False]]),
        gamma=0.5,
        lam=1.0,
        ratio_SB=np.ones((3, 1)),
        live_SB=np.array([[True], [False], [True]]),
    )
    assert targets.advantages_SB[:, 0].tolist() == [expected, 0.0, 7.0 + 50.0 - 3.0]
    assert targets.values_SB[1, 0] == 8.0  # the step that reset teaches nothing
