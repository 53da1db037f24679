"""Rollouts, and the arithmetic of their age.

A `RolloutState` is one trajectory of one prompt; a *group* is the list of the k trajectories of the same
prompt and is what the replay buffer stores. This module holds those records, their statuses and the one
definition of staleness used everywhere. It does no I/O and needs only numpy.

A rollout's life::

    INIT -> generated -> COMPLETED -> trained (ARCHIVED)
                      -> ABORTED   -> continued or generated again
                      -> FAILED    -> dropped, with its error
    COMPLETED -> FILTERED (rejected by the validity function) or EXPIRED (too old; prompt kept)

Staleness. A token made by the weights after train step ``m`` and trained at train step ``i`` has staleness
``i - m - 1``; 0 is on-policy. A rollout is as stale as its oldest generated token, a group as its stalest
rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

UNLABELED = -1
"""The model step of a token without a label (real model steps count from 0)."""


class Status(Enum):
    """The state of a rollout and, by `get_group_status`, of a group."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    SKIPPED = "skipped"
    MAX_TRIES = "max_tries"
    ARCHIVED = "archived"


def _column(kind: Kind, default: Any = None, **rule: Any) -> Any:
    return field(default=default, metadata={"kind": kind, **rule})


def _array(dtype: type[np.generic], **rule: Any) -> Any:
    return field(default_factory=lambda: _EMPTY[dtype], metadata={"kind": "array", "dtype": dtype, **rule})


@dataclass(slots=True, eq=False)
class RolloutState:
    """One trajectory of one prompt.

    Invariants: the array fields are always contiguous 1-D numpy arrays of the stated dtype, never None
    (assigning any sequence converts it; None empties it), and after a `put` the four ``response_*`` /
    ``logprobs`` arrays have one length R. Two rollouts are equal only if they are the same object.

    >>> state = RolloutState([{"role": "user", "content": "1+1="}], prompt_ids=[5, 6])
    >>> state.append([7, 8], logprobs=[-0.1, -0.2], model_step=3)
    >>> state.response_ids.tolist(), state.response_mask.tolist(), state.tokens.tolist()
    ([7, 8], [1, 1], [5, 6, 7, 8])
    """

    message: list[Message]
    """The prompt as a chat: ``[{"role": ..., "content": ...}, ...]``."""
    _: KW_ONLY
    # Identity
    rollout_id: str | int | None = _column("text")
    group_id: str | int | None = _column("text")
    session_id: str | int | None = _column("text")
    """Rollouts with the same session go to the same engine, so that it can reuse its prefix cache."""
    task_name: str | None = _column("text")
    num_tries: int = _column("whole", 0)
    """How often the rollout was aborted and started over."""
    # Prompt
    prompt_ids: IntArray = _array(np.int32)
    """int32, P: the prompt's tokens."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    sample_params: SampleParams | None = _column("params")
    """None: those of the agent loop."""
    data_source: str | dict[str, Any] | None = None
    reward_model: dict[str, Any] | None = None
    """The judge's input, for example ``{"ground_truth": "4"}``."""
    mm_info: dict[str, Any] | None = _column("value", large=True)
    """Multimodal inputs."""
    # Engine input
    tokens: IntArray = _array(np.int32)
    """int32, P + R: what the engine continues, prompt and response so far."""
    # Engine output
    response: str = _column("text", "", wiped=True, large=True)
    response_ids: IntArray = _array(np.int32, wiped=True)
    """int32, R: generated and environment tokens in order."""
    logprobs: FloatArray = _array(np.float32, fill=np.nan, wiped=True)
    """float32, R: natural log of the probability each token was sampled with; NaN where unknown."""
    response_mask: ByteArray = _array(np.uint8, fill=1, wiped=True)
    """uint8, R: 1 on tokens that the policy generated, 0 on tool and environment tokens."""
    response_model_steps: IntArray = _array(np.int32, fill=UNLABELED, wiped=True)
    """int32, R: the model step whose weights made each token; -1 where not labeled yet."""
    routed_experts: NDArray[Any] | None = _column("value", wiped=True, large=True)
    """int8 or int16, up to P + R - 1 x layers x k: of a mixture of experts, those that the engine sent each
    token of prompt and response to. None: unknown; so are tokens beyond its end, and what is -1."""
    tool_calls: list[dict[str, Any]] | None = _column("value", wiped=True)
    finish_reason: str | None = _column("text", wiped=True)
    # Outcome
    reward: dict[str, Any] | None = _column("value", wiped=True)
    """At least ``{"score": float}`` once judged."""
    status: Status = _column("status", Status.INIT)
    seq_staleness: int = _column("whole", 0)
    error_msg: str | None = _column("text", wiped=True)
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def append(
        self,
        ids: Sequence[int] | IntArray,
        *,
        logprobs: Sequence[float] | FloatArray | None = None,
        mask: int = 1,
        model_step: int | Sequence[int] | IntArray = UNLABELED,
    ) -> None:
        """Append R' tokens to all token-level fields and to ``tokens`` at once.

        `logprobs` left out are NaN; `mask` is 1 for generated and 0 for environment tokens; `model_step` is
        one step for all or one per token.

        Raises:
            ValueError: the logprobs or steps are not as many as the ids, or earlier fields are ragged.
        """
        fill_token_fields(self)
        new_ids = _as_array("response_ids", ids, np.int32)
        if len(self.tokens) == 0:
            self.tokens = self.prompt_ids
        arrays = {"tokens": new_ids, "response_ids": new_ids}
        given: dict[str, Any] = {"logprobs": logprobs, "response_mask": mask, "response_model_steps": model_step}
        for name, value in given.items():
            rule = FIELDS[name]
            if value is None:
                value = rule.fill
            if isinstance(value, int | float) or getattr(value, "ndim", 1) == 0:
                value = _constant(len(new_ids), value, rule.dtype)
            arrays[name] = _as_array(name, value, rule.dtype)
            if len(arrays[name]) != len(new_ids):
                raise ValueError(f"{name} has {len(arrays[name])} entries for {len(new_ids)} appended tokens")
        for name, array in arrays.items():
            slot = ROLLOUT_SLOTS[name]
            # Nearly always the first tokens of a response; a copy, for the caller may use its arrays again.
            earlier = slot.__get__(self)
            slot.__set__(self, np.concatenate([earlier, array]) if len(earlier) else array.copy())


