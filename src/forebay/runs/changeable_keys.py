"""Which keys of a run file may change when a run goes on: a literal table, for every key.

::

    run.toml of the run + overrides --changed--> refused with the reason, or told in the log
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forebay.config import ConfigError
from forebay.runs.config import RunConfig

_WEIGHTS = "the weights are those of the checkpoint"
_WARMED_UP = "the warm-up was before the first train step"
_ADAPTERS = "the adapters are those of the checkpoint"
_PROMPTS = "the checkpoint counts prompts by their place in the data"
_PLACE = "the run stays in its folder"

FIXED = {
    "name": _PLACE,
    "output": _PLACE,
    "seed": "the order of the prompts depends on it",
    "rollouts_per_prompt": "groups that are on their way have that size",
    "record": "a record is replayed from the first train step on",
    "model.source": _WEIGHTS,
    "model.tiny.hidden_size": _WEIGHTS,
    "model.tiny.num_layers": _WEIGHTS,
    "model.tiny.num_heads": _WEIGHTS,
    "model.tiny.alphabet": _WEIGHTS,
    "tasks.*.name": "the checkpoint keeps its prompts by task",
    "tasks.*.data.shuffle_seed": _PROMPTS,
    "tasks.*.data.start": _PROMPTS,
    "tasks.*.data.size": _PROMPTS,
    "train.lora_rank": _ADAPTERS,
    "train.lora_alpha": _ADAPTERS,
    "train.lora_targets": _ADAPTERS,
    "warmup.steps": _WARMED_UP,
    "warmup.lr": _WARMED_UP,
    "warmup.batch_size": _WARMED_UP,
}
"""Why each of these cannot change; ``*`` is any task's place."""

_FREE_WORDS = """
    steps batch_size search_path threads checkpoint_every keep_checkpoints show_every trace verify_weights
    model.attention model.max_context
    engine.name engine.arguments engine.dtype cluster.name cluster.arguments
    tasks.*.data.source tasks.*.data.arguments tasks.*.data.prompt_column tasks.*.data.answer_column
    tasks.*.data.system_prompt
    tasks.*.eval_data.source tasks.*.eval_data.arguments tasks.*.eval_data.prompt_column
    tasks.*.eval_data.answer_column tasks.*.eval_data.system_prompt tasks.*.eval_data.shuffle_seed
    tasks.*.eval_data.start tasks.*.eval_data.size
    tasks.*.judge.name tasks.*.judge.arguments tasks.*.judge.timeout_s tasks.*.judge.shuffle_seed
    tasks.*.agent.name tasks.*.agent.arguments
    tasks.*.sample.max_tokens tasks.*.sample.temperature tasks.*.sample.top_p tasks.*.sample.top_k
    tasks.*.sample.stop tasks.*.sample.stop_token_ids tasks.*.sample.seed
    tasks.*.weight tasks.*.overlong_prompts tasks.*.max_staleness
    replay.limit replay.keep_consumed
    produce.mode produce.strategy produce.filter produce.sync_weights_interval produce.max_staleness
    produce.staleness_rule produce.over_sample_threshold produce.enable_partial_rollout
    produce.tail_batch_trigger_size produce.tail_batch_max_tries produce.max_retries produce.in_flight_update
    produce.stall_after_s
    produce.min_members produce.max_failed_groups
    train.lr train.schedule train.schedule_warmup_steps train.weight_decay train.max_grad_norm
    train.mini_batches train.epochs train.token_budget train.layout train.dtype train.ranks
    train.gradient_checkpointing train.advantage train.loss train.clip train.dual_clip train.kl_coef
    train.kl_estimator train.entropy_coef train.normalization train.correction train.correction_band
    train.guard train.guard_bands train.critic_lr train.lam
    evaluate.every evaluate.rollouts_per_prompt evaluate.temperature
    metrics.sinks metrics.project
"""
FREE = frozenset(_FREE_WORDS.split())
"""Read anew by every start. What does not fit a checkpoint is then refused by the part that reads it."""


def changed(before: RunConfig, after: RunConfig) -> list[str]:
    """What the resumed run does otherwise, a line for each key.

    Raises:
        ConfigError: a key cannot change.
    """
    old, new = dict(_leaves(before)), dict(_leaves(after))
    lines = []
    for key in sorted(old.keys() | new.keys()):
        was, will_be = old.get(key), new.get(key)
        if was == will_be:
            continue
        if (reason := FIXED.get(_pattern(key))) is not None:
            raise ConfigError(
                f"cannot go on with {key} = {will_be!r}, it is {was!r}: {reason}; leave it out, or start a "
                f"new run under another name=..."
            )
        lines.append(f"changed: {key} = {will_be!r}, was {was!r}")
    return lines


def _pattern(key: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in key.split("."))


def _leaves(config: RunConfig) -> Iterator[tuple[str, Any]]:
    # The folder of the run may have been moved, and is no one's wish.
    yield from _walk(config.model_dump(mode="json", exclude={"name", "output"}), "")


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and _pattern(key) not in FREE:
        for name, item in value.items():
            yield from _walk(item, f"{key}.{name}" if key else name)
    elif key == "tasks":
        for number, task in enumerate(value):
            yield from _walk(task, f"tasks.{number}")
    elif value is not None:
        yield key, value
