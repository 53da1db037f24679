"""Acts in environments and cuts what happens into fragments.

::

    weights, version --load--> policy --action--> vector of environments --observation, reward, done--.
                                  ^                                                                   |
                                  '-------------------------------------------------------------------'
    make_fragment: T of these steps --> SampleFragment     take_episodes: those that ended since

It knows nothing of buffers and other processes. Shapes: T steps, E environments, D numbers in an observation,
A numbers in a continuous action, H units of memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from forebay.environments.policy import Policy, State
from forebay.fragments import SampleFragment

Array = np.ndarray[Any, Any]


class Episode(NamedTuple):
    """One that ended."""

    reward: float
    """The sum of its rewards, not discounted."""
    num_steps: int


class Stepper:
    """One stream of environment steps.

    Invariants: fragments follow each other without a gap; every step says which weights acted in it;
    `in_state` and the observations of a fragment are all that its log-probs depend on.

    >>> stepper = Stepper(make_vector(config, 8), policy, length=32, worker_uuid="worker-0", seed=0)
    >>> stepper.load(0, policy.weights())
    >>> stepper.make_fragment().obs.shape
    (32, 8, 4)
    """

    def __init__(self, envs: Any, policy: Policy, *, length: int, worker_uuid: str, seed: int) -> None:
        """`envs` resets in a step of its own (`forebay.environments.workers.vector`); it is reset here."""
        self.version = -1
        """Of the weights that act."""
        self._envs, self._policy, self._length = envs, policy, length
        self._worker_uuid, self._fid = worker_uuid, 0
        self._generator = torch.Generator().manual_seed(seed)
        self._obs_ED: Array = envs.reset(seed=seed)[0]
        self._state: State = policy.initial_state(envs.num_envs)
        self._first_E = np.ones(envs.num_envs, np.bool_)
        self._resets_E = np.zeros(envs.num_envs, np.bool_)
        self._rewards_E = np.zeros(envs.num_envs, np.float64)
        self._lengths_E = np.zeros(envs.num_envs, np.int64)
        self._episodes: list[Episode] = []

    def load(self, version: int, weights: bytes) -> None:
        """From now on these act."""
        self._policy.load_weights(weights)
        self.version = version

    def take_episodes(self) -> list[Episode]:
        """Those that ended since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def make_fragment(self) -> SampleFragment:
        """Take T steps.

        Beside the fields of every fragment: ``extras["terminated"]`` and ``extras["live"]``, [T, E] bool. A
        step that is not live only resets; its observation is the last one of the episode before.
        """
        in_state = [part.numpy().copy() for part in self._state]
        steps = [self._step() for _ in range(self._length)]
        columns: dict[str, Any] = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
        extras = {name: columns.pop(name) for name in ("terminated", "live")}
        fragment = SampleFragment(
            **columns,
            in_state=in_state,
            worker_uuid=self._worker_uuid,
            fid_in_worker=self._fid,
            next_obs=self._obs_ED.copy(),
            model_versions=np.full(self._length, self.version, np.int64),
            extras=extras,
        )
        self._fid += 1
        return fragment

    def _step(self) -> dict[str, Array]:
        obs_ED, first_E, live_E = self._obs_ED, self._first_E, ~self._resets_E
        action, logprob_E = self._act(obs_ED, first_E)
        self._obs_ED, reward_E, terminated_E, truncated_E, _ = self._envs.step(
            self._policy.head.to_env(action)
        )
        done_E = terminated_E | truncated_E
        self._first_E, self._resets_E = ~live_E, done_E
        self._count(reward_E, live_E, done_E)
        return {
            "obs": obs_ED,
            "action": action,
            "reward": reward_E.astype(np.float32),
            "next_done": done_E,
            "first": first_E,
            "logprobs": logprob_E,
            "terminated": terminated_E,
            "live": live_E,
        }

    @torch.inference_mode()
    def _act(self, obs_ED: Array, first_E: Array) -> tuple[Array, Array]:
        policy = self._policy
        obs, first = torch.from_numpy(obs_ED[None]), torch.from_numpy(first_E[None])
        params, self._state = policy.act_params(obs, first, self._state)
        action = policy.head.sample(params[0], self._generator)
        return action.numpy(), policy.head.log_prob(params[0], action).numpy()

    def _count(self, reward_E: Array, live_E: Array, done_E: Array) -> None:
        self._rewards_E += reward_E
        self._lengths_E += live_E
        for index in np.flatnonzero(done_E):
            self._episodes.append(Episode(float(self._rewards_E[index]), int(self._lengths_E[index])))
            self._rewards_E[index], self._lengths_E[index] = 0.0, 0