FAILED_AT_KEY = "failed_at"
"""Key in ``extra_fields`` of a FAILED rollout: file and line in a user's code that raised."""

TURN_REWARDS_KEY = "turn_rewards"
"""Key in ``reward``, or else in ``extra_fields``: pairs of (response tokens until then, reward), for what was
earned before the end. The rest of the ``score`` is earned at the end."""

EPISODE_KEY = "episode"
"""The state of an episode with an environment: an `EpisodeRecord` as a dict."""
TRAJECTORY_OF_KEY = "trajectory_of"
"""Key in ``extra_fields`` of a further trajectory: the rollout id of the first one of the same attempt."""

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SampleParams:
    """How tokens are drawn. A run file's ``[tasks.sample]`` table is one of these."""

    max_tokens: int = 256
    """Budget of generated tokens for one rollout, over all its turns and continuations."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """Only the likeliest tokens that have this probability together are drawn; 1: all."""
    top_k: int = 0
    """0 means all tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a rollout; the text stays in the response."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a rollout, besides the model's own end-of-sequence ids."""
    seed: int | None = None
    """In place of the run's seed; None: that one. A rollout's id and try are mixed in, so those of one prompt
    differ all the same."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        # Any sequence is accepted; a tuple can be hashed and shared by a group.
        stop: Any = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.temperature >= 0:  # so that NaN is refused too
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative (0 = all tokens), got {self.top_k}")
        if "" in self.stop:
            raise ValueError(f"stop must not hold an empty text, which every response ends in; got {self.stop}")


Kind = Literal["text", "whole", "array", "status", "params", "value"]


@dataclass(frozen=True, slots=True)
class FieldRule:
    """How everything that stores, sends, checks or wipes rollouts treats one field.

    >>> FIELDS["logprobs"].dtype, FIELDS["logprobs"].wiped, FIELDS["mm_info"].wiped
    (<class 'numpy.float32'>, True, False)
    """

    name: str
    kind: Kind = "value"
    """``text`` and ``whole`` numbers are columns of a table where they are plain; an ``array`` has a `dtype`;
    ``status`` and ``params`` are one class each; a ``value`` may be anything that nests plain values."""
    dtype: type[np.generic] | None = None
    fill: float | None = None
    """A field with one entry per response token: the entry of a token whose caller gave none."""
    wiped: bool = False
    """Whether the field goes back to its default with the response."""
    large: bool = False
    """Whether it may hold so much that a put does not copy it, not even for a check."""


# One empty array for all rollouts: nothing can be written into it, and millions of them would fill memory.
_EMPTY: Mapping[type[np.generic], NDArray[Any]] = {
    dtype: np.empty(0, dtype) for dtype in (np.int32, np.float32, np.uint8)
}

FIELDS: Mapping[str, FieldRule] = {f.name: FieldRule(f.name, **f.metadata) for f in fields(RolloutState)}
"""The rules of the fields, in their order."""

ROLLOUT_FIELDS = tuple(FIELDS)

_FILLED = tuple(name for name, rule in FIELDS.items() if rule.fill is not None)

TOKEN_FIELDS = ("response_ids", *_FILLED)
"""The fields that have one entry per response token."""

ROLLOUT_SLOTS: dict[str, Any] = {name: RolloutState.__dict__[name] for name in ROLLOUT_FIELDS}
"""The fields' descriptors. Writing through one skips the conversion: for values that are right by origin."""

