"""Small Python functions to write: a sentence says what `f` returns, and four assertions test it.

The prompt ``Write a Python function f(a, b) that returns a times 3 plus b.`` has tests such as
``assert f(-7, 4) == -17``. Inputs are drawn; what has to come out is computed here, by the function that
stands beside the sentence in `KINDS`. The judge ``code`` runs program and tests in a sandbox.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from typing import Any

from forebay.config import ConfigError

Row = dict[str, Any]

NUM_TESTS = 4
NUMBERS = range(2, 14)
"""The numbers that stand in the sentences."""
LETTERS = string.ascii_lowercase[:20]
"""The letters that do."""


def _pair(draw: random.Random, _: Any) -> tuple[Any, ...]:
    return draw.randint(-40, 40), draw.randint(-40, 40)


def _number(draw: random.Random, k: Any) -> tuple[Any, ...]:
    # Half of them are multiples of the sentence's number.
    return (draw.choice([draw.randint(-40, 40), k * draw.randint(-5, 5)]),)


def _list(draw: random.Random, k: Any) -> tuple[Any, ...]:
    return ([draw.choice([draw.randint(-20, 20), k]) for _ in range(draw.randint(k + 1, k + 6))],)


def _text(draw: random.Random, k: Any) -> tuple[Any, ...]:
    if isinstance(k, int):
        return ("".join(draw.choices(LETTERS, k=k + draw.randint(1, 4))),)
    return ("".join(draw.choices([k, *LETTERS], [12, *[1] * len(LETTERS)], k=draw.randint(4, 8))),)


Kind = tuple[str, str, Callable[..., Any], Callable[[random.Random, Any], tuple[Any, ...]], Sequence[Any]]

KINDS: tuple[Kind, ...] = (
    ("a, b", "a times {k} plus b", lambda k, a, b: a * k + b, _pair, NUMBERS),
    ("a, b", "a minus b plus {k}", lambda k, a, b: a - b + k, _pair, NUMBERS),
    ("a, b", "the sum of a and b, times {k}", lambda k, a, b: (a + b) * k, _pair, NUMBERS),
    ("a, b", "the product of a and b, minus {k}", lambda k, a, b: a * b - k, _pair, NUMBERS),
    ("a, b", "the larger of a and b, plus {k}", lambda k, a, b: max(a, b) + k, _pair, NUMBERS),
    ("a, b", "a squared plus {k} times b", lambda k, a, b: a * a + k * b, _pair, NUMBERS),
    ("a, b", "True if the sum of a and b is greater than {k}", lambda k, a, b: a + b > k, _pair, NUMBERS),
    ("a", "True if a is divisible by {k}", lambda k, a: a % k == 0, _number, NUMBERS),
    ("a", "the remainder of a divided by {k}", lambda k, a: a % k, _number, NUMBERS),
    ("a", "a plus {k}, squared", lambda k, a: (a + k) ** 2, _number, NUMBERS),
    ("a", "a divided by {k}, rounded down", lambda k, a: a // k, _number, NUMBERS),
    ("a", "{k} if a is negative, else a", lambda k, a: k if a < 0 else a, _number, NUMBERS),
    ("s", "the sum of the first {k} items of the list s", lambda k, s: sum(s[:k]), _list, NUMBERS),
    ("s", "the list s without its first {k} items", lambda k, s: s[k:], _list, NUMBERS),
    ("s", "the largest number of the list s plus {k}", lambda k, s: max(s) + k, _list, NUMBERS),
    ("s", "how often {k} is in the list s", lambda k, s: s.count(k), _list, NUMBERS),
    ("s", "the first {k} letters of the text s", lambda k, s: s[:k], _text, NUMBERS),
    ("s", "the last {k} letters of the text s", lambda k, s: s[-k:], _text, NUMBERS),
    ("s", "the text s {k} times in a row", lambda k, s: s * k, _text, NUMBERS),
    ("s", "how often the letter {k} is in the text s", lambda k, s: s.count(k), _text, LETTERS),
    ("s", "the text s with each {k} replaced by a dash", lambda k, s: s.replace(k, "-"), _text, LETTERS),
    ("s", "True if the text s begins with {k}", lambda k, s: s.startswith(k), _text, LETTERS),
    ("s", "the text s followed by the letter {k}", lambda k, s: s + k, _text, LETTERS),
)
"""Arguments, sentence, solution, how inputs are drawn, and the numbers or letters for the sentence."""


def functions(*, size: int | None = None, seed: int = 0) -> list[Row]:
    """`size` distinct tasks (None: all 308), in drawn order, as rows ``{"prompt", "reward_model"}``.

    Raises:
        ConfigError: `size` is not from 1 to the number of tasks.
    """
    tasks = [(kind, k) for kind in KINDS for k in kind[4]]
    if size is not None and not 1 <= size <= len(tasks):
        raise ConfigError(f"functions: size must be from 1 to {len(tasks)}, got {size}")
    draw = random.Random(f"functions/{seed}")
    return [_row(draw, *kind[:4], k) for kind, k in draw.sample(tasks, size or len(tasks))]


def _row(
    draw: random.Random,
    arguments: str,
    sentence: str,
    solve: Callable[..., Any],
    make: Callable[[random.Random, Any], tuple[Any, ...]],
    k: Any,
) -> Row:
    while True:
        calls = [make(draw, k) for _ in range(NUM_TESTS)]
        results = [solve(k, *call) for call in calls]
        # A function that always returns the same must not pass.
        if any(result != results[0] for result in results):
            break
    tests = [
        f"assert f({', '.join(map(repr, call))}) == {result!r}" for call, result in zip(calls, results, strict=True)
    ]
    prompt = f"Write a Python function f({arguments}) that returns {sentence.format(k=k)}."
    return {"prompt": prompt, "reward_model": {"tests": tests}}
