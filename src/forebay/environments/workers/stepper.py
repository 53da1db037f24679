"""Acts in environments that are stepped together, and cuts what happens into fragments.

::

    gymnasium.make(id, **arguments) --> FlattenObservation --> SyncVectorEnv of num_envs, NEXT_STEP autoreset

    weights, version --load--> policy --action--> vector of environments --observation, reward, done--.
                                  ^                                                                   |
                                  '-------------------------------------------------------------------'
    make_fragment: T of these steps --> SampleFragment     take_episodes: those that ended since

    step t      acts, the episode ends          reward, terminated or truncated
    step t + 1  resets: its action is ignored   its observation is the *last* one of the old episode
    step t + 2  acts                            its observation is the first one of the new episode

The step that resets costs one step an episode. In return every observation is in the stream, the last of an
episode too: its value goes on where an episode was only truncated, without a second array that comes and
goes. Shapes: T steps, E environments, D numbers in an observation, A numbers in a continuous action, H units
of memory.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from forebay.config import ConfigError, errors_about
from forebay.environments.config import EnvironmentConfig
from forebay.environments.policy import Policy, State
from forebay.environments.workers.messages import Episode
from forebay.extras import needed_by
from forebay.fragments import SampleFragment

Array = np.ndarray[Any, Any]


class Stepper:
    """One stream of environment steps.

    Invariants: fragments follow each other without a gap; every step says which weights acted in it;
    `in_state` and the observations of a fragment are all that its log-probs depend on.

    >>> from forebay.environments.policy import Categorical
    >>> from forebay.environments.config import PolicyConfig
    >>> envs = make_vector(EnvironmentConfig(id="CartPole-v1"), num_envs=8)
    >>> policy = Policy(4, Categorical(2), PolicyConfig())
    >>> Stepper(envs, policy, length=32, worker_uuid="worker-0", seed=0).make_fragment().obs.shape
    (32, 8, 4)
    """

    def __init__(self, envs: Any, policy: Policy, *, length: int, worker_uuid: str, seed: int) -> None:
        """`envs` is from `make_vector`; it is reset here."""
        self.version = -1
        """Model version of the weights that act."""
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
        """Act with these weights from now on."""
        self._policy.load_weights(weights)
        self.version = version

    def take_episodes(self) -> list[Episode]:
        """The episodes that ended since the last call."""
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
        head = self._policy.head
        obs, first = torch.from_numpy(obs_ED[None]), torch.from_numpy(first_E[None])
        # Not around the environments' own step: they may use torch, too.
        with torch.inference_mode():
            params, self._state = self._policy.act_params(obs, first, self._state)
            action = head.sample(params[0], self._generator)
            logprob_E = head.log_prob(params[0], action).numpy()
        self._obs_ED, reward_E, terminated_E, truncated_E, _ = self._envs.step(head.to_env(action.numpy()))
        done_E = terminated_E | truncated_E
        # Where an episode ends, the next step resets, and the one after that is the first of another.
        self._first_E, self._resets_E = ~live_E, done_E
        # Counted here, because gymnasium's own statistics take 15 us of a step's 300.
        self._rewards_E += reward_E
        self._lengths_E += live_E
        for index in np.flatnonzero(done_E):
            self._episodes.append(Episode(float(self._rewards_E[index]), int(self._lengths_E[index])))
            self._rewards_E[index], self._lengths_E[index] = 0.0, 0
        return {
            "obs": obs_ED,
            "action": action.numpy(),
            "reward": reward_E.astype(np.float32),
            "next_done": done_E,
            "first": first_E,
            "logprobs": logprob_E,
            "terminated": terminated_E,
            "live": live_E,
        }


def make_env(config: EnvironmentConfig) -> Any:
    """One environment with flat observations.

    Raises:
        ConfigError: gymnasium is not installed, there is none of that id, or it does not take these arguments.
    """
    with needed_by("a run in environments"):
        import gymnasium
    named = f"environment.id = {config.id!r} with arguments = {config.arguments}"
    with errors_about(named, gymnasium.error.Error, ImportError, TypeError, ValueError):
        env = gymnasium.make(config.id, disable_env_checker=True, **config.arguments)
    return gymnasium.wrappers.FlattenObservation(env)


def make_vector(config: EnvironmentConfig, num_envs: int) -> Any:
    """`num_envs` of them, stepped together as the module says.

    Raises:
        ConfigError: as `make_env`.
    """
    with needed_by("a run in environments"):
        from gymnasium import vector
    return vector.SyncVectorEnv([lambda: make_env(config)] * num_envs, autoreset_mode=vector.AutoresetMode.NEXT_STEP)


def spaces(config: EnvironmentConfig) -> tuple[int, Any]:
    """Numbers in an observation, and the action space.

    Raises:
        ConfigError: as `make_env`, or observations have no fixed size.
    """
    env = make_env(config)
    try:
        shape: Sequence[int] | None = env.observation_space.shape
        if shape is None or len(shape) != 1:
            raise ConfigError(
                f"environment.id = {config.id!r} has observations of no fixed size: "
                f"{env.unwrapped.observation_space}; wrap it so that they are arrays"
            )
        return shape[0], env.action_space
    finally:
        env.close()