_write_steps = ROLLOUT_SLOTS["response_model_steps"].__set__
_read_token_fields = attrgetter(*TOKEN_FIELDS)


def _converting(name: str, dtype: type[np.generic]) -> property:
    """The slot `name` as an attribute that converts what is assigned; the other fields stay plain slots."""
    write = ROLLOUT_SLOTS[name].__set__

    def assign(state: RolloutState, value: Any) -> None:
        write(state, _as_array(name, value, dtype))

    return property(ROLLOUT_SLOTS[name].__get__, assign)


for _rule in FIELDS.values():
    if _rule.dtype is not None:
        setattr(RolloutState, _rule.name, _converting(_rule.name, _rule.dtype))


def _as_array(name: str, value: Any, dtype: Any) -> NDArray[Any]:
    """`value` as a contiguous 1-D array; a copy only if dtype or layout differ."""
    if type(value) is np.ndarray and value.dtype == dtype and value.ndim == 1 and value.flags.c_contiguous:
        return value
    if value is None:
        return _EMPTY[dtype]
    if not isinstance(value, np.ndarray):
        value = list(value)
        if dtype is np.float32:
            value = [np.nan if item is None else item for item in value]
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind not in "iubf":
        raise ValueError(f"{name} must hold numbers, got {array.dtype} such as {array[0]}")
    converted = np.ascontiguousarray(array, dtype=dtype)
    # A cast to integers would drop fractions and wrap what is out of range without a word.
    if dtype is not np.float32 and converted is not array and (converted != array).any():
        wrong = array[converted != array][0]
        raise ValueError(f"{name} must hold whole numbers that fit {dtype.__name__}, got {wrong}")
    return converted


def fill_token_fields(state: RolloutState) -> None:
    """Give the token-level fields one length: mask 1, logprob NaN, model step unlabeled where left out.

    Raises:
        ValueError: a field is neither empty nor as long as ``response_ids``.
    """
    ids, logprobs, mask, steps = _read_token_fields(state)
    if (length := len(ids)) == len(logprobs) == len(mask) == len(steps):
        return
    for name in _FILLED:
        have = len(getattr(state, name))
        if have == length:
            continue
        if have:
            raise ValueError(
                f"rollout {state.rollout_id!r}: {name} has {have} entries but response_ids has {length}; "
                f"give one per response token, or none"
            )
        ROLLOUT_SLOTS[name].__set__(state, _constant(length, FIELDS[name].fill, FIELDS[name].dtype))


def _constant(length: int, value: Any, dtype: Any) -> NDArray[Any]:
    # Half the time of `np.full`; a put makes up to 24 of these.
    array = np.empty(length, dtype)
    array.fill(value)
    return array


# A group that is not wholly COMPLETED takes the first of these that any of its members has.
_PRECEDENCE = [*map(Status, ("failed", "aborted", "max_tries", "expired", "filtered", "skipped", "init", "archived"))]

_FINISHED_OF_ITSELF = frozenset({"stop", "length", "tool_calls"})


def status_from_finish_reason(finish_reason: str | None) -> Status:
    """The status of a rollout whose engine stopped for `finish_reason`; unknown reasons are failures."""
    if finish_reason in _FINISHED_OF_ITSELF:
        return Status.COMPLETED
    return Status.ABORTED if finish_reason == "abort" else Status.FAILED


def get_group_status(group: Sequence[RolloutState]) -> Status:
    """COMPLETED if every member is, else the most pressing status any member has.

    Raises:
        ValueError: the group is empty.
    """
    if not group:
        raise ValueError("an empty group has no status; a group holds at least one rollout")
    # A list, because comparing members of an enum is far cheaper than hashing them.
    statuses = [state.status for state in group]
    if statuses.count(Status.COMPLETED) == len(statuses):
        return Status.COMPLETED
    for status in _PRECEDENCE:
        if status in statuses:
            return status
    raise TypeError(f"the statuses of rollouts are of the enum Status, got {statuses}")


