"""Plays episodes with the likeliest actions: for a mean return, and for pictures of one.

::

    policy --play--> one episode in each of num_episodes environments --> Episode each
           --watch-> one episode, drawn ----------------------------------> a few frames of it
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from forebay.config import ConfigError
from forebay.environments.config import EnvironmentConfig, FragmentRunConfig
from forebay.environments.policy import Policy
from forebay.environments.show import EVAL_RETURN
from forebay.environments.workers.messages import Episode
from forebay.environments.workers.stepper import import_gymnasium, make_env, make_vector

Array = np.ndarray[Any, Any]

EVALUATION_SEED = 1_000_000
"""Added to the run's: no worker is reset with the seeds of an evaluation."""
MAX_STEPS = 27_000
"""Of an episode that does not end by itself: half an hour of an Atari game with four frames a step (Mnih et
al., 2015), the longest limit in common use."""
NUM_FRAMES = 8
"""Of an episode: enough to see the movement, few enough to see the thing side by side."""


class Player:
    """A policy that acts by itself, and remembers where it has a memory."""

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


def play(
    config: EnvironmentConfig, policy: Policy, num_episodes: int, seed: int, *, max_steps: int | None = None
) -> list[Episode]:
    """The first episode of `num_episodes` environments, reset with seeds of their own.

    Taking the first episodes that end, whatever environment they are of, would favor short ones. One that
    does not end counts as far as `max_steps`, by default `MAX_STEPS`.
    """
    envs = make_vector(config, num_episodes)
    try:
        player = Player(policy, num_episodes)
        obs_ED = envs.reset(seed=seed)[0]
        plays_E = np.ones(num_episodes, np.bool_)
        rewards_E, lengths_E = np.zeros(num_episodes), np.zeros(num_episodes, np.int64)
        for _ in range(MAX_STEPS if max_steps is None else max_steps):
            obs_ED, reward_E, terminated_E, truncated_E, _ = envs.step(player.act(obs_ED))
            # Only the first episode of each environment counts.
            rewards_E += reward_E * plays_E
            lengths_E += plays_E
            plays_E &= ~(terminated_E | truncated_E)
            if not plays_E.any():
                break
    finally:
        envs.close()
    return [Episode(*each) for each in zip(rewards_E.tolist(), lengths_E.tolist(), strict=True)]


def measure(config: FragmentRunConfig, policy: Policy) -> dict[str, float]:
    """The metrics of an evaluation: `config.eval_episodes` episodes, the same ones every time."""
    seed = config.seed + EVALUATION_SEED
    episodes = play(config.environment, policy, config.eval_episodes, seed)
    returns = np.array([episode.reward for episode in episodes])
    return {
        EVAL_RETURN: float(returns.mean()),
        "eval/min_return": float(returns.min()),
        "eval/std_return": float(returns.std()),
        "eval/episode_steps": float(np.mean([episode.num_steps for episode in episodes])),
        "eval/episodes": len(episodes),
    }


def watch(config: FragmentRunConfig, policy: Policy) -> dict[int, Array]:
    """Frames of the first episode of an evaluation, by step, [height, width, 3] uint8.

    At most `NUM_FRAMES`, nearly evenly spread, the first and the last among them; none if the environment
    does not draw itself.

    Raises:
        ConfigError: drawing needs a library that is missing.
    """
    env = make_env(config.environment)
    draws = "rgb_array" in env.metadata.get("render_modes", [])
    env.close()
    if not draws:
        return {}
    # Drawn into memory: no screen is looked for, and pygame does not greet.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    env = make_env(config.environment, render_mode="rgb_array")
    try:
        return _film(env, Player(policy, 1), config.seed + EVALUATION_SEED)
    except import_gymnasium().error.DependencyNotInstalled as error:
        raise ConfigError(f"environment.id = {config.environment.id!r} cannot be drawn: {error}") from error
    finally:
        env.close()


def _film(env: Any, player: Player, seed: int) -> dict[int, Array]:
    """Frames by step: as the episode grows longer, every other one is let go, and fewer are drawn."""
    obs_D, _ = env.reset(seed=seed)
    frames, stride = {0: env.render()}, 1
    for step in range(1, MAX_STEPS + 1):
        obs_D, _, terminated, truncated, _ = env.step(player.act(obs_D[None])[0])
        ends = terminated or truncated
        if ends or step % stride == 0:
            frames[step] = env.render()
        if ends:
            break
        if len(frames) > 2 * NUM_FRAMES:
            stride *= 2
            frames = {at: frame for at, frame in frames.items() if at % stride == 0}
    chosen = np.linspace(0, len(frames) - 1, min(NUM_FRAMES, len(frames))).round().astype(int)
    return {at: frames[at] for at in np.array(list(frames))[chosen].tolist()}
