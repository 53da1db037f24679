"""The meaning of a policy's numbers: a distribution over the actions of an action space.

::

    policy --params_P--> sample, mode --> action (stored) --to_env--> what the environment gets
                     '-> log_prob(action), entropy

Nothing here has weights. Shapes: any leading axes ..., P parameters, A numbers in a continuous action.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch

from forebay.config import ConfigError

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Gaussian:
    """Independent normal numbers; the parameters are means, then logarithms of standard deviations.

    An action is in units of half the space's range around its middle, and is clipped on its way to the
    environment. The stored action is not clipped, so its density is exact.

    >>> head = Gaussian(np.array([-2.0]), np.array([2.0]))
    >>> head.to_env(np.array([[0.5], [3.0]])).tolist()
    [[1.0], [2.0]]
    """

    def __init__(self, low_A: np.ndarray[Any, Any], high_A: np.ndarray[Any, Any]) -> None:
        """Bounds of the action space; without finite ones the unit is 1."""
        bounded = np.isfinite(low_A) & np.isfinite(high_A)
        self._low, self._high = low_A, high_A
        low, high = np.where(bounded, low_A, -1.0), np.where(bounded, high_A, 1.0)
        self._middle, self._half = (low + high) / 2, (high - low) / 2
        self.num_params, self.num_free = 2 * len(low), len(low)

    def sample(self, params: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """One action for each row of ``params [..., P]``."""
        mean, log_std = params.chunk(2, -1)
        return mean + log_std.exp() * torch.empty_like(mean).normal_(generator=generator)

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        """The likeliest action."""
        return params.chunk(2, -1)[0]

    def log_prob(self, params: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """[...] of `action`."""
        mean, log_std = params.chunk(2, -1)
        return (-0.5 * ((action - mean) / log_std.exp()) ** 2 - log_std - _HALF_LOG_2PI).sum(-1)

    def entropy(self, params: torch.Tensor) -> torch.Tensor:
        """[...] in nats."""
        return (params.chunk(2, -1)[1] + 0.5 + _HALF_LOG_2PI).sum(-1)

    def to_env(self, action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The actions as the environment takes them."""
        clipped = np.clip(self._middle + self._half * action, self._low, self._high)
        return np.asarray(clipped, self._low.dtype)


class Categorical:
    """One of `num_actions`; the parameters are logits.

    >>> head = Categorical(2)
    >>> head.log_prob(torch.zeros(1, 2), torch.tensor([1])).item()
    -0.6931...
    """

    num_free = 0
    """Parameters, the last ones, that do not depend on the observation."""

    def __init__(self, num_actions: int, start: int = 0) -> None:
        """Environments count actions from `start`; here they are counted from 0."""
        self.num_params = num_actions
        self._start = start

    def sample(self, params: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """One action for each row of ``params [..., P]``: the largest of logits + Gumbel noise."""
        noise = torch.empty_like(params).exponential_(generator=generator)
        return (params - noise.log()).argmax(-1)

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        """The likeliest action."""
        return params.argmax(-1)

    def log_prob(self, params: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """[...] of `action`."""
        return params.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: torch.Tensor) -> torch.Tensor:
        """[...] in nats."""
        logprobs = params.log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum(-1)

    def to_env(self, action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The actions as the environment takes them."""
        return action + self._start


ActionHead: TypeAlias = Categorical | Gaussian
"""A family of distributions over actions; `num_params` is P."""


def head_for(action_space: Any) -> ActionHead:
    """The distributions over a gymnasium ``Discrete`` space, or a ``Box`` with one axis.

    Raises:
        ConfigError: it is another space.
    """
    kind = type(action_space).__name__
    if kind == "Discrete":
        return Categorical(int(action_space.n), int(action_space.start))
    if kind == "Box" and len(action_space.shape) == 1:
        return Gaussian(action_space.low, action_space.high)
    raise ConfigError(
        f"the environment has the action space {action_space}; a policy here acts in Discrete spaces and in "
        f"Box spaces with one axis: wrap the environment"
    )
