"""Plays episodes with the likeliest actions: for a mean return, and for pictures of one.

::

    policy --play--> one episode in each of num_episodes environments --> Episode each
           --watch-> one episode, drawn ----------------------------------> frames
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from forebay.environments.policy import Policy
from forebay.environments.stepper import Episode
from forebay.environments.vector import EnvironmentConfig, make_env, make_vector

Array = np.ndarray[Any, Any]


class Player:
    """A policy that acts by itself, and remembers where it has a memory.

    >>> player = Player(policy, num_envs=1)
    >>> action = player.act(observation[None])[0]
    """

    def __init__(self, policy: Policy, num_envs: int) -> None:
        self._policy = policy
        self._state = policy.initial_state(num_envs)
        self._first = torch.ones(1, num_envs)

    @torch.inference_mode()
    def act(self, obs_ED: Array) -> Array:
        """The likeliest action for each observation, as the environment takes it."""
        params, self._state = self._policy.act_params(
            torch.from_numpy(obs_ED[None]), self._first, self._state
        )
        self._first = torch.zeros_like(self._first)
        return self._policy.head.to_env(self._policy.head.mode(params[0]).numpy())


def play(config: EnvironmentConfig, policy: Policy, num_episodes: int, seed: int) -> list[Episode]:
    """The first episode of `num_episodes` environments, reset with seeds of their own.

    Taking the first episodes that end, whatever environment they are of, would favour short ones.
    """
    envs = make_vector(config, num_episodes)
    try:
        player = Player(policy, num_episodes)
        obs_ED = envs.reset(seed=seed)[0]
        plays_E = np.ones(num_episodes, np.bool_)
        rewards_E, lengths_E = np.zeros(num_episodes), np.zeros(num_episodes, np.int64)
        while plays_E.any():
            obs_ED, reward_E, terminated_E, truncated_E, _ = envs.step(player.act(obs_ED))
            rewards_E += reward_E * plays_E
            lengths_E += plays_E
            plays_E &= ~(terminated_E | truncated_E)
    finally:
        envs.close()
    return [Episode(float(reward), int(steps)) for reward, steps in zip(rewards_E, lengths_E, strict=True)]


def watch(config: EnvironmentConfig, policy: Policy, seed: int) -> list[Array]:
    """The frames of one episode, [height, width, 3] uint8; none if the environment does not draw itself.

    Raises:
        ConfigError: drawing needs a library that is missing.
    """
    env = make_env(config, render_mode=None)
    draws = "rgb_array" in env.metadata.get("render_modes", [])
    env.close()
    if not draws:
        return []
    # Drawn into memory: no screen is looked for, and pygame does not greet.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    env = make_env(config, render_mode="rgb_array")
    try:
        player = Player(policy, 1)
        obs_D, _ = env.reset(seed=seed)
        frames = [env.render()]
        ended = False
        while not ended:
            obs_D, _, terminated, truncated, _ = env.step(player.act(obs_D[None])[0])
            frames.append(env.render())
            ended = terminated or truncated
    finally:
        env.close()
    return frames
