"""Which keys of a run file may not change when a run goes on, and which of the others did.

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
"""Why each of these cannot change; ``*`` is any task's place. Every start reads the others anew, and the part
that reads one refuses a value that does not fit the checkpoint."""

_TABLES_OF_ONE_KEY = ("arguments", "guard_bands")
"""Keys whose value is a table that is told as a whole."""


def changed(before: RunConfig, after: RunConfig) -> list[str]:
    """A line for each key that the resumed run has another value for.

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
    # The folder of the run may have been moved, which is no wish to change it.
    yield from _walk(config.model_dump(mode="json", exclude={"name", "output"}), "")


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and key.rpartition(".")[2] not in _TABLES_OF_ONE_KEY:
        for name, item in value.items():
            yield from _walk(item, f"{key}.{name}" if key else name)
    elif key == "tasks":
        for number, task in enumerate(value):
            yield from _walk(task, f"tasks.{number}")
    elif value is not None:
        yield key, value
