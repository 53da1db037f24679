"""Rewards by step: any judge scores a response as it stood at the end of each line; a step earns the gain.

`run.toml` names the judge as ``steps:StepRewards``; with ``train.credit = "token"`` a token then counts for
the gains of its own step and of those that follow.
"""

import itertools
from dataclasses import replace
from functools import cached_property

from forebay.config import parse_config
from forebay.judges import Judge, JudgeConfig, build_judge
from forebay.judges.base import JudgeError
from forebay.models import load_tokenizer, resolve_model


class StepRewards(Judge):
    """Scores the beginnings of a response that end where a line ends, all of them at once.

    Invariants: the score is that of the whole response, and the steps' rewards sum to it: the first step
    earns its whole score, each later one its difference from the one before.

    Args:
        judge: the table of the judge that scores each beginning; not one that compares a group.
        tokenizer: of the model that is trained, named as ``model.source`` is.
        most_steps: beyond so many, what is left is one step.
        timeout_s: of the judge, where its table says nothing.
    """

    def __init__(self, *, judge, tokenizer, most_steps=32, timeout_s=30.0):
        # The judge of the beginnings keeps its own time.
        super().__init__(timeout_s=None)
        self.inner = build_judge(parse_config(JudgeConfig, {"timeout_s": timeout_s, **judge}))
        if self.inner.needs_whole_group:
            raise ValueError(f"judge {self.inner.name} compares whole responses; give one that scores them")
        self.model, self.most_steps = tokenizer, most_steps

    @cached_property
    def tokenizer(self):
        """Loaded for the first verdict: a run file is checked without it."""
        return load_tokenizer(resolve_model(self.model, weights=False))

    async def score(self, state):
        """The verdict on the whole response, and what each step before the last earned."""
        ends = self.step_ends(state.response_ids.tolist())
        beginnings = [self.beginning(state, end) for end in ends]
        verdicts = await self.inner.verdicts([*beginnings, state])
        failed = next((each for each in verdicts if isinstance(each, JudgeError)), None)
        if failed is not None:
            raise failed
        scores = [0.0, *(each["score"] for each in verdicts)]
        gains = [after - before for before, after in itertools.pairwise(scores)]
        # The last step earns the rest of the score.
        return {**verdicts[-1], "turn_rewards": list(zip(ends, gains, strict=False)), "steps": len(gains)}

    def step_ends(self, ids):
        """Numbers of tokens after which a line that is not empty has ended, but for the last line."""
        ends, line = [], ""
        for place, token in enumerate(ids, start=1):
            line += self.tokenizer.decode([token])
            if "\n" in line:
                if line.strip():
                    ends.append(place)
                line = ""
        return [end for end in ends if end < len(ids)][: self.most_steps - 1]

    def beginning(self, state, end):
        """The rollout as it was after `end` tokens of its response."""
        names = ("response_ids", "logprobs", "response_mask", "response_model_steps")
        fields = {name: getattr(state, name)[:end] for name in names}
        text = self.tokenizer.decode(state.response_ids[:end], skip_special_tokens=True)
        return replace(state, response=text, **fields)

    async def aclose(self):
        """Close the judge of the beginnings."""
        await self.inner.aclose()
