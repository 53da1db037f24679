"""Handing the trained weights to whatever generates rollouts.

::

    TrainController.sync_weights --update_weights(weights, model_step)--> WeightReceiver

A rollout controller is one. The receiver is declared here because this package knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from forebay.train.lora import model_weights


class WeightReceiver(Protocol):
    """Takes over weights; a rollout controller is one."""

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None:
        """Generate with `weights` from now on; they are those after train step `model_step`.

        The tensors belong to the trainer and change with its next step: whoever keeps them copies them
        before returning.
        """
        ...


async def sync_weights(model: nn.Module, receiver: WeightReceiver, model_step: int) -> None:
    """Give `receiver` all weights of `model`, adapters merged, and return once they are in use.

    No training step may run meanwhile.
    """
    await receiver.update_weights(model_weights(model), model_step)
