"""The experts that routers of a mixture of experts choose: recorded during a pass, or replayed.

::

    engine    forward pass --taken()--> (C, layers, k) ids --> rollout.routed_experts
    trainer   replay(ids) --> forward and backward pass: the same experts, weighed by the router of now

An engine and a trainer that round differently send some tokens to other experts, and a token's log
probability then differs by far more than rounding. Replaying the engine's choice takes that out of the loss:
Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (Rollout
Routing Replay). Only the choice is replayed: the weights of the experts come from the logits that the router
computes now, with their gradient, by the router's own code.

Shapes: C tokens of a pass, M layers with a router, k experts of a token, E experts of a layer.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

OWN_CHOICE = -1
"""A place without an expert's id: the router chooses itself."""

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of E in configs of transformers."""


class Routing:
    """Listens to the routers of a model, and chooses for them where it was told to.

    It stays in the model: a backward pass that computes layers once more has the choice of the last `replay`.
    A model without experts, or of a kind that transformers names no routers of, has no `num_layers`.

    ::

        routing = Routing(model)
        output = model(input_ids)
        routing.taken().shape == (input_ids.numel(), routing.num_layers, 8)  # True
    """

    def __init__(self, model: nn.Module) -> None:
        self._taken: dict[int, torch.Tensor] = {}
        self._replayed_CMk: torch.Tensor | None = None
        config: Any = getattr(model, "config", None)
        sizes = None if config is None else config.get_text_config()
        num_experts = next((size for name in _NUM_EXPERTS if (size := getattr(sizes, name, None))), 0)
        self.num_chosen = int(getattr(sizes, "num_experts_per_tok", None) or 0)
        """k: experts that a router chooses for each token; 0 if the config names none."""
        routers = _routers(model) if num_experts and self.num_chosen else []
        self.num_layers = len(routers)
        """M: layers with a router."""
        # Ids from 0 to 127, and `OWN_CHOICE`, fit into a byte.
        self.dtype = torch.int8 if num_experts <= 128 else torch.int16
        """Integer type of the expert ids that are kept."""
        for number, router in enumerate(routers):
            listener = _Listener(router.forward, partial(self._choose, number, num_experts))
            # Not compiled: inside a compiled layer this is a break between two programs.
            router.forward = torch.compiler.disable(listener.run)  # type: ignore[no-untyped-call]

    @property
    def is_complete(self) -> bool:
        """Whether the last pass told every router's choice: not of those that choose without `topk`."""
        return len(self._taken) == self.num_layers

    def taken(self) -> torch.Tensor:
        """(C, M, k), in `dtype`: the experts of the last forward pass."""
        return torch.stack([self._taken[number] for number in range(self.num_layers)], dim=1).to(self.dtype)

    def replay(self, ids: torch.Tensor | None) -> None:
        """Have the next passes, forward and backward, take these experts; None: the routers' own.

        `ids` is (C, M, k), `OWN_CHOICE` where nothing is known.

        Raises:
            ValueError: they are of another model.
        """
        if ids is not None and ids.shape[1:] != (self.num_layers, self.num_chosen):
            raise ValueError(
                f"routed_experts has {tuple(ids.shape[1:])} layers and experts for each token, but the model "
                f"has {self.num_layers} layers with experts and takes {self.num_chosen} of each"
            )
        self._replayed_CMk = None if ids is None else ids.long()

    def _choose(self, number: int, num_experts: int, scores: Any, chosen: Any) -> Any:
        """The result of the router's own `topk` of `scores`, or what takes its place."""
        if scores.shape[-1] != num_experts or chosen.indices.shape[-1] != self.num_chosen:
            # A `topk` over something else, such as groups of experts.
            return chosen
        if self._replayed_CMk is not None:
            ids_Ck = self._replayed_CMk[:, number].view(chosen.indices.shape)
            ids_Ck = torch.where(ids_Ck == OWN_CHOICE, chosen.indices, ids_Ck)
            # The scores are those of now, with their gradient: only the choice is the engine's.
            chosen = torch.return_types.topk((scores.gather(-1, ids_Ck), ids_Ck))
        self._taken[number] = chosen.indices.detach()
        return chosen


class _Listener(TorchFunctionMode):
    """Runs a router, and gives every result of `topk` in it to `choose`, which may give another."""

    def __init__(self, forward: Callable[..., Any], choose: Callable[[Any, Any], Any]) -> None:
        self._forward, self._choose = forward, choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Routers choose by `topk`, whatever else their code does; `is_complete` tells of one that does not.
        result = func(*args, **(kwargs or {}))
        return self._choose(args[0], result) if func in (torch.topk, torch.Tensor.topk) else result

    def run(self, *inputs: Any, **named: Any) -> Any:
        """The router's output, its choice of experts noted or replaced."""
        with self:
            return self._forward(*inputs, **named)


def copied(model: nn.Module) -> Any:
    """A deep copy of `model` that no `Routing` listens to: its routers are its own."""
    copy_of = copy.deepcopy(model)
    for router in _routers(copy_of):
        # The copied attribute is the listener of the original's router.
        router.__dict__.pop("forward", None)
    return copy_of


def _routers(model: nn.Module) -> list[Any]:
    """The routers in the order of layers: those whose logits transformers can record."""
    kinds: set[Any] = set()
    for module in model.modules():
        recorded: Any = getattr(module, "_can_record_outputs", None) or {}
        named = recorded.get("router_logits", ())
        entries = named if isinstance(named, list | tuple) else (named,)
        kinds |= {getattr(entry, "target_class", entry) for entry in entries}
    return [module for module in model.modules() if isinstance(module, tuple(kinds))]
