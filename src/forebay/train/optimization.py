"""AdamW over a model's trainable weights: schedule, gradient clipping, and a state that is plain tensors.

::

    loss.backward() ... --> Optimizer.step(train_step) : clip -> learning rate of this step -> AdamW -> zero
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from forebay.train.parallel.sharding import slice_like, whole

BETAS = (0.9, 0.999)
"""AdamW's published defaults; no result here depends on other values."""


def schedule_factor(schedule: str, train_step: int, *, warmup_steps: int, total_steps: int | None) -> float:
    """The share of the peak learning rate for the step after `train_step` completed ones.

    It rises linearly over `warmup_steps`, then stays (``constant``), or falls to 0 at `total_steps` along a
    line or half a cosine wave.

    >>> [schedule_factor("linear", s, warmup_steps=2, total_steps=4) for s in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if train_step < warmup_steps:
        return (train_step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    assert total_steps is not None, "a falling schedule is only built with its end"
    progress = min(1.0, (train_step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2


@dataclass(eq=False)
class Optimizer:
    """AdamW with its schedule over the weights of `model` that require a gradient.

    Invariants: norms and biases (fewer than two dimensions) never decay; a gradient that is not finite
    raises and changes no weight.

    >>> layer = nn.Linear(2, 1)
    >>> optimizer = Optimizer(layer, lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> norm = optimizer.step(0)

    Raises:
        ValueError: a falling schedule without `total_steps`, or a model without trainable weights.
    """

    model: nn.Module
    _: KW_ONLY
    lr: float
    """The peak."""
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """0: gradients are never scaled down."""

    def __post_init__(self) -> None:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule {self.schedule!r} needs total_steps, the train step at which it ends")
        self._parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError(f"{type(self.model).__name__} has no weights that require a gradient")
        decayed = [p for p in self._parameters.values() if p.ndim >= 2]
        others = [p for p in self._parameters.values() if p.ndim < 2]
        by_decay = [(decayed, self.weight_decay), (others, 0.0)]
        groups = [{"params": weights, "weight_decay": decay} for weights, decay in by_decay if weights]
        self._adamw = torch.optim.AdamW(groups, lr=self.lr, betas=BETAS, fused=True)

    def learning_rate(self, train_step: int) -> float:
        """The rate of the step after `train_step` completed ones."""
        return self.lr * schedule_factor(
            self.schedule, train_step, warmup_steps=self.warmup_steps, total_steps=self.total_steps
        )

    def step(self, train_step: int) -> float:
        """Apply the accumulated gradients, clear them, and return their L2 norm before clipping.

        Raises:
            FloatingPointError: the norm is not finite.
        """
        norm = float(self.clip())
        if not math.isfinite(norm):
            self.zero_grad()
            raise FloatingPointError(
                f"the gradient norm after train step {train_step} is {norm}; no weight was changed; lower "
                f"the learning rate or look at the batch's logprobs and advantages"
            )
        self.apply(self.learning_rate(train_step))
        return norm

    def clip(self) -> torch.Tensor:
        """Scale down gradients whose norm is over the limit; the norm they had."""
        limit = self.max_grad_norm or math.inf
        return whole(nn.utils.clip_grad_norm_(self._parameters.values(), limit))

    def apply(self, lr: float) -> None:
        """AdamW's update by the gradients as they are, which are then cleared."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def moments(self) -> Iterator[torch.Tensor]:
        """The tensors of AdamW's state; none before the first step."""
        for state in self._adamw.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The moments and step counts, whole, as ``WEIGHT|KEY`` and tensor; none before the first step."""
        for name, parameter in self._parameters.items():
            for key, value in self._adamw.state[parameter].items():
                yield f"{name}|{key}", whole(value)

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_tensors` gave.

        Raises:
            ValueError: the weights are not those of this optimizer.
        """
        state: dict[str, dict[str, Any]] = {}
        for key, value in tensors.items():
            name, _, part = key.rpartition("|")
            state.setdefault(name, {})[part] = value
        if tensors and set(state) != set(self._parameters):
            different = sorted(set(state) ^ set(self._parameters))
            raise ValueError(f"the saved optimizer is of another model; weights that differ: {different[:5]}")
        numbers = {id(p): i for i, p in enumerate(p for g in self._adamw.param_groups for p in g["params"])}
        by_number = {
            numbers[id(parameter)]: {key: slice_like(value, parameter) for key, value in state[name].items()}
            for name, parameter in self._parameters.items()
            if name in state
        }
        self._adamw.load_state_dict(
            {"state": by_number, "param_groups": self._adamw.state_dict()["param_groups"]}
        )
