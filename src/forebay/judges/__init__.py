"""Judgers: they give finished rollouts their reward."""

from forebay.judges.base import DEFAULT_TIMEOUT_S, Judger
from forebay.judges.build import JUDGERS, JudgeConfig, build_judger
from forebay.judges.exact_match import ExactMatchJudger
from forebay.judges.functions import FunctionJudger
from forebay.judges.math import MathVerifyJudger
from forebay.judges.reasoning_gym import ReasoningGymJudger
from forebay.judges.shuffled import ShuffledJudger

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "JUDGERS",
    "ExactMatchJudger",
    "FunctionJudger",
    "JudgeConfig",
    "Judger",
    "MathVerifyJudger",
    "ReasoningGymJudger",
    "ShuffledJudger",
    "build_judger",
]
