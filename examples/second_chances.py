"""An environment of your own: a judge looks at every turn, and a model that is wrong is told so and may try again.

    python examples/second_chances.py

In a run file beside this one it is the environment of a ``multi_turn`` agent, ``second_chances:SecondChances``, and
the judge of the task is ``forebay.agents:episode_reward``. Here two tries are
written down, of which the first is wrong.
"""

import asyncio
from collections.abc import Mapping
from copy import copy
from typing import Any

from forebay.agents import Environment, Reply
from forebay.config import parse_config
from forebay.judges import JudgeConfig, build_judge
from forebay.types import RolloutState, Status

SOLVED_SCORE = 1.0
"""A try at or over this score ends the episode; as in evaluations."""


class SecondChances(Environment):
    """Has every turn judged, by the `judge` of a run file, and gives the model `num_tries` tries.

    The rewards of an episode add up to the best score of any try, times `discount` for every try before it (a negative
    score is not discounted), however the episode ends; a judge that fails, fails the rollout. After a try that was not
    right the environment `says` so.
    """

    def __init__(
        self,
        judge: str | Mapping[str, Any],
        num_tries: int = 3,
        discount: float = 1.0,
        says: str = "That is not right. Try again.",
    ) -> None:
        if num_tries < 1 or not 0 < discount <= 1:
            raise ValueError(f"num_tries is at least 1 and discount over 0, at most 1; got {num_tries}, {discount}")
        self._judge = build_judge(parse_config(JudgeConfig, judge, source="second_chances"))
        self._num_tries, self._discount, self._says = num_tries, discount, says

    async def reset(self, state: RolloutState) -> dict[str, Any]:
        """Begin without a try and without a best score."""
        return {"num_tries": 0, "best": None}

    async def step(self, state: RolloutState, memory: dict[str, Any], text: str) -> Reply:
        """Judge the try."""
        # The judge writes status and reward into it, and the episode may go on.
        tried = copy(state)
        tried.response, tried.status, tried.reward = text, Status.COMPLETED, None
        judged = await self._judge.judge(tried)
        if judged.reward is None:
            raise RuntimeError(judged.error_msg or "the judge gave no verdict")
        score = float(judged.reward["score"])
        worth = score * self._discount ** memory["num_tries"] if score > 0 else score
        best = memory["best"]
        # The gain, try by try: the episode may end by a limit before the last one.
        gain = worth if best is None else max(worth - best, 0.0)
        memory["best"] = worth if best is None else max(best, worth)
        memory["num_tries"] += 1
        if score >= SOLVED_SCORE or memory["num_tries"] == self._num_tries:
            return Reply(done=True, reward=gain)
        return Reply(self._says, reward=gain)

    async def shut_down(self) -> None:
        """Close the judge."""
        await self._judge.aclose()


async def main() -> None:
    """Play two tries."""
    environment = SecondChances({"name": "exact_match"}, discount=0.8)
    state = RolloutState([{"role": "user", "content": "1+2="}], reward_model={"ground_truth": "3"})
    memory = await environment.reset(state)
    for text in ("4", "3"):
        print(text, await environment.step(state, memory, text))
    await environment.shut_down()


if __name__ == "__main__":
    asyncio.run(main())
