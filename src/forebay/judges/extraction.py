"""What of a response is its answer, and what of a rollout is the right one. Text in, text out."""

from __future__ import annotations

import re

from forebay.types import RolloutState

PATTERNS = {
    # A minus belongs to the number unless something is subtracted from: "= -4" but not "10-4".
    "last_number": r"((?:(?<![\w)])-)?\d[\d,]*(?:\.\d+)?)",
    "answer_tag": r"<answer>(.*?)</answer>",
    # Cut off in its middle, a block has no end.
    "code_block": r"```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)",
}
"""Named patterns; any regular expression with one group may be written instead."""


def compile_pattern(extract: str) -> re.Pattern[str]:
    """The named pattern or regular expression `extract`, matching across lines.

    Raises:
        ValueError: it is not a regular expression with exactly one group.
    """
    try:
        pattern = re.compile(PATTERNS.get(extract, extract), re.DOTALL)
    except re.error as error:
        raise ValueError(f"extract = {extract!r} is not a regular expression: {error}") from None
    if pattern.groups != 1:
        raise ValueError(
            f"extract = {extract!r} has {pattern.groups} groups; write one ( ) around the answer, "
            f"or one of {', '.join(PATTERNS)}"
        )
    return pattern


def find_answer(pattern: re.Pattern[str], text: str) -> str | None:
    """The group of the last match, stripped; None without a match. The last, since models think aloud."""
    found = pattern.findall(text)
    return found[-1].strip() if found else None


def ground_truth(state: RolloutState) -> str:
    """The right answer of the rollout's prompt, stripped.

    Raises:
        ValueError: the prompt brought none.
    """
    truth = (state.reward_model or {}).get("ground_truth")
    if truth is None:
        raise ValueError("the prompt has no reward_model['ground_truth']; set answer_column of its data")
    return str(truth).strip()
