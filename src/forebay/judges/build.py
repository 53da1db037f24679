"""From a run file's ``[tasks.judge]`` table to a judger."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from forebay.beside import ArgumentPaths
from forebay.config import ConfigError, StrictModel, look_up
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judger
from forebay.judges.code import CodeJudger
from forebay.judges.composed import ComposedJudger, Part
from forebay.judges.exact_match import ExactMatchJudger
from forebay.judges.functions import FunctionJudger
from forebay.judges.llm import LLMJudger
from forebay.judges.math import MathVerifyJudger
from forebay.judges.reasoning_gym import ReasoningGymJudger
from forebay.judges.shuffled import ShuffledJudger


def compose(
    *,
    parts: Sequence[Mapping[str, Any]],
    by: str = "data_source",
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
) -> ComposedJudger:
    """A `ComposedJudger` of what the tables `parts` describe.

    >>> compose(parts=[{"name": "math_verify"}, {"name": "mine:politeness", "weight": 0.1}])

    Args:
        parts: each with ``name``, ``arguments`` and ``timeout_s`` as in ``[tasks.judge]``, and ``label``
            (the part after the colon of the name by default), ``weight`` and ``only`` as of a `Part`.
        by: see `ComposedJudger`.
        timeout_s: of the parts that have none of their own.

    Raises:
        ConfigError: a part cannot be built.
        ValueError: they do not fit together.
    """
    return ComposedJudger([_part(dict(table), timeout_s) for table in parts], by=by)


def _part(table: dict[str, Any], timeout_s: float | None) -> Part:
    known = ("name", "arguments", "timeout_s", "label", "weight", "only")
    if unknown := set(table) - set(known):
        raise ConfigError(f"composed: a part has unknown keys {sorted(unknown)}; known: {', '.join(known)}")
    name = str(table.get("name", ""))
    only = table.get("only")
    return Part(
        label=table.get("label", name.rpartition(":")[2]),
        weight=float(table.get("weight", 1.0)),
        only=None if only is None else (only,) if isinstance(only, str) else tuple(map(str, only)),
        judger=build_judger(
            JudgeConfig(
                name=name,
                arguments=table.get("arguments", {}),
                timeout_s=table.get("timeout_s", timeout_s),
            )
        ),
    )


JUDGERS: dict[str, Callable[..., Judger]] = {
    "code": CodeJudger,
    "composed": compose,
    "llm": LLMJudger,
    "exact_match": ExactMatchJudger,
    "math_verify": MathVerifyJudger,
    "reasoning_gym": ReasoningGymJudger,
}
"""What a run file may name; besides, ``package.module:Name`` of a function or a `Judger` class."""


class JudgeConfig(StrictModel):
    """Which judger; in a run file a table, or only the name.

    >>> build_judger(JudgeConfig(name="exact_match", arguments={"extract": "last_number"}))
    """

    name: str = ""
    """A word of `JUDGERS`, or ``package.module:Name`` of a function of a rollout or of a `Judger` class."""
    arguments: Annotated[dict[str, Any], ArgumentPaths] = Field(default_factory=dict)
    """Keyword arguments of the judger or function."""
    timeout_s: float | None = Field(default=DEFAULT_TIMEOUT_S, gt=0)
    """For one rollout."""
    shuffle_seed: int | None = None
    """Control experiment: permute the rewards within each group. None: no."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


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
    if config.name in JUDGERS or (isinstance(factory, type) and issubclass(factory, Judger)):
        judger = _construct(config, factory)
    else:
        judger = _wrap_function(config, factory)
    return judger if config.shuffle_seed is None else ShuffledJudger(judger, seed=config.shuffle_seed)


def _construct(config: JudgeConfig, factory: Callable[..., Judger]) -> Judger:
    arguments = {"timeout_s": config.timeout_s, **config.arguments}
    _check_arguments(config, factory, arguments)
    try:
        return factory(**arguments)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"judger {config.name!r}: {error}") from None


def _wrap_function(config: JudgeConfig, function: Callable[..., Any]) -> Judger:
    # The rollout stands for the first argument.
    _check_arguments(config, function, config.arguments, None)
    return FunctionJudger(function, name=config.name, timeout_s=config.timeout_s, arguments=config.arguments)


def _check_arguments(
    config: JudgeConfig, function: Callable[..., Any], arguments: dict[str, Any], *positional: Any
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise ConfigError(f"judger {config.name!r}: {error}; its arguments: {known}") from None
