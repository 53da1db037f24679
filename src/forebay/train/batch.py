"""`TrainBatch`: the rollouts of one train step as flat arrays, and what each step adds to them.

It holds no tensors and knows no model: `collate` turns parts of it into tensors.

::

    groups --from_groups--> TrainBatch --pack_pad_dispatch--> .packs --mask_stale--> .loss_weights
      --compute_old_logprobs--> .old_logprobs   --compute_ref_logprobs--> .ref_logprobs
      --compute_values--> .values               --compute_advantages--> .advantages   --train--> .metrics

Shapes: S sequences, T tokens of all sequences one after the other, R response tokens in the same order.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from forebay.models.images import Images, images_of, reply_images_of
from forebay.types import (
    EPISODE_KEY,
    TRAJECTORY_OF_KEY,
    TURN_REWARDS_KEY,
    UNLABELED,
    FloatArray,
    IntArray,
    RolloutState,
    Status,
    fill_token_fields,
)

Groups = Iterable[Sequence[RolloutState]]
Layout = Literal["padded", "packed", "shared_prompt"]
"""How a micro-batch lies in tensors; `collate` explains them."""
Pack = NDArray[np.int64]
"""The sequence numbers of one micro-batch; ``~n``, which is negative, is sequence n passed and not trained."""
Example = tuple[Any, ...]
"""Prompt ids and response ids; perhaps a mask, 1 on the response tokens to train, without which all are; and
perhaps the prompt's ``mm_info``."""


