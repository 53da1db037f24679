"""Rollouts, their statuses and the arithmetic of their age."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.types import (
    ROLLOUT_FIELDS,
    TOKEN_FIELDS,
    UNLABELED,
    RolloutState,
    SampleParams,
    Status,
    calculate_seq_staleness,
    expire_group,
    fill_token_fields,
    get_group_status,
    maybe_expire_group,
    oldest_step_of,
    refresh_seq_staleness,
    reset_rollout_response,
    status_from_finish_reason,
    update_sample_version,
)

DTYPES = {
    "prompt_ids": np.int32,
    "tokens": np.int32,
    "response_ids": np.int32,
    "logprobs": np.float32,
    "response_mask": np.uint8,
    "response_model_steps": np.int32,
}

PRECEDENCE = [
    Status.FAILED,
    Status.ABORTED,
    Status.MAX_TRIES,
    Status.EXPIRED,
    Status.FILTERED,
    Status.SKIPPED,
    Status.INIT,
    Status.ARCHIVED,
]


def rollout(**fields: object) -> RolloutState:
    return RolloutState([{"role": "user", "content": "1+1="}], **fields)  # type: ignore[arg-type]


def with_steps(*steps: int, **fields: object) -> RolloutState:
    return rollout(response_ids=range(len(steps)), response_model_steps=steps, **fields)


def test_statuses_are_the_lower_case_names() -> None:
    assert {status.value for status in Status} == {status.name.lower() for status in Status}
    assert len(Status) == 9


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_are_empty_by_default_and_never_none(name: str) -> None:
    state = rollout()
    assert getattr(state, name).shape == (0,)
    assert getattr(state, name).dtype == DTYPES[name]
    setattr(state, name, [1, 2])
    setattr(state, name, None)
    assert getattr(state, name).shape == (0,)
    assert getattr(state, name).dtype == DTYPES[name]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    "value",
    [
        [1, 0, 1],
        (1, 0, 1),
        np.array([1, 0, 1], np.int64),
        np.array([1.0, 0.0, 1.0]),
        np.array([1, 9, 0, 9, 1], np.int32)[::2],
        [True, False, True],
    ],
    ids=["list", "tuple", "int64", "whole floats", "strided", "bools"],
)
def test_any_sequence_becomes_a_contiguous_array_of_the_field_s_dtype(name: str, value: object) -> None:
    array = getattr(rollout(**{name: value}), name)
    assert array.tolist() == [1, 0, 1]
    assert array.dtype == DTYPES[name]
    assert array.flags.c_contiguous


def test_an_array_of_the_right_dtype_is_not_copied() -> None:
    ids = np.arange(4, dtype=np.int32)
    assert rollout(response_ids=ids).response_ids is ids


def test_a_missing_logprob_in_a_list_is_nan() -> None:
    assert np.isnan(rollout(logprobs=[-0.5, None]).logprobs).tolist() == [False, True]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1, 2], [3, 4]], r"response_ids must be one-dimensional, got shape \(2, 2\)"),
        (np.array(3), "one-dimensional"),
        ([1.5], "whole numbers that fit int32, got 1.5"),
        ([2**40], f"whole numbers that fit int32, got {2**40}"),
        (np.array([2**40]), f"whole numbers that fit int32, got {2**40}"),
        (["1"], "must hold numbers"),
        ([None], "must hold numbers"),
    ],
)
def test_what_is_no_list_of_token_ids_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rollout(response_ids=value)
    state = rollout(response_ids=[7])
    with pytest.raises(ValueError, match=message):
        state.response_ids = value  # type: ignore[assignment]
    assert state.response_ids.tolist() == [7]


def test_only_the_message_is_required_and_positional() -> None:
    with pytest.raises(TypeError):
        RolloutState()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        RolloutState([], "r0")  # type: ignore[misc]


def test_unknown_fields_are_errors() -> None:
    with pytest.raises(TypeError, match="respons"):
        rollout(respons="4")
    with pytest.raises(AttributeError):
        rollout().respons = "4"  # type: ignore[attr-defined]


def test_rollouts_are_equal_only_to_themselves_and_do_not_share_their_defaults() -> None:
    one, other = rollout(), rollout()
    assert one != other
    assert len({one, other}) == 2
    one.extra_fields["key"] = 1
    assert other.extra_fields == {}


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_has_the_same_fields_and_its_own_arrays(clone: object) -> None:
    state = rollout(prompt_ids=[1], rollout_id="r", reward={"score": 1.0})
    state.append([2, 3], logprobs=[-1.0, -2.0], model_step=4)
    twin = clone(state)  # type: ignore[operator]
    for name in ROLLOUT_FIELDS:
        np.testing.assert_equal(getattr(twin, name), getattr(state, name))
    twin.response_ids[0] = 99
    assert state.response_ids.tolist() == [2, 3]


def test_what_is_appended_is_a_copy_of_arrays_that_the_caller_may_use_again() -> None:
    state = rollout()
    ids, logprobs, steps = np.array([3, 4], np.int32), np.array([-1, -2], np.float32), np.array([0, 1], np.int32)
    for _ in range(2):
        state.append(ids, logprobs=logprobs, model_step=steps)
        for array in (ids, logprobs, steps):
            array[:] = 9
    assert state.tokens.tolist() == state.response_ids.tolist() == [3, 4, 9, 9]
    assert state.logprobs.tolist() == [-1, -2, 9, 9]
    assert state.response_model_steps.tolist() == [0, 1, 9, 9]
    state.tokens[0] = 5
    assert state.response_ids[0] == 3


def test_append_extends_all_token_fields_and_the_engine_input() -> None:
    state = rollout(prompt_ids=[1, 2])
    state.append([3, 4], logprobs=[-0.5, -0.25], model_step=7)
    state.append([5], mask=0)
    state.append([6], model_step=[8])
    assert state.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert state.response_ids.tolist() == [3, 4, 5, 6]
    assert state.response_mask.tolist() == [1, 1, 0, 1]
    assert state.response_model_steps.tolist() == [7, 7, UNLABELED, 8]
    np.testing.assert_array_equal(state.logprobs, np.array([-0.5, -0.25, np.nan, np.nan], np.float32))
    assert {name: getattr(state, name).dtype for name in DTYPES} == DTYPES


def test_append_of_nothing_changes_no_response() -> None:
    state = rollout(prompt_ids=[1])
    state.append([])
    assert [len(getattr(state, name)) for name in TOKEN_FIELDS] == [0, 0, 0, 0]
    assert state.tokens.tolist() == [1]


def test_append_does_not_write_into_the_prompt() -> None:
    prompt = np.array([1, 2], np.int32)
    state = rollout(prompt_ids=prompt)
    state.append([3])
    state.tokens[0] = 99
    assert prompt.tolist() == [1, 2]


@pytest.mark.parametrize("wrong", [{"logprobs": [-1.0]}, {"model_step": [1, 2, 3]}])
def test_append_refuses_ragged_fields_and_leaves_the_rollout_as_it_was(wrong: dict[str, object]) -> None:
    state = rollout(prompt_ids=[1])
    state.append([2])
    with pytest.raises(ValueError, match="2 appended tokens"):
        state.append([3, 4], **wrong)  # type: ignore[arg-type]
    assert state.tokens.tolist() == [1, 2]
    assert [len(getattr(state, name)) for name in TOKEN_FIELDS] == [1, 1, 1, 1]


def test_fill_completes_what_was_left_out() -> None:
    state = rollout(response_ids=[1, 2])
    fill_token_fields(state)
    assert state.response_mask.tolist() == [1, 1]
    assert state.response_model_steps.tolist() == [UNLABELED, UNLABELED]
    assert np.isnan(state.logprobs).all()


@pytest.mark.parametrize("name", ["logprobs", "response_mask", "response_model_steps"])
@pytest.mark.parametrize("length", [1, 3])
def test_fill_and_append_refuse_ragged_fields(name: str, length: int) -> None:
    state = rollout(rollout_id="r7", response_ids=[1, 2], **{name: [1] * length})
    with pytest.raises(ValueError, match=f"'r7': {name} has {length} entries but response_ids has 2"):
        fill_token_fields(state)
    with pytest.raises(ValueError, match=name):
        state.append([3])


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 50), max_size=4), st.sampled_from([0, 1]), st.integers(0, 5)), max_size=5
    )
)
def test_token_fields_keep_one_length_and_tokens_are_prompt_plus_response(
    pieces: list[tuple[list[int], int, int]],
) -> None:
    state = rollout(prompt_ids=[1, 2, 3])
    for ids, mask, step in pieces:
        state.append(ids, mask=mask, model_step=step)
    assert len({len(getattr(state, name)) for name in TOKEN_FIELDS}) == 1
    response = [token for ids, _, _ in pieces for token in ids]
    assert state.response_ids.tolist() == response
    if pieces:
        assert state.tokens.tolist() == [1, 2, 3, *response]


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("stop", Status.COMPLETED),
        ("length", Status.COMPLETED),
        ("tool_calls", Status.COMPLETED),
        ("abort", Status.ABORTED),
        ("error", Status.FAILED),
        (None, Status.FAILED),
        ("content_filter", Status.FAILED),
    ],
)
def test_finish_reasons(reason: str | None, status: Status) -> None:
    assert status_from_finish_reason(reason) is status


@given(st.lists(st.sampled_from(Status), min_size=1, max_size=6))
def test_a_group_takes_the_first_status_in_the_order_that_any_member_has(statuses: list[Status]) -> None:
    expected = next((status for status in PRECEDENCE if status in statuses), Status.COMPLETED)
    assert get_group_status([rollout(status=status) for status in statuses]) is expected


def test_an_empty_group_has_no_status() -> None:
    with pytest.raises(ValueError, match="empty group"):
        get_group_status([])


@given(st.integers(0, 100), st.integers(0, 100))
def test_a_token_ages_by_one_each_train_step_and_starts_at_zero(model_step: int, later: int) -> None:
    assert calculate_seq_staleness(model_step, model_step + 1) == 0
    assert calculate_seq_staleness(model_step, model_step + 1 + later) == later


@given(st.lists(st.integers(UNLABELED, 9), max_size=8), st.integers(0, 8), st.integers(0, 9))
def test_labels_are_given_once_and_never_changed(steps: list[int], missing: int, model_step: int) -> None:
    state = rollout(response_ids=range(len(steps) + missing), response_model_steps=steps)
    update_sample_version(state, model_step)
    expected = [model_step if step == UNLABELED else step for step in steps] + [model_step] * missing
    assert state.response_model_steps.tolist() == expected
    update_sample_version(state, model_step + 1)
    assert state.response_model_steps.tolist() == expected


@given(st.lists(st.lists(st.integers(UNLABELED, 9), max_size=5), min_size=1, max_size=4), st.integers(1, 20))
def test_a_rollout_is_as_stale_as_its_oldest_labeled_token(steps: list[list[int]], train_step: int) -> None:
    group = [with_steps(*of_rollout) for of_rollout in steps]
    refresh_seq_staleness(group, train_step)
    labeled = [[step for step in of_rollout if step != UNLABELED] for of_rollout in steps]
    assert [state.seq_staleness for state in group] == [
        train_step - min(known) - 1 if known else 0 for known in labeled
    ]


@given(st.lists(st.tuples(st.integers(UNLABELED, 4), st.integers(0, 2)), max_size=8), st.booleans())
def test_the_oldest_step_is_that_of_generated_and_labeled_tokens(
    tokens: list[tuple[int, int]], has_mask: bool
) -> None:
    state = with_steps(*(step for step, _ in tokens))
    if has_mask:
        state.response_mask = [mask for _, mask in tokens]  # type: ignore[assignment]
    counted = [step for step, mask in tokens if step != UNLABELED and (mask or not has_mask)]
    assert oldest_step_of(state) == min(counted, default=None)
    fill_token_fields(state)
    assert oldest_step_of(state) == min(counted, default=None)


def test_what_is_filled_in_belongs_to_one_rollout() -> None:
    one, other = rollout(response_ids=[1, 2]), rollout(response_ids=[1, 2])
    for state in (one, other):
        update_sample_version(state, 3)
        fill_token_fields(state)
    for name in ("logprobs", "response_mask", "response_model_steps"):
        getattr(one, name)[0] = 9
        assert getattr(other, name)[0] != 9


def test_labeling_does_not_write_into_the_caller_s_array() -> None:
    steps = np.array([2, UNLABELED], np.int32)
    state = rollout(response_ids=[1, 2], response_model_steps=steps)
    update_sample_version(state, 3)
    assert state.response_model_steps.tolist() == [2, 3]
    assert steps.tolist() == [2, UNLABELED]


def test_a_tool_s_tokens_do_not_make_a_rollout_stale() -> None:
    state = with_steps(0, 5, response_mask=[0, 1])
    refresh_seq_staleness([state], 6)
    assert state.seq_staleness == 0


def finished() -> RolloutState:
    state = rollout(
        rollout_id="r",
        group_id="g",
        task_name="t",
        prompt_ids=[1, 2],
        num_tries=2,
        mm_info={"image": 1},
        extra_fields={"key": 1},
        reward_model={"ground_truth": "2"},
    )
    state.append([3], logprobs=[-1.0], model_step=4)
    state.response, state.reward, state.finish_reason = "2", {"score": 1.0}, "stop"
    state.error_msg, state.routed_experts, state.tool_calls = "none", [0], [{"name": "f"}]
    state.status, state.seq_staleness = Status.COMPLETED, 3
    return state


def test_reset_wipes_what_was_generated_and_keeps_the_prompt() -> None:
    state, before = finished(), finished()
    reset_rollout_response(state)
    assert [len(getattr(state, name)) for name in TOKEN_FIELDS] == [0, 0, 0, 0]
    assert state.tokens.tolist() == state.prompt_ids.tolist() == [1, 2]
    wiped = {"reward": None, "finish_reason": None, "error_msg": None, "routed_experts": None}
    wiped |= {"tool_calls": None, "response": ""}
    for name in set(ROLLOUT_FIELDS) - set(DTYPES):
        assert getattr(state, name) == wiped.get(name, getattr(before, name)), name


def test_after_a_reset_a_new_response_leaves_the_prompt_alone() -> None:
    state = finished()
    reset_rollout_response(state)
    state.tokens[0] = 99
    assert state.prompt_ids.tolist() == [1, 2]


def test_expiry_is_of_the_whole_group() -> None:
    group = [finished(), finished()]
    expire_group(group)
    assert [state.status for state in group] == [Status.EXPIRED] * 2
    assert [len(state.response_ids) for state in group] == [0, 0]
    assert [state.seq_staleness for state in group] == [3, 3]


@pytest.mark.parametrize("threshold", [0, -1])
def test_a_threshold_that_would_wipe_fresh_groups_is_refused(threshold: int) -> None:
    state = finished()
    with pytest.raises(ValueError, match=f"positive, got {threshold}"):
        maybe_expire_group([state], threshold)
    assert state.response == "2"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 6), st.sampled_from(Status))
def test_a_group_expires_at_the_threshold_and_only_if_it_could_be_trained(
    staleness: list[int], threshold: int, status: Status
) -> None:
    group = [rollout(status=status, seq_staleness=age, response="x") for age in staleness]
    expected = status in (Status.COMPLETED, Status.ABORTED) and max(staleness) >= threshold
    assert maybe_expire_group(group, threshold) is expected
    assert {state.status for state in group} == {Status.EXPIRED if expected else status}
    assert {state.response for state in group} == {"" if expected else "x"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("stop", ("\n", "")),
    ],
)
def test_sample_params_refuse_what_cannot_be_sampled(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SampleParams(**{field: value})  # type: ignore[arg-type]


def test_sample_params_do_not_change() -> None:
    with pytest.raises(AttributeError):
        SampleParams().seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        SampleParams(max_token=1)  # type: ignore[call-arg]
