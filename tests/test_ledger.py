"""The ledger: every group in exactly one place, and the balance that shows it."""

import contextlib
import gc
import itertools
import json
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.io import safe_files
from forebay.ledger import Ledger, compare_dropped
from forebay.ledger.bias import Summary, length_bias
from forebay.ledger.histories import Histories
from forebay.ledger.journal import read_events
from forebay.replay import FIFOReplayPolicy, IndexedStorage, ReplayBuffer
from forebay.types import RolloutState, Status


def has_seen(ledger, group_id, task_name):
    """Whether the group has an event other than ``admitted``."""
    life = ledger.life(group_id, task_name)
    return life is not None and life.place != "admitted"


def lines_of(path):
    """The events; the checksum that each line ends with is what reading looks at."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(list(line)[-1] == "crc32" for line in lines)
    return [{name: value for name, value in line.items() if name != "crc32"} for line in lines]


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
    assert ledger.life("a", "math").place == "trained"
    assert ledger.life("c", "math").place == "live"
    assert ledger.life(4, "math").place == "live"
    assert ledger.life("4", "math") is None
    assert ledger.life("a", "code") is None


def test_lost_doubled_and_repeated_groups_show():
    ledger = Ledger()
    ledger.record("a", "math", "produced")
    ledger.record("b", "code", "produced")
    lost = ledger.balance({"math": 1})
    assert (lost.difference, lost.ok, lost.by_task["math"].ok, lost.by_task["code"].difference) == (1, False, True, 1)
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
    [(("a", "math", "eaten"), "'eaten'"), (("a", "math", "dropped"), "reason"), ((None, "math", "produced"), "math")],
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
    resumed.restore(state, Path())
    assert resumed.balance({"math": 1}) == ledger_of_checkpoint().balance({"math": 1})
    assert resumed.life("a", "math").place == "trained"
    assert resumed.life(2, "math").place != "trained"
    assert resumed.life("c", "math") is None
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
    st.sampled_from(["admitted", "produced", "retried", "left", "trained", "dropped", "requeued"]),
    st.sampled_from(["filtered", "failed"]),
)


def place_after(event, reason, before):
    if event in ("admitted", "retried", "left"):
        return before or "live"
    return {"trained": "trained", "dropped": reason}.get(event, "live")


@given(st.lists(EVENTS, max_size=40), st.integers(0, 40))
def test_every_group_is_in_one_place(events, cut):
    """Against a dict of places, after every event; also when saved and loaded on the way."""
    ledger, places = Ledger(), {}
    for number, (group_id, task, event, reason) in enumerate(events):
        if number == cut:
            state, ledger = json.loads(json.dumps(ledger.state_dict())), Ledger()
            ledger.restore(state, Path())
        ledger.record(group_id, task, event, reason=reason)
        places[task, group_id] = place_after(event, reason, places.get((task, group_id)))
        live = Counter(task for (task, _), place in places.items() if place == "live")
        assert {task: count for task, count in ledger.count_live().items() if count} == dict(live)
        balance = ledger.balance(live)
        assert balance.difference == 0
        assert all(part.difference == 0 for part in balance.by_task.values())
        assert balance.generated == len(places)
        assert balance.trained == sum(place == "trained" for place in places.values())
        dropped = Counter(place for place in places.values() if place in ("filtered", "failed"))
        assert balance.dropped == dropped
        assert balance.left == sum(entry[2] == "left" for entry in events[: number + 1])
        for (of_task, name), place in places.items():
            life = ledger.life(name, of_task)
            told = "live" if life.place == "admitted" else life.reason or life.place
            assert (life.group_id, told) == (name, place)


OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([Status.COMPLETED, Status.ABORTED]), st.integers(0, 3)),
    st.tuples(st.just("take"), st.integers(1, 3), st.integers(1, 5)),
    st.tuples(st.just("restore"), st.integers(0, 5)),
    st.tuples(st.just("refresh"), st.integers(1, 6)),
    st.tuples(st.just("drop expired")),
    st.tuples(st.just("retry")),
)


@given(st.lists(OPERATIONS, max_size=40))
async def test_the_balance_of_a_real_buffer_holds_at_every_moment(operations):
    ledger, numbers, flight = Ledger(), itertools.count(), []
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage(), limit=6)
    buffer.on_evict = lambda row: ledger.record(row.item[0].group_id, "t", "dropped", reason="evicted")
    for name, *arguments in operations:
        if name == "put":
            state = RolloutState([], group_id=next(numbers), status=arguments[0], response_ids=[1])
            ledger.record(state.group_id, "t", "produced")
            await buffer.put([state], "t", model_step=arguments[1])
        elif name == "take":
            groups, _ = await buffer.take_batch({"t": arguments[0]}, train_step=arguments[1])
            for group in groups["t"]:
                ledger.record(group[0].group_id, "t", "trained", train_step=arguments[1])
        elif name == "restore":
            consumed = {"status": "archived", "train_step": {"$gt": arguments[0]}}
            for row in await buffer.storage.get(consumed):
                ledger.record(row.item[0].group_id, "t", "requeued")
            await buffer.restore(arguments[0])
        elif name == "refresh":
            await buffer.refresh_staleness({"t": 2}, arguments[0])
        elif name == "drop expired":
            for group in await buffer.get(9, "t", Status.EXPIRED):
                ledger.record(group[0].group_id, "t", "dropped", reason="expired")
        else:
            for group in [*flight, *await buffer.get(1, "t", Status.ABORTED)]:
                if group in flight:
                    flight.remove(group)
                    ledger.record(group[0].group_id, "t", "produced")
                    await buffer.put(group, "t")
                else:
                    ledger.record(group[0].group_id, "t", "retried")
                    flight.append(group)
        balance = ledger.balance({"t": len(buffer) + len(flight)})
        assert balance.ok, balance


def test_a_life_remembers_what_matters():
    times = itertools.count(100)
    ledger = Ledger(clock=lambda: next(times))
    assert ledger.life("a", "math") is None
    ledger.record("a", "math", "admitted")
    life = ledger.life("a", "math")
    assert (life.place, life.num_tokens, life.score, life.train_step) == ("admitted", None, None, None)
    ledger.record("a", "math", "produced", num_tokens=10, latency_s=1.5)
    ledger.record("a", "math", "retried")
    ledger.record("a", "math", "produced", num_tokens=30, latency_s=2.5, score=0.25)
    ledger.record("a", "math", "retried")
    ledger.record("a", "math", "produced", num_tokens=20, latency_s=1.0, score=1.0)
    assert ledger.life("a", "math").place == "live"
    ledger.record("a", "math", "trained", train_step=4)
    life = ledger.life("a", "math")
    assert (life.place, life.reason, life.train_step, life.num_retries) == ("trained", None, 4, 2)
    assert (life.first_s, life.last_s) == (100, 106)
    assert (life.num_tokens, life.latency_s, life.score) == (20, 5.0, 0.25)
    ledger.record("b", "math", "dropped", reason="over: budget")
    assert ledger.life("b", "math").reason == "over: budget"
    assert ledger.balance({}).retried == 2


STEPS = st.lists(EVENTS | st.just("save") | st.just("rewind") | st.just("crash"), max_size=30)


@given(STEPS)
def test_a_reader_of_the_file_rebuilds_the_ledger(tmp_path_factory, steps):
    """Also when a run went back to a checkpoint, several times, in the same process or in a new one."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    times = itertools.count()
    ledger = Ledger(path, clock=lambda: next(times) / 7)
    saved = ledger.state_dict()
    for step in steps:
        if step == "save":
            saved = json.loads(json.dumps(ledger.state_dict()))
        elif step in ("rewind", "crash"):
            if step == "crash":
                ledger.close()
                ledger = Ledger(path, clock=lambda: next(times) / 7)
            ledger.restore(saved, Path())
        else:
            group_id, task, event, reason = step
            details = {"num_tokens": 5, "latency_s": 0.1, "score": 1 / 3} if event == "produced" else {}
            ledger.record(group_id, task, event, reason=reason, **details)
    ledger.close()
    assert Ledger.read(path).state_dict() == ledger.state_dict()


