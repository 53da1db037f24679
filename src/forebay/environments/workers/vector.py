"""Environments stepped together, with one shape of observations and one meaning of "done".

::

    gymnasium.make(id, **arguments) --> FlattenObservation --> SyncVectorEnv of num_envs, NEXT_STEP autoreset

    step t      acts, the episode ends          reward, terminated or truncated
    step t + 1  resets: its action is ignored   its observation is the *last* one of the old episode
    step t + 2  acts                            its observation is the first one of the new episode

The step that resets costs one step an episode. In return every observation is in the stream, the last of an
episode too: its value goes on where an episode was only truncated, without a second array that comes and
goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

from pydantic import BaseModel, Field

from forebay.beside import ArgumentPaths
from forebay.config import ConfigError
from forebay.extras import needed_by

MODES = {
    "processes": "forebay.environments.workers.processes:ProcessWorkers",
    "threads": "forebay.environments.workers.threads:ThreadWorkers",
    "ray": "forebay.cluster.environments:RayWorkers",
}
"""What runs the workers, by the name in a recipe."""


class EnvironmentConfig(BaseModel, extra="forbid", frozen=True):
    """A recipe's ``[environment]`` table: the task, and how many work on it.

    >>> EnvironmentConfig(id="CartPole-v1").num_envs
    8
    """

    id: str
    """Of a registered gymnasium environment; ``my_module:MyEnv-v0`` imports the module first."""
    arguments: Annotated[dict[str, Any], ArgumentPaths] = {}
    """Further keyword arguments of ``gymnasium.make``."""
    num_envs: int = Field(default=8, ge=1)
    """Environments that each worker steps together."""
    workers: int = Field(default=2, ge=1)
    """Processes, threads or actors that act at the same time."""
    mode: str = "processes"
    """``processes``, ``threads``, ``ray``, or ``package.module:Class``."""


def import_gymnasium() -> Any:
    """The module gymnasium.

    Raises:
        ConfigError: it is not installed.
    """
    with needed_by("a run in environments"):
        return import_module("gymnasium")


def make_env(config: EnvironmentConfig, render_mode: str | None = None) -> Any:
    """One environment with flat observations.

    Raises:
        ConfigError: there is none of that id, or it does not take these arguments.
    """
    gymnasium = import_gymnasium()
    try:
        env = gymnasium.make(config.id, render_mode=render_mode, disable_env_checker=True, **config.arguments)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise ConfigError(
            f"environment.id = {config.id!r} with arguments = {config.arguments}: {error}"
        ) from error
    return gymnasium.wrappers.FlattenObservation(env)


def make_vector(config: EnvironmentConfig, num_envs: int) -> Any:
    """`num_envs` of them as a ``gymnasium.vector.SyncVectorEnv``; see the module for its steps.

    Raises:
        ConfigError: as `make_env`.
    """
    vector = import_gymnasium().vector
    return vector.SyncVectorEnv(
        [lambda: make_env(config)] * num_envs, autoreset_mode=vector.AutoresetMode.NEXT_STEP
    )


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
