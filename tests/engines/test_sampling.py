from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.engines.local import sampling as local
from forebay.engines.local.sampling import Sampling, seed_state, uniforms


def sampling(*rows: tuple[float, int, float]) -> Sampling:
    """Rows of (temperature, top_k, top_p)."""
    temperature, top_k, top_p = zip(*rows, strict=True)
    return Sampling(np.array(temperature, np.float32), np.array(top_k, np.int64), np.array(top_p, np.float32))


def draw(logits: torch.Tensor, how: Sampling, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log probabilities as numpy arrays."""
    drawn = local.draw(logits, how, torch.from_numpy(uniform)).numpy()
    return drawn[:, 0].astype(np.int32), drawn[:, 1].astype(np.float32)


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The distribution sampled from, the slow way: temperature, then top-k, then top-p of what is left."""
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    kept = order[: top_k or len(order)]
    weight = {token: math.exp(scaled[token] - max(scaled)) for token in kept}
    total, so_far, nucleus = sum(weight.values()), 0.0, []
    for token in kept:
        nucleus.append(token)
        so_far += weight[token]
        if so_far >= top_p * total and top_p < 1:
            break
    total = sum(weight[token] for token in nucleus)
    return [weight[token] / total if token in nucleus else 0.0 for token in range(len(logits))]


# Values apart enough that rounding cannot change which token is the last of a nucleus.
LOGITS = st.lists(st.integers(-12, 12).map(lambda i: i * 0.37), min_size=1, max_size=9)


@given(
    LOGITS,
    st.floats(0.3, 3),
    st.integers(0, 10),
    st.sampled_from([1.0, 0.913, 0.517, 0.0371]),
    st.floats(0, 1, exclude_max=True),
)
def test_draws_by_inverse_cdf_with_the_logprob_of_what_it_drew_from(logits, temperature, top_k, top_p, u):
    how = sampling((temperature, top_k, top_p))
    ids, logprobs = draw(torch.tensor([logits]), how, np.array([u]))
    expected = reference(logits, float(np.float32(temperature)), top_k, float(np.float32(top_p)))
    token = int(ids[0])
    assert math.isclose(math.exp(logprobs[0]), expected[token], rel_tol=1e-4)
    below = sum(expected[:token])
    assert below - 1e-5 <= u <= below + expected[token] + 1e-5


def test_rows_of_one_batch_keep_their_own_settings():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(5, 1)
    how = sampling((1, 0, 1), (0, 0, 1), (1, 2, 1), (1, 0, 0.5), (2, 0, 1))
    for u in np.linspace(0, 0.999, 50):
        ids, logprobs = draw(logits, how, np.full(5, u))
        each = [
            draw(logits[:1], sampling(row), np.array([u]))
            for row in ((1, 0, 1), (0, 0, 1), (1, 2, 1), (1, 0, 0.5), (2, 0, 1))
        ]
        assert ids.tolist() == [int(one[0][0]) for one in each]
        assert logprobs.tolist() == [float(one[1][0]) for one in each]


def test_greedy_takes_the_most_likely_and_reports_it_at_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    ids, logprobs = draw(logits, sampling((0, 1, 0.1)), np.array([0.99]))
    assert ids.tolist() == [1]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits, -1)[0, 1]), abs=1e-6)


def test_never_draws_an_impossible_token():
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 500] = 0.0
    for u in (0.0, 0.5, 1 - 2.0**-48):
        ids, logprobs = draw(logits, sampling((1, 0, 1)), np.array([u]))
        assert (ids.tolist(), logprobs.tolist()) == ([500], [0.0])


def test_rare_tokens_of_a_large_vocabulary_get_their_share():
    torch.manual_seed(0)
    logits = torch.randn(1, 50_000) * 3
    probabilities = torch.softmax(logits.double(), -1)[0]
    sums = probabilities.cumsum(0)
    for token in (1, 20_000, 49_999):
        u = float(sums[token] - probabilities[token] / 2)
        assert draw(logits, sampling((1, 0, 1)), np.array([u]))[0].tolist() == [token]


@pytest.mark.parametrize("top_k", [0, 40])
def test_a_vocabulary_summed_by_blocks_draws_what_one_summed_whole_does(top_k, monkeypatch):
    torch.manual_seed(1)
    # Not a whole number of blocks, and one block without any weight.
    logits = torch.randn(300, 1300).double() * 4
    logits[:, 512:1024] = -torch.inf
    logits = logits.to(torch.bfloat16)
    how = sampling(*[(0.7, top_k, 1.0)] * 300)
    u = np.linspace(0, 1 - 2.0**-48, 300)
    whole, expected = draw(logits, how, u)
    monkeypatch.setattr(local, "_WHOLE_SUM_TOKENS", 0)
    ids, logprobs = draw(logits, how, u)
    assert (ids == whole).mean() > 0.99
    assert np.isfinite(logprobs).all()
    np.testing.assert_allclose(logprobs[ids == whole], expected[ids == whole], atol=1e-5)
    beside = [draw(logits[i : i + 1], sampling((0.7, top_k, 1.0)), u[i : i + 1]) for i in range(0, 300, 60)]
    assert [int(one[0][0]) for one in beside] == ids[::60].tolist()
    assert [float(one[1][0]) for one in beside] == logprobs[::60].tolist()


def test_broken_logits_show_in_the_logprob():
    logits = torch.tensor([[0.0, torch.nan], [0.0, 1.0]])
    _, logprobs = draw(logits, sampling((1, 0, 1), (1, 0, 1)), np.array([0.5, 0.5]))
    assert np.isfinite(logprobs).tolist() == [False, True]


def test_uniforms_depend_on_seed_and_position_only():
    states = np.array([seed_state(seed) for seed in range(2000)], np.uint64)
    numbers = np.stack([uniforms(states, np.full(2000, position)) for position in range(50)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(np.unique(numbers)) == numbers.size
    assert uniforms(states[3:4], np.array([7]))[0] == numbers[7, 3]
    # Mean and correlations of neighbors within five standard errors of those of independent numbers.
    error = 5 * math.sqrt(1 / 12 / numbers.size)
    assert abs(numbers.mean() - 0.5) < error
    centered = numbers - 0.5
    for product in (centered[1:] * centered[:-1], centered[:, 1:] * centered[:, :-1]):
        assert abs(product.mean()) < 5 / 12 / math.sqrt(product.size)


def test_negative_and_huge_seeds_are_seeds():
    assert len({seed_state(seed) for seed in (0, -1, 2**64 - 2, 2**63, -(2**70) + 5)}) == 5
