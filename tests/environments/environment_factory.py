"""Policies, streams and small runs for the tests of environments."""

from __future__ import annotations

import contextlib
from pathlib import Path

import gymnasium
import numpy as np
import torch

from forebay.environments.config import EnvironmentConfig, FragmentRunConfig, PolicyConfig
from forebay.environments.policy import Policy, head_for
from forebay.environments.workers.stepper import Stepper, make_vector, spaces


class Counting(gymnasium.Env):
    """Observes how many steps ago its episode began; ends after `length`, by itself or cut off."""

    observation_space = gymnasium.spaces.Box(-1, 1000, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=3, truncates=False):
        self.length, self.truncates = length, truncates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        ends = self.count == self.length
        obs = np.full(1, self.count, np.float32)
        return obs, 1.0, ends and not self.truncates, ends and self.truncates, {}


COUNTING = "forebay_test/Counting-v0"
gymnasium.register(COUNTING, Counting)


def make_policy(environment, **policy):
    obs_size, action_space = spaces(environment)
    return Policy(obs_size, head_for(action_space), PolicyConfig(**policy))


def make_stepper(env_id="CartPole-v1", *, num_envs=3, length=16, seed=0, memory="none", arguments=None):
    """A stepper with weights of version 0, and a policy of its own with the same weights."""
    environment = EnvironmentConfig(id=env_id, num_envs=num_envs, arguments=arguments or {})
    torch.manual_seed(seed)
    policy = make_policy(environment, memory=memory, hidden_size=16)
    acting = make_policy(environment, memory=memory, hidden_size=16)
    stepper = Stepper(make_vector(environment, num_envs), acting, length=length, worker_uuid="w", seed=seed)
    stepper.load(0, policy.weights())
    return stepper, policy


def random_stream(rng, steps, streams):
    """Rewards, values, and ends of episodes of both kinds, with the steps that only reset after them."""
    done = np.zeros((steps, streams), np.bool_)
    terminated, live = done.copy(), ~done
    for t in range(steps):
        live[t] = ~done[t - 1] if t else True
        done[t] = live[t] & (rng.random(streams) < 0.2)
        terminated[t] = done[t] & (rng.random(streams) < 0.5)
    return {
        "reward_SB": rng.normal(size=(steps, streams)) * live,
        "value_SB": rng.normal(size=(steps, streams)),
        "next_value_B": rng.normal(size=streams),
        "terminated_SB": terminated,
        "done_SB": done,
        "live_SB": live,
    }


def small_run(tmp_path, **changes):
    """A recipe of a run that takes seconds."""
    values = {
        "name": "small",
        "steps": 3,
        "batch_size": 2,
        "output": str(tmp_path),
        "eval_episodes": 4,
        "environment": {"id": "CartPole-v1", "num_envs": 4, "workers": 1, "mode": "threads"},
        "fragments": {"length": 16},
        "policy": {"hidden_size": 16},
        "train": {"epochs": 2, "mini_batches": 2},
    }
    for name, value in changes.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) else value
    return FragmentRunConfig.model_validate(values)


def pid_of(worker_uuid):
    # A test beside this one names its workers alike: only a child of this process is meant.
    for child in own_children():
        with contextlib.suppress(OSError):
            if f'"worker_uuid":"{worker_uuid}"' in Path(f"/proc/{child}/cmdline").read_text():
                return child
    raise AssertionError(f"no process of {worker_uuid}")


def own_children():
    for task in Path("/proc/self/task").iterdir():
        yield from map(int, (task / "children").read_text().split())
