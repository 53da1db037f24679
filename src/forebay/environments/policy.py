"""A small actor and critic, with or without memory, and the distributions over actions that its numbers mean.

::

    obs_SBD --normalize--> [Linear, tanh, GRU or LSTM cell over S]  --> actor --> params_SBP
                            only with memory; state reset at `first` '-> critic --> values_SB

    head: params_P --> sample, mode --> action (stored) --to_env--> what the environment gets
                  '--> log_prob(action), entropy

Shapes: S consecutive steps, B environments side by side, D numbers in an observation, P parameters of a
distribution over actions, A numbers in a continuous action, H units of memory. A worker acts with S = 1, a
trainer replays whole chunks: the same code, so equal weights and states give equal log-probs.
"""

import math
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from forebay.config import ConfigError
from forebay.environments.config import PolicyConfig

State = tuple[torch.Tensor, ...]
"""[B, H] each: none without memory, one of a GRU, two (output and cell) of an LSTM."""

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
MIN_STD = 1e-2
"""A number that hardly ever changes is not blown up to noise."""
MIN_VALUE_STEP = 0.05
"""The least weight of a new batch in the scale of values: it follows a policy that improves within 20
batches."""
MAX_OBSERVATION = 10.0
"""Standard deviations: a rare outlier must not drive tanh units into saturation for good."""


