"""Putting a trainer's parameters into a model of this process, all or nothing: whole, or as LoRA adapters.

::

    (name, tensor), ... --check names and shapes--> copy into the model's own parameters
                             | lent, of their dtype and device: the model uses them where they lie
    (name, tensor), ... + config --check everything--> weight = starting weight + scale * B @ A, where adapted
                                    | anything wrong: ValueError, nothing changed
    starting weights: a copy of the adapted ones, made when adapters first come, forgotten with a full load

Adapters do not use peft's own injection: that renames parameters, and costs two more products at every layer
of every token. The arithmetic is that of a trainer which merges, operation by operation, so that adapters
alone give the weights that a full hand-over would have given. Adapters are computed anew from the kept copy
each time: subtracting the last ones would leave rounding errors behind.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from forebay.io.shared import LentTensors
from forebay.models.starting_weights import (
    BASE_FINGERPRINT,
    AdapterConfig,
    AdaptersRefusedError,
    BaseDiffersError,
    Weights,
    fingerprint,
)


class AdaptedWeights:
    """A model's parameters as its starting weights and the adapters of now.

    Invariants: adapters that are refused change nothing; after `load` the parameters are those that the same
    adapters, merged by the trainer, would have; `full_load` makes the parameters of then the starting
    weights. The kept copy lies where the model does and is as large as the weights that have adapters; memory
    that is lent is not written to.

    ::

        adapted = AdaptedWeights(model)
        adapted.load(load_file(folder / "adapter_model.safetensors").items(), config)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._starting: dict[str, torch.Tensor] = {}
        self._fingerprint: str | None = None
        self._are_lent = False

    def full_load(self, *, are_lent: bool = False) -> None:
        """The model has got other parameters, all of them; whether they lie in memory that was lent."""
        self._starting.clear()
        self._fingerprint = None
        self._are_lent = are_lent

    def load(self, adapters: Weights, config: AdapterConfig) -> None:
        """Put these adapters, and no others, on the starting weights.

        `adapters` and `config` are what peft writes: ``adapter_model.safetensors`` and
        ``adapter_config.json``. Where `config` has a `BASE_FINGERPRINT`, the starting weights must have it.

        Raises:
            BaseDiffersError: they have another.
            AdaptersRefusedError: adapters of a kind that is not computed here.
            ValueError: the adapters do not fit the model, or are incomplete.
        """
        adapted = self._checked(dict(adapters), config)
        self._check_base(config)
        with torch.no_grad():
            # All copies first: where memory does not suffice for them, nothing has changed.
            for name in adapted.keys() - self._starting.keys():
                weight = adapted[name].weight
                kept = weight.detach().clone()
                if self._are_lent:
                    # Then the layer gets the copy, which is about to change.
                    kept, weight.data = weight.detach(), kept
                self._starting[name] = kept
            # Layers that had an adapter and have none now get their starting weights back.
            for name in self._starting.keys() - adapted.keys():
                self._model.get_parameter(name).copy_(self._starting.pop(name))
            for name, adapter in adapted.items():
                adapter.put_on(self._starting[name])

    def _check_base(self, config: AdapterConfig) -> None:
        wanted = config.get(BASE_FINGERPRINT)
        if wanted is None:
            return
        if self._fingerprint is None:
            parameters = self._model.named_parameters()
            self._fingerprint = fingerprint((name, self._starting.get(name, own)) for name, own in parameters)
        if wanted != self._fingerprint:
            raise BaseDiffersError(
                f"these adapters are for the starting weights {wanted[:12]}, but the engine holds "
                f"{self._fingerprint[:12]}; give it those first, in the dtype that it holds, or all weights"
            )

    def _checked(self, adapters: dict[str, torch.Tensor], config: AdapterConfig) -> "dict[str, _Adapter]":
        """The adapters, by the name of the weight that they change."""
        scale = scale_of(config)
        factors: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in adapters.items():
            match = _NAME.fullmatch(name)
            if match is None:
                raise AdaptersRefusedError(f"{name!r} is no factor of a linear layer's LoRA adapter")
            factors.setdefault(match["layer"], {})[match["factor"]] = tensor
        if not factors:
            raise ValueError("no adapters were given")
        shares = Counter(id(own) for _, own in self._model.named_parameters(remove_duplicate=False))
        adapted = {}
        for name, pair in factors.items():
            try:
                layer: Any = self._model.get_submodule(name)
            except AttributeError:
                raise ValueError(f"the model has no layer {name!r} that an adapter could be for") from None
            if not isinstance(layer, nn.Linear | Conv1D):
                raise AdaptersRefusedError(f"{name!r} is a {type(layer).__name__}, not a linear layer")
            if shares[id(layer.weight)] > 1:
                raise AdaptersRefusedError(f"{name!r} shares its weight with another layer")
            adapted[f"{name}.weight"] = _adapter(name, layer, pair, config["r"], scale)
        return adapted


_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<factor>[AB])\.weight")
"""How peft names the two factors of a linear layer's adapter in files."""

_UNDERSTOOD = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "bias", BASE_FINGERPRINT),
    # Which layers have adapters, their names say; whether a weight is stored transposed, the layer's class.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    # For training only, or notes.
    *("task_type", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
    *("lora_dropout", "init_lora_weights", "megatron_core", "qalora_group_size"),
}
"""Keys of ``adapter_config.json`` that are applied, or have no effect here; all others must be off."""

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # The other ways to begin change the starting weights.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Values that mean nothing to the merge, where others do."""