def test_a_line_that_was_cut_off_stands_for_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.record("a", "math", "produced")
    state = ledger.state_dict()
    ledger.record("b", "math", "produced")
    ledger.close()
    path.write_bytes(path.read_bytes()[:-20])
    assert Ledger.read(path).balance({"math": 1}).ok
    resumed = Ledger(path)
    resumed.restore(state, Path())
    resumed.record("c", "math", "produced")
    resumed.close()
    read = Ledger.read(path)
    assert read.balance({"math": 2}).ok
    assert has_seen(read, "c", "math")
    assert not has_seen(read, "b", "math")


def test_a_file_that_starts_over_counts_from_there(tmp_path):
    """A run without a checkpoint to go back to begins again, in the same folder."""
    path = tmp_path / "ledger.jsonl"
    for group_id in ("a", "b"):
        ledger = Ledger(path)
        ledger.record(group_id, "math", "produced")
        ledger.close()
    assert has_seen(Ledger.read(path), "b", "math")
    assert not has_seen(Ledger.read(path), "a", "math")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"number": 0, "event": "produced"}\n', "event 0"),
        ("hello}\n", "not a ledger's"),
        ("hello\nworld\n", "line 1 is not a ledger's"),
        ('{"number": 1, nonsense}\n', "is damaged at byte 0"),
        ('{"number": 1, "time_s": 1}\n', "event 1 .* KeyError"),
        ('{"number": 1, "time_s": 1, "event": "sold", "task": "t", "group": 1}\n', "unknown event 'sold'"),
        ('{"number": 1, "time_s": 1, "event": "produced", "task": "t", "group": [1]}\n', "unhashable"),
    ],
)
def test_a_file_that_is_no_ledger_is_one_clear_error(tmp_path, text, message):
    path = tmp_path / "ledger.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Ledger.read(path)