class Policy(nn.Module):
    """Actor and critic; see the module for the data flow.

    Invariants: what happened before a step with `first` has no influence on it; everything that acting needs
    is in `weights`.

    >>> policy = Policy(4, Categorical(2), PolicyConfig())
    >>> params, state = policy.act_params(torch.zeros(1, 3, 4), torch.ones(1, 3), policy.initial_state(3))
    >>> params.shape
    torch.Size([1, 3, 2])
    """

    def __init__(self, obs_size: int, head: "ActionHead", config: PolicyConfig) -> None:
        """Orthogonal weights; the actor begins nearly uniform (Andrychowicz et al., 2021)."""
        super().__init__()
        self.head = head
        hidden = config.hidden_size
        self._hidden = hidden
        self.encoder: nn.Module | None = None
        self.cell: nn.GRUCell | nn.LSTMCell | None = None
        size = obs_size
        if config.memory != "none":
            self.encoder = nn.Sequential(nn.Linear(obs_size, hidden), nn.Tanh())
            self.cell = (nn.GRUCell if config.memory == "gru" else nn.LSTMCell)(hidden, hidden)
            size = hidden
        self.actor = _layers(size, hidden, head.num_params - head.num_free, last_gain=0.01)
        self.critic = _layers(size, hidden, 1, last_gain=1.0)
        # Zeros: each standard deviation begins at 1, half the range of the action.
        self.free_params = nn.Parameter(torch.zeros(head.num_free))
        # Buffers, so that they travel and are saved with the weights.
        self.obs_mean, self.obs_std = nn.Buffer(torch.zeros(obs_size)), nn.Buffer(torch.ones(obs_size))
        self.value_mean, self.value_std = nn.Buffer(torch.zeros(())), nn.Buffer(torch.ones(()))

    def initial_state(self, num_envs: int) -> State:
        """The state before the first step of an episode."""
        count = 0 if self.cell is None else 1 if isinstance(self.cell, nn.GRUCell) else 2
        return tuple(torch.zeros(num_envs, self._hidden) for _ in range(count))

    def features(self, obs_SBD: torch.Tensor, first_SB: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """The input of actor and critic, [S, B, ...], and the state after the last step."""
        normal = (obs_SBD.float() - self.obs_mean) / self.obs_std
        normal = normal.clamp(-MAX_OBSERVATION, MAX_OBSERVATION)
        if self.cell is None or self.encoder is None:
            return normal, state
        outputs: list[torch.Tensor] = []
        goes_on_SB1 = 1.0 - first_SB.float().unsqueeze(-1)
        # Step by step, and not with `nn.GRU`: an episode may begin at any step of the stream.
        for encoded_BH, goes_on_B1 in zip(self.encoder(normal), goes_on_SB1, strict=True):
            state = tuple(part * goes_on_B1 for part in state)
            if isinstance(self.cell, nn.GRUCell):
                state = (self.cell(encoded_BH, state[0]),)
            else:
                state = self.cell(encoded_BH, (state[0], state[1]))
            outputs.append(state[0])
        return torch.stack(outputs), state

    def params(self, features: torch.Tensor) -> torch.Tensor:
        """[..., P] of the distribution over actions."""
        seen: torch.Tensor = self.actor(features)
        if not self.head.num_free:
            return seen
        return torch.cat([seen, self.free_params.expand(*seen.shape[:-1], -1)], -1)

    def normal_values(self, features: torch.Tensor) -> torch.Tensor:
        """[...] values in units of `value_std` around `value_mean`."""
        values: torch.Tensor = self.critic(features).squeeze(-1)
        return values

    def values(self, features: torch.Tensor) -> torch.Tensor:
        """[...] expected discounted rewards."""
        return self.normal_values(features) * self.value_std + self.value_mean

    def act_params(self, obs_SBD: torch.Tensor, first_SB: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """`params` of what follows from the observations, and the state after them."""
        features, state = self.features(obs_SBD, first_SB, state)
        return self.params(features), state

    @torch.no_grad()
    def rescale_values(self, targets_N: torch.Tensor, step: int) -> None:
        """Follow the scale of `targets_N` without changing what the critic says.

        PopArt (van Hasselt et al., 2016, arXiv 1602.07714): the last layer is changed against the scale.
        `step` counts batches from 0; the first one sets the scale alone.
        """
        weight = max(1.0 / (step + 1), MIN_VALUE_STEP)
        old_mean, old_std = self.value_mean.item(), self.value_std.item()
        mean = (1 - weight) * old_mean + weight * targets_N.mean().item()
        second = (1 - weight) * (old_mean**2 + old_std**2) + weight * targets_N.square().mean().item()
        # The inner bound is for rounding, which may leave a variance below 0.
        std = max(math.sqrt(max(0.0, second - mean**2)), MIN_STD)
        last = self.critic[-1]
        assert isinstance(last, nn.Linear)
        last.weight.mul_(old_std / std)
        last.bias.copy_((last.bias * old_std + old_mean - mean) / std)
        self.value_mean.fill_(mean)
        self.value_std.fill_(std)

    def weights(self) -> bytes:
        """All parameters and buffers as float32 bytes, in the order of `state_dict`."""
        return nn.utils.parameters_to_vector(self.state_dict().values()).numpy().tobytes()

    def load_weights(self, weights: bytes) -> None:
        """Take over what `weights` of an equal policy gave."""
        vector = torch.from_numpy(np.frombuffer(weights, np.float32).copy())
        nn.utils.vector_to_parameters(vector, self.state_dict(keep_vars=True).values())


def _layers(size: int, hidden: int, out: int, *, last_gain: float) -> nn.Sequential:
    sizes, gains = [size, hidden, hidden, out], [math.sqrt(2.0), math.sqrt(2.0), last_gain]
    layers: list[nn.Module] = []
    for size_in, size_out, gain in zip(sizes[:-1], sizes[1:], gains, strict=True):
        linear = nn.Linear(size_in, size_out)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


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
        """[...] log probability of `action`, in nats."""
        mean, log_std = params.chunk(2, -1)
        return (-0.5 * ((action - mean) / log_std.exp()) ** 2 - log_std - _HALF_LOG_2PI).sum(-1)

    def entropy(self, params: torch.Tensor) -> torch.Tensor:
        """[...] entropy of the distribution, in nats."""
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
        # The negative logarithm of an exponential number is Gumbel noise.
        noise = torch.empty_like(params).exponential_(generator=generator)
        return (params - noise.log()).argmax(-1)

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        """The likeliest action."""
        return params.argmax(-1)

    def log_prob(self, params: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """[...] log probability of `action`, in nats."""
        return params.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: torch.Tensor) -> torch.Tensor:
        """[...] entropy of the distribution, in nats."""
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
    # By name: this module does without gymnasium.
    kind = type(action_space).__name__
    if kind == "Discrete":
        return Categorical(int(action_space.n), int(action_space.start))
    if kind == "Box" and len(action_space.shape) == 1:
        return Gaussian(action_space.low, action_space.high)
    raise ConfigError(
        f"the environment has the action space {action_space}; a policy here acts in Discrete spaces and in "
        f"Box spaces with one axis: wrap the environment"
    )
