"""Metrics of evaluation rollouts, and the ``[evaluate]`` table.

It does no rollout itself: hand it finished groups.

    groups by an agent loop, held-out prompts -> Evaluator.evaluate(groups) -> {"eval/score": ..., ...}

Failed rollouts (an engine or judge error) are counted as ``failed`` and left out of the scores: they say
nothing about the model.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, Field

from forebay.agents.extra_fields import mean_counts
from forebay.config import StrictModel
from forebay.judges.base import mean_parts
from forebay.metrics import EVAL_SCORE
from forebay.types import TRAJECTORY_OF_KEY, RolloutState, Status, count_generated

_Groups = Sequence[Sequence[RolloutState]]

SOLVED_SCORE = 1.0
"""A rollout at or over this score counts as solved, for accuracy and pass@k."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is correct.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1:
    ``1 - C(n - c, k) / C(n, k)``.

    Raises:
        ValueError: k is not in 1..num_samples.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be in 1..{num_samples}, got {k}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


class Evaluator:
    """Turns judged groups into flat metrics, over all and per task.

    >>> state = RolloutState([], task_name="t", status=Status.COMPLETED, reward={"score": 1.0},
    ...                      response_ids=[1, 2], finish_reason="stop")
    >>> Evaluator().evaluate([[state]])["eval/accuracy"]
    1.0
    """

    def evaluate(self, groups: Sequence[Sequence[RolloutState]], *, whole: bool = True) -> dict[str, float]:
        """Mean score, accuracy, pass@k (k = 1, 2, 4, .. up to the group size), length and truncation.

        Keys are ``eval/NAME`` and, with several tasks, ``eval/TASK/NAME``; the latter alone if the groups are
        not the `whole` of what is evaluated, whose numbers they would not continue. Lengths are in generated
        tokens. Where agents count turns and tool calls, their means are among them, as are those of the
        numbers that judges give beside the score.

        Raises:
            ValueError: there are no groups, or a rollout is neither judged nor failed, or a group is empty.
        """
        if not groups or not all(groups):
            raise ValueError("nothing to evaluate: no groups were given, or one has no rollouts")
        by_task: dict[str, list[Sequence[RolloutState]]] = defaultdict(list)
        for group in groups:
            by_task[str(group[0].task_name)].append(group)
        metrics = self._metrics(groups, "eval") if whole else {}
        if len(by_task) > 1 or not whole:
            for task_name, task_groups in by_task.items():
                metrics.update(self._metrics(task_groups, f"eval/{task_name}"))
        return metrics

    def _metrics(self, groups: Sequence[Sequence[RolloutState]], prefix: str) -> dict[str, float]:
        # A further trajectory of an attempt is no other attempt.
        groups = [[s for s in group if TRAJECTORY_OF_KEY not in s.extra_fields] for group in groups]
        judged = [[s for s in group if s.status is not Status.FAILED] for group in groups]
        rollouts = [state for group in judged for state in group]
        num_rollouts = sum(len(group) for group in groups)
        scores = [_score(state) for state in rollouts]
        values = {
            "score": _mean(scores),
            "accuracy": _mean([score >= SOLVED_SCORE for score in scores]),
            "length": _mean(list(map(count_generated, rollouts))),
            "truncated": _mean([state.finish_reason == "length" for state in rollouts]),
            "failed": 1.0 - len(rollouts) / num_rollouts,
            "rollouts": float(num_rollouts),
            **mean_counts(rollouts),
            **mean_parts(state.reward for state in rollouts),
            **self._pass_at_k(groups, judged),
        }
        return {f"{prefix}/{name}": value for name, value in values.items()}

    def _pass_at_k(self, groups: _Groups, judged: _Groups) -> dict[str, float]:
        """Over groups with no failed member, so that every k has the same prompts behind it."""
        size = min(map(len, groups))
        complete = [group for group, left in zip(groups, judged, strict=True) if len(left) == len(group)]
        correct = [(len(group), sum(_score(state) >= SOLVED_SCORE for state in group)) for group in complete]
        # In groups of one, pass@1 is the accuracy.
        ks = [2**i for i in range(size.bit_length()) if 2**i <= size > 1]
        return {f"pass@{k}": _mean([pass_at_k(n, c, k) for n, c in correct]) for k in ks if correct}


def _score(state: RolloutState) -> float:
    if state.reward is None:
        raise ValueError(
            f"rollout {state.rollout_id!r} ({state.status.value}) has no reward; judge it before evaluating"
        )
    return float(state.reward["score"])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


class TaskEvalConfig(BaseModel):
    """How the held-out prompts of one task are tried; None: as ``[evaluate]`` says."""

    # As a `StrictModel`, without being one more ancestor of `EvalConfig`.
    model_config = StrictModel.model_config

    every: int | None = Field(default=None, ge=0)
    """Train steps between evaluations; 0: only before and after."""
    rollouts_per_prompt: int | None = Field(default=None, ge=1)
    """Responses to each held-out prompt."""
    temperature: float | None = Field(default=None, ge=0)
    """Of sampling in evaluations; 0: the likeliest token each time."""


class EvalConfig(TaskEvalConfig):
    """When and how the held-out prompts are tried; before and after training they always are."""

    every: int = Field(default=0, ge=0)
    """Train steps between evaluations; 0: only before and after."""
    rollouts_per_prompt: int = Field(default=1, ge=1)
    """Responses to each held-out prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Of sampling in evaluations; 0: the likeliest token each time."""
    mode: Literal["pause", "beside"] = "pause"
    """``pause``: production rests meanwhile. ``beside``: it goes on, and so does training; an engine of its
    own holds the weights of the step. Of several processes, servers, or engines and workers on Ray it is the
    last, else one more."""
    best: str = EVAL_SCORE
    """The metric whose highest value names the best checkpoint, which is kept besides `keep_checkpoints`;
    evaluate and save at the same steps."""
