"""Judges: they give finished rollouts their reward."""

from typing import Any

from forebay.judges.answers import ExactMatchJudge
from forebay.judges.base import (
    DEFAULT_TIMEOUT_S,
    GroupJudge,
    Judge,
    JudgeError,
    TransientJudgeError,
    mean_parts,
)
from forebay.judges.build import JUDGES, JudgeConfig, build_judge, compose
from forebay.judges.code import CodeJudge
from forebay.judges.composed import ComposedJudge, FunctionJudge, Part, ShuffledJudge, judges_group
from forebay.judges.libraries import MathVerifyJudge, ReasoningGymJudge
from forebay.judges.llm import LLMJudge

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "JUDGES",
    "CodeJudge",
    "ComposedJudge",
    "ExactMatchJudge",
    "FunctionJudge",
    "GroupJudge",
    "Judge",
    "JudgeConfig",
    "JudgeError",
    "LLMJudge",
    "MathVerifyJudge",
    "Part",
    "ReasoningGymJudge",
    "ShuffledJudge",
    "TransientJudgeError",
    "build_judge",
    "compose",
    "judges_group",
    "mean_parts",
]


def __getattr__(name: str) -> Any:
    # Up to version 0.1 a judge was called a judger: `Judger`, `ExactMatchJudger`, `build_judger`.
    present = name.replace("Judger", "Judge").replace("judger", "judge").replace("JUDGERS", "JUDGES")
    if present != name and present in __all__:
        return globals()[present]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
