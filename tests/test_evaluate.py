import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.evaluate import Evaluator, pass_at_k
from forebay.types import RolloutState, Status


def rollout(score, *, task="t", length=3, finish="stop", status=Status.COMPLETED):
    return RolloutState(
        [],
        task_name=task,
        status=status,
        reward=None if score is None else {"score": score},
        response_ids=range(length),
        finish_reason=finish,
    )


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(n, data):
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    hits = [i < correct for i in range(n)]
    subsets = list(combinations(hits, k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_refuses_a_k_out_of_range():
    with pytest.raises(ValueError, match=r"1\.\.4"):
        pass_at_k(4, 1, 5)


def test_metrics_over_all_and_per_task():
    groups = [
        [rollout(1.0), rollout(0.5, length=5, finish="length")],
        [rollout(0.0, task="u"), rollout(0.0, task="u", length=1)],
    ]
    metrics = Evaluator().evaluate(groups)
    assert metrics["eval/score"] == pytest.approx(0.375)
    assert metrics["eval/accuracy"] == pytest.approx(0.25)
    assert metrics["eval/length"] == pytest.approx(3.0)
    assert metrics["eval/truncated"] == pytest.approx(0.25)
    assert metrics["eval/pass@1"] == pytest.approx(0.25)
    assert metrics["eval/pass@2"] == pytest.approx(0.5)
    assert metrics["eval/t/pass@2"] == 1.0
    assert metrics["eval/u/accuracy"] == 0.0


def test_failed_rollouts_are_counted_not_scored():
    groups = [[rollout(1.0), rollout(None, status=Status.FAILED)]]
    metrics = Evaluator().evaluate(groups)
    assert metrics["eval/score"] == 1.0
    assert metrics["eval/failed"] == 0.5


def test_pass_at_k_is_of_whole_groups_alone():
    failed = rollout(None, status=Status.FAILED)
    metrics = Evaluator().evaluate([[rollout(1.0), rollout(0.0), failed], [failed, rollout(0.0), rollout(0.0)]])
    assert not [name for name in metrics if "pass@" in name]
    metrics = Evaluator().evaluate([[rollout(1.0), failed], [rollout(0.0), rollout(0.0)]])
    assert (metrics["eval/pass@1"], metrics["eval/pass@2"]) == (0.0, 0.0)


def test_all_failed_has_no_score():
    metrics = Evaluator().evaluate([[rollout(None, status=Status.FAILED)]])
    assert math.isnan(metrics["eval/score"])
    assert metrics["eval/failed"] == 1.0


def test_length_counts_generated_tokens_only():
    state = rollout(1.0, length=4)
    state.response_mask = [1, 0, 0, 1]
    assert Evaluator().evaluate([[state]])["eval/length"] == 2.0


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(ValueError, match="no groups"):
        Evaluator().evaluate([])
    with pytest.raises(ValueError, match="no rollouts"):
        Evaluator().evaluate([[rollout(1.0)], []])
    with pytest.raises(ValueError, match="no reward"):
        Evaluator().evaluate([[rollout(None)]])