def scores_of(group: Sequence[RolloutState]) -> list[float]:
    """The scores of those rollouts that have one; a score of None is none."""
    return [float(score) for state in group if (score := (state.reward or {}).get("score")) is not None]


def calculate_seq_staleness(model_step: int, current_train_step: int) -> int:
    """Staleness of tokens when they are trained: of model step 3 in train step 6 it is 6 - 3 - 1 = 2."""
    return current_train_step - model_step - 1


def update_sample_version(state: RolloutState, model_step: int) -> None:
    """Label with `model_step` the response tokens that have no model step yet; never relabel."""
    steps = state.response_model_steps
    missing = len(state.response_ids) - len(steps)
    if not len(steps):
        _write_steps(state, _constant(missing, model_step, np.int32))
        return
    if missing > 0:
        labeled = np.concatenate([steps, _constant(missing, UNLABELED, np.int32)])
    elif steps[steps.argmin()] > UNLABELED:
        # Labeled throughout, as engines deliver it.
        return
    else:
        labeled = steps.copy()
    np.copyto(labeled, model_step, where=labeled == UNLABELED)
    _write_steps(state, labeled)


def oldest_step_of(state: RolloutState) -> int | None:
    """The oldest labeled model step of any generated token of the rollout; None without labels."""
    steps, mask = state.response_model_steps, state.response_mask
    if not len(steps):
        return None
    # `argmin` takes a fifth of the time of `min`, and where it points decides nearly always.
    at = steps.argmin()
    if (smallest := steps[at]) > UNLABELED and (len(mask) != len(steps) or mask[at]):
        return int(smallest)
    made = made_by(state)
    return int(made.min()) if len(made) else None


def made_by(state: RolloutState) -> IntArray:
    """The labeled model steps of the generated tokens of the rollout, in their order."""
    steps, mask = state.response_model_steps, state.response_mask
    labeled = steps != UNLABELED
    # A mask that is left out is filled in when a group is put: until then every token counts as generated.
    if len(mask) == len(steps):
        # Tokens of a tool or an environment were made by no weights.
        labeled &= mask != 0
    made: IntArray = steps[labeled]
    return made


def count_generated(state: RolloutState) -> int:
    """Response tokens that the policy generated; without a mask, as before a put, all of them."""
    return int(np.count_nonzero(state.response_mask)) if len(state.response_mask) else len(state.response_ids)


def label_and_fill(state: RolloutState, model_step: int | None) -> int | None:
    """`update_sample_version`, `fill_token_fields` and `oldest_step_of` in turn.

    Raises:
        ValueError: token fields have different lengths.
    """
    if model_step is not None:
        update_sample_version(state, model_step)
    fill_token_fields(state)
    return oldest_step_of(state)


def refresh_seq_staleness(group: Sequence[RolloutState], current_train_step: int) -> None:
    """Write each rollout's staleness at `current_train_step`, from its oldest label; 0 without labels."""
    for state in group:
        step = oldest_step_of(state)
        state.seq_staleness = 0 if step is None else calculate_seq_staleness(step, current_train_step)


def reset_rollout_response(state: RolloutState) -> None:
    """Wipe everything generated and judged; the prompt, `mm_info` and `extra_fields` stay."""
    for wipe, default in _WIPED:
        wipe(state, default)
    state.tokens = state.prompt_ids.copy()


_BLANK = RolloutState([])
_WIPED = [(ROLLOUT_SLOTS[name].__set__, getattr(_BLANK, name)) for name, rule in FIELDS.items() if rule.wiped]
"""How each field that is wiped is written, and its default."""


def note_place(state: RolloutState, place: str | None) -> None:
    """Remember, or forget, where in a user's code `state` failed."""
    state.extra_fields.pop(FAILED_AT_KEY, None)
    if place is not None:
        state.extra_fields[FAILED_AT_KEY] = place


def expire_group(group: Sequence[RolloutState]) -> None:
    """Make the whole group EXPIRED: responses wiped, prompts and the staleness reached kept."""
    for state in group:
        reset_rollout_response(state)
        state.status = Status.EXPIRED


def maybe_expire_group(group: Sequence[RolloutState], stale_threshold: int) -> bool:
    """Expire a COMPLETED or ABORTED group that is at or over `stale_threshold`; return whether it was.

    Raises:
        ValueError: the threshold is not positive: fresh groups would be wiped.
    """
    if stale_threshold <= 0:
        raise ValueError(f"the stale threshold must be positive, got {stale_threshold}")
    if get_group_status(group) not in (Status.COMPLETED, Status.ABORTED):
        return False
    if max(state.seq_staleness for state in group) < stale_threshold:
        return False
    expire_group(group)
    return True
