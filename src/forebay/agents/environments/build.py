"""From a run file's ``environment`` to an environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.agents.environments.contract import Environment, LiveEnvironment
from forebay.agents.environments.retry import SecondChances
from forebay.config import ConfigError, StrictModel, find_component, parse_component

ENVIRONMENTS: dict[str, Any] = {"live": LiveEnvironment, "second_chances": SecondChances}
"""The names that ``environment`` may have in a run file; besides, ``package.module:Class``."""

ENVIRONMENT_ARGUMENTS: dict[str, type[StrictModel]] = {
    name: environment.Arguments for name, environment in ENVIRONMENTS.items()
}
"""The model of each one's ``arguments``."""


def environment_class(environment: str | Mapping[str, Any]) -> Any:
    """The class, or function, that `environment` names and that takes its arguments; nothing is made.

    Raises:
        ConfigError: the name is unknown, or its arguments do not fit.
    """
    return find_component("environment", parse_component(environment, source="environment"), ENVIRONMENTS)


def check_environment(environment: Any) -> Any:
    """`environment` as it is, if `build_environment` could take it; nothing is made.

    Raises:
        ConfigError: the name is unknown, or its arguments do not fit.
    """
    if isinstance(environment, str | Mapping):
        environment_class(environment)
    return environment


def build_environment(environment: Environment | str | Mapping[str, Any]) -> Environment:
    """`environment`, or what it names: a name, or a table with ``name`` and ``arguments``.

    Raises:
        ConfigError: the name is unknown, or its arguments do not fit.
    """
    if isinstance(environment, Environment):
        return environment
    config = parse_component(environment, source="environment")
    made = find_component("environment", config, ENVIRONMENTS)(**config.arguments)
    if not isinstance(made, Environment):
        raise ConfigError(
            f"environment {config.name!r} makes a {type(made).__name__}; it must be an Environment with "
            f"reset(state) and step(state, memory, text)"
        )
    return made
