"""The single-turn agent loop: one prompt in, one answer out.

It does not sample tokens (the rollout controller does) and does not judge (the judge does).

::

    message, tools --chat template--> prompt_ids = tokens --controller--> response_ids --decode--> response
                     (once a prompt)                 ^ a continued rollout enters here
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from forebay.agents.base import AgentLoop, Generator, GroupJudge
from forebay.config import StrictModel
from forebay.renamed import old_keywords
from forebay.types import IntArray, Message, RolloutState, SampleParams
from forebay.watching.activity import Activities

NO_TOOLS = "none"
"""A rollout's ``tool_choice`` with which its prompt tells of no tools."""


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    name_or_path: str
    chat_template: Any

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any:
        """The token ids of a chat."""
        ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """The text of token ids."""
        ...


def require_chat_template(tokenizer: ChatTokenizer) -> None:
    """Raise unless the tokenizer can turn a chat into tokens.

    Raises:
        ValueError: it has no chat template.
    """
    if not tokenizer.chat_template:
        where = tokenizer.name_or_path or "the given tokenizer"
        raise ValueError(
            f"the tokenizer of {where!r} has no chat template, so chats cannot become tokens: put a "
            f"chat_template.jinja into that folder, set tokenizer.chat_template, or use the instruct model"
        )


def render_prompt(
    tokenizer: ChatTokenizer, message: list[Message], tools: list[dict[str, Any]] | None = None
) -> IntArray:
    """int32, P: the chat as the model sees it, up to where its answer begins."""
    ids: Sequence[int] = tokenizer.apply_chat_template(
        message, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return np.asarray(ids, dtype=np.int32)


def offered_tools(
    tools: list[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None
) -> list[dict[str, Any]] | None:
    """Those of `tools` that a prompt tells of."""
    return None if tool_choice == NO_TOOLS else tools


class PromptRenderer:
    """Renders the prompts of rollouts, once for all members of a group.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        require_chat_template(tokenizer)
        self._tokenizer = tokenizer
        # The latest prompt: the members of a group start one after the other, so one entry serves them all.
        self._latest: tuple[list[Message], list[dict[str, Any]] | None, IntArray] | None = None

    def render(self, message: list[Message], tools: list[dict[str, Any]] | None = None) -> IntArray:
        """int32, P: as `render_prompt`."""
        if self._latest is not None and self._latest[:2] == (message, tools):
            return self._latest[2]
        prompt_ids = render_prompt(self._tokenizer, message, tools)
        # Copies: the chat of a rollout may grow, and must not then count as the same prompt.
        self._latest = ([dict(part) for part in message], tools, prompt_ids)
        return prompt_ids


class SingleTurnArguments(StrictModel, strict=True):
    """What a run file may say of a ``single_turn`` agent: nothing, it has only the task's settings."""


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

    def __init__(
        self,
        rollout_controller: Generator,
        judge: GroupJudge | None,
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
        if len(state.prompt_ids) == 0:
            offered = offered_tools(state.tools, state.tool_choice)
            state.prompt_ids = self._prompts.render(state.message, offered)
        if len(state.tokens) == 0:
            state.tokens = state.prompt_ids
        if state.sample_params is None:
            state.sample_params = self.sample_params
        await self.rollout_controller.generate_sample(state)
        state.response = self.tokenizer.decode(state.response_ids.tolist(), skip_special_tokens=True)
        return state
