import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import ConfigError
from forebay.produce import DataConfig, load_prompts
from forebay.produce.prompts.demo_tasks import MAX_PROBLEMS, addition, sorting


@given(digits=st.integers(1, 9), seed=st.integers(0, 5), index=st.integers(0, 99))
def test_addition_is_right_and_has_the_asked_digits(digits: int, seed: int, index: int) -> None:
    row = addition(digits=digits, seed=seed)[index]
    first, second = row["prompt"].removesuffix("=").split("+")
    assert len(first) == len(second) == digits
    assert row["answer"] == str(int(first) + int(second))


@given(length=st.integers(1, 12), letters=st.integers(2, 26), seed=st.integers(0, 5))
def test_sorting_is_right_and_uses_the_asked_letters(length: int, letters: int, seed: int) -> None:
    row = sorting(length=length, letters=letters, seed=seed)[1]
    text = row["prompt"].removesuffix("=")
    assert len(text) == length
    assert max(text) <= "abcdefghijklmnopqrstuvwxyz"[letters - 1]
    assert row["answer"] == "".join(sorted(text))


def test_every_problem_occurs_exactly_once() -> None:
    assert len({row["prompt"] for row in addition(digits=2)}) == 90 * 90
    assert len({row["prompt"] for row in addition(digits=1)}) == 10 * 10
    assert len({row["prompt"] for row in sorting(length=3, letters=5)}) == 5**3


def test_the_seed_decides_the_order() -> None:
    assert list(addition(seed=1)[:50]) == list(addition(seed=1)[:50])
    assert list(addition(seed=1)[:50]) != list(addition(seed=2)[:50])


def test_huge_tasks_are_cut_so_that_passes_over_them_end() -> None:
    problems = sorting(length=12)
    assert len(problems) == MAX_PROBLEMS
    assert len({problems[index]["prompt"] for index in range(0, MAX_PROBLEMS, 100)}) == MAX_PROBLEMS // 100


@pytest.mark.parametrize(
    ("source", "arguments", "name"),
    [
        ("addition", {"digits": 0}, "digits"),
        ("addition", {"digits": 10}, "digits"),
        ("sorting", {"length": 0}, "length"),
        ("sorting", {"letters": 27}, "letters"),
    ],
)
def test_arguments_out_of_range_are_named(source, arguments, name) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' = {arguments[name]}: "):
        load_prompts(DataConfig(source=source, arguments=arguments))
