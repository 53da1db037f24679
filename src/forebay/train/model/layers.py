"""A model's decoder layers: some keep less for the backward pass, and all may be compiled.

::

    checkpoint_activations(model, share)    the first layers keep their input and compute the rest once more
    compile_layers(model, device)           torch.compile: one program for all layers and all lengths
"""

import importlib.util
import os
import shutil
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay.config import ConfigError

COMPILER = "inductor"
"""torch's own, which writes Triton for a GPU and C++ for a CPU."""
_MOST_PROGRAMS = 64
"""The most programs of one layer's code: with and without gradient, adapters, or a window of attention."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers in the order in which they are passed."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_activations(model: nn.Module, share: float = 1.0, *, offload: bool = False) -> None:
    """Make the first `share` of the layers recompute in the backward pass, while dropout stays off.

    The first, because the backward pass comes to them last, when it has freed what the others kept. With
    `offload` their inputs wait in the host's memory.

    transformers recomputes only layers in training mode. Setting that on the layers themselves, and not on
    what is inside them, leaves every dropout in evaluation mode. Its own switch would add a hook to the
    embeddings at every call.

    Raises:
        ValueError: the model's code has no layers that can be recomputed.
    """
    layers: list[Any] = decoder_layers(model)
    if not layers:
        raise ValueError(f"no layer of {type(model).__name__} can be recomputed: set gradient_checkpointing = false")
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = layer.training = number < round(share * len(layers))
        layer._gradient_checkpointing_func = _recompute_from_cpu if offload else _recompute


_recompute = partial(checkpoint, use_reentrant=False)


def _recompute_from_cpu(function: Any, *inputs: Any) -> Any:
    # Inside, nothing is kept by the first pass, so this moves the inputs alone.
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return _recompute(function, *inputs)


def compile_layers(model: nn.Module, device: torch.device) -> None:
    """Make every layer of `model` a compiled program, made in the first passes; its weights stay its own.

    Raises:
        ConfigError: the machine has no compiler.
    """
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        raise ConfigError("train.compile needs a C++ compiler, and there is neither g++ nor clang++ nor $CXX")
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("train.compile on a GPU needs Triton, which is not installed: pip install triton")
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, _MOST_PROGRAMS)
    for layer in decoder_layers(model):
        layer.compile(backend=COMPILER, dynamic=True)
