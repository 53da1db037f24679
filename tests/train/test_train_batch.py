"""What may enter a batch, in which order, and what it knows about itself."""

import numpy as np
import pytest

from forebay.train import TrainBatch
from forebay.types import RolloutState, SampleParams, Status


def rollout(rollout_id="r", group_id=0, **changes):
    settings = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "status": Status.COMPLETED,
        "reward": {"score": 1.0},
        "task_name": "t",
    }
    return RolloutState([], rollout_id=rollout_id, group_id=group_id, **{**settings, **changes})


def test_the_order_depends_on_ids_only(make_groups):
    groups = make_groups(12, 2)
    groups[3][0].task_name = groups[3][1].task_name = "another"
    shuffled = [groups[i] for i in np.random.default_rng(5).permutation(12)]
    batch = TrainBatch.from_groups(shuffled)
    expected = ["3.0", "3.1"] + [f"{g}.{m}" for g in range(12) if g != 3 for m in range(2)]
    assert batch.rollout_ids == expected
    assert batch.group_index.tolist() == np.repeat(np.arange(12), 2).tolist()


def test_numbered_groups_sort_as_numbers_and_before_named_ones():
    groups = [[rollout(str(i), i)] for i in ("b", 10, 9, "a", None)]
    assert TrainBatch.from_groups(groups).rollout_ids == ["9", "10", "None", "a", "b"]


def test_arrays_hold_every_token_once():
    batch = TrainBatch.from_groups(
        [
            [
                rollout("x", response_mask=[1, 0, 1], logprobs=[-0.5, -0.25, -1.0]),
                rollout("y", prompt_ids=[9], response_ids=[]),
            ]
        ]
    )
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 9]
    assert (batch.num_sequences, batch.num_tokens, batch.num_response_tokens) == (2, 6, 3)
    assert batch.lengths.tolist() == [5, 1]
    assert batch.token_starts.tolist() == [0, 5]
    assert batch.generated_lengths.tolist() == [2, 0]
    assert [part.tolist() for part in batch.by_sequence(batch.rollout_logprobs)] == [[-0.5, -0.25, -1.0], []]


def test_equal_prompts_have_equal_numbers():
    groups = [[rollout(prompt_ids=[1, 2])] * 2, [rollout(group_id=1, prompt_ids=[1])] * 2, [rollout(group_id=2)]]
    assert TrainBatch.from_groups(groups).prompt_index.tolist() == [0, 0, 1, 1, 0]


def test_a_rollouts_own_temperature_comes_first():
    groups = [[rollout(sample_params=SampleParams(temperature=0.5)), rollout()]]
    assert TrainBatch.from_groups(groups, temperature=0.75).temperatures.tolist() == [0.5, 0.75]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": Status.FAILED}, "failed"),
        ({"status": Status.ABORTED}, "aborted"),
        ({"status": Status.FILTERED}, "filtered"),
        ({"reward": None}, "no score"),
        ({"reward": {"accuracy": 1.0}}, "no score"),
        ({"prompt_ids": []}, "no prompt tokens"),
        ({"sample_params": SampleParams(temperature=0.0)}, "greedy: temperature 0"),
    ],
)
def test_what_cannot_be_trained_on_is_named(changes, reason):
    with pytest.raises(ValueError, match=rf"only COMPLETED rollouts .* rollouts 'bad' \({reason}\)"):
        TrainBatch.from_groups([[rollout("good"), rollout("bad", **changes)]])


def test_many_bad_rollouts_are_named_in_part():
    with pytest.raises(ValueError, match=r"'0' \(failed\).*'4' \(failed\) and 3 more"):
        TrainBatch.from_groups([[rollout(str(i), status=Status.FAILED) for i in range(8)]])


def test_a_group_that_mixes_prompts_is_an_error():
    with pytest.raises(ValueError, match="groups that mix prompts"):
        TrainBatch.from_groups([[rollout("a", 1), rollout("b", 2)]])


@pytest.mark.parametrize(("groups", "message"), [([], "at least one group"), ([[]], "group without rollouts")])
def test_nothing_to_train_on_is_an_error(groups, message):
    with pytest.raises(ValueError, match=message):
        TrainBatch.from_groups(groups)
