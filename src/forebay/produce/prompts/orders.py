"""Which prompts an epoch hands out, and in which order: chosen when it begins, from what the books say.

::

    shuffled order, scores of earlier epochs --plan--> indices of this epoch, each once

| name          | an epoch is                                                                                |
|---------------|--------------------------------------------------------------------------------------------|
| `shuffled`    | all prompts, in an order that seed and epoch decide                                        |
| `curriculum`  | all prompts, by an expression over their columns                                           |
| `difficulty`  | the prompts whose pass rate is in a band, those never tried, and a share of the others     |
| `prioritized` | a share of the prompts: those with most to learn, or not seen for longest                  |

The pass rate of a prompt is the mean score of its latest group, which the ledger keeps with every checkpoint.
A plan is kept with the sampler, so a resumed run goes on with the same one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic import Field

from forebay.config import Component, StrictModel, find_component
from forebay.produce.prompts.dataset import Prompt
from forebay.produce.prompts.expressions import compile_expression


class Tried(NamedTuple):
    """The latest group of a prompt that has a score."""

    epoch: int
    score: float
    """Mean over its rollouts: the pass rate, where rewards are 0 and 1."""


Latest = Callable[[int], Tried | None]
"""From a prompt's index to its latest group with a score; None: the books know of none."""


class Curriculum(StrictModel, strict=True):
    """All prompts from the smallest to the largest value, in every epoch; equal ones in shuffled order.

    >>> prompts = [Prompt(message=[], extra={"level": level}) for level in (3, 1, 2)]
    >>> Curriculum(by="level").plan(range(3), prompts, lambda index: None)
    [1, 2, 0]
    """

    by: str
    """A Jinja expression over the columns that are neither prompt nor answer: ``level``, or ``-level``."""

    def plan(self, shuffled: Sequence[int], prompts: Sequence[Prompt], latest: Latest) -> list[int]:
        """All indices of the epoch, by rising value of `by`; equal ones stay shuffled."""
        value = compile_expression("sampler.arguments.by", self.by)
        return sorted(shuffled, key=lambda index: value(prompts[index].extra, prompts[index].place))


class Difficulty(StrictModel, strict=True):
    """Prompts that are neither too easy nor too hard: only groups of unequal rewards teach anything."""

    band: tuple[float, float] = Field(default=(0.1, 0.9), strict=False)
    """The lowest and highest pass rate of a prompt that is tried in every epoch."""
    share: float = Field(default=0.1, ge=0, le=1)
    """The share of the other prompts that an epoch tries again, beginning with those tried longest ago."""

    def plan(self, shuffled: Sequence[int], prompts: Sequence[Prompt], latest: Latest) -> list[int]:
        """The prompts in the band, those never tried, and the share of the others; all if there is none."""
        (low, high), tried = sorted(self.band), {index: latest(index) for index in shuffled}
        others = [i for i in shuffled if (t := tried[i]) is not None and not low <= t.score <= high]
        # By epoch first. All of them were tried; the second operand only satisfies the type checker.
        others.sort(key=lambda index: tried[index] or Tried(-1, 0.0))
        left_out = set(others[math.ceil(self.share * len(others)) :])
        # All of them if none is left: an epoch without prompts would be refused.
        return [index for index in shuffled if index not in left_out] or list(shuffled)


class Prioritized(StrictModel, strict=True):
    """The part of the prompts that promises most, the most promising first."""

    by: Literal["regret", "recency"] = "regret"
    """``regret``: p (1 - p) of the pass rate p, which is largest where half of the attempts fail, with
    prompts never tried before all others (Rutherford et al., 2024, arXiv 2408.15099). ``recency``: those
    that were not tried for longest."""
    share: float = Field(default=0.5, gt=0, le=1)
    """The share of all prompts that an epoch has."""

    def plan(self, shuffled: Sequence[int], prompts: Sequence[Prompt], latest: Latest) -> list[int]:
        """The first `share` of the prompts by `by`; equal ones are in shuffled order."""

        def rank(index: int) -> float:
            tried = latest(index)
            if tried is None:
                return -math.inf
            return tried.epoch if self.by == "recency" else -tried.score * (1 - tried.score)

        return sorted(shuffled, key=rank)[: math.ceil(self.share * len(shuffled))]


class Shuffled(StrictModel, strict=True):
    """All prompts in shuffled order: the sampler's own."""


Order: TypeAlias = Curriculum | Difficulty | Prioritized
"""Has ``plan(shuffled, prompts, latest)``: the indices of an epoch, at least one, from all of them in the
epoch's `shuffled` order."""

SAMPLERS: dict[str, type[StrictModel]] = {
    "shuffled": Shuffled,
    "curriculum": Curriculum,
    "difficulty": Difficulty,
    "prioritized": Prioritized,
}
"""The names that ``sampler`` may have in a run file; besides, ``package.module:Class`` with a ``plan``."""


def build_order(config: Component) -> Order | None:
    """The order that `config` names; None: shuffled.

    Raises:
        ConfigError: the name is unknown, or an argument does not fit.
    """
    made: Any = find_component("sampler", config, SAMPLERS)(**config.arguments)
    return None if isinstance(made, Shuffled) else made
