"""AdamW over a model's trainable weights: schedule, gradient clipping, and a state that is plain tensors.

::

    loss.backward() ... --> Optimizer.step(train_step) : clip -> learning rate of this step -> AdamW -> zero

AdamW's two moments take twice the bytes of the weights, and only its step reads them. ``cpu`` keeps them in
the host's memory and brings those of one weight at a time to the device: the same numbers, for the time of
the copies there and back. ``8bit`` leaves them on the device in a quarter of the bytes (Dettmers et al. 2022,
"8-bit Optimizers via Block-wise Quantization"), by bitsandbytes: 256 numbers share a scale.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.adamw import adamw

from forebay.extras import needed_by
from forebay.models.devices import ONE_RECORDING
from forebay.train.config import TrainConfig
from forebay.train.offload import Place
from forebay.train.parallel.sharding import clip_gradients, sum_replicated


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
    >>> optimizer = Optimizer(layer, TrainConfig(lr=0.1))
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> norm = optimizer.step(0)

    Raises:
        ValueError: a falling schedule without `total_steps`, or a model without trainable weights.
    """

    model: nn.Module
    settings: TrainConfig
    """Its peak learning rate, schedule, decay, clipping and moments."""
    _: KW_ONLY
    total_steps: int | None = None
    mesh: DeviceMesh | None = None
    """The ranks that hold slices of `model` and saw different sequences; None: one rank."""

    def __post_init__(self) -> None:
        schedule, _ = self.settings.fall_and_rise
        if schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule {schedule!r} needs total_steps, the train step at which it ends")
        self._parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError(f"{type(self.model).__name__} has no weights that require a gradient")
        # A fused step takes slices of one mesh at a time.
        alike: dict[tuple[bool, Any], list[nn.Parameter]] = {}
        for weight in self._parameters.values():
            alike.setdefault((weight.ndim >= 2, getattr(weight, "device_mesh", None)), []).append(weight)
        groups: list[dict[str, Any]] = [
            {"params": weights, "weight_decay": self.settings.weight_decay if decays else 0.0}
            for (decays, _), weights in alike.items()
        ]
        self._adamw = self._make(groups)

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        peak, betas, epsilon = self.settings.lr, self.settings.adam[:2], self.settings.adam[2]
        if self.settings.moments != "8bit":
            return torch.optim.AdamW(groups, lr=peak, betas=betas, eps=epsilon, fused=True)
        with needed_by("train.moments = '8bit'"):
            from bitsandbytes.optim import AdamW8bit
        # It computes a table, which a plan's tensors without content cannot hold.
        with unset_fake_temporarily():
            bits: torch.optim.Optimizer = AdamW8bit(groups, peak, betas, epsilon)
        return bits

    def learning_rate(self, train_step: int) -> float:
        """The rate of the step after `train_step` completed ones."""
        schedule, warmup_steps = self.settings.fall_and_rise
        return self.settings.lr * schedule_factor(
            schedule, train_step, warmup_steps=warmup_steps, total_steps=self.total_steps
        )

    def step(self, train_step: int) -> float:
        """Apply the accumulated gradients, clear them, and return their L2 norm before clipping.

        Raises:
            FloatingPointError: the norm is not finite.
        """
        norm = float(self.clip())
        # Before the update, which would leave NaN in the moments for all later steps.
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
        # Without a limit the norm is measured all the same.
        limit = self.settings.max_grad_norm or math.inf
        if self.mesh is None:
            return nn.utils.clip_grad_norm_(self._parameters.values(), limit)
        # First, because the limit is one of the whole gradient.
        sum_replicated(self._parameters.values(), self.mesh)
        return clip_gradients(self._parameters.values(), limit)

    def apply(self, lr: float) -> None:
        """AdamW's update by the gradients as they are, which are then cleared."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
            if self.settings.moments == "cpu":
                self._step_from_cpu(group)
        if self.settings.moments != "cpu":
            # That of bitsandbytes waits for the whole device.
            with ONE_RECORDING:
                self._adamw.step()
        self.zero_grad()

    @torch.no_grad()
    def _step_from_cpu(self, group: Mapping[str, Any]) -> None:
        """AdamW's step, with moments that are on the device for the update of their weight only."""
        device = group["params"][0].device
        settings = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}
        settings["beta1"], settings["beta2"] = group["betas"]
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self._adamw.state[weight]
            if not state:
                state["step"] = torch.zeros(())
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(weight, device="cpu", pin_memory=weight.is_cuda)
            near = {key: value.to(device, non_blocking=True) for key, value in state.items()}
            first, second, step = ([near[key]] for key in ("exp_avg", "exp_avg_sq", "step"))
            adamw([weight], [weight.grad], first, second, [], step, **settings)
            for key in state:
                state[key].copy_(near[key], non_blocking=True)
        if device.type == "cuda":
            # They are on their way back, and the next reader may be another than the device. Not the whole device:
            # while an engine of the process records a graph, a wait for that fails, and the recording with it.
            torch.cuda.current_stream(device).synchronize()

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def places(self) -> Iterator[Place]:
        """The tensors of AdamW's state, for `forebay.train.offload`; none before the first step."""
        for number, state in enumerate(self._adamw.state.values()):
            for key, value in state.items():
                if hasattr(value, "full_tensor"):
                    # A slice: what it is a slice of stays known, and a collective finds it where it lies.
                    yield f"{number}|{key}", value._local_tensor, partial(setattr, value, "_local_tensor")
                elif isinstance(value, torch.Tensor):
                    yield f"{number}|{key}", value, partial(state.__setitem__, key)

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The moments and step counts by ``WEIGHT|KEY``, sliced as weights are; at first none."""
        for name, parameter in self._parameters.items():
            for key, value in self._adamw.state[parameter].items():
                # bitsandbytes counts steps in a plain number.
                yield f"{name}|{key}", torch.as_tensor(value)

    def place_for(self, key: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for what `state_tensors` gave by this name, where it will stay; None: no weight of this optimizer."""
        weight = self._parameters.get(key.rpartition("|")[0])
        if weight is None:
            return None
        own: dict[str, Any] = {"device": "cpu", "pin_memory": weight.is_cuda} if self.settings.moments == "cpu" else {}
        if weight.shape == size:
            # Split as its weight is.
            return torch.zeros_like(weight, dtype=dtype, requires_grad=False, **own)
        # Step counts, and the scales of 8-bit moments, have shapes of their own.
        return torch.zeros(size, dtype=dtype, **(own or {"device": weight.device}))

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_tensors` gave, in memory of `place_for`, which is kept.

        Raises:
            ValueError: the moments are of another kind.
        """
        # A weight that had no gradient, an image tower's under text alone, has no moments.
        if tensors and any(key.endswith("|state1") for key in tensors) != (self.settings.moments == "8bit"):
            raise ValueError(
                f"the saved moments do not go with moments = {self.settings.moments!r}: '8bit' and the "
                f"others are not made into each other; go on with the setting of the run that saved them"
            )
        self._adamw.state.clear()
        for key, value in tensors.items():
            name, _, part = key.rpartition("|")
            is_count = self.settings.moments == "8bit" and part == "step"
            self._adamw.state[self._parameters[name]][part] = int(value) if is_count else value
