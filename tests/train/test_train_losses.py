"""Losses against golden numbers and their formulas written out for one token at a time."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.train.config import LOSS_NAMES, TrainConfig
from forebay.train.objective.losses import (
    MAX_LOG_RATIO,
    POLICY_LOSSES,
    PolicyInputs,
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_penalty,
    value_loss,
)

LOW, HIGH = 0.2, 0.3
CONFIG = TrainConfig(clip=(LOW, HIGH))


def inputs(log_ratios, advantages, sequences=None):
    old = torch.linspace(-1.0, -2.0, len(log_ratios))
    logprobs = (old + torch.tensor(log_ratios)).requires_grad_()
    index = torch.tensor(sequences if sequences is not None else [0] * len(log_ratios))
    return PolicyInputs(logprobs, old, torch.tensor(advantages), index, int(index.max()) + 1)


tokens = st.lists(
    st.tuples(st.floats(-2, 2, width=32), st.floats(-3, 3, width=32), st.integers(0, 2)), min_size=1, max_size=8
)


def test_clipped_by_hand():
    # Ratios 1.5, 0.5, 1.5, 0.5 against A = 1, 1, -1, -1.
    given_ = inputs([math.log(r) for r in (1.5, 0.5, 1.5, 0.5)], [1.0, 1.0, -1.0, -1.0])
    result = clipped_loss(given_, CONFIG)
    assert result.loss.tolist() == pytest.approx([-1.3, -0.5, 1.5, 0.8])
    assert result.clipped_high.tolist() == [True, False, False, False]
    assert result.clipped_low.tolist() == [False, False, False, True]


@given(tokens, st.sampled_from([None, 1.5, 3.0]))
def test_clipped_is_the_papers_formula(rows, dual_clip):
    given_ = inputs([r[0] for r in rows], [r[1] for r in rows])
    result = clipped_loss(given_, TrainConfig(clip=(LOW, HIGH) if dual_clip is None else (LOW, HIGH, dual_clip)))
    for log_ratio, advantage, loss in zip(
        (given_.logprobs - given_.old_logprobs).tolist(), given_.advantages.tolist(), result.loss, strict=True
    ):
        ratio = math.exp(log_ratio)
        objective = min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)
        if dual_clip is not None and advantage < 0:
            objective = max(objective, dual_clip * advantage)
        assert loss.item() == pytest.approx(-objective, rel=1e-4, abs=1e-5)


def test_a_clipped_token_has_no_gradient_and_another_has_the_policy_gradient():
    given_ = inputs([0.5, 0.0], [1.0, 2.0])
    clipped_loss(given_, CONFIG).loss.sum().backward()
    assert given_.logprobs.grad.tolist() == [0.0, -2.0]


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    given_ = inputs([math.log(10.0)], [-1.0])
    assert clipped_loss(given_, CONFIG).loss.item() == pytest.approx(10.0, rel=1e-5)
    bounded = clipped_loss(given_, TrainConfig(clip=(LOW, HIGH, 3.0)))
    assert bounded.loss.item() == 3.0
    assert bounded.clipped_high.tolist() == [True]


@given(tokens)
def test_gspo_has_one_ratio_per_sequence(rows):
    rows.sort(key=lambda row: row[2])
    given_ = inputs([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows])
    result = gspo_loss(given_, CONFIG)
    log_ratios = (given_.logprobs - given_.old_logprobs).tolist()
    for row, advantage, loss in zip(rows, given_.advantages.tolist(), result.loss, strict=True):
        own = [log_ratio for log_ratio, other in zip(log_ratios, rows, strict=True) if other[2] == row[2]]
        ratio = math.exp(sum(own) / len(own))
        objective = min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)
        assert loss.item() == pytest.approx(-objective, rel=1e-4, abs=1e-5)


def test_gspo_gradient_by_hand():
    # Two tokens, ratios e^0.1 and e^-0.1: s = 1. With the mean over tokens, d loss / d logprob = -A s / 2.
    given_ = inputs([0.1, -0.1], [3.0, 3.0])
    gspo_loss(given_, CONFIG).loss.mean().backward()
    assert given_.logprobs.grad.tolist() == pytest.approx([-1.5, -1.5])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    given_ = inputs([math.log(2.0), math.log(0.5), 0.0], [1.0, -1.0, 1.0])
    result = cispo_loss(given_, CONFIG)
    expected = [-1.3 * given_.logprobs[0], 0.8 * given_.logprobs[1], -given_.logprobs[2]]
    assert result.loss.tolist() == pytest.approx([value.item() for value in expected])
    result.loss.sum().backward()
    assert given_.logprobs.grad.tolist() == pytest.approx([-1.3, 0.8, -1.0])
    assert result.clipped_high.tolist() == [True, False, False]
    assert result.clipped_low.tolist() == [False, True, False]


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_a_huge_ratio_stays_finite(name):
    given_ = inputs([500.0, -500.0], [0.0, 1.0])
    result = POLICY_LOSSES[name](given_, TrainConfig())
    assert torch.isfinite(result.loss).all()
    assert MAX_LOG_RATIO < 500


def test_the_table_names_what_a_run_file_may_name():
    assert tuple(POLICY_LOSSES) == LOSS_NAMES


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)])
def test_kl_by_hand(estimator, expected):
    assert float(kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator)) == pytest.approx(expected)


def test_kl_estimates_average_to_the_divergence():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    exact = (policy * (policy / reference).log()).sum()
    for estimator in ("k1", "k3"):
        mean = (policy * kl_penalty(policy.log(), reference.log(), estimator)).sum()
        assert float(mean) == pytest.approx(float(exact), rel=1e-5)


def test_the_gradient_of_k2_is_that_of_the_divergence_and_of_k1_nothing():
    logits = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    reference = torch.tensor([0.4, 0.4, 0.2]).log()
    logprobs = logits.log_softmax(-1)
    policy = logprobs.exp().detach()
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)[0]
    k1, k2 = (
        torch.autograd.grad((policy * kl_penalty(logprobs, reference, name)).sum(), logits, retain_graph=True)[0]
        for name in ("k1", "k2")
    )
    torch.testing.assert_close(k2, exact)
    torch.testing.assert_close(k1, torch.zeros(3))


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 1.0, 0.1], requires_grad=True)
    loss, clipped = value_loss(values, torch.tensor([0.0, 0.0, 0.0]), torch.tensor([2.0, -1.0, 1.0]), clip=0.2)
    # (1 - 2)^2 < (0.2 - 2)^2;  (1 + 1)^2 > (0.2 + 1)^2;  0.1 is within the range.
    assert loss.tolist() == pytest.approx([1.8**2 / 2, 2.0, 0.9**2 / 2])
    assert clipped.tolist() == [True, False, False]
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, 2.0, -0.9])
