"""Several judges as one: a weighted sum of those that apply to a rollout.

::

    rollout --by--> its key, for example its data source
       |
       +--> part "answer"  (every key)        --> score a --> reward["answer"] = a
       +--> part "format"  (only some keys)   --> score f --> reward["format"] = f
       |                                                      reward["score"] = weights . scores
       '--> any part fails, or none applies: FAILED
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.judges.base import Judge, JudgeError, Verdict, checked_reward
from forebay.renamed import old_keywords
from forebay.types import ROLLOUT_FIELDS, RolloutState


@old_keywords(judger="judge")
@dataclass(frozen=True, kw_only=True)
class Part:
    """One judge of a `ComposedJudge`."""

    label: str
    """Its key in the reward."""
    judge: Judge
    weight: float = 1.0
    """0: only logged."""
    only: tuple[str, ...] | None = None
    """The keys of the rollouts that it judges; None: all."""


class ComposedJudge(Judge):
    """The weighted sum of the scores of several judges, each for the rollouts that it is meant for.

    Invariants: the reward holds ``score``, every part's score under its label and what else the part said
    under ``label/...``; the weights are used as they are given; a rollout that a part fails on, or that no
    part judges, is FAILED. A part that judges groups gets the rollouts of the group that it is meant for.
    Parts keep their own time-outs and retries.

    >>> judge = ComposedJudge(
    ...     [
    ...         Part(label="answer", judge=ExactMatchJudge(extract="last_number")),
    ...         Part(label="proof", judge=rubric, weight=0.5, only=("proofs",)),
    ...     ]
    ... )
    >>> # a rollout of data source "proofs" -> {"score": 1.25, "answer": 1.0, "proof": 0.5}

    Args:
        parts: with different labels.
        by: the field of the rollout, or of a mapping in one (``reward_model.style``), that `only` refers to.

    Raises:
        ValueError: no parts, a label twice or reserved, or an unknown field.
    """

    def __init__(self, parts: Sequence[Part], *, by: str = "data_source") -> None:
        super().__init__(timeout_s=None)
        labels = [part.label for part in parts]
        if not parts:
            raise ValueError("parts must not be empty")
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"two parts are called {sorted(twice)}; give one of them another label")
        if "score" in labels:
            raise ValueError("a part may not be called 'score', where the sum goes; give it another label")
        if by.partition(".")[0] not in ROLLOUT_FIELDS:
            raise ValueError(
                f"by = {by!r} is not a field of a rollout; use data_source, task_name or reward_model.KEY"
            )
        self.parts = tuple(parts)
        self.by = by

    @property
    def name(self) -> str:
        """The labels of the parts."""
        return " + ".join(part.label for part in self.parts)

    @property
    def needs_whole_group(self) -> bool:
        """Whether a part does."""
        return any(part.judge.needs_whole_group for part in self.parts)

    async def score(self, state: RolloutState) -> Verdict:
        """The weighted sum, and the parts."""
        (verdict,) = await self.verdicts([state])
        if isinstance(verdict, JudgeError):
            raise verdict
        return verdict

    async def verdicts(self, states: Sequence[RolloutState]) -> list[dict[str, Any] | JudgeError]:
        """See `Judge.verdicts`."""
        keys = [self._key(state) for state in states]
        by_part = await asyncio.gather(*(_verdicts_of(part, states, keys) for part in self.parts))
        pairs = list(zip(self.parts, by_part, strict=True))
        return [
            self._combine(key, {part: found[at] for part, found in pairs if at in found})
            for at, key in enumerate(keys)
        ]

    def _key(self, state: RolloutState) -> str | None:
        name, *path = self.by.split(".")
        value = getattr(state, name)
        for step in path:
            value = value.get(step) if isinstance(value, Mapping) else None
        return None if value is None else str(value)

    def _combine(
        self, key: str | None, verdicts: Mapping[Part, dict[str, Any] | JudgeError]
    ) -> dict[str, Any] | JudgeError:
        if not verdicts:
            return JudgeError(f"no part judges rollouts whose {self.by} is {key!r}")
        reward: dict[str, Any] = {"score": 0.0}
        for part, verdict in verdicts.items():
            if isinstance(verdict, JudgeError):
                return JudgeError(f"part {part.label}: {verdict}", place=verdict.place)
            reward["score"] += part.weight * verdict["score"]
            reward[part.label] = verdict["score"]
            reward |= {f"{part.label}/{name}": value for name, value in verdict.items() if name != "score"}
        try:
            return checked_reward(reward)
        except ValueError as error:
            return JudgeError(str(error))

    async def aclose(self) -> None:
        """Close the parts."""
        await asyncio.gather(*(part.judge.aclose() for part in self.parts))


async def _verdicts_of(
    part: Part, states: Sequence[RolloutState], keys: Sequence[str | None]
) -> dict[int, dict[str, Any] | JudgeError]:
    """The part's verdicts by the place of the rollouts that it is meant for."""
    places = [at for at, key in enumerate(keys) if part.only is None or key in part.only]
    if not places:
        return {}
    verdicts = await part.judge.verdicts([states[at] for at in places])
    return dict(zip(places, verdicts, strict=True))
