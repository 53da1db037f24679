"""A small task that needs a calculator twice: ``*4,37+58;`` is 37+58, and the result times 4.

The second sum goes on from the result of the first, so nothing but that result tells what to call next. Rows
carry a demonstration for the supervised warm-up. Some call the calculator as ``[37+58]``, read ``=00095;``,
call ``[00095*4]``, read ``=00380;`` and answer ``#00380``; the others give up at once and answer ``?``. Which
of the two pays is for the reward to teach.

A decoder made from nothing has to learn to copy before anything else. Numbers have their width, and prompt,
results, calls and answer their form, so that what is copied always stands seven characters before.
"""

from __future__ import annotations

import random
import re
from typing import Any

from forebay.config import ConfigError
from forebay.tools.calculator import calculate
from forebay.tools.contract import ToolError

Row = dict[str, Any]

WIDTH = 5
"""Digits of every result, with zeros before it."""

_NUM_PROBLEMS = 90 * 90 * 2 * 8
"""Two numbers of two digits, a sign and a number of one digit."""


def chained_sums(*, size: int = 20_000, seed: int = 0, giving_up: float = 0.8) -> list[Row]:
    """`size` distinct problems, as rows ``{"prompt", "answer", "demonstration"}``.

    `giving_up` is the share of demonstrations that do without the calculator.

    Raises:
        ConfigError: `size` is not from 1 to the number of problems, or `giving_up` is not from 0 to 1.
    """
    if not 1 <= size <= _NUM_PROBLEMS:
        raise ConfigError(f"chained_sums: size must be from 1 to {_NUM_PROBLEMS}, got {size}")
    if not 0 <= giving_up <= 1:
        raise ConfigError(f"chained_sums: giving_up must be from 0 to 1, got {giving_up}")
    draw = random.Random(f"chained_sums/{seed}")
    return [_row(number, draw.random() < giving_up) for number in draw.sample(range(_NUM_PROBLEMS), size)]


def _row(number: int, gives_up: bool) -> Row:
    number, a = divmod(number, 90)
    number, b = divmod(number, 90)
    c, sign = divmod(number, 2)
    first, rest = f"{a + 10}+{b + 10}", f"{'+*'[sign]}{c + 2}"
    half = _work_out(first)
    result = _work_out(half + rest)
    calls = [(first, half), (half + rest, result)]
    turns = [turn for call, value in calls for turn in _call(call, value)]
    answer = {"role": "assistant", "content": f"#{result}"}
    return {
        "prompt": f"{rest},{first};",
        "answer": result,
        "demonstration": [{"role": "assistant", "content": "?"}] if gives_up else [*turns, answer],
    }


def _call(expression: str, value: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": f"[{expression}]"}, {"role": "user", "content": f"={value};"}]


def _work_out(expression: str) -> str:
    # Zeros before a number are not arithmetic.
    value = calculate(re.sub(r"\b0+(?=\d)", "", expression))
    if not isinstance(value, int) or not 0 <= value < 10**WIDTH:
        raise ToolError(f"{value} is not a whole number of up to {WIDTH} digits")
    return f"{value:0{WIDTH}}"


async def small_calculator(expression: str) -> str:
    """Work out an expression with whole numbers.

    Args:
        expression: for example 12+34
    """
    # Errors in words would need letters, which a decoder with an alphabet of its own may not have.
    try:
        return _work_out(expression)
    except ToolError:
        return "?"
