"""The columns of a run's history: rollouts that left the run, and activities that ended, as Arrow tables."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.agents.extra_fields import conversation_of, facts_of
from forebay.ledger import GroupLife
from forebay.models.images import IMAGES, REPLY_IMAGES, Images, images_of, reply_images_of
from forebay.produce.strategies.context import GROUP_GENERATE_TIME_KEY
from forebay.train.batch import TrainBatch
from forebay.types import UNLABELED, RolloutState
from forebay.watching.activity import Span

TEXTS = ("outcome", "reason", "task", "group_id", "rollout_id", "status", "finish_reason")
NUMBERS = {
    "train_step": "int32",
    "member": "int32",
    "staleness": "int32",
    "first_model_step": "int32",
    "last_model_step": "int32",
    "num_tokens": "int32",
    "prompt_tokens": "int32",
    "prompt_hash": "int64",
    "time_s": "float64",
    "score": "float64",
    "advantage": "float32",
    "generate_s": "float32",
}
TOKENS = {
    "token_ids": "int32",
    "mask": "uint8",
    "model_steps": "int32",
    "logprobs": "float32",
    "trainer_logprobs": "float32",
    "advantages": "float32",
}
"""Lists with an entry per response token; empty where nothing is known."""
DOCUMENTS = ("prompt", "response", "conversation", "reward", "truth", "facts", "error")
"""Long texts; ``conversation``, ``reward``, ``truth`` and ``facts`` are JSON, or empty."""
IMAGE_COLUMNS = {IMAGES: images_of, REPLY_IMAGES: reply_images_of}
"""The images of the prompt, and those of the replies in the conversation after it, each in their order."""


class Left(NamedTuple):
    """Groups that left the run together."""

    groups: list[Sequence[RolloutState]]
    outcome: str
    reason: str | None
    train_step: int
    time_s: float
    learned: TrainBatch | None
    life: GroupLife | None


def rollouts_table(left: Sequence[Left]) -> Any:
    """The lines of these groups as a table."""

    rows: list[dict[str, Any]] = []
    images: dict[str, dict[Images, int]] = {name: {} for name in IMAGE_COLUMNS}
    for batch in left:
        learned = {} if batch.learned is None else _learned_by_rollout(batch.learned)
        for group in batch.groups:
            for member, state in enumerate(group):
                texts = _texts(state, batch)
                row: dict[str, Any] = {**texts, **_numbers(state, batch, texts["prompt"], len(group))}
                row["member"], row["token_ids"], row["mask"] = member, state.response_ids, state.response_mask
                row["model_steps"], row["logprobs"] = state.response_model_steps, state.logprobs
                row["trainer_logprobs"], row["advantages"] = learned.get(state.rollout_id, (_NO_TOKENS, _NO_TOKENS))
                for name, known in images.items():
                    row[name] = known.setdefault(IMAGE_COLUMNS[name](state), len(known))
                rows.append(row)
    columns: dict[str, Any] = {name: pa.array([row[name] for row in rows], pa.string()) for name in TEXTS}
    columns |= {name: pa.array([row[name] for row in rows], pa.large_string()) for name in DOCUMENTS}
    for name, known in images.items():
        # As data URLs with blanks between; the members of a group share one text.
        places, urls = pa.array([row[name] for row in rows], pa.int32()), [*map(_as_urls, known)]
        columns[name] = pa.DictionaryArray.from_arrays(places, pa.array(urls, pa.string()))
    of_tokens = _of_tokens(rows)
    for name, kind in NUMBERS.items():
        numbers = of_tokens[name] if name in of_tokens else [row[name] for row in rows]
        # NaN becomes null, which averages in SQL leave out.
        columns[name] = pa.array(np.asarray(numbers, kind), from_pandas=True)
    for name, kind in TOKENS.items():
        lists = [row[name] for row in rows]
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int32)
        flat = np.concatenate(lists).astype(kind, copy=False)
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
    return pa.table(columns)


def _texts(state: RolloutState, batch: Left) -> dict[str, str]:
    conversation, facts = conversation_of(state), facts_of(state)
    reward = state.reward if isinstance(state.reward, Mapping) else {}
    truth = state.reward_model.get("ground_truth", "") if isinstance(state.reward_model, Mapping) else ""
    texts = {
        "outcome": batch.outcome,
        "reason": batch.reason,
        "task": state.task_name,
        "group_id": state.group_id,
        "rollout_id": state.rollout_id,
        "status": state.status.value,
        "finish_reason": state.finish_reason,
        "prompt": prompt_text(state.message),
        "response": state.response,
        "conversation": _as_json([*state.message, *conversation]) if conversation else "",
        "reward": _as_json(reward) if len(reward) > 1 else "",
        "truth": truth if isinstance(truth, str) else _as_json(truth),
        "facts": _as_json(facts) if facts else "",
        "error": state.error_msg,
    }
    return {name: _writable(text) for name, text in texts.items()}


def _as_urls(images: Images) -> str:
    return " ".join(f"data:image/png;base64,{b64encode(image).decode()}" for image in images)


def _numbers(state: RolloutState, batch: Left, prompt: str, group_size: int) -> dict[str, float]:
    score = state.reward.get("score") if isinstance(state.reward, Mapping) else None
    seconds = state.extra_fields.get(GROUP_GENERATE_TIME_KEY)
    num_tokens = len(state.response_ids)
    if batch.life is not None and not num_tokens:
        # The books have the tokens of the whole group; each member gets an equal part.
        num_tokens = (batch.life.num_tokens or 0) // max(1, group_size)
        score, seconds = batch.life.score, batch.life.latency_s
    return {
        "train_step": batch.train_step,
        "staleness": state.seq_staleness,
        "num_tokens": num_tokens,
        "prompt_tokens": len(state.prompt_ids),
        "prompt_hash": hash_prompt(state.task_name, prompt),
        "time_s": batch.time_s,
        "score": np.nan if not isinstance(score, int | float) else score,
        "generate_s": seconds if isinstance(seconds, int | float) else np.nan,
    }


def _of_tokens(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """For each rollout: the model steps of its oldest and newest token, or -1, and its mean advantage, or NaN.

    Tokens that tools and environments wrote count for neither. For all at once: many rollouts are short.
    """
    steps, at = _generated(rows, "model_steps")
    last = np.full(len(rows), UNLABELED)
    np.maximum.at(last, at, steps)
    first = last.copy()
    np.minimum.at(first, at, np.where(steps == UNLABELED, np.iinfo(np.int32).max, steps))
    advantages, at = _generated(rows, "advantages")
    sums, counts = np.bincount(at, advantages, len(rows)), np.bincount(at, minlength=len(rows))
    mean = np.divide(sums, counts, out=np.full(len(rows), np.nan), where=counts > 0)
    return {"first_model_step": first, "last_model_step": last, "advantage": mean}


def _generated(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """A column's values of generated tokens, and the number of each one's row."""
    counts = [len(row[name]) for row in rows]
    # Without a mask all tokens are.
    masks = [row["mask"] if len(row["mask"]) == n else np.ones(n) for row, n in zip(rows, counts, strict=True)]
    made = np.concatenate(masks) != 0
    return np.concatenate([row[name] for row in rows])[made], np.repeat(np.arange(len(rows)), counts)[made]


def _learned_by_rollout(batch: TrainBatch) -> dict[Any, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """By rollout id: the trainer's log-probabilities and the advantages of its response tokens."""
    # With a place for rollouts that have no response token, the last ones too.
    ends = np.cumsum(np.bincount(batch.response_rows, minlength=len(batch.rollout_ids)))
    columns = [
        [_NO_TOKENS] * len(ends) if values is None else np.split(values, ends[:-1])
        for values in (batch.trainer_logprobs, batch.advantages)
    ]
    return dict(zip(batch.rollout_ids, zip(*columns, strict=True), strict=True))