@dataclass(frozen=True, eq=False)
class _Adapter:
    """The matrix that is added to one weight: ``scale * B @ A``."""

    weight: torch.Tensor
    """The model's own parameter: out, in; or in, out where `is_transposed`."""
    a: torch.Tensor
    """r x in: A of the adapter."""
    b: torch.Tensor
    """out x r: B of the adapter."""
    scale: float
    is_transposed: bool

    def put_on(self, base: torch.Tensor) -> None:
        """Make the weight `base` with it; in the order, and with the dtypes, of a trainer's merge."""
        a, b = self.a.to(base.device), self.b.to(base.device)
        if in_float32 := a.device.type == "cpu" and a.dtype in (torch.float16, torch.bfloat16):
            a, b = a.float(), b.float()
        # In place where it can be: on a CPU, new memory for each result takes longer than the arithmetic.
        product = (b @ a).mul_(self.scale)
        delta = product.T if self.is_transposed else product
        delta = (delta.to(self.a.dtype) if in_float32 else delta).to(base.dtype)
        torch.add(base, delta, out=self.weight)


def scale_of(config: AdapterConfig) -> float:
    """The factor of the product of both matrices: Hu et al. 2021; Kalajdzievski 2023 for rsLoRA.

    Raises:
        AdaptersRefusedError: the config wants something else besides.
        ValueError: it lacks the rank or alpha.
    """
    if config.get("peft_type") != "LORA":
        raise AdaptersRefusedError(f"adapters of type {config.get('peft_type')!r} are not LoRA")
    on = {name: value for name, value in config.items() if value and name not in _UNDERSTOOD}
    on |= {
        name: config[name] for name, harmless in _HARMLESS.items() if name in config and config[name] not in harmless
    }
    if on:
        raise AdaptersRefusedError(f"LoRA with {on} is not applied exactly here")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"adapters need a rank and an alpha, got r = {rank!r} and lora_alpha = {alpha!r}")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _adapter(name: str, layer: Any, pair: Mapping[str, torch.Tensor], rank: int, scale: float) -> _Adapter:
    """The adapter of one layer.

    Raises:
        ValueError: a factor is missing, or has another shape than the layer and the rank ask for.
    """
    if missing := {"A", "B"} - pair.keys():
        raise ValueError(f"the adapter of {name!r} has no lora_{missing.pop()}")
    is_transposed = isinstance(layer, Conv1D)
    size_out, size_in = reversed(layer.weight.shape) if is_transposed else layer.weight.shape
    for factor, shape in {"A": (rank, size_in), "B": (size_out, rank)}.items():
        if tuple(pair[factor].shape) != shape:
            raise ValueError(
                f"lora_{factor} of {name!r} has shape {tuple(pair[factor].shape)}, but the layer and a rank "
                f"of {rank} need {shape}"
            )
    return _Adapter(layer.weight, pair["A"], pair["B"], scale, is_transposed)


_NAMED_IN_ERRORS = 3
"""Enough to see a pattern (a prefix, another model), few enough to read."""


def take_weights(own: Mapping[str, torch.Tensor], weights: Weights, *, are_lent: bool = False) -> bool:
    """Make `weights` the content of the parameters and persistent buffers of these names, `own`.

    `own` is a model's ``state_dict(keep_vars=True)``: to make it takes longer than to check all of this. Every
    parameter must be given, a tied one under any of its names; buffers may be left out. Tensors may be on
    another device and of another dtype, and are copied. `LentTensors` that are as the model's own take their
    place without a copy. `are_lent` is what the last call returned: whether the model uses such tensors.

    Raises:
        ValueError: names are missing or unknown, or a shape differs; then nothing has changed.
    """
    given = dict(weights)
    if unknown := [name for name in given if name not in own]:
        raise ValueError(f"the model has no {_some(unknown)}; its names look like {_some(list(own))}")
    taken = [own[name] for name in given]
    covered = set(map(id, taken))
    # A parameter's class is asked for last: that takes torch longer than all the rest.
    if missing := [name for name, t in own.items() if id(t) not in covered and isinstance(t, nn.Parameter)]:
        raise ValueError(f"no weights were given for {_some(missing)}")
    for place, (name, tensor) in zip(taken, given.items(), strict=True):
        if tensor.shape != place.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but the model's is {tuple(place.shape)}")
    kinds = [[(tensor.dtype, tensor.device) for tensor in tensors] for tensors in (given.values(), taken)]
    lent = weights if isinstance(weights, LentTensors) and kinds[0] == kinds[1] else None
    with torch.no_grad():
        if are_lent:
            # The memory that was lent before may change from now on, and is not to be written to here.
            for kept in own.values():
                if lent is None or id(kept) not in covered:
                    kept.data = kept.clone()
        if lent is None:
            # On a GPU a few launches for all of them.
            torch._foreach_copy_(taken, list(given.values()))
        else:
            lent.are_in_use = True
            for place, tensor in zip(taken, given.values(), strict=True):
                place.data = tensor
    return lent is not None


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED_IN_ERRORS])
    return f"{shown} and {len(names) - _NAMED_IN_ERRORS} more" if len(names) > _NAMED_IN_ERRORS else shown