def test_an_event_that_no_file_takes_is_entered_nowhere(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.record("a", "math", "produced")
    with pytest.raises(TypeError, match="JSON"):
        ledger.record("b", "math", "produced", note=object())
    for wrong in ({"num_tokens": 2**40}, {"train_step": -1}):
        with pytest.raises(ValueError, match="must be from 0"):
            ledger.record("b", "math", "produced", **wrong)
    ledger.record("c", "math", "produced")
    ledger.close()
    assert ledger.balance({"math": 2}).ok
    assert Ledger.read(path).state_dict() == ledger.state_dict()


def test_a_state_of_another_version_or_shape_is_refused():
    ledger = Ledger()
    ledger.record("a", "math", "produced")
    state = ledger.state_dict()
    with pytest.raises(ValueError, match="version"):
        ledger.restore({**state, "version": 0}, Path())
    for wrong in (
        [],
        {**state, "num_events": None},
        {**state, "tasks": {"math": {"groups": []}}},
        {**state, "tasks": {"math": [["a"]]}},
        {"version": 1},
    ):
        with pytest.raises(ValueError, match="state"):
            ledger.restore(wrong, Path())
    assert ledger.state_dict() == state
    assert ledger.balance({"math": 1}).ok


def test_rollouts_that_left_are_counted_beside_the_place_of_their_group():
    ledger = Ledger()
    for event in ("admitted", "left", "left", "produced"):
        ledger.record("a", "math", event, reason="failed" if event == "left" else None)
    assert (ledger.life("a", "math").place, ledger.life("a", "math").num_left) == ("live", 2)
    ledger.restore(json.loads(json.dumps(ledger.state_dict())), Path())
    assert ledger.life("a", "math").num_left == ledger.balance({}).left == 2
    assert ledger.balance({"math": 1}).ok


def test_the_bias_report_is_the_arithmetic_it_says():
    rng = np.random.default_rng(0)
    ledger, values = Ledger(), {"trained": [], "filtered": [], "expired": []}
    for number in range(90):
        outcome = ["trained", "filtered", "expired"][number % 3]
        tokens, score = int(rng.integers(10, 90)) + 40 * (number % 3), float(rng.random())
        ledger.record(number, "math", "produced", num_tokens=tokens, score=score)
        event = {"event": "trained"} if outcome == "trained" else {"event": "dropped", "reason": outcome}
        ledger.record(number, "math", **event)
        values[outcome].append((tokens, score))
    ledger.record("live", "math", "produced", num_tokens=10**6)
    ledger.record("unknown", "math", "dropped", reason="expired")
    found = compare_dropped(ledger)
    assert list(found) == ["all", "expired", "filtered"]
    columns = {outcome: np.array(pairs).T for outcome, pairs in values.items()}
    columns["all"] = np.concatenate([columns["expired"], columns["filtered"]], axis=1)
    for reason, (tokens, latency, score) in found.items():
        for one, place in ((tokens, 0), (score, 1)):
            trained, dropped = columns["trained"][place], columns[reason][place]
            assert (one.trained.count, one.dropped.count) == (30, len(dropped))
            assert one.dropped.median == pytest.approx(np.median(dropped), rel=1e-6)
            assert one.difference == pytest.approx(dropped.mean() - trained.mean(), rel=1e-5)
            error = np.sqrt(trained.var(ddof=1) / 30 + dropped.var(ddof=1) / len(dropped))
            assert one.standard_error == pytest.approx(error, rel=1e-6)
        assert latency.dropped.count == 0
        assert np.isnan(latency.difference)
        assert not latency.is_notable
    assert found["expired"][0].is_notable
    assert not found["expired"][2].is_notable
    assert compare_dropped(ledger, "none")["all"][0].trained.count == 0
    assert Summary.of(np.array([1.0])).mean == 1.0
    assert np.isnan(Summary.of(np.array([1.0])).variance)


LENGTHS = st.tuples(
    st.integers(0, 9),
    st.sampled_from(["produced", "trained", "dropped", "requeued"]),
    st.sampled_from(["expired", "evicted", "filtered"]),
    st.none() | st.integers(0, 40),
)


@given(st.lists(LENGTHS, min_size=20, max_size=80), st.integers(0, 80))
def test_the_length_bias_is_that_of_the_groups_as_they_are_now(events, cut):
    """By sums that are kept, also through a state, against the arithmetic over all lives."""
    ledger = Ledger()
    for number, (name, event, reason, tokens) in enumerate(events):
        if number == cut:
            state, ledger = json.loads(json.dumps(ledger.state_dict())), Ledger()
            ledger.restore(state, Path())
        ledger.record(name, "math", event, reason=reason, num_tokens=tokens)
    compared = compare_dropped(ledger, "math")
    ratios = [
        one.dropped.mean / one.trained.mean
        for reason in ("expired", "evicted")
        for one in compared.get(reason, [])[:1]
        if one.is_notable and one.trained.mean and one.difference > 0
    ]
    assert length_bias(ledger, "math") == (pytest.approx(max(ratios)) if ratios else None)


def settle(ledger, first, last):
    """So many groups, from their first event to their last."""
    for number in range(first, last):
        name = f"math/0/0/{number}"
        ledger.record(name, "math", "admitted")
        ledger.record(name, "math", "produced", num_tokens=number, latency_s=1.5, score=0.25)
        ledger.record(name, "math", "dropped", reason="filtered")
    gc.collect()


def test_settled_groups_take_no_memory_and_keep_their_lives(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    tracemalloc.start()
    try:
        settle(ledger, 0, 1000)
        before, _ = tracemalloc.get_traced_memory()
        settle(ledger, 1000, 4000)
        assert tracemalloc.get_traced_memory()[0] - before < 3 * 3000
    finally:
        tracemalloc.stop()
    lives = [ledger.life(f"math/0/0/{number}", "math") for number in range(4000)]
    assert [(life.place, life.num_tokens) for life in lives] == [("dropped", n) for n in range(4000)]
    assert ledger.balance({"math": 0}).ok
    # Another end of a settled group is told apart.
    ledger.record("math/0/0/7", "math", "requeued")
    assert ledger.name_live("math") == ["math/0/0/7"]
    for step in (1, 2):
        ledger.record("math/0/0/7", "math", "trained", train_step=step)
    balance = ledger.balance({"math": 0})
    assert (balance.generated, balance.trained, balance.repeated) == (4000, 1, 1)
    ledger.close()
    assert Ledger.read(tmp_path / "ledger.jsonl").state_dict() == ledger.state_dict()


def test_a_full_disk_for_settled_groups_is_one_sentence_and_never_forgets_some():
    ledger = Ledger()
    ledger.record("first", "math", "trained", train_step=1)
    (groups,) = ledger.histories()
    groups._settled.execute("PRAGMA max_page_count = 4")
    with pytest.raises(OSError, match="SQLITE_TMPDIR"):
        settle(ledger, 0, 1000)
    # A group that was settled before is refused too, rather than taken for one that was never seen.
    with pytest.raises(OSError, match="SQLITE_TMPDIR"):
        ledger.life("first", "math")


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_forked_process_that_ends_leaves_the_books_as_they_are(is_dropped):
    child = """
        import gc, os, sys
        from forebay.ledger import Ledger
        ledger = Ledger()
        for number in range(20_000):
            ledger.record(f"{number}{'x' * 100}", "math", "trained", train_step=number)
        if not (child := os.fork()):
            try:
                ledger.life("0", "math")
            except RuntimeError as error:
                assert "forked" in str(error)
                if IS_DROPPED:
                    del ledger
                    gc.collect()
                    os._exit(0)
                sys.exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        for number in range(20_000):
            assert ledger.life(f"{number}{'x' * 100}", "math").train_step == number
        """
    code = textwrap.dedent(child).replace("IS_DROPPED", str(is_dropped))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "", "'", "4", 4, -4, 10**30])
