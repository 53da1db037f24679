"""The single-turn agent loop: one prompt in, one answer out.

It does not sample tokens (the rollout controller does) and does not judge (the judge does).

::

    message, tools --chat template--> prompt_ids = tokens --controller--> response_ids --decode--> response
                     (once a prompt)                 ^ a continued rollout enters here
"""

from forebay.agents.base import AgentLoop
from forebay.agents.chat.rendering import PromptRenderer
from forebay.types import RolloutState


class SingleTurnAgentLoop(AgentLoop):
    """Renders the prompt, has one response generated, and decodes it.

    Invariants: ``prompt_ids`` are made once and kept, so that a continued or regenerated rollout has the same
    prompt; ``response`` is the text of ``response_ids``, also of an aborted rollout.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    is_whole_at_awaits = True

    def set_up(self) -> None:
        """Check that the tokenizer has a chat template."""
        self._prompts = PromptRenderer(self.tokenizer)

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Generate, or continue, one rollout in place."""
        self._prompts.render(state)
        await self.rollout_controller.generate_sample(state)
        state.response = self.tokenizer.decode(state.response_ids.tolist(), skip_special_tokens=True)
        return state
