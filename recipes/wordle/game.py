"""Wordle: guess a secret word in a few turns; each guess is answered letter by letter.

``!`` is a letter in its place, ``?`` one that stands elsewhere in the secret, ``.`` one that is not in it. A
letter that a guess has twice is marked as often as the secret has it, those in their place first.

The secrets of `run.toml` are the English words of five letters in ``words.csv``; any others do.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from forebay.agents import Environment, Reply
from forebay.types import RolloutState

MAX_GUESSES = 6


def mark(guess: str, secret: str) -> str:
    """The answer to a guess.

    >>> mark("crane", "caper"), mark("eerie", "caper")
    ('!??.?', '?.?..')
    """
    left = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    marks = []
    for g, s in zip(guess, secret, strict=True):
        if g == s:
            marks.append("!")
        elif left[g] > 0:
            left[g] -= 1
            marks.append("?")
        else:
            marks.append(".")
    return "".join(marks)


class Wordle(Environment):
    """One game for each rollout.

    Its reward is 1 for the word, less 0.1 for each guess after the first; for a lost game 0.1 for each letter
    of the last guess that was in its place.
    """

    async def reset(self, state: RolloutState) -> dict[str, Any]:
        """The secret is the row's answer."""
        assert state.reward_model is not None
        return {"secret": state.reward_model["ground_truth"], "guesses": 0}

    async def step(self, state: RolloutState, memory: dict[str, Any], text: str) -> Reply:
        """Answer the last word of the right length; without one the turn is lost."""
        secret = memory["secret"]
        found = re.findall(rf"\b[a-z]{{{len(secret)}}}\b", text.lower())
        memory["guesses"] += 1
        if found and found[-1] == secret:
            return Reply(done=True, reward=1 - 0.1 * (memory["guesses"] - 1))
        says = mark(found[-1], secret) if found else "-" * len(secret)
        if memory["guesses"] < MAX_GUESSES:
            return Reply(says)
        return Reply(done=True, reward=0.1 * says.count("!"))
