"""Groups for the replay benchmarks: rollouts as an engine leaves them, with random tokens.

A rollout has a prompt (its ids shared by the group), response ids, logprobs, a mask, the labels of its tokens
(or none yet), `tokens` (prompt and response), a reward and ids; no response text. `multi_turn` rollouts have
a tenth of their tokens from tools (mask 0) and labels of two model steps; the others are one turn by one
model: a mask of ones, one label throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forebay.replay.groups import StoredGroup, copy_group
from forebay.types import ROLLOUT_FIELDS, RolloutState, Status

GROUP_SIZE = 8
VOCABULARY = 150_000
MESSAGE = [{"role": "user", "content": "What is 17 * 24? Think step by step, then give the number."}]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the groups of a benchmark look like."""

    tokens: int
    """Response tokens of a rollout."""
    prompt_tokens: int = 64
    multi_turn: bool = False

    def __str__(self) -> str:
        kind = ", several turns" if self.multi_turn else ""
        return f"{GROUP_SIZE} x {self.tokens:,} tokens{kind}"


def make_group(
    shape: Shape, generator: np.random.Generator, *, model_step: int | None = None, status: Status = Status.COMPLETED
) -> list[RolloutState]:
    """A group with arrays of its own; its tokens are labeled if `model_step` is given."""
    prompt_ids = generator.integers(0, VOCABULARY, shape.prompt_tokens, np.int32)
    number = int(generator.integers(2**40))
    return [
        _make_rollout(shape, generator, prompt_ids, f"{number}-{member}", str(number), model_step, status)
        for member in range(GROUP_SIZE)
    ]


def _make_rollout(
    shape: Shape,
    generator: np.random.Generator,
    prompt_ids: np.ndarray,
    rollout_id: str,
    group_id: str,
    model_step: int | None,
    status: Status,
) -> RolloutState:
    ids = generator.integers(0, VOCABULARY, shape.tokens, np.int32)
    mask = np.ones(shape.tokens, np.uint8)
    steps = np.full(0 if model_step is None else shape.tokens, model_step or 0, np.int32)
    if shape.multi_turn:
        mask[shape.tokens // 2 : shape.tokens // 2 + shape.tokens // 10] = 0
        steps[shape.tokens // 2 :] += 1
    return RolloutState(
        MESSAGE,
        rollout_id=rollout_id,
        group_id=group_id,
        prompt_ids=prompt_ids,
        tokens=np.concatenate([prompt_ids, ids]),
        response_ids=ids,
        logprobs=-generator.exponential(size=shape.tokens).astype(np.float32),
        response_mask=mask,
        response_model_steps=steps,
        reward={"score": float(generator.integers(2))},
        finish_reason="stop",
        status=status,
    )


def copies(template: list[RolloutState], count: int) -> Iterator[list[RolloutState]]:
    """Groups of rollouts of their own that share the template's arrays."""
    stored = StoredGroup(template)
    for _ in range(count):
        yield list(copy_group(stored))


def array_bytes(groups: list[list[RolloutState]]) -> int:
    """Bytes of all different arrays of these rollouts."""
    arrays = {
        value.__array_interface__["data"][0]: value.nbytes
        for group in groups
        for state in group
        for name in ROLLOUT_FIELDS
        if isinstance(value := getattr(state, name), np.ndarray) and len(value)
    }
    return sum(arrays.values())
