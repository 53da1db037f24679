"""A control: rewards that look right in every statistic and say nothing about which response was right."""

from __future__ import annotations

import hashlib
import random

from forebay.judges.base import Judge, Target, Verdict
from forebay.types import RolloutState


class ShuffledJudge(Judge):
    """Judges with `inner`, then permutes the rewards among the rollouts of the group.

    Training on it shows what is gained without any signal: format, luck, a bug that leaks answers.
    Invariants: the multiset of a group's rewards is unchanged; the permutation depends only on the seed and
    the group's id; FAILED rollouts keep their failure; a single rollout is judged as it is.

    >>> control = ShuffledJudge(ExactMatchJudge(), seed=1)
    """

    def __init__(self, inner: Judge, *, seed: int) -> None:
        super().__init__(timeout_s=None)
        self.inner = inner
        self.seed = seed

    @property
    def name(self) -> str:
        """The inner judge's name, marked."""
        return f"shuffled {self.inner.name}"

    @property
    def needs_whole_group(self) -> bool:
        """True: a part of the group would be permuted among itself."""
        return True

    async def score(self, state: RolloutState) -> Verdict:
        """The inner judge's score: one rollout has nothing to be permuted with."""
        return await self.inner.score(state)

    async def judge(self, target: Target) -> Target:
        """Judge, then permute."""
        await self.inner.judge(target)
        if isinstance(target, list):
            self._permute([state for state in target if state.reward is not None])
        return target

    async def aclose(self) -> None:
        """Close the inner judge."""
        await self.inner.aclose()

    def _permute(self, judged: list[RolloutState]) -> None:
        if not judged:
            return
        digest = hashlib.blake2b(f"{self.seed}/{judged[0].group_id}".encode(), digest_size=8).digest()
        rewards = [state.reward for state in judged]
        random.Random(int.from_bytes(digest, "little")).shuffle(rewards)
        for state, reward in zip(judged, rewards, strict=True):
            state.reward = reward
