"""From a run file's ``[tasks.judge]`` table to a judger."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from pydantic import Field

from forebay.config import ConfigError, StrictModel, look_up
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judger
from forebay.judges.exact_match import ExactMatchJudger
from forebay.judges.functions import FunctionJudger
from forebay.judges.math import MathVerifyJudger
from forebay.judges.reasoning_gym import ReasoningGymJudger
from forebay.judges.shuffled import ShuffledJudger

JUDGERS: dict[str, Callable[..., Judger]] = {
    "exact_match": ExactMatchJudger,
    "math_verify": MathVerifyJudger,
    "reasoning_gym": ReasoningGymJudger,
}
"""What a run file may name; besides, ``package.module:Name`` of a function or a `Judger` class."""


class JudgeConfig(StrictModel):
    """Which judger.

    >>> build_judger(JudgeConfig(name="exact_match", arguments={"extract": "last_number"}))
    """

    name: str = ""
    """A word of `JUDGERS`, or ``package.module:Name`` of a function of a rollout or of a `Judger` class."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the judger or function."""
    timeout_s: float | None = Field(default=DEFAULT_TIMEOUT_S, gt=0)
    """For one rollout."""
    shuffle_seed: int | None = None
    """Control experiment: permute the rewards within each group. None: no."""


def build_judger(config: JudgeConfig | None) -> Judger:
    """The judger that `config` describes.

    Raises:
        ConfigError: no judger is named, it is unknown, or it does not take the arguments.
    """
    if config is None or not config.name:
        raise ConfigError(
            f"the task has no judger, so its rollouts would have no reward: set judge.name to one of "
            f"{', '.join(JUDGERS)}, or to package.module:function"
        )
    factory = look_up("judger", config.name, JUDGERS)
    if not callable(factory):
        raise ConfigError(f"judger {config.name!r} is a {type(factory).__name__}, not a function or class")
    if isinstance(factory, type) and issubclass(factory, Judger):
        judger = _construct(config, factory)
    else:
        judger = _wrap_function(config, factory)
    return judger if config.shuffle_seed is None else ShuffledJudger(judger, seed=config.shuffle_seed)


def _construct(config: JudgeConfig, judger_class: type[Judger]) -> Judger:
    arguments = {"timeout_s": config.timeout_s, **config.arguments}
    _check_arguments(config, judger_class, arguments)
    try:
        return judger_class(**arguments)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"judger {config.name!r}: {error}") from None


def _wrap_function(config: JudgeConfig, function: Callable[..., Any]) -> Judger:
    # The rollout stands for the first argument.
    _check_arguments(config, function, config.arguments, None)
    bound = functools.partial(function, **config.arguments)
    return FunctionJudger(bound, name=config.name, timeout_s=config.timeout_s)


def _check_arguments(
    config: JudgeConfig, function: Callable[..., Any], arguments: dict[str, Any], *positional: Any
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise ConfigError(f"judger {config.name!r}: {error}; its arguments: {known}") from None