@dataclass(eq=False, kw_only=True)
class TrainBatch:
    """The sequences of all groups of one train step, and what is computed for their tokens.

    Invariants: sequences of a group are neighbors; groups stand in an order that depends on their ids only,
    so that the loss does not depend on which rollout finished first; arrays by response token are 0 where
    `response_mask` is False.

    >>> state = RolloutState([], prompt_ids=[5, 6], response_ids=[7], status=Status.COMPLETED,
    ...                      reward={"score": 1.0})
    >>> batch = TrainBatch.from_groups([[state, state]])
    >>> batch.num_sequences, batch.num_tokens, batch.scores.tolist()
    (2, 6, [1.0, 1.0])
    """

    rollout_ids: list[str | int | None]
    """S: the rollout that each sequence is of, for messages."""
    task_names: list[str | None]
    """S: the task that each sequence is of."""
    input_ids: IntArray
    """int32, T: prompt and response of each sequence."""
    prompt_lengths: NDArray[np.int64]
    """S tokens; at least 1."""
    response_lengths: NDArray[np.int64]
    """S tokens, environment tokens included; 0 is possible."""
    response_mask: NDArray[np.bool_]
    """R: True on the tokens that the policy generated; only those are trained."""
    rollout_logprobs: FloatArray
    """float32, R: the engine's; NaN where unknown."""
    model_steps: IntArray
    """int32, R: the weights that made each token; -1 where they are unknown."""
    scores: NDArray[np.float64]
    """S: the reward (`reward["score"]`) of each sequence."""
    group_index: NDArray[np.int64]
    """S: number of the group in this batch, from 0."""
    attempt_first: NDArray[np.int64]
    """S: number of the first sequence of the same attempt; its own, but for further trajectories."""
    temperatures: NDArray[np.float32]
    """S: what each sequence was sampled with."""
    token_rewards: NDArray[np.float64]
    """R: the scores where they were earned: at the ends of turns, the rest at the last generated token."""

    routed_experts: NDArray[Any] | None = None
    """int8 or int16, T x layers x k: those that the engine sent each token to; -1 where that is unknown.
    None: it is for all."""
    images: list[Images] = field(default_factory=list)
    """S: the bytes of the files of each prompt's images; empty where no sequence has any."""
    reply_images: list[Images] = field(default_factory=list)
    """S: the same of the images in each response, which environments replied with."""
    mini_batches: list[Pack] = field(default_factory=list)
    """The sequences of each optimizer step; empty until packed."""
    packs: list[list[list[Pack]]] = field(default_factory=list)
    """The micro-batches, by mini-batch and rank: passes are made over these."""
    layout: Layout = "padded"
    penalties: tuple[float, float] | None = None
    """Weights of divergence and entropy in this step; None: the config's."""
    loss_weights: FloatArray | None = None
    """float32, R: factor of each token's loss; a token with 0 takes no part in any mean. None: all 1."""
    old_logprobs: FloatArray | None = None
    """float32, R: of the policy that the ratio is taken against; NaN where the loss reads none."""
    ref_logprobs: FloatArray | None = None
    """float32, R: of the reference model; NaN as above."""
    ref_top: FloatArray | None = None
    """float32, R x 2 K: log probabilities of the reference's K likeliest tokens at each place, then their
    ids; NaN as above. None: the loss reads none."""
    trainer_logprobs: FloatArray | None = None
    """float32, R: of the trained policy in the step's first epoch, set by it; NaN where there was no pass."""
    values: FloatArray | None = None
    """float32, R: the critic's estimate before each token."""
    advantages: FloatArray | None = None
    """float32, R: advantage of each token; None before they are computed."""
    returns: FloatArray | None = None
    """float32, R: what the critic should have said."""
    token_weights: FloatArray | None = None
    """float32, R: weight of each token's loss in its mini-batch, normalization and masks included."""
    importance: FloatArray | None = None
    """float32, R: importance weights, trainer over engine. None: none, or worked out in the training pass."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Measures of the steps, as ``train/NAME``."""

    @classmethod
    def from_groups(cls, groups: Groups, *, temperature: float = 1.0, overlong: str | float = "train") -> Self:
        """The batch of these groups; `temperature` holds for rollouts without their own ``sample_params``.

        `overlong` is for rollouts cut at their ``max_tokens``: ``filter`` gives them loss weight 0, and a
        share takes `overlong_penalty` from scores (Yu et al. 2025, "DAPO", section 3.4).

        Raises:
            ValueError: no groups, or a rollout that is not COMPLETED, judged and sampled at a temperature
                over 0, or has no prompt, or a group that mixes prompts. The message names the rollouts.
        """
        # Not in the order in which rollouts were finished, which differs from run to run.
        ordered = sorted(groups, key=_canonical_key)
        states = list(chain.from_iterable(ordered))
        if not states:
            raise ValueError("a train batch needs at least one group; got none")
        temperatures = [s.sample_params.temperature if s.sample_params else temperature for s in states]
        _check_trainable(ordered, states, temperatures)
        for state in states:
            # A put has done so; groups from elsewhere may leave fields out.
            fill_token_fields(state)
        masks = [state.response_mask.astype(bool) for state in states]
        penalties = np.array([overlong_penalty(s, overlong) for s in states])
        scores = np.array([float((s.reward or {})["score"]) for s in states]) - penalties
        batch = cls(
            rollout_ids=[state.rollout_id for state in states],
            task_names=[state.task_name for state in states],
            input_ids=np.concatenate(list(chain.from_iterable((s.prompt_ids, s.response_ids) for s in states))),
            prompt_lengths=np.array([len(s.prompt_ids) for s in states], np.int64),
            response_lengths=np.array([len(s.response_ids) for s in states], np.int64),
            response_mask=np.concatenate(masks),
            rollout_logprobs=np.concatenate([s.logprobs for s in states]),
            model_steps=np.concatenate([s.response_model_steps for s in states]),
            scores=scores,
            group_index=np.repeat(np.arange(len(ordered)), [len(group) for group in ordered]),
            attempt_first=_attempt_first(ordered),
            temperatures=np.array(temperatures, np.float32),
            token_rewards=np.concatenate(list(map(_token_rewards, states, masks, scores))),
            routed_experts=_routed_experts(states),
        )
        images, replied = list(map(images_of, states)), list(map(reply_images_of, states))
        if any(images) or any(replied):
            batch.images, batch.reply_images = images, replied
        if not isinstance(overlong, str):
            batch.metrics["train/overlong_penalty"] = float(penalties.mean())
        elif overlong == "filter":
            # An episode that ran out of turns says "length", too, and none of its tokens is cut.
            of_turns_S = [s.extra_fields.get(EPISODE_KEY, {}).get("ended_by") == "max_turns" for s in states]
            cut_S = np.array([s.finish_reason == "length" for s in states]) & ~np.array(of_turns_S)
            batch.loss_weights = (~cut_S[batch.response_rows]).astype(np.float32)
        return batch

    @classmethod
    def from_examples(cls, examples: Iterable[Example]) -> Self:
        """A batch without rewards, for supervised training."""
        states = [
            RolloutState(
                [],
                rollout_id=position,
                prompt_ids=np.asarray(prompt),
                response_ids=np.asarray(response),
                response_mask=np.asarray(more[0] if more else (), np.uint8),
                mm_info=more[1] if len(more) > 1 else None,
                status=Status.COMPLETED,
                reward={"score": 0.0},
            )
            for position, (prompt, response, *more) in enumerate(examples)
        ]
        return cls.from_groups([states] if states else [])

    def to_plain(self) -> dict[str, Any]:
        """Its fields by name but for images, for another process: arrays and plain values."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return plain | {"images": [], "reply_images": []}

    def images_for(self, rank: int) -> list[Any]:
        """The images in the packs of `rank`, for another process: arrays, each file once, and where they belong."""
        own = {number for ranks in self.packs for pack in ranks[rank] for number in passed(pack).tolist()}
        numbers: dict[bytes, int] = {}
        tables = [
            [[numbers.setdefault(file, len(numbers)) for file in each if row in own] for row, each in enumerate(kind)]
            for kind in (self.images, self.reply_images)
        ]
        return [[np.frombuffer(file, np.uint8) for file in numbers], *tables]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], images: Sequence[Any] = ()) -> Self:
        """The batch of what `to_plain` and `images_for` gave."""
        arrays, *tables = images or ([], [], [])
        files = [array.tobytes() for array in arrays]
        shown, replied = ([tuple(files[number] for number in row) for row in table] for table in tables)
        return cls(**{**plain, "images": shown, "reply_images": replied})

    @property
    def num_sequences(self) -> int:
        """S: how many sequences the batch has."""
        return len(self.prompt_lengths)

    @property
    def num_tokens(self) -> int:
        """T: tokens of all prompts and responses."""
        return len(self.input_ids)

    @property
    def num_response_tokens(self) -> int:
        """R: tokens of all responses, environment tokens included."""
        return len(self.response_mask)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """S tokens, prompt and response."""
        return self.prompt_lengths + self.response_lengths

    @cached_property
    def token_starts(self) -> NDArray[np.int64]:
        """S: where each sequence begins in arrays by token."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def response_starts(self) -> NDArray[np.int64]:
        """S: where each sequence begins in arrays by response token."""
        return np.cumsum(self.response_lengths) - self.response_lengths

    @cached_property
    def response_rows(self) -> NDArray[np.int64]:
        """R: the sequence each response token belongs to."""
        return np.repeat(np.arange(self.num_sequences), self.response_lengths)

    @cached_property
    def generated_lengths(self) -> NDArray[np.int64]:
        """S: response tokens that the policy generated."""
        return np.bincount(self.response_rows[self.response_mask], minlength=self.num_sequences)

    @cached_property
    def prompt_index(self) -> NDArray[np.int64]:
        """S: number of the prompt; sequences with equal prompt tokens and images have equal numbers."""
        numbers: dict[tuple[bytes, Images], int] = {}
        ends = (self.token_starts + self.prompt_lengths).tolist()
        images = self.images or [()] * self.num_sequences
        prompts = (self.input_ids[a:b].tobytes() for a, b in zip(self.token_starts.tolist(), ends, strict=True))
        # By content and not by group: any two sequences with the same prompt can share its pass.
        both = zip(prompts, images, strict=True)
        return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in both], np.int64)

    @cached_property
    def image_kinds(self) -> NDArray[np.int64]:
        """S: 1 where the prompt has images, and 2 more where the response has some."""
        kinds = [bool(one) + 2 * bool(other) for one, other in zip(self.images, self.reply_images, strict=True)]
        return np.array(kinds or [0] * self.num_sequences, np.int64)

    @property
    def in_loss(self) -> NDArray[np.bool_]:
        """R: generated tokens whose loss weight is not 0."""
        if self.loss_weights is None:
            return self.response_mask
        return np.asarray(self.response_mask & (self.loss_weights != 0))

    def token_staleness(self, train_step: int) -> NDArray[np.int64]:
        """R: staleness of each token trained at `train_step` (from 1); 0 where its weights are unknown."""
        return np.where(self.model_steps == UNLABELED, 0, train_step - 1 - self.model_steps.astype(np.int64))

    def mask_stale(self, train_step: int, thresholds: int | Mapping[str, int]) -> None:
        """Give loss weight 0 to the tokens whose staleness at `train_step` is at or over their threshold.

        Each token counts by its own model step, so the fresh part of a continued rollout stays. `thresholds`
        are by task name, or one for all.

        Raises:
            ValueError: a task has no threshold, or a threshold is not positive.
        """
        limits_S = np.array([_threshold(thresholds, name) for name in self.task_names])
        stale_R = self.token_staleness(train_step) >= limits_S[self.response_rows]
        weights_R = 1.0 if self.loss_weights is None else self.loss_weights
        self.loss_weights = np.where(stale_R, 0.0, weights_R).astype(np.float32)

    def by_sequence(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """An array by response token as S views, one per sequence."""
        return np.split(values, self.response_starts[1:])


def passed(pack: Pack) -> Pack:
    """The sequences that a pass of this micro-batch is made over."""
    return np.where(pack < 0, ~pack, pack)


def overlong_penalty(state: RolloutState, share: str | float) -> float:
    """0 up to the last `share` of the rollout's ``max_tokens``, then rising linearly to 1 at their end.

    Yu et al. 2025, "DAPO", equation 13, where the share is 4,096 of 20,480 tokens. 0 where `share` is a word,
    and where the rollout names no budget.
    """
    if isinstance(share, str) or share == 0 or state.sample_params is None:
        return 0.0
    budget = state.sample_params.max_tokens
    # `max_tokens` bounds what is generated; tokens of tools are not in it.
    over = int(np.count_nonzero(state.response_mask)) - (1 - share) * budget
    return min(max(over / (share * budget), 0.0), 1.0)


def _token_rewards(state: RolloutState, mask_R: NDArray[np.bool_], score: float) -> NDArray[np.float64]:
    """By response token: each reward at the last token that was generated until it was given."""
    rewards_R = np.zeros(len(mask_R))
    generated = np.flatnonzero(mask_R)
    noted = state.extra_fields.get(TURN_REWARDS_KEY, ())
    given = [*(state.reward or {}).get(TURN_REWARDS_KEY, noted)]
    # The score is the whole, of which the turns have had their parts.
    given.append((len(mask_R), score - sum(reward for _, reward in given)))
    for end, reward in given:
        # A reward before the first token is earned with that one.
        place = max(int(np.searchsorted(generated, end)) - 1, 0)
        if len(generated):
            rewards_R[generated[place]] += reward
    return rewards_R


def _attempt_first(groups: Iterable[Sequence[RolloutState]]) -> NDArray[np.int64]:
    firsts: list[int] = []
    for group in groups:
        # By the id that further trajectories name, for nothing says that they are neighbors of the first.
        numbers: dict[Any, int] = {}
        marks = [state.extra_fields.get(TRAJECTORY_OF_KEY) for state in group]
        for number, (state, mark) in enumerate(zip(group, marks, strict=True), start=len(firsts)):
            if mark is None:
                numbers[state.rollout_id] = number
        for number, mark in enumerate(marks, start=len(firsts)):
            # Where the first is missing, the next one takes its place.
            firsts.append(number if mark is None else numbers.setdefault(mark, number))
    return np.array(firsts, np.int64)


def _routed_experts(states: Sequence[RolloutState]) -> NDArray[Any] | None:
    """Those of all tokens, one sequence after the other; ValueError where they are of several models."""
    known = [state.routed_experts for state in states if state.routed_experts is not None]
    if not known:
        return None
    lengths = [len(state.prompt_ids) + len(state.response_ids) for state in states]
    shape, dtype = (sum(lengths), *known[0].shape[1:]), np.result_type(*(each.dtype for each in known))
    all_experts = np.full(shape, -1, dtype)
    for state, end, length in zip(states, np.cumsum(lengths), lengths, strict=True):
        if (experts := state.routed_experts) is not None:
            # Often one short: an engine has no need to pass the last token through the model.
            all_experts[end - length : end][: len(experts)] = experts[:length]
    return all_experts


def _threshold(thresholds: int | Mapping[str, int], task_name: str | None) -> int:
    threshold = thresholds if isinstance(thresholds, int) else thresholds.get(task_name or "")
    if threshold is None:
        raise ValueError(f"task {task_name!r} has no stale threshold, only {thresholds}; give it one")
    if threshold <= 0:
        raise ValueError(f"the stale threshold of task {task_name!r} must be at least 1, got {threshold}")
    return threshold


def _canonical_key(group: Sequence[RolloutState]) -> tuple[str, bool, int, str]:
    """Task, then group id: numbers by value and before words."""
    if not group:
        raise ValueError("a group without rollouts cannot be trained on; leave it out")
    group_id = group[0].group_id
    number = group_id if isinstance(group_id, int) else 0
    return group[0].task_name or "", not isinstance(group_id, int), number, str(group_id)


def _check_trainable(
    groups: Sequence[Sequence[RolloutState]], states: Sequence[RolloutState], temperatures: Sequence[float]
) -> None:
    mixed = [group[0].rollout_id for group in groups if len({state.group_id for state in group}) > 1]
    if mixed:
        raise ValueError(f"groups that mix prompts (several group ids), beginning with rollouts {mixed[:5]}")
    problems = [
        f"{state.rollout_id!r} ({problem})"
        for state, temperature in zip(states, temperatures, strict=True)
        if (problem := why_untrainable(state, temperature)) is not None
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"only COMPLETED rollouts with a prompt, a score and a sampling temperature over 0 can be "
            f"trained on; leave out the groups of rollouts {', '.join(problems[:5])}{more}"
        )


def why_untrainable(state: RolloutState, temperature: float) -> str | None:
    """Why a rollout that was sampled at `temperature` cannot be trained on; None if it can."""
    if state.status is not Status.COMPLETED:
        return str(state.status.value)
    if state.reward is None or "score" not in state.reward:
        return "no score"
    score: Any = state.reward["score"]
    try:
        is_number = math.isfinite(float(score))
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        return f"the score {score!r} is no finite number"
    if len(state.prompt_ids) == 0:
        return "no prompt tokens"
    if temperature <= 0:
        return "greedy: temperature 0"
    return None
