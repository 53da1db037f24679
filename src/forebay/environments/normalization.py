"""Scales that are learned beside the weights: of observations, and of values.

::

    observations of a batch --> Moments --> policy.obs_mean, policy.obs_std      after the weights' update
    value targets of a batch -> rescale_values --> policy.value_mean, value_std, the critic's last layer

Both travel with the weights (`Policy.weights`), so a worker normalizes as the trainer did at that version.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from forebay.environments.policy import Policy

Array = np.ndarray[Any, Any]

MIN_STD = 1e-2
"""A number that hardly ever changes is not blown up to noise."""
MIN_VALUE_STEP = 0.05
"""The least weight of a new batch in the scale of values: it follows a policy that improves within 20
batches."""


class Moments:
    """Mean and variance of all rows seen, added batch by batch (Chan et al., 1979).

    >>> moments = Moments(1)
    >>> moments.add(np.array([[1.0], [3.0]]))
    >>> moments.mean.tolist(), moments.std.tolist()
    ([2.0], [1.0])
    """

    def __init__(self, size: int) -> None:
        self.count = 0.0
        self.mean = np.zeros(size)
        self._squares = np.zeros(size)

    @property
    def std(self) -> Array:
        """Standard deviations, those of numbers that hardly change aside: they are 1."""
        std = np.sqrt(self._squares / max(1.0, self.count))
        return np.where(std < MIN_STD, 1.0, std)

    def add(self, rows_ND: Array) -> None:
        """Count these too."""
        count = self.count + len(rows_ND)
        mean, difference = rows_ND.mean(0), rows_ND.mean(0) - self.mean
        squares = ((rows_ND - mean) ** 2).sum(0)
        self._squares += squares + difference**2 * self.count * len(rows_ND) / count
        self.mean = self.mean + difference * len(rows_ND) / count
        self.count = count

    def arrays(self) -> dict[str, Array]:
        """What `load` takes."""
        return {"count": np.array(self.count), "mean": self.mean, "squares": self._squares}

    def load(self, arrays: dict[str, Array]) -> None:
        """Go on from there."""
        self.count = float(arrays["count"])
        self.mean, self._squares = arrays["mean"].copy(), arrays["squares"].copy()


def rescale_values(policy: Policy, targets_N: torch.Tensor, step: int) -> None:
    """Follow the scale of `targets_N` without changing what the critic says.

    PopArt (van Hasselt et al., 2016, arXiv 1602.07714): the last layer is changed against the scale. `step`
    counts batches from 0; the first one sets the scale alone.
    """
    weight = max(1.0 / (step + 1), MIN_VALUE_STEP)
    old_mean, old_std = policy.value_mean.item(), policy.value_std.item()
    mean = (1 - weight) * old_mean + weight * targets_N.mean().item()
    second = (1 - weight) * (old_mean**2 + old_std**2) + weight * targets_N.square().mean().item()
    std = max(math.sqrt(max(0.0, second - mean**2)), MIN_STD)
    last = policy.critic[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.mul_(old_std / std)
        last.bias.copy_((last.bias * old_std + old_mean - mean) / std)
        policy.value_mean.fill_(mean)
        policy.value_std.fill_(std)
