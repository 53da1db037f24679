"""Judges: they give finished rollouts their reward."""

from typing import Any

from forebay.judges.answers import ExactMatchJudge as ExactMatchJudge
from forebay.judges.base import GroupJudge as GroupJudge
from forebay.judges.base import Judge as Judge
from forebay.judges.base import JudgeError as JudgeError
from forebay.judges.base import TransientJudgeError as TransientJudgeError
from forebay.judges.build import JUDGES as JUDGES
from forebay.judges.build import JudgeConfig as JudgeConfig
from forebay.judges.build import build_judge as build_judge
from forebay.judges.code import CodeJudge as CodeJudge
from forebay.judges.composed import ComposedJudge as ComposedJudge
from forebay.judges.composed import FunctionJudge as FunctionJudge
from forebay.judges.composed import Part as Part
from forebay.judges.composed import ShuffledJudge as ShuffledJudge
from forebay.judges.composed import judges_group as judges_group
from forebay.judges.libraries import MathVerifyJudge as MathVerifyJudge
from forebay.judges.libraries import ReasoningGymJudge as ReasoningGymJudge
from forebay.judges.llm import LLMJudge as LLMJudge
from forebay.judges.reward import RewardModelJudge as RewardModelJudge


def __getattr__(name: str) -> Any:
    # Up to version 0.1 a judge was called a judger: `Judger`, `ExactMatchJudger`, `build_judger`.
    present = name.replace("Judger", "Judge").replace("judger", "judge").replace("JUDGERS", "JUDGES")
    if present != name and present in globals():
        return globals()[present]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
