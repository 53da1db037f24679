"""Judgers: they give finished rollouts their reward."""

from forebay.judges.base import (
    DEFAULT_TIMEOUT_S,
    GroupJudger,
    JudgeError,
    Judger,
    TransientJudgeError,
    mean_parts,
)
from forebay.judges.build import JUDGERS, JudgeConfig, build_judger, compose
from forebay.judges.code import CodeJudger
from forebay.judges.composed import ComposedJudger, Part
from forebay.judges.exact_match import ExactMatchJudger
from forebay.judges.functions import FunctionJudger, judges_group
from forebay.judges.llm import LLMJudger
from forebay.judges.math import MathVerifyJudger
from forebay.judges.reasoning_gym import ReasoningGymJudger
from forebay.judges.shuffled import ShuffledJudger

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "JUDGERS",
    "CodeJudger",
    "ComposedJudger",
    "ExactMatchJudger",
    "FunctionJudger",
    "GroupJudger",
    "JudgeConfig",
    "JudgeError",
    "Judger",
    "LLMJudger",
    "MathVerifyJudger",
    "Part",
    "ReasoningGymJudger",
    "ShuffledJudger",
    "TransientJudgeError",
    "build_judger",
    "compose",
    "judges_group",
    "mean_parts",
]
