"""A model as plain values and tensors, from which another process builds the same model.

::

    nn.Module --to_parts--> {"class", "config", "tensors", ...} --frames--> from_parts --> nn.Module

For models of transformers, and critics over them. Tied weights go once; what is computed from the config
(rotary frequencies) does not go at all.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from forebay.train.model.critic import Critic


def to_parts(model: nn.Module) -> dict[str, Any]:
    """The class, config and tensors of `model`; on the CPU, and not copied if they are there already.

    Raises:
        ValueError: it is not a model of transformers, or has quantized weights.
    """
    if isinstance(model, Critic):
        return {"body": to_parts(model.body), "head": dict(model.head.state_dict())}
    transformers_model: Any = model
    if not hasattr(model, "save_pretrained") or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be sent to several ranks, because only plain models of "
            f"transformers can; give one, or train with ranks = 1"
        )
    config, generation = transformers_model.config, getattr(model, "generation_config", None)
    return {
        "class": _name(type(model)),
        "config_class": _name(type(config)),
        "config": config.to_json_string(use_diff=False),
        "attention": config._attn_implementation,
        "generation": generation.to_json_string(use_diff=False) if generation is not None else None,
        "tensors": {name: tensor.detach().cpu() for name, tensor in _tensors(model).items()},
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
    }


def from_parts(parts: Mapping[str, Any]) -> nn.Module:
    """The model that `to_parts` was given; it keeps the tensors of `parts`."""
    if "body" in parts:
        critic = Critic(from_parts(parts["body"]), parts["head"]["weight"].shape[1])
        critic.head.load_state_dict(parts["head"])
        return critic
    config = _find(parts["config_class"]).from_dict(json.loads(parts["config"]))
    model: Any = _find(parts["class"])._from_config(config, attn_implementation=parts["attention"])
    if parts["generation"] is not None:
        model.generation_config = type(model.generation_config).from_dict(json.loads(parts["generation"]))
    for name, tensor in _tensors(model).items():
        tensor.data = parts["tensors"][name]
    for name in parts["frozen"]:
        model.get_parameter(name).requires_grad_(False)
    return model.eval()  # type: ignore[no-any-return]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and saved buffers; each once, though it may have several names."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _find(name: str) -> Any:
    module, _, qualified = name.partition(":")
    return getattr(importlib.import_module(module), qualified)
