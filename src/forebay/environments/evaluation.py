"""Plays episodes with the likeliest actions, for a mean return."""

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.environments.config import EnvironmentConfig, FragmentRunConfig
from forebay.environments.policy import Policy
from forebay.environments.workers.stepper import make_vector

EVAL_RETURN = "eval/return"
EVALUATION_SEED = 1_000_000
"""Added to the run's: no worker is reset with the seeds of an evaluation."""
MAX_STEPS = 27_000
"""Of an episode that does not end by itself: half an hour of an Atari game with four frames a step (Mnih et
al., 2015), the longest limit in common use."""


def play(
    config: EnvironmentConfig, policy: Policy, num_episodes: int, seed: int, *, max_steps: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rewards and steps of the first episode of `num_episodes` environments, reset with seeds of their own.

    Taking the first episodes that end, whatever environment they are of, would favor short ones. One that
    does not end counts as far as `max_steps`, by default `MAX_STEPS`.
    """
    envs = make_vector(config, num_episodes)
    try:
        obs_ED = envs.reset(seed=seed)[0]
        state, first = policy.initial_state(num_episodes), torch.ones(1, num_episodes)
        plays_E = np.ones(num_episodes, np.bool_)
        rewards_E, lengths_E = np.zeros(num_episodes), np.zeros(num_episodes, np.int64)
        for _ in range(MAX_STEPS if max_steps is None else max_steps):
            # Not around the environments' own step: they may use torch, too.
            with torch.inference_mode():
                params, state = policy.act_params(torch.from_numpy(obs_ED[None]), first, state)
                first, action_E = torch.zeros_like(first), policy.head.mode(params[0]).numpy()
            obs_ED, reward_E, terminated_E, truncated_E, _ = envs.step(policy.head.to_env(action_E))
            # Only the first episode of each environment counts.
            # Not by a product: the reward of one that has ended may be no number.
            rewards_E[plays_E] += reward_E[plays_E]
            lengths_E += plays_E
            plays_E &= ~(terminated_E | truncated_E)
            if not plays_E.any():
                break
    finally:
        envs.close()
    return rewards_E, lengths_E


def measure(config: FragmentRunConfig, policy: Policy) -> dict[str, float]:
    """The metrics of an evaluation: `config.eval_episodes` episodes, the same ones every time."""
    seed = config.seed + EVALUATION_SEED
    returns, lengths = play(config.environment, policy, config.eval_episodes, seed)
    return {
        EVAL_RETURN: float(returns.mean()),
        "eval/min_return": float(returns.min()),
        "eval/std_return": float(returns.std()),
        "eval/episode_steps": float(lengths.mean()),
        "eval/episodes": len(returns),
    }
