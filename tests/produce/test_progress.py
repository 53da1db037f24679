import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.produce.manager import split_batch
from forebay.produce.progress import ProduceProgress


def allocate(weights):
    return lambda batch_size, step: split_batch(batch_size, weights)


def test_target_rises_step_by_step_and_never_falls():
    progress = ProduceProgress.build(["a", "b"])
    sizes = progress.ensure_target_upto(batch_size=4, future_step=3, allocate_batch_sizes=allocate({"a": 1, "b": 3}))
    assert sizes == {"a": 1, "b": 3}
    assert progress.target_samples == {"a": 3, "b": 9}
    progress.ensure_target_upto(batch_size=4, future_step=1, allocate_batch_sizes=allocate({"a": 1, "b": 3}))
    assert progress.target_samples == {"a": 3, "b": 9}
    assert progress.target_upto_future_step == 3


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 12)), max_size=12))
def test_targets_are_monotonic_and_count_each_step_once(calls):
    progress = ProduceProgress.build(["a", "b"])
    expected: dict[int, int] = {}
    for batch_size, future_step in calls:
        before = dict(progress.target_samples)
        for step in range(max(expected, default=0) + 1, future_step + 1):
            expected[step] = batch_size
        progress.ensure_target_upto(
            batch_size=batch_size, future_step=future_step, allocate_batch_sizes=allocate({"a": 2, "b": 1})
        )
        assert all(progress.target_samples[name] >= before[name] for name in before)
    assert sum(progress.target_samples.values()) == sum(expected.values())


def test_an_unknown_task_is_a_key_error():
    progress = ProduceProgress.build(["a"])
    for call in (
        lambda: progress.mark_consumed({"b": 1}),
        lambda: progress.add_raw_rewards("b", 1.0, 1),
        lambda: progress.consume_raw_rewards("b"),
        lambda: progress.add_produced("b", 1, 1),
        lambda: progress.consume_produced("b"),
    ):
        with pytest.raises(KeyError):
            call()
    # A split that is not of all tasks leaves the targets as they were.
    for sizes in ({"a": 1, "b": 1}, {}):
        with pytest.raises(KeyError, match="must name every task"):
            progress.ensure_target_upto(batch_size=1, future_step=1, allocate_batch_sizes=lambda *_, it=sizes: it)
    assert progress.target_samples == {"a": 0}
    assert progress.target_upto_future_step == 0


def test_windows_are_read_and_reset():
    progress = ProduceProgress.build(["a"])
    progress.add_raw_rewards("a", 1.5, 3)
    progress.add_produced("a", 4, 100)
    progress.add_produce_time(2.5)
    assert progress.consume_raw_rewards("a") == (1.5, 3)
    assert progress.consume_raw_rewards("a") == (0.0, 0)
    assert progress.consume_produced("a") == (4, 100)
    assert progress.consume_produced("a") == (0, 0)
    assert progress.consume_produce_time() == 2.5
    assert progress.consume_produce_time() == 0.0


def test_state_round_trips_in_place():
    progress = ProduceProgress.build(["a", "b"])
    progress.begin_consume(4)
    progress.finish_consume(4)
    progress.advance_future_step()
    progress.mark_consumed({"a": 3})
    progress.add_raw_rewards("b", 0.5, 1)
    state = progress.state_dict()
    other = ProduceProgress.build(["a", "b"])
    consumed, targets = other.consumed_samples, other.target_samples
    other.load_state_dict(state)
    assert other == progress
    assert other.next_consumer_step == 5
    assert other.consumed_samples is consumed
    assert other.target_samples is targets
    state["consumed_samples"]["a"] = 99
    assert other.consumed_samples["a"] == 3


def test_a_foreign_state_is_refused():
    progress = ProduceProgress.build(["a"])
    state = progress.state_dict()
    del state["produce_time_s"]
    with pytest.raises(ValueError, match="produce_time_s"):
        progress.load_state_dict(state)


def test_local_progress_targets_one_step():
    progress = ProduceProgress.build_local(["a", "b"], {"a": 3, "b": 0}, 7)
    assert progress.target_samples == {"a": 3, "b": 0}
    assert progress.consumed_samples == {"a": 0, "b": 0}
    assert progress.next_consumer_step == progress.producer_future_step == 7


def test_local_progress_knows_no_target_of_a_task_without_a_size():
    progress = ProduceProgress.build_local(["a", "b"], {"a": 3}, 7)
    with pytest.raises(KeyError, match="b"):
        progress.target_samples["b"]


@given(
    st.integers(0, 500),
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 100), min_size=1).filter(
        lambda weights: sum(weights.values()) > 0
    ),
)
def test_the_split_is_exact_and_within_one_of_the_share(batch_size, weights):
    sizes = split_batch(batch_size, weights)
    assert sum(sizes.values()) == batch_size
    total = sum(weights.values())
    for name, weight in weights.items():
        assert abs(sizes[name] - batch_size * weight / total) < 1 + 1e-6
        assert weight > 0 or sizes[name] == 0


def test_split_ties_go_in_task_order():
    assert split_batch(3, {"b": 1, "a": 1}) == {"b": 2, "a": 1}
    assert split_batch(7, {"b": 1.0, "a": 2.0, "c": 0.0}) == {"b": 2, "a": 5, "c": 0}
    assert split_batch(14, {"a": 0.1, "b": 0.3, "c": 0.6}) == {"a": 2, "b": 4, "c": 8}
    with pytest.raises(ValueError, match="positive weight"):
        split_batch(1, {"a": 0})
