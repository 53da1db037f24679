"""Handing the trained weights to whatever generates rollouts.

::

    TrainController.sync_weights --update_weights(weights, model_step)--> WeightReceiver
                      with LoRA, and a receiver that takes adapters:
                                 --update_adapters(adapters, model_step, config=...)--> AdapterReceiver

A rollout controller is a receiver. The receivers are declared here because this package knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch


class WeightReceiver(Protocol):
    """Takes over weights; a rollout controller is one."""

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None:
        """Generate with `weights` from now on; they are those after train step `model_step`.

        The tensors belong to the trainer and change with its next step: whoever keeps them copies them
        before returning.
        """
        ...


@runtime_checkable
class AdapterReceiver(Protocol):
    """A `WeightReceiver` that can also keep the starting weights and take LoRA adapters on top of them."""

    @property
    def takes_adapters(self) -> bool:
        """Whether all its engines do; if not, it gets merged weights."""
        ...

    async def update_adapters(
        self, adapters: Iterable[tuple[str, torch.Tensor]], model_step: int, *, config: Mapping[str, Any]
    ) -> None:
        """Generate with these adapters on the starting weights; they are those after train step `model_step`.

        Names are those of peft's ``adapter_model.safetensors``, and `config` is its ``adapter_config.json``,
        so that writing both to a folder gives what engines load. The tensors stay the trainer's.
        """
        ...


class WeightSource(Protocol):
    """Where the weights come from: a learner."""

    adapter_config: dict[str, Any] | None
    """peft's config of the adapters, as plain values; None if all weights are trained."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, adapters merged."""
        ...

    def adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapters' weights."""
        ...


async def sync_weights(source: WeightSource, receiver: WeightReceiver, model_step: int) -> None:
    """Give `receiver` the adapters, if it takes them, else all weights, and return once they are in use.

    No training step may run meanwhile. Gathering and merging happen in a thread.
    """
    config = source.adapter_config
    if config is not None and isinstance(receiver, AdapterReceiver) and receiver.takes_adapters:
        adapters = await asyncio.to_thread(lambda: list(source.adapters()))
        await receiver.update_adapters(adapters, model_step, config=config)
        return
    weights = await asyncio.to_thread(lambda: list(source.weights()))
    await receiver.update_weights(weights, model_step)
