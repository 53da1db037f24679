import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.train.objective.losses import token_weights

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


@given(lengths, st.sampled_from(["token-mean", "sequence-mean", 7]), st.integers(0, 2**32 - 1))
def test_weighted_sums_are_the_means_they_stand_for(lens, normalization, seed):
    random = np.random.default_rng(seed)
    losses = [random.normal(size=length) for length in lens]
    weights = token_weights(normalization, np.array(lens))
    got = sum(weight * part.sum() for weight, part in zip(weights, losses, strict=True))
    expected = {
        "token-mean": lambda: np.concatenate(losses).mean(),
        "sequence-mean": lambda: np.mean([part.mean() for part in losses if len(part)]),
        7: lambda: np.mean([part.sum() / 7 for part in losses]),
    }[normalization]()
    assert got == pytest.approx(expected)


def test_nothing_to_train_is_no_division_by_zero():
    for normalization in ("token-mean", "sequence-mean", 5):
        assert np.isfinite(token_weights(normalization, np.array([0, 0]))).all()
