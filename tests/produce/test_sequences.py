from hypothesis import given
from hypothesis import strategies as st

from forebay.produce.prompts.sequences import LazySequence, permutation, shuffled


@given(size=st.integers(1, 3000), key=st.text(max_size=8))
def test_a_permutation_visits_every_index_once(size: int, key: str) -> None:
    order = permutation(size, key)
    assert sorted(map(order, range(size))) == list(range(size))


@given(size=st.integers(2, 2**60), data=st.data())
def test_large_permutations_stay_in_range_and_do_not_collide(size: int, data: st.DataObject) -> None:
    positions = data.draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=20))
    order = permutation(size, "large")
    entries = {order(position) for position in positions}
    assert len(entries) == len(positions)
    assert all(0 <= entry < size for entry in entries)


def test_permutations_are_the_same_on_every_machine() -> None:
    order = permutation(10, "epoch 0")
    assert [order(i) for i in range(10)] == [1, 3, 8, 0, 2, 6, 5, 7, 4, 9]


def test_each_entry_is_equally_likely_at_each_position() -> None:
    size, num_keys = 6, 2000
    counts = [[0] * size for _ in range(size)]
    for key in range(num_keys):
        order = permutation(size, f"k{key}")
        for position in range(size):
            counts[position][order(position)] += 1
    expected = num_keys / size
    chi_square = sum((count - expected) ** 2 / expected for row in counts for count in row)
    # 25 degrees of freedom: 52.6 is exceeded once in a thousand sets of keys; the keys here are fixed.
    assert chi_square < 52.6


def test_neighbors_do_not_stay_neighbors() -> None:
    size = 2000
    order = permutation(size, "k")
    close = sum(abs(order(i) - order(i + 1)) <= 10 for i in range(size - 1))
    assert close < 3 * 20  # about 20 of 2000 random pairs are that close


@given(size=st.integers(0, 50), start=st.integers(-60, 60), stop=st.integers(-60, 60))
def test_slices_are_lazy_sequences_equal_to_list_slices(size: int, start: int, stop: int) -> None:
    doubled = LazySequence(lambda i: 2 * i, range(size))
    assert list(doubled[start:stop]) == [2 * i for i in range(size)][start:stop]
    assert isinstance(doubled[start:stop], LazySequence)


def test_items_are_made_when_they_are_asked_for() -> None:
    made: list[int] = []

    def make(index: int) -> int:
        made.append(index)
        return index

    view = shuffled(LazySequence(make, range(1000)), "key")[10:20]
    assert made == []
    assert view[3] == made[0]
    assert len(made) == 1
