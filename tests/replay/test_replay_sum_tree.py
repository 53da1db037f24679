"""The sum tree against a list that is summed anew for every draw."""

import random

from hypothesis import given
from hypothesis import strategies as st

from forebay.replay.stores.sum_tree import SumTree

PRIORITIES = st.sampled_from([0.0, 0.0, 0.25, 1.0, 2.5, 1000.0])
"""Multiples of a quarter, whose sums are exact."""
FRACTIONS = st.sampled_from([0.0, 0.25, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True)


def draw_from(rows, fraction):
    """The timestamp_id that `fraction` draws from ``{timestamp_id: priority}``."""
    total, running = sum(rows.values()), 0.0
    if not total:
        return min(rows)
    for timestamp_id, priority in sorted(rows.items()):
        running += priority
        if running > fraction * total:
            return timestamp_id
    raise AssertionError(f"{fraction} of {total} lies beyond the last row")


@given(st.dictionaries(st.integers(0, 99), PRIORITIES, max_size=40), st.data())
def test_any_history_draws_like_a_list(rows, data):
    rows = dict(reversed(rows.items()))
    tree = SumTree(list(rows), [1000 + key for key in rows], list(rows.values()))
    for _ in range(30):
        key = data.draw(st.integers(0, 99))
        match data.draw(st.sampled_from(["add", "discard", "draw", "draw"])):
            case "add" if key not in rows:
                rows[key] = data.draw(PRIORITIES)
                tree.add(key, 1000 + key, rows[key])
            case "discard":
                rows.pop(key, None)
                tree.discard(key)
            case "draw":
                fractions = data.draw(st.lists(FRACTIONS, min_size=3, max_size=3))
                expected = []
                for fraction in fractions[: len(rows)]:
                    expected.append(1000 + draw_from(rows, fraction))
                    del rows[expected[-1] - 1000]
                assert tree.draw(3, iter(fractions).__next__) == expected
    assert sorted(tree.draw(99, lambda: 0.0)) == sorted(1000 + key for key in rows)


@given(st.lists(st.floats(0, 1e300), max_size=30), st.integers(0, 99))
def test_every_row_is_drawn_once_and_zeros_last_whatever_is_rounded(priorities, seed):
    places = range(len(priorities))
    tree = SumTree(places, places, priorities)
    drawn = tree.draw(99, random.Random(seed).random)
    assert sorted(drawn) == list(range(len(priorities)))
    zeros = [place for place, priority in enumerate(priorities) if not priority]
    assert drawn[len(drawn) - len(zeros) :] == zeros
    assert tree.draw(1, random.random) == []
