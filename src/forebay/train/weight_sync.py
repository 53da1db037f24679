"""Handing the trained weights to whatever generates rollouts.

::

    TrainController.sync_weights --update_weights(weights, model_step)--> WeightReceiver
                      with LoRA, and a receiver that takes adapters:
                                 --update_adapters(adapters, model_step, config=...)--> it
                                       BaseDiffersError: --update_weights(starting weights, 0)-->, and again
                                       AdaptersRefusedError, or BaseDiffersError of one that generates with
                                       trained weights: --update_weights(merged weights, model_step)-->

A rollout controller is a receiver. Receivers are declared here because this package knows no engine.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from forebay.models.config import Precision
from forebay.models.live_weights import LiveWeights, cast
from forebay.models.starting_weights import AdaptersRefusedError, BaseDiffersError, Weights
from forebay.train.learner import Learner
from forebay.train.parallel.learner import RankedLearner

logger = logging.getLogger(__name__)


class WeightReceiver(Protocol):
    """Takes over weights; a rollout controller is one.

    It may say of itself, by attributes that are True, that it ``takes_live_weights`` or ``casts_weights``
    (`forebay.engines.pool`). One that ``takes_adapters`` can also keep the starting weights and take LoRA adapters
    on top of them: its ``update_adapters(adapters, model_step, config=...)`` generates with these from then on. Their
    names are those of peft's ``adapter_model.safetensors``, and the config is its ``adapter_config.json``, so that
    writing both to a folder gives what engines load, with one key more: the `BASE_FINGERPRINT` of the starting
    weights (`forebay.models.starting_weights`). It raises `BaseDiffersError` where it holds other weights than the
    starting ones, which `update_weights` gives it then, and `AdaptersRefusedError` where it cannot use these adapters
    exactly, and needs merged weights.
    """

    async def update_weights(self, weights: Weights, model_step: int) -> None:
        """Generate with `weights` from now on; they are those after train step `model_step`.

        The tensors belong to the trainer and change with its next step: a receiver that keeps them copies
        them before it returns.
        """


async def sync_weights(
    source: Learner | RankedLearner,
    receiver: WeightReceiver,
    model_step: int,
    *,
    dtype: Precision = "float32",
    live: LiveWeights | None = None,
) -> int:
    """Give `receiver` the adapters, if it takes them, else all weights; the bytes, once they are in use.

    Whole weights are cast to `dtype` here, once for all engines, where these do not cast them themselves;
    adapters stay float32. A receiver whose engines read the trainer's memory gets `live` ones instead.

    A receiver that does not hold the starting weights gets them before its first adapters. One whose
    `model_step` is above 0 has trained weights and gets merged ones: its rollouts must not fall back to those
    of step 0.
    No training step may run meanwhile. Gathering and merging happen in a thread.
    """

    async def gather(weights: Callable[[], Weights], dtype: Precision | None) -> Weights:
        return await asyncio.to_thread(lambda: list(cast(weights(), dtype)))

    config = source.adapter_config
    if config is not None and getattr(receiver, "takes_adapters", False):
        taker: Any = receiver
        adapters = await gather(source.adapters, "float32")
        # Read before the call, which may change it.
        held_step = getattr(receiver, "model_step", 0)
        try:
            try:
                await taker.update_adapters(adapters, model_step, config=config)
            except BaseDiffersError:
                if held_step > 0:
                    raise
                # The starting weights are those of step 0, since new adapters change nothing.
                base = partial(source.weights, merged=False)
                await receiver.update_weights(await gather(base, dtype), 0)
                await taker.update_adapters(adapters, model_step, config=config)
            return _num_bytes(adapters, "float32")
        # Also a `BaseDiffersError`, which is one of these.
        except AdaptersRefusedError as refusal:
            logger.warning("all weights of step %d are handed over, adapters merged: %s", model_step, refusal)
    if live is not None and getattr(receiver, "takes_live_weights", False):
        weights: Any = live
    else:
        # An engine in this process casts on the way into its model: a cast copy before would be one more.
        weights = await gather(source.weights, None if getattr(receiver, "casts_weights", False) else dtype)
    await receiver.update_weights(weights, model_step)
    return _num_bytes(weights.sizes() if isinstance(weights, LiveWeights) else weights, dtype)


def _num_bytes(weights: Weights, dtype: Precision) -> int:
    """As engines hold them, which may cast those of floating point to `dtype` themselves."""
    itemsize = getattr(torch, dtype).itemsize
    return sum(t.numel() * (itemsize if t.is_floating_point() else t.itemsize) for _, t in weights)
