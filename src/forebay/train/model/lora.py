"""LoRA through peft: adapters in, adapters off (the reference model), adapters merged (engines, files).

    model --add_lora--> model with adapters --model_weights--> the names and shapes of the model without them

Merging never touches the trained weights: adding and subtracting an adapter in place would leave rounding
errors behind.
"""

import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from forebay.train.parallel.sharding import own_block, whole

Block = tuple[str, tuple[slice, ...], torch.Tensor]
"""A part of a weight: the weight's name, where in it, and the content."""

Part = tuple[str, nn.Parameter, Any]
"""A parameter by the name that it has without adapters, and the layer that merges its adapter, if it has one."""

ADAPTER = "default"
"""peft's name of the one adapter of a model."""

# peft and 8-bit moments load bitsandbytes, which warns on many CPUs of a kernel for 4-bit weights; none are here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def add_lora(
    model: nn.Module, *, rank: int, alpha: float, targets: str | tuple[str, ...], frozen: Iterable[str] = ()
) -> nn.Module:
    """`model` with adapters in it, which are then its only trainable weights. `model` itself is changed.

    Layers whose weights are named in `frozen` get no adapters.

    Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models". Without dropout: the logprobs of
    the training pass must be those of the policy that sampled.

    Raises:
        ValueError: no layer of the model is one of `targets`, or one that is shares its weight with another
            layer, which would get the merged weight too.
    """
    from peft import LoraConfig, get_peft_model

    modules = targets if isinstance(targets, str) else list(targets)
    excluded = sorted({name.rpartition(".")[0] for name in frozen}) or None
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=modules, exclude_modules=excluded, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        # peft asks transformers for attributes under names that newer versions of it deprecate.
        warnings.simplefilter("ignore", FutureWarning)
        # It warns of shared weights, which is an error below.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        adapted: nn.Module = get_peft_model(model, config)
    names: dict[int, list[str]] = {}
    for name, parameter in without_adapters(adapted).named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        if len(shared) > 1 and any(".base_layer." in name for name in shared):
            plain = " and ".join(name.replace(".base_layer", "") for name in shared)
            raise ValueError(f"{plain} are one weight, which cannot have an adapter; choose other lora_targets")
    return adapted


def is_lora(model: nn.Module) -> bool:
    """Whether `model` came from `add_lora`."""
    return hasattr(model, "peft_config")


def without_adapters(model: Any) -> nn.Module:
    """The model that the adapters were added to; they still act in it."""
    base: nn.Module = model.get_base_model() if is_lora(model) else model
    return base


def model_weights(
    model: nn.Module, *, merged: bool = True, parts: Iterable[Part] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of all weights as the model without adapters has them, merged one at a time.

    With `merged` False, the weights below the adapters. Those without any are the model's own tensors, not
    copies. Of a sharded model every rank goes through all of it, and each tensor is gathered when it is asked
    for: two are never whole at a time, unless the caller keeps them. `parts` are its `named_parts`, if they are
    known: to look for them takes half as long as a GPU takes to copy a billion weights.
    """
    for name, parameter, layer in parts or named_parts(model):
        value = whole(parameter.detach())
        if merged and layer is not None:
            with torch.no_grad():
                value = value + layer.get_delta_weight(ADAPTER).to(value.device, value.dtype)
        yield name, value


def named_parts(model: nn.Module) -> Iterator[Part]:
    """Names as `model_weights` has them, the parameters of these names, and the layers with their adapters."""
    base = without_adapters(model)
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        # peft puts the layer that an adapter is added to one level lower.
        owner_name, _, last = name.rpartition(".base_layer.")
        if not owner_name:
            yield name, parameter, None
            continue
        layer: Any = base.get_submodule(owner_name)
        adapts = last == "weight" and hasattr(layer, "get_delta_weight")
        yield f"{owner_name}.{last}", parameter, layer if adapts else None


def own_blocks(
    parts: Iterable[Part], *, merged: bool, only: Mapping[str, torch.Tensor], are_whole: bool = False
) -> Iterator[Block]:
    """The blocks of `only` these of `model_weights` that this rank holds, or, in its dtype there, all of each.

    `parts` are the model's `named_parts`. Ranks go through the same ones together.
    """
    for name, parameter, layer in parts:
        if name not in only:
            continue
        value, adapts = parameter.detach(), merged and layer is not None
        # Cast before it travels, where nothing is added to it.
        place, block = ((), whole(value if adapts else value.to(only[name].dtype))) if are_whole else own_block(value)
        if adapts and block.numel() and not only[name].is_meta:
            with torch.no_grad():
                block = block + layer.get_delta_weight(ADAPTER)[place].to(block.device, block.dtype)
        yield name, place, block


def adapter_config(model: Any) -> dict[str, Any]:
    """The content of peft's ``adapter_config.json``."""
    config = model.peft_config[ADAPTER].to_dict() | {"inference_mode": True}
    values: dict[str, Any] = json.loads(json.dumps(config, default=sorted, sort_keys=True))
    return values


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The adapters' weights under the names that peft gives them in files."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            # peft puts the name of the adapter into names in memory only.
            yield name.replace(f".{ADAPTER}.", "."), parameter
