"""Plans of several tests ask for the memory of the same step, which takes half a second each time."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from forebay.plan.memory import StepMemory, step_memory
from forebay.train import TrainConfig
from forebay.train.batch import TrainBatch

FOUND: dict[str, StepMemory] = {}


def remembered(model_config: Any, config: TrainConfig, batch: TrainBatch, **given: Any) -> StepMemory:
    """`step_memory`, computed once for each set of arguments."""
    arrays = [(name, getattr(value, "tolist", lambda v=value: v)()) for name, value in vars(batch).items()]
    models = [model_config, given.pop("teacher", None)]
    sizes = [model and model.to_json_string(use_diff=False) for model in models]
    key = repr((sizes, config.model_dump(), arrays, sorted(given.items())))
    if key not in FOUND:
        FOUND[key] = step_memory(model_config, config, batch, teacher=models[1], **given)
    return deepcopy(FOUND[key])