def prompt_text(messages: Sequence[object]) -> str:
    """The text of a prompt: of its one message, or of all with their roles.

    >>> prompt_text([{"role": "user", "content": "1+1="}])
    '1+1='
    """
    parts = [message for message in messages if isinstance(message, Mapping)]
    if len(parts) == 1:
        return _content(parts[0].get("content"))
    return "\n\n".join(f"{part.get('role', '?')}: {_content(part.get('content'))}" for part in parts)


def hash_prompt(task_name: str | None, prompt: str) -> int:
    """The same number for the same prompt of a task, in every run."""
    text = f"{task_name}\0{prompt}".encode("utf-8", "replace")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)


def _content(content: object) -> str:
    return content if isinstance(content, str) else "" if content is None else _as_json(content)


def _writable(value: object) -> str:
    """`value` as UTF-8 can say it."""
    text = "" if value is None else str(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def spans_table(spans: Sequence[Span], to_unix_s: float = 0.0) -> Any:
    """The lines of these activities as a table, their times `to_unix_s` later."""

    start_s, end_s, *texts = zip(*spans, strict=True)
    times = (np.array(column) + to_unix_s for column in (start_s, end_s))
    return pa.table([*times, *(list(map(_writable, text)) for text in texts)], Span._fields)


_NO_TOKENS = np.empty(0, np.float32)
# As it is read: a search for a word finds it.
_as_json = json.JSONEncoder(default=repr, separators=(",", ":"), ensure_ascii=False).encode
