"""Two small verifiable tasks that need no download: adding numbers and sorting letters.

Each has a model of its arguments, which checks them, and a function that returns every distinct problem of
its kind once, as rows ``{"prompt", "answer"}``, in an order that its seed fixes. Slices of one task
(``start`` and ``size`` of the data configuration) therefore share no problem: a held-out set is disjoint from
the training set by construction.
"""

import string
from collections.abc import Callable

from pydantic import Field

from forebay.config import StrictModel
from forebay.produce.prompts.sequences import LazySequence, permutation

Row = dict[str, str]

# A pass over all prompts (to check their lengths, say) must end within seconds, and 26 ** 8 would not.
MAX_PROBLEMS = 100_000


class AdditionArguments(StrictModel, strict=True):
    """The arguments of the data source ``addition`` in a run file."""

    digits: int = Field(default=2, ge=1, le=9)
    """Digits of each of the two numbers."""
    seed: int = 0
    """Chooses the order of the problems."""


class SortingArguments(StrictModel, strict=True):
    """The arguments of the data source ``sorting`` in a run file."""

    length: int = Field(default=8, ge=1, le=12)
    """Letters of a problem."""
    letters: int = Field(default=26, ge=2, le=26)
    """How many of the alphabet's first letters are used."""
    seed: int = 0
    """Chooses the order of the problems."""


def addition(*, digits: int = 2, seed: int = 0) -> LazySequence[Row]:
    """All sums of two numbers of `digits` digits: prompt ``12+34=``, answer ``46``.

    At most `MAX_PROBLEMS` of them. ``12+34`` and ``34+12`` are two problems.
    """
    lowest = 0 if digits == 1 else 10 ** (digits - 1)
    num_operands = 10**digits - lowest

    def make(problem: int) -> Row:
        first, second = (lowest + operand for operand in divmod(problem, num_operands))
        return {"prompt": f"{first}+{second}=", "answer": str(first + second)}

    return _distinct_problems(make, num_operands**2, f"addition/{digits}/{seed}")


def sorting(*, length: int = 8, letters: int = 26, seed: int = 0) -> LazySequence[Row]:
    """All strings of `length` of the first `letters` letters: prompt ``dbca=``, answer ``abcd``.

    At most `MAX_PROBLEMS` of them.
    """

    def make(problem: int) -> Row:
        text = "".join(string.ascii_lowercase[problem // letters**place % letters] for place in range(length))
        return {"prompt": f"{text}=", "answer": "".join(sorted(text))}

    return _distinct_problems(make, letters**length, f"sorting/{length}/{letters}/{seed}")


def _distinct_problems(make: Callable[[int], Row], num_problems: int, key: str) -> LazySequence[Row]:
    order = LazySequence(permutation(num_problems, key), range(min(num_problems, MAX_PROBLEMS)))
    return LazySequence(make, order)
