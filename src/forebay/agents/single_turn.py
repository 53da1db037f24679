"""The single-turn agent loop: one prompt in, one answer out.

It does not sample tokens (the rollout controller does) and does not judge (the judge does).

::

    message, tools --chat template--> prompt_ids = tokens --controller--> response_ids --decode--> response
                     (once a prompt)                 ^ a continued rollout enters here
"""

from __future__ import annotations

from forebay.agents.base import AgentLoop, Generator
from forebay.agents.chat.rendering import ChatTokenizer, PromptRenderer
from forebay.config import StrictModel
from forebay.judges.base import Judge
from forebay.renamed import old_keywords
from forebay.types import RolloutState, SampleParams
from forebay.watching.activity import Activities


@old_keywords(judger="judge")
class SingleTurnAgentLoop(AgentLoop):
    """Renders the prompt, has one response generated, and decodes it.

    Invariants: ``prompt_ids`` are made once and kept, so that a continued or regenerated rollout has the same
    prompt; ``response`` is the text of ``response_ids``, also of an aborted rollout.

    >>> loop = SingleTurnAgentLoop(controller, judge, tokenizer, sample_params=SampleParams(max_tokens=64))
    >>> group = await loop.generate_group(await sampler.sample("math"))
    >>> group[0].response, group[0].reward
    ('46', {'score': 1.0})

    Args:
        rollout_controller: makes the tokens.
        judge: gives the rewards; None leaves them out.
        tokenizer: with a chat template.
        sample_params: for rollouts that bring none.
        activities: where to note what is being done; None: nobody looks.
    """

    class Arguments(StrictModel, strict=True):
        """What a run file may say of a ``single_turn`` agent: nothing, it has only the task's settings."""

    def __init__(
        self,
        rollout_controller: Generator,
        judge: Judge | None,
        tokenizer: ChatTokenizer,
        *,
        sample_params: SampleParams,
        activities: Activities | None = None,
    ) -> None:
        super().__init__(rollout_controller, judge, activities=activities)
        self.tokenizer = tokenizer
        self.sample_params = sample_params
        self._prompts = PromptRenderer(tokenizer)

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Generate, or continue, one rollout in place."""
        self._prompts.render(state)
        if state.sample_params is None:
            state.sample_params = self.sample_params
        await self.rollout_controller.generate_sample(state)
        state.response = self.tokenizer.decode(state.response_ids.tolist(), skip_special_tokens=True)
        return state
