"""A small task that needs a calculator twice: ``37+58;*4?`` is 380.

Each problem is two sums, of which the second goes on from the result of the first, so nothing but the first
result tells what to call next. Rows carry a demonstration for the supervised warm-up: most call the
calculator as ``[37+58]``, read ``=95;``, call ``[95*4]``, read ``=380;`` and answer ``380``; the rest guess
at once, as a model does that does not know better. Which of the two pays is for the reward to teach.
"""

from __future__ import annotations

import random
from typing import Any

from forebay.config import ConfigError
from forebay.tools.calculator import calculate
from forebay.tools.contract import ToolError

Row = dict[str, Any]

MAX_DIGITS = 7
"""Of a result: the right ones have four at most, and others should not fill the context."""

_NUM_PROBLEMS = 90 * 90 * 2 * 3 * 8
"""Two numbers of two digits, a sign, a sign, a number of one digit."""


def chained_sums(*, size: int = 20_000, seed: int = 0, guessing: float = 0.5) -> list[Row]:
    """`size` distinct problems, as rows ``{"prompt", "answer", "demonstration"}``.

    `guessing` is the share of demonstrations without the calculator.

    Raises:
        ConfigError: `size` is not from 1 to the number of problems, or `guessing` is not from 0 to 1.
    """
    if not 1 <= size <= _NUM_PROBLEMS:
        raise ConfigError(f"chained_sums: size must be from 1 to {_NUM_PROBLEMS}, got {size}")
    if not 0 <= guessing <= 1:
        raise ConfigError(f"chained_sums: guessing must be from 0 to 1, got {guessing}")
    draw = random.Random(f"chained_sums/{seed}")
    return [_row(number, draw.random() < guessing) for number in draw.sample(range(_NUM_PROBLEMS), size)]


def _row(number: int, guesses: bool) -> Row:
    number, a = divmod(number, 90)
    number, b = divmod(number, 90)
    number, sign = divmod(number, 2)
    c, then = divmod(number, 3)
    first = f"{a + 10}{'+-'[sign]}{b + 10}"
    rest = f"{'+-*'[then]}{c + 2}"
    half = calculate(first)
    result = calculate(f"{half}{rest}")
    calls = [(first, half), (f"{half}{rest}", result)]
    turns = [] if guesses else [turn for call, value in calls for turn in _call(call, value)]
    return {
        "prompt": f"{first};{rest}?",
        "answer": str(result),
        "demonstration": [*turns, {"role": "assistant", "content": str(result)}],
    }


def _call(expression: str, value: float) -> list[dict[str, str]]:
    return [
        {"role": "assistant", "content": f"[{expression}]"},
        {"role": "user", "content": f"={value};"},
    ]


async def small_calculator(expression: str) -> str:
    """Work out an expression with whole numbers.

    Args:
        expression: for example 12+34
    """
    # Errors in words would need letters, which a decoder with an alphabet of its own may not have.
    try:
        value = calculate(expression)
    except ToolError:
        return "?"
    return str(value) if isinstance(value, int) and len(str(value)) <= MAX_DIGITS else "?"
