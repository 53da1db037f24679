"""From a run file's ``environment`` to an environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.agents.environments.contract import Environment
from forebay.agents.environments.retry import SecondChances, SecondChancesArguments
from forebay.agents.environments.stateful import LiveArguments, LiveEnvironment
from forebay.config import Component, ConfigError, StrictModel, check_arguments, look_up, parse_config

ENVIRONMENTS: dict[str, Any] = {"live": LiveEnvironment, "second_chances": SecondChances}
"""What ``environment`` may name in a run file; besides, ``package.module:Class``."""

ENVIRONMENT_ARGUMENTS: dict[str, type[StrictModel]] = {
    "live": LiveArguments,
    "second_chances": SecondChancesArguments,
}
"""What the ``arguments`` of each may be."""


def environment_class(environment: str | Mapping[str, Any]) -> Any:
    """The class, or function, that `environment` names; nothing is made.

    Raises:
        ConfigError: the name is unknown.
    """
    return look_up("environment", _component(environment).name, ENVIRONMENTS)


def _component(environment: str | Mapping[str, Any]) -> Component:
    named = {"name": environment} if isinstance(environment, str) else environment
    return parse_config(Component, named, source="environment")


def check_environment(environment: Any) -> Any:
    """`environment` as it is, if `build_environment` could take it; nothing is made.

    Raises:
        ConfigError: the name is unknown, or its arguments do not fit.
    """
    if isinstance(environment, str | Mapping):
        _find(_component(environment))
    return environment


def _find(config: Component) -> Any:
    factory = look_up("environment", config.name, ENVIRONMENTS)
    check_arguments(
        "environment", config.name, ENVIRONMENT_ARGUMENTS.get(config.name, factory), config.arguments
    )
    return factory


def build_environment(environment: Environment | str | Mapping[str, Any]) -> Environment:
    """`environment`, or what it names: a name, or a table with ``name`` and ``arguments``.

    Raises:
        ConfigError: the name is unknown, or its arguments do not fit.
    """
    if isinstance(environment, Environment):
        return environment
    config = _component(environment)
    made = _find(config)(**config.arguments)
    if not isinstance(made, Environment):
        raise ConfigError(
            f"environment {config.name!r} makes a {type(made).__name__}; it must be an Environment with "
            f"reset(state) and step(state, memory, text)"
        )
    return made