def test_a_settled_group_may_have_every_name_that_a_line_holds(tmp_path, name):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.record(name, "math", "trained", train_step=1)
    assert [row[0] for row in ledger.state_dict()["tasks"]["math"]] == [name]
    ledger.record(name, "math", "requeued")
    assert ledger.name_live("math") == [name]
    ledger.close()
    assert Ledger.read(tmp_path / "ledger.jsonl").state_dict() == ledger.state_dict()


def test_a_thread_that_reads_finds_a_group_wherever_it_is():
    ledger = Ledger()
    ledger.record("a", "math", "produced", score=0.5)
    is_over, scores = threading.Event(), []

    def read():
        while not is_over.is_set():
            life = ledger.life("a", "math")
            scores.append(life and life.score)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(2000):
        ledger.record("a", "math", "trained", train_step=step)
        ledger.record("a", "math", "requeued")
    is_over.set()
    reader.join()
    assert set(scores) == {0.5}


def test_nothing_is_so_many_times_longer_than_no_token_at_all():
    ledger = Ledger()
    for number in range(8):
        is_trained = number % 2 == 0
        ledger.record(number, "math", "produced", num_tokens=0 if is_trained else 10 + number)
        ledger.record(number, "math", "trained" if is_trained else "dropped", reason="expired")
    assert compare_dropped(ledger, "math")["expired"][0].is_notable
    assert length_bias(ledger, "math") is None


