"""From a run file's ``[tasks.judge]`` table to a judge."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import Field

from forebay.config import Component, ConfigError, StrictModel, check_arguments, errors_about, look_up, parse_config
from forebay.judges.answers import ExactMatchJudge
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judge
from forebay.judges.code import CodeJudge
from forebay.judges.composed import ComposedJudge, FunctionJudge, Part, ShuffledJudge
from forebay.judges.libraries import MathVerifyJudge, ReasoningGymJudge
from forebay.judges.llm import LLMJudge
from forebay.judges.reward import RewardModelJudge


class PartConfig(Component):
    """One part of the judge ``composed``."""

    name: str
    """Which judge, as of a task."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds for one rollout; None: as long as the whole judge has."""
    label: str | None = None
    """Its key in the reward; None: the part of its name after the colon."""
    weight: float = 1.0
    """Of its score in the sum; 0: only logged."""
    only: str | list[str] | None = None
    """The keys of the rollouts that it judges; None: all."""


class ComposedArguments(StrictModel, strict=True):
    """The arguments of the judge ``composed`` in a run file."""

    parts: list[PartConfig] = Field(min_length=1)
    """The judges whose weighted scores are added up."""
    by: str = "data_source"
    """The field of a rollout, or of a mapping in one (``reward_model.style``), that a part's `only` means."""


def compose(
    *, parts: Sequence[Mapping[str, Any]], by: str = "data_source", timeout_s: float | None = DEFAULT_TIMEOUT_S
) -> ComposedJudge:
    """A `ComposedJudge` of what the tables `parts` describe.

    >>> compose(parts=[{"name": "math_verify"}, {"name": "exact_match", "label": "exact"}]).name
    'math_verify + exact'

    Args:
        parts: tables as `PartConfig`.
        by: see `ComposedArguments`.
        timeout_s: of the parts that have none of their own.

    Raises:
        ConfigError: a part cannot be built.
        ValueError: they do not fit together.
    """
    built: list[Part] = []
    for place, part in enumerate(parts):
        table = parse_config(PartConfig, part, source=f"parts.{place}")
        # A part that says nothing has the whole judge's limit; one that says None has no limit.
        only, own_s = table.only, table.timeout_s if "timeout_s" in table.model_fields_set else timeout_s
        built.append(
            Part(
                label=table.name.rpartition(":")[2] if table.label is None else table.label,
                weight=table.weight,
                only=None if only is None else tuple([only] if isinstance(only, str) else only),
                judge=build_judge(JudgeConfig(name=table.name, arguments=table.arguments, timeout_s=own_s)),
            )
        )
    return ComposedJudge(built, by=by)


JUDGES: dict[str, Callable[..., Judge]] = {
    "code": CodeJudge,
    "composed": compose,
    "llm": LLMJudge,
    "exact_match": ExactMatchJudge,
    "math_verify": MathVerifyJudge,
    "reasoning_gym": ReasoningGymJudge,
    "reward_model": RewardModelJudge,
}
"""The names of judges in a run file; besides, ``package.module:Name`` of a function or a `Judge` class."""

JUDGE_ARGUMENTS: dict[str, type[StrictModel]] = {
    name: getattr(judge, "Arguments", ComposedArguments) for name, judge in JUDGES.items()
}
"""The ``arguments`` of each, by its name."""


class JudgeConfig(Component):
    """Which judge; in a run file a table, or only the name.

    >>> build_judge(JudgeConfig(name="exact_match", arguments={"extract": "last_number"})).name
    'ExactMatchJudge'
    """

    name: str = ""
    """``exact_match``, ``math_verify``, ``reasoning_gym``, ``code``, ``llm``, ``reward_model``, ``composed``,
    or ``package.module:Name`` of a function of a rollout or of a `Judge` class."""
    timeout_s: float | None = Field(default=DEFAULT_TIMEOUT_S, gt=0)
    """Seconds for one rollout; None: no limit."""
    shuffle_seed: int | None = None
    """Control experiment: permute the rewards within each group. None: no."""


def build_judge(config: JudgeConfig | None) -> Judge:
    """The judge that `config` describes.

    Raises:
        ConfigError: no judge is named, it is unknown, or it does not take the arguments.
    """
    if config is None or not config.name:
        raise ConfigError(
            f"the task has no judge, so its rollouts would have no reward: set judge.name to one of "
            f"{', '.join(JUDGES)}, or to package.module:function"
        )
    factory = look_up("judge", config.name, JUDGES)
    if not callable(factory):
        raise ConfigError(f"judge {config.name!r} is a {type(factory).__name__}, not a function or class")
    model = JUDGE_ARGUMENTS.get(config.name)
    judge: Judge
    # A judge keeps its time limit itself; `FunctionJudge` keeps that of a function.
    if model is not None or (isinstance(factory, type) and issubclass(factory, Judge)):
        arguments = {"timeout_s": config.timeout_s, **config.arguments}
        # In a run file timeout_s stands beside `arguments`, so the model of a named judge does not know it.
        check_arguments("judge", config.name, model or factory, config.arguments if model else arguments)
        with errors_about(f"judge {config.name!r}", ConfigError, ValueError):
            judge = factory(**arguments)
    else:
        # The rollout stands for the first argument.
        check_arguments("judge", config.name, partial(factory, None), config.arguments)
        judge = FunctionJudge(factory, name=config.name, timeout_s=config.timeout_s, arguments=config.arguments)
    return judge if config.shuffle_seed is None else ShuffledJudge(judge, seed=config.shuffle_seed)
