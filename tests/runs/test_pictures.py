"""The learning curve as text."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.runs.show.pictures import read_curve, smooth, terminal_curve


def rows(count: int) -> list[dict[str, float | None]]:
    return [
        {
            "train_step": step,
            "reward": step / count,
            "response_tokens": 10.0,
            "tokens_per_s": 9000.0,
            "time/generate_s": 0.3,
            "time/train_s": 0.2,
        }
        for step in range(1, count + 1)
    ]


EVALUATIONS: list[dict[str, float | None]] = [
    {"train_step": 0, "eval/score": 0.1},
    {"train_step": 40, "eval/score": 0.9},
]


def test_a_curve_holds_what_is_known_and_finite() -> None:
    steps, values = read_curve(
        [
            {"train_step": 1, "reward": 0.5},
            {"train_step": 2, "reward": None},
            {"train_step": 3, "reward": math.nan},
            {"train_step": 4},
            {"train_step": 5, "reward": 1.0},
        ],
        "reward",
    )
    assert steps.tolist() == [1, 5]
    assert values.tolist() == [0.5, 1.0]


@given(st.lists(st.floats(-10, 10), max_size=30), st.integers(1, 9))
def test_smoothing_is_the_mean_of_the_neighbors_there_are(values: list[float], half: int) -> None:
    smoothed = smooth(np.array(values), 2 * half + 1)
    assert len(smoothed) == len(values)
    if len(values) > 2 * half:
        expected = [np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
        np.testing.assert_allclose(smoothed, expected, atol=1e-12)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_curve_in_the_terminal_has_its_size_and_no_colors(ascii_only: bool) -> None:
    text = terminal_curve(rows(40), EVALUATIONS, width=80, height=12, ascii_only=ascii_only)
    lines = text.splitlines()
    assert len(lines) == 12
    assert max(map(len, lines)) == 80
    assert text.count("o") == 2
    assert all(character.isprintable() for line in lines for character in line)
    assert text.isascii() is ascii_only


def test_a_rising_reward_is_drawn_rising() -> None:
    lines = terminal_curve(rows(40), [], width=60, height=12, ascii_only=True).splitlines()
    tops = [min(i for i, line in enumerate(lines[1:-2]) if line[column] == "*") for column in (8, 30, 55)]
    assert tops == sorted(tops, reverse=True)
    assert len(set(tops)) == 3


def test_drawing_twice_gives_the_same_picture() -> None:
    first = terminal_curve(rows(40), EVALUATIONS, width=80, height=12, ascii_only=False)
    terminal_curve(rows(3), [], width=40, height=6, ascii_only=True)
    assert terminal_curve(rows(40), EVALUATIONS, width=80, height=12, ascii_only=False) == first


def test_fewer_than_two_rewards_are_no_curve() -> None:
    assert terminal_curve(rows(1), EVALUATIONS, width=80, height=12, ascii_only=False) == ""