def test_tasks_are_compared_on_their_own():
    ledger = Ledger()
    for number, (task, tokens) in enumerate([("short", 1), ("short", 3), ("long", 100), ("long", 300)]):
        ledger.record(number, task, "produced", num_tokens=tokens)
        ledger.record(number, task, "dropped" if number % 2 else "trained", reason="filtered")
    assert compare_dropped(ledger, "short")["filtered"][0].difference == 2
    assert compare_dropped(ledger, "long")["filtered"][0].difference == 200
    assert compare_dropped(ledger)["all"][0].difference == 101


def test_a_restart_stands_whatever_is_rewound_and_counts_for_no_group(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.record("a", "math", "produced")
    state = ledger.state_dict()
    ledger.record("a", "math", "trained", train_step=1)
    ledger.note_part("engine 0", "its process has ended")
    ledger.restore(state, Path())
    ledger.record("a", "math", "trained", train_step=1)
    ledger.close()
    assert [event["event"] for event in read_events(path)] == ["produced", "rewound", "trained"]
    assert Ledger.read(path).state_dict() == ledger.state_dict()
    (restart,) = [line for line in map(json.loads, path.read_text().splitlines()) if "part" in line]
    assert (restart["event"], restart["part"]) == ("restarted", "engine 0")


def write_ledger(path, num_groups=6):
    """A ledger of groups produced and trained, the first of them taken back and trained again."""
    times = itertools.count(100)
    ledger = Ledger(path, clock=lambda: next(times))
    for number in range(num_groups):
        ledger.record(number, "math", "produced", num_tokens=number)
    state = ledger.checkpoint(path.parent)
    ledger.record(0, "math", "trained", train_step=1)
    ledger.restore(state, path.parent)
    for number in range(num_groups):
        ledger.record(number, "math", "trained", train_step=1)
    return ledger


@given(data=st.data())
def test_every_damage_to_the_file_is_a_counted_loss_and_never_an_error(tmp_path_factory, data):
    """A flipped bit, a missing or doubled stretch, zeros after a power cut: what is left is read."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    ledger = write_ledger(path)
    ledger.close()
    whole, content = Ledger.read(path), bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "zeros", "line"]))
    start = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[start] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[start : start + data.draw(st.integers(1, 300))]
    elif kind == "zeros":
        end = min(len(content), start + data.draw(st.integers(1, 300)))
        content[start:end] = bytes(end - start)
    else:
        lines = bytes(content).splitlines(keepends=True)
        del lines[data.draw(st.integers(0, len(lines) - 1))]
        content = bytearray(b"".join(lines))
    path.write_bytes(content)
    read = Ledger.read(path)
    # What is known of a group is what an event said of it, never what nobody said.
    for number in range(6):
        life = read.life(number, "math")
        assert life is None or (life.place, life.train_step) in (("live", None), ("live", 1), ("trained", 1))
        assert life is None or life.num_tokens in (None, number)
    # From the file alone the last event cannot be missed; a checkpoint knows how many there were.
    state = ledger_place(path, whole)
    at_end = Ledger.read_checkpoint(state, path.parent)
    events = {number: read.life(number, "math") for number in range(6)}
    if events != {number: whole.life(number, "math") for number in range(6)}:
        assert at_end.lost_events > 0
        assert not at_end.balance(at_end.count_live()).ok
    # The run goes on with it, and the next reader says the same of the loss.
    again = Ledger(path)
    again.restore(state, path.parent)
    again.record("new", "math", "produced")
    again.close()
    assert again.lost_events == at_end.lost_events
    later = Ledger.read(path)
    assert has_seen(later, "new", "math")
    assert later.state_dict() == again.state_dict()


def ledger_place(path, ledger):
    """What a checkpoint after the last event says."""
    num_events = ledger.state_dict()["num_events"]
    return {"version": 2, "num_events": num_events, "lost_events": 0, "file": path.name, "num_bytes": 10**9}


def test_a_gap_is_counted_and_shown_in_the_balance(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write_ledger(path).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[4:]))
    ledger = Ledger.read(path)
    balance = ledger.balance({"math": 0})
    assert (ledger.lost_events, balance.lost_events, balance.ok) == (2, 2, False)
    # What came later of the same groups stands.
    assert (balance.generated, balance.trained) == (6, 6)


def test_a_file_of_version_0_1_has_no_checksums(tmp_path):
    path = tmp_path / "ledger.jsonl"
    old = [{"number": i, "time_s": 1, "event": "produced", "task": "t", "group": i} for i in (1, 2, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    assert Ledger.read(path).balance({"t": 3}).ok
    ledger = Ledger(path)
    ledger.restore({**Ledger.read(path).state_dict()}, Path())
    ledger.record(4, "t", "produced")
    ledger.close()
    assert Ledger.read(path).balance({"t": 4}).ok


def test_a_checkpoint_of_the_ledger_does_not_grow_with_it(tmp_path):
    ledger = Ledger(tmp_path / "run" / "ledger.jsonl")
    sizes = []
    for number in range(2000):
        ledger.record(number, "math", "produced")
        sizes.append(len(json.dumps(ledger.checkpoint(tmp_path / "run" / "checkpoints" / "step_1"))))
    ledger.close()
    assert sizes[-1] - sizes[0] < 20


def test_a_checkpoint_of_a_moved_run_finds_its_ledger(tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step_1" / "manager"
    folder.mkdir(parents=True)
    ledger = Ledger(tmp_path / "run" / "ledger.jsonl")
    ledger.record("a", "math", "trained", train_step=1)
    state = json.loads(json.dumps(ledger.checkpoint(folder)))
    ledger.record("b", "math", "trained", train_step=2)
    ledger.close()
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere")
    read = Ledger.read_checkpoint(state, moved / "checkpoints" / "step_1" / "manager")
    assert (read.lost_events, read.life("a", "math").place) == (0, "trained")
    assert not has_seen(read, "b", "math")
    (moved / "ledger.jsonl").unlink()
    assert Ledger.read_checkpoint(state, moved / "checkpoints" / "step_1" / "manager").lost_events == 1


def test_what_a_full_disk_refused_is_in_no_later_line(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.record("a", "math", "produced")
    file = ledger._journal._file

    class Full:
        """Takes ten bytes of a line, then none."""

        def __init__(self):
            self.taken = 0

        def write(self, data):
            if self.taken:
                raise OSError(28, "No space left on device")
            self.taken = 10
            return file.write(data[:10])

    monkeypatch.setattr(ledger._journal, "_file", Full())
    with pytest.raises(OSError, match="No space left"):
        ledger.record("b", "math", "produced")
    assert not has_seen(ledger, "b", "math")
    monkeypatch.setattr(ledger._journal, "_file", file)
    ledger.record("c", "math", "produced")
    assert ledger._journal.num_bytes == path.stat().st_size
    ledger.close()
    assert Ledger.read(path).balance({"math": 2}).ok


def test_lines_that_a_power_cut_damaged_after_the_checkpoint_take_none_before_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for number in range(10):
        ledger.record(f"g{number}", "sums", "produced", num_tokens=1)
    state = ledger.checkpoint(tmp_path)
    for number in range(4):
        ledger.record(f"late{number}", "sums", "produced", num_tokens=1)
    ledger.close()
    # As stale blocks of the disk: they look like lines, and their checksums are wrong.
    whole = path.read_bytes()
    path.write_bytes(whole[: state["num_bytes"]] + whole[state["num_bytes"] :].replace(b"late", b"tale"))
    ledger = Ledger(path)
    ledger.restore(state, tmp_path)
    ledger.record("g10", "sums", "produced", num_tokens=1)
    ledger.close()
    read = Ledger.read(path)
    assert read.lost_events == 0
    assert read.balance({"sums": 11}).ok


def test_uses_are_counted_beside_the_place_and_taken_back():
    ledger = Ledger()
    for event, step in [("produced", None), ("trained", 3), ("reused", 5), ("reused", 6), ("unused", None)]:
        ledger.record("a", "math", event, train_step=step)
    for _ in range(2):
        life = ledger.life("a", "math")
        assert (life.place, life.num_reused) == ("trained", 1)
        balance = ledger.balance({})
        assert balance.ok
        assert (balance.generated, balance.trained, balance.reused) == (1, 1, 1)
        ledger.restore(json.loads(json.dumps(ledger.state_dict())), Path())


@given(data=st.data())
def test_kept_books_and_later_lines_are_the_books_of_all_lines(tmp_path_factory, data):
    """Checkpoints whose books are kept or not, and returns to any of them, each by a process of its own."""
    folder = tmp_path_factory.mktemp("run")
    path, states = folder / "ledger.jsonl", []
    ledger = Ledger(path)
    for number in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["event", "event", "event", "cut", "keep", "restore", "part"]))
        if what == "cut":
            states.append(ledger.checkpoint(folder))
        elif what == "keep" and states:
            ledger.keep(data.draw(st.sampled_from(states)))
        elif what == "part":
            ledger.note_part("engine 0", "its process has ended")
        elif what == "restore" and states:
            # Later checkpoints are gone, as a person deletes them.
            del states[data.draw(st.integers(1, len(states))) :]
            ledger.close()
            ledger, place = Ledger(path), {name: states[-1][name] for name in ("num_bytes", "num_events")}
            alone = Ledger.read(path, **place)
            ledger.restore(states[-1], folder)
            assert ledger.state_dict()["tasks"] == alone.state_dict()["tasks"]
            assert ledger.balance(ledger.count_live()) == alone.balance(alone.count_live())
            assert sorted(ledger.name_live("a")) == sorted(alone.name_live("a"))
            assert ledger.lost_events == 0
        else:
            group, event = f"g{number % 5}", data.draw(st.sampled_from(["produced", "trained", "dropped", "requeued"]))
            said = {"num_tokens": number, "latency_s": 0.5, "score": 0.25} if event == "produced" else {}
            reason = "filtered" if event == "dropped" else None
            ledger.record(group, data.draw(st.sampled_from("ab")), event, reason=reason, **said)
    ledger.close()
    assert Ledger.read(path).state_dict() == ledger.state_dict()
    for task in ledger.task_names:
        for histories, alone in zip(ledger.histories(task), Ledger.read(path).histories(task), strict=True):
            assert histories.token_powers("trained") == alone.token_powers("trained")


def kept_books(folder):
    """Books of ten settled and two live groups, kept as of the last event, and the state of that moment."""
    ledger = write_ledger(folder / "ledger.jsonl")
    for number in range(10):
        ledger.record(f"g{number}", "math", "produced", num_tokens=number)
    state = ledger.checkpoint(folder)
    ledger.keep(state)
    ledger.close()
    return state


def events_entered(monkeypatch):
    """A list that gets each event that is entered in books from now on."""
    entered, enter = [], Histories.enter

    def noted(self, event, **options):
        entered.append(event)
        return enter(self, event, **options)

    monkeypatch.setattr(Histories, "enter", noted)
    return entered


def test_a_resume_reads_no_line_of_before_the_kept_books(tmp_path, monkeypatch):
    state = kept_books(tmp_path)
    ledger, entered = Ledger(tmp_path / "ledger.jsonl"), events_entered(monkeypatch)
    ledger.restore(state, tmp_path)
    assert not entered
    assert ledger.balance({"math": 10}).ok
    ledger.record("g1", "math", "trained", train_step=2)
    ledger.keep(later := ledger.checkpoint(tmp_path))
    # One as it was recorded, one from its line.
    assert [event["group"] for event in entered] == ["g1", "g1"]
    ledger.close()
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.restore(later, tmp_path)
    ledger.close()
    assert ledger.life("g1", "math").place == "trained"
    assert ledger.balance({"math": 9}).ok


@pytest.mark.parametrize("name", ["0.db", "place.json", "checksums.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_books_are_told_anew_from_the_lines(tmp_path, name, damage):
    state, file = kept_books(tmp_path), tmp_path / "books" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "flip" else content[:-1])
    if damage == "gone":
        file.unlink()
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.restore(state, tmp_path)
    ledger.close()
    assert ledger.balance({"math": 10}).ok
    assert ledger.state_dict()["tasks"] == Ledger.read(tmp_path / "ledger.jsonl").state_dict()["tasks"]


def test_kept_books_of_another_file_are_not_taken(tmp_path):
    path, states = tmp_path / "ledger.jsonl", []
    # In this order: the lines of the first are no longer than those of the second.
    for name in ("new", "old"):
        path.unlink(missing_ok=True)
        with contextlib.closing(Ledger(path, clock=lambda: 1.5)) as ledger:
            ledger.record(name, "math", "produced")
            states.append(ledger.checkpoint(tmp_path))
            if name == "new":
                ledger.keep(states[0])
    assert states[0]["num_bytes"] <= states[1]["num_bytes"]
    with contextlib.closing(Ledger(path)) as ledger:
        ledger.restore(states[1], tmp_path)
        assert ledger.name_live("math") == ["old"]


@pytest.mark.parametrize("number", range(6))
def test_a_kill_while_books_are_kept_loses_nothing(tmp_path, monkeypatch, number):
    kept_books(tmp_path)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.restore(ledger_place(tmp_path / "ledger.jsonl", Ledger.read(tmp_path / "ledger.jsonl")), tmp_path)
    ledger.record("g1", "math", "trained", train_step=2)
    state, steps = ledger.checkpoint(tmp_path), itertools.count()

    def killed(function):
        def call(*arguments, **options):
            if next(steps) >= number:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for place, name in ((safe_files, "seal"), (safe_files, "sync_tree"), (Path, "rename"), (Path, "replace")):
            patched.setattr(place, name, killed(getattr(place, name)))
        # What a killed process leaves is not tidied up by it either.
        patched.setattr(safe_files.shutil, "rmtree", lambda *arguments, **options: None)
        with contextlib.suppress(KeyboardInterrupt):
            ledger.keep(state)
    ledger.close()
    again = Ledger(tmp_path / "ledger.jsonl")
    again.restore(state, tmp_path)
    assert again.life("g1", "math").place == "trained"
    assert again.balance({"math": 9}).ok
    again.keep(state)
    again.close()
    assert (tmp_path / "books" / "place.json").exists()


def test_what_rows_say_is_entered_once_and_settled_groups_are_named(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for group in ("live", "taken", "trained"):
        ledger.record(group, "math", "admitted")
    ledger.record("live", "math", "produced", num_tokens=5)
    ledger.record("trained", "math", "trained", train_step=1)
    rows = {"live": {"num_tokens": 5}, "taken": {"num_tokens": 6, "score": 0.5}, "trained": {"num_tokens": 7}}
    rows |= {"new": {"num_tokens": 8}, "begun": {}}
    num_lines = len(lines_of(tmp_path / "ledger.jsonl"))
    for _ in range(2):
        assert ledger.record_found("math", rows) == {"trained"}
    told = lines_of(tmp_path / "ledger.jsonl")[num_lines:]
    assert [(line["event"], line["group"]) for line in told] == [
        ("produced", "taken"),
        ("produced", "new"),
        ("admitted", "begun"),
    ]
    assert all(line["found"] for line in told)
    assert ledger.life("taken", "math").score == 0.5
    assert ledger.balance({"math": 4}).ok
    ledger.close()
    assert Ledger.read(tmp_path / "ledger.jsonl").state_dict() == ledger.state_dict()
