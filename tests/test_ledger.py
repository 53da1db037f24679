"""The ledger: every group in exactly one place, and the balance that shows it."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.ledger import Ledger


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_life():
    ledger = Ledger()
    for group_id in ("a", "b", "c", 4):
        ledger.record(group_id, "math", "produced")
    ledger.record("a", "math", "produced")
    ledger.record("a", "math", "trained", train_step=1)
    ledger.record("b", "math", "dropped", reason="filtered")
    ledger.record("c", "math", "dropped", reason="evicted")
    ledger.record("c", "math", "requeued")
    balance = ledger.balance({"math": 2})
    assert (balance.generated, balance.trained, balance.dropped, balance.live) == (4, 1, {"filtered": 1}, 2)
    assert balance.ok
    assert ledger.was_trained("a", "math")
    assert not ledger.was_trained("c", "math")
    assert ledger.has_seen(4, "math")
    assert not ledger.has_seen("4", "math")
    assert not ledger.has_seen("a", "code")


def test_lost_doubled_and_repeated_groups_show():
    ledger = Ledger()
    ledger.record("a", "math", "produced")
    ledger.record("b", "code", "produced")
    lost = ledger.balance({"math": 1})
    assert (lost.difference, lost.ok, lost.by_task["math"].ok, lost.by_task["code"].difference) == (
        1,
        False,
        True,
        1,
    )
    assert ledger.balance({"math": 1, "code": 2}).difference == -1
    # One too many here and one too few there is not in balance.
    crossed = ledger.balance({"math": 2, "code": 0})
    assert (crossed.difference, crossed.ok) == (0, False)
    assert not ledger.balance({"math": 1, "code": 1, "unknown": 1}).ok
    ledger.record("a", "math", "trained", train_step=1)
    ledger.record("a", "math", "trained", train_step=2)
    repeated = ledger.balance({"math": 0, "code": 1})
    assert (repeated.difference, repeated.repeated, repeated.ok) == (0, 1, False)


def test_a_group_that_was_brought_back_may_be_trained_again():
    ledger = Ledger()
    for event in ("produced", "trained", "requeued", "trained"):
        ledger.record("a", "math", event, train_step=3)
    assert ledger.balance({}).ok


def test_the_first_event_admits_a_group():
    ledger = Ledger()
    ledger.record("a", "math", "trained", train_step=1)
    ledger.record("b", "math", "dropped", reason="failed")
    assert ledger.balance({"math": 0}).ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "math", "eaten"), "'eaten'"),
        (("a", "math", "dropped"), "reason"),
        ((None, "math", "produced"), "math"),
    ],
)
def test_wrong_entries_change_nothing(arguments, message):
    ledger = Ledger()
    with pytest.raises(ValueError, match=message):
        ledger.record(*arguments)
    assert ledger.balance({}).generated == 0


def test_the_file_has_every_event_at_once(tmp_path):
    path = tmp_path / "run" / "ledger.jsonl"
    ledger = Ledger(path, clock=lambda: 12.5)
    ledger.record("a", "math", "produced")
    ledger.record(7, "math", "dropped", reason="failed", error="engine", num_tries=2)
    assert lines_of(path) == [
        {"number": 1, "time_s": 12.5, "event": "produced", "task": "math", "group": "a"},
        {
            "number": 2,
            "time_s": 12.5,
            "event": "dropped",
            "task": "math",
            "group": 7,
            "reason": "failed",
            "error": "engine",
            "num_tries": 2,
        },
    ]
    ledger.close()


def test_a_resumed_run_goes_back_to_its_checkpoint(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.record("a", "math", "produced")
    ledger.record(2, "math", "produced")
    ledger.record("a", "math", "trained", train_step=1)
    state = json.loads(json.dumps(ledger.state_dict()))
    ledger.record(2, "math", "trained", train_step=2)
    ledger.record("c", "math", "produced")
    ledger.close()
    resumed = Ledger(path)
    resumed.load_state_dict(state)
    assert resumed.balance({"math": 1}) == ledger_of_checkpoint().balance({"math": 1})
    assert resumed.was_trained("a", "math")
    assert not resumed.was_trained(2, "math")
    assert not resumed.has_seen("c", "math")
    assert resumed.state_dict() == state | {"num_events": 4}
    assert [line["event"] for line in lines_of(path)][-2:] == ["produced", "rewound"]
    assert lines_of(path)[-1]["to_event"] == 3
    resumed.close()


def ledger_of_checkpoint():
    ledger = Ledger()
    ledger.record("a", "math", "produced")
    ledger.record(2, "math", "produced")
    ledger.record("a", "math", "trained", train_step=1)
    return ledger


EVENTS = st.tuples(
    st.sampled_from(["a", "b", 1, 2]),
    st.sampled_from(["math", "code"]),
    st.sampled_from(["produced", "trained", "dropped", "requeued"]),
    st.sampled_from(["filtered", "failed"]),
)


@given(st.lists(EVENTS, max_size=40), st.integers(0, 40))
def test_every_group_is_in_one_place(events, cut):
    """Against a dict of last places; also when saved and loaded on the way."""
    ledger, places = Ledger(), {}
    for number, (group_id, task, event, reason) in enumerate(events):
        if number == cut:
            state, ledger = ledger.state_dict(), Ledger()
            ledger.load_state_dict(state)
        ledger.record(group_id, task, event, reason=reason)
        places[task, group_id] = reason if event == "dropped" else event
    live = Counter(task for (task, _), place in places.items() if place in ("produced", "requeued"))
    balance = ledger.balance(live)
    assert balance.difference == 0
    assert all(part.difference == 0 for part in balance.by_task.values())
    assert balance.generated == len(places)
    assert balance.trained == sum(place == "trained" for place in places.values())
    assert balance.dropped == Counter(place for place in places.values() if place in ("filtered", "failed"))
