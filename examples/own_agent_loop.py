"""An agent loop of your own: the model answers, is asked to check its answer, and answers again.

    python examples/own_agent_loop.py

Only `generate_sample` is written here. Judging, failures, pauses, stages for the live view and stall reports
come with `AgentLoop`. What the model sees and makes stays tokens: the question is appended with mask 0, so it
is never trained on, and nothing the model wrote is tokenized again.
"""

import asyncio

import numpy as np

from forebay.agents import AgentLoop
from forebay.engines import RolloutController
from forebay.judges import Judge
from forebay.testing import ScriptedEngine
from forebay.types import RolloutState, SampleParams, Status

CHECK_IDS = [90, 91, 92]
"""What "check your answer" is for a tokenizer."""


class CheckedAnswer(AgentLoop):
    """Two turns: an answer, and a second one after the model was asked to check the first."""

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Generate both turns; an interruption ends the rollout as ABORTED, and the next call goes on."""
        state.prompt_ids = np.frombuffer(state.message[-1]["content"].encode(), np.uint8)
        state.sample_params = SampleParams(max_tokens=16)
        asked = CHECK_IDS[0] in state.response_ids[state.response_mask == 0]
        await self.rollout_controller.generate_sample(state)
        if state.status is Status.COMPLETED and not asked:
            state.append(CHECK_IDS, mask=0)
            await self.rollout_controller.generate_sample(state)
        return state


class LastToken(Judge):
    """The score is 1 if the last token is even."""

    async def score(self, state: RolloutState) -> float:
        """Score one completed rollout."""
        return float(state.response_ids[-1] % 2 == 0)


async def main() -> None:
    """Roll out one group on a scripted engine and show what would be trained on."""
    engine = ScriptedEngine(lambda request: [request.seed % 7, len(request.input_ids) % 10], model_step=3)
    loop = CheckedAnswer(RolloutController(engine), LastToken())
    question = [{"role": "user", "content": "2+2"}]
    group = [RolloutState(question, rollout_id=f"g/{member}", group_id="g") for member in range(3)]
    for state in await loop.generate_group(group):
        print(state.rollout_id, state.status.value, "tokens", state.response_ids.tolist())
        print("  trained", state.response_mask.tolist(), "versions", state.response_model_steps.tolist())
        print("  reward", state.reward)


if __name__ == "__main__":
    asyncio.run(main())
