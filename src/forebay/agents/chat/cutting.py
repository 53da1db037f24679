"""Taking the end off a rollout's response."""

from __future__ import annotations

from forebay.types import TOKEN_FIELDS, RolloutState


def cut_unanswered(state: RolloutState) -> None:
    """Take off what follows the model's last token: replies that it has no room to answer teach nothing."""
    end = len(state.response_ids)
    while end and not state.response_mask[end - 1]:
        end -= 1
    surplus = len(state.response_ids) - end
    if end and surplus:
        state.tokens = state.tokens[: len(state.tokens) - surplus].copy()
        for name in TOKEN_FIELDS:
            setattr(state, name, getattr(state, name)[:end].copy())
